"""What a run folder shows: read a piece at a time, thinned, counted, drawn."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from superoffload.errors import InputError
from superoffload.widgets import RunPanel, plot_loss, plot_run
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.run_figures import run_spec
from superoffload.widgets.run_html import cards, head_html, how_html, rollbacks_html
from superoffload.widgets.run_reader import RunReader, read_run
from superoffload.widgets.run_views import MAX_MARKS, MAX_POINTS, SHOWN_UNDONE, RunView, thin
from superoffload.widgets.theme import DARK

GPU = {"gpu_name": "NVIDIA H200", "gpu_busy_source": "NVML's samples of the whole GPU", "cores": 16,
       "adam_threads": 14, "gpu_capacity_bytes": 100 * 10**9, "host_capacity_bytes": 200 * 10**9}  # fmt: skip
CPU = {"gpu_name": None, "gpu_busy_source": "no GPU", "cores": 2, "adam_threads": 1, "gpu_capacity_bytes": None,
       "host_capacity_bytes": 16 * 10**9}  # fmt: skip


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 4.0 / step, "grad_norm": 0.5, "verdict": "commit", "clip_coefficient": 1.0,
        "tokens_per_s": 1000.0 + step, "step_s": 0.5, "speculated": 8, "undone": 0, "speculated_s": 0.1, "undo_s": 0.0,
        "after_verdict_s": 0.05, "waited_s": 0.01, "cpu_busy": 0.25, "gpu_busy": 0.9, "gpu_peak_bytes": 30 * 10**9,
        "gpu_reserved_bytes": 40 * 10**9, "host_bytes": 50 * 10**9, **changes,
    }  # fmt: skip


def clipped(step: int) -> dict[str, Any]:
    return row(step, verdict="clip", grad_norm=2.0, clip_coefficient=0.5, undone=6, undo_s=0.2, waited_s=0.3)


def write(folder: Path, rows: list[dict[str, Any]], **status: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "status.json").write_text(json.dumps({"state": "running", "steps": 100, **status}))
    return folder


def add(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as f:
        f.write(text)


def same(a: RunView, b: RunView) -> bool:
    return repr(a) == repr(b)  # NaN is not equal to itself


def test_a_run_folder_becomes_curves(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    run = write_run(tmp_path / "run", 4, tail='{"step": 5, "lo')
    view = read_run(run)
    assert view.steps == (1, 2, 3, 4)
    assert view.loss == (4.0, 2.0, pytest.approx(4 / 3), 1.0)
    assert view.smooth_loss[1] == pytest.approx((4 + 2 + 4 / 3 + 1) / 4)
    assert view.verdict_counts == (("clip", 1), ("commit", 3))
    assert view.unreadable_lines == 0, "a line that is being written is no error"
    assert view.state == "running"
    fig = plot_loss(run)
    assert fig.data[0].y.tolist() == pytest.approx(list(view.loss))
    assert list(fig.data[1].x) == [2]
    assert fig.data[4].y.tolist() == [1000, 1001, 1002, 1003]


def test_a_run_is_read_piece_by_piece(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row(1), row(2)], **GPU)
    reader = RunReader(run)
    assert reader.read().steps == (1, 2)
    add(run, json.dumps(row(3))[:20])
    assert reader.read().steps == (1, 2)
    add(run, json.dumps(row(3))[20:] + "\nnonsense\n[4]\n" + json.dumps(row(4)) + "\n")
    view = reader.read()
    assert view.steps == (1, 2, 3, 4) and view.unreadable_lines == 2
    assert same(view, read_run(run)), "in pieces or at once is the same"


@pytest.mark.parametrize(
    "line",
    ['{"step": Infinity}', '{"step": 1' + "0" * 30 + "}", '{"step": 3, "loss": 1' + "0" * 400 + "}", "[" * 10**5],
)
def test_a_number_that_is_none_is_one_unreadable_line(tmp_path: Path, line: str) -> None:
    run = write(tmp_path / "run", [row(1), row(2)], **GPU)
    reader = RunReader(run)
    add(run, line + "\n" + json.dumps(row(3)) + "\n")
    view = reader.read()
    assert view.steps == (1, 2, 3) and view.unreadable_lines == 1
    assert reader.read().unreadable_lines == 1, "and is not read again"


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", [row(i) for i in range(1, 1001)])
    reader, lines = RunReader(run), []
    reader.read()
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (lines.append(text), loads(text))[1])
    add(run, json.dumps(row(1001)) + "\n")
    assert reader.read().total_steps == 1001
    assert len(lines) == 2, "one row and the status file"


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row(i) for i in range(1, 9)])
    reader = RunReader(run)
    assert reader.read().steps[-1] == 8
    write(run, [row(i, loss=7.0) for i in range(1, 4)])  # shorter, as a resumed run cuts it
    assert reader.read().loss == (7.0, 7.0, 7.0)
    write(run, [row(i, loss=9.0) for i in range(1, 30)])  # and longer than what was read
    assert set(reader.read().loss) == {9.0}
    (run / "metrics.jsonl").unlink()
    assert reader.read().steps == ()


def test_steps_that_run_again_replace_what_they_were(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row(1), row(2), clipped(3), row(4), row(2, loss=9.0), row(3)])
    view = read_run(run)
    assert view.steps == (1, 2, 3) and view.loss[1] == 9.0
    assert view.rollbacks.steps == 0 and view.verdict_counts == (("commit", 3),)


def test_the_ledger_counts_what_was_undone(tmp_path: Path) -> None:
    skipped = row(5, verdict="skip", grad_norm=None, undone=2, speculated=3, undo_s=0.05, waited_s=0.0, loss=None)
    rows = [row(1, speculated=0), row(2), clipped(3), row(4), skipped]
    view = read_run(write(tmp_path / "run", rows, **GPU))
    ledger = view.rollbacks
    assert [(s.step, s.verdict, s.undone, s.speculated) for s in ledger.last] == [(5, "skip", 2, 3), (3, "clip", 6, 8)]
    assert (ledger.steps, ledger.buckets, ledger.speculated_steps) == (2, 8, 4)
    assert (ledger.undo_s, ledger.waited_s) == (pytest.approx(0.25), pytest.approx(0.3))
    table = rollbacks_html(view)
    assert table.count('<th scope="row">') == 3 and table.count('<th scope="col">') == 7
    assert "<caption>" in table and 'tabindex="0"' in table
    for text in ("not finite", "6 of 8", "250 ms", "all 2", "0.5"):
        assert text in table, text
    many = read_run(write(tmp_path / "many", [clipped(i) for i in range(1, 51)]))
    assert len(many.rollbacks.last) == SHOWN_UNDONE and many.rollbacks.last[0].step == 50
    assert many.rollbacks.buckets == 300 and f"the last {SHOWN_UNDONE} shown" in rollbacks_html(many)
    assert "none; no step speculated" in rollbacks_html(read_run(write(tmp_path / "off", [row(1, speculated=0)])))


@pytest.mark.parametrize(
    "changes",
    [{"undone": math.inf}, {"undone": -math.inf}, {"undone": math.nan}, {"undone": 6, "speculated": None},
     {"undone": 6, "speculated": math.inf}],
    ids=str,
)  # fmt: skip
def test_a_row_with_no_number_of_buckets_tells_of_no_undone_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    view = read_run(write(tmp_path / "run", [row(1), row(2, **changes), clipped(3)], **GPU))
    assert [s.step for s in view.rollbacks.last] == [3] and view.rollbacks.buckets == 6
    assert "6 of 8" in rollbacks_html(view)


def test_busy_and_memory_are_of_the_last_steps(tmp_path: Path) -> None:
    rows = [row(i, gpu_busy=0.0 if i <= 20 else None if i % 2 else 0.8) for i in range(1, 41)]
    view = read_run(write(tmp_path / "run", rows, **GPU))
    assert view.recent.gpu_busy == pytest.approx(0.8), "steps without a sample do not count"
    assert view.recent.adam_busy == pytest.approx(0.3)
    shown = {c.name: (c.value, c.label) for c in cards(view)}
    assert shown["GPU busy"] == ("80%", "measured")
    assert shown["CPU Adam busy"] == ("30%", "of 14 threads")
    assert shown["GPU memory"] == ("30 GB", "peak, of 100 GB")
    assert shown["Host memory"] == ("50 GB", "of 200 GB")
    fig = plot_run(view)
    by_name = {(t.yaxis, t.name): t for t in fig.data}
    assert by_name["y4", "GPU memory"].y[0] == 30.0 and by_name["y4", "Host memory"].y[0] == 25.0
    assert by_name["y3", "CPU Adam"].y[0] == pytest.approx(30.0)
    assert "NVML" in how_html(view) and "measured" in how_html(view)


def test_without_a_gpu_nothing_is_made_up(tmp_path: Path) -> None:
    rows = [row(i, gpu_busy=None, gpu_peak_bytes=None, gpu_reserved_bytes=None) for i in range(1, 4)]
    view = read_run(write(tmp_path / "run", rows, **CPU))
    shown = {c.name: (c.value, c.label) for c in cards(view)}
    assert shown["GPU busy"] == shown["GPU memory"] == ("–", "no GPU")
    assert shown["CPU busy"] == ("25%", "of 2 cores")
    assert "the CPU computes the model" in head_html(view)
    drawn = {t.name: t for t in plot_run(view).data}
    assert not drawn["GPU"].showlegend and np.isnan(drawn["GPU"].y).all()
    assert drawn["CPU, all cores"].showlegend
    assert "forward and backward are part of it" in how_html(view)


def test_an_older_log_says_what_it_lacks(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    view = read_run(write_run(tmp_path / "run", 3))
    assert view.has_gpu is None and math.isnan(view.recent.host_bytes)
    shown = {c.name: (c.value, c.label) for c in cards(view)}
    assert all(shown[name] == ("–", "not in its log") for name in
               ("GPU busy", "CPU Adam busy", "CPU busy", "GPU memory", "Host memory"))  # fmt: skip


def test_thinning_keeps_the_ends_and_every_peak() -> None:
    values = np.full(100_000, 2.0)
    values[31_415], values[77_777] = 9.0, 0.5
    values[500:600] = np.nan
    kept = thin(values, MAX_POINTS)
    assert len(kept) <= MAX_POINTS and (np.diff(kept) > 0).all()
    assert {0, 31_415, 77_777, 99_999} <= set(kept.tolist())
    assert thin(values[:MAX_POINTS], MAX_POINTS).tolist() == list(range(MAX_POINTS))


def test_rare_verdicts_are_marked_wherever_the_curve_is_thinned(tmp_path: Path) -> None:
    rows = [row(i) for i in range(1, 5001)]
    rows[2000], rows[3000] = clipped(2001), row(3001, verdict="skip", loss=None)
    view = read_run(write(tmp_path / "run", rows))
    assert view.clipped.steps == (2001,) and view.clipped.loss == (4.0 / 2001,)
    assert view.skipped.steps == (3001,) and math.isfinite(view.skipped.loss[0])
    many = read_run(write(tmp_path / "many", [clipped(i) for i in range(1, 5001)]))
    assert len(many.clipped.steps) == MAX_MARKS and many.clipped.steps[-1] == 5000


def test_a_long_run_stays_quick_and_small(tmp_path: Path, sent: list[tuple[str, int]]) -> None:
    """100,000 steps, every one of the last ones clipped: half a second at first, and little from then on."""
    run = write(tmp_path / "run", [clipped(i) if i % 3 == 0 else row(i) for i in range(1, 100_001)], **GPU)
    panel = RunPanel(run, follow=False)
    sent.clear()
    taken = []
    for step in range(100_001, 100_006):
        add(run, json.dumps(row(step)) + "\n")
        begin = time.process_time()
        panel.refresh()
        taken.append(time.process_time() - begin)
    assert panel.view is not None and panel.view.total_steps == 100_005
    assert len(panel.view.steps) <= MAX_POINTS
    assert min(taken) < 0.25, f"CPU seconds a refresh: {taken}"
    sizes = [size for _, size in sent]
    assert sum(sizes) / 5 < 100_000, f"bytes a refresh: {sizes}"
    panel.close()


def test_a_live_figure_turns_from_one_run_into_another(tmp_path: Path) -> None:
    small = read_run(write(tmp_path / "a", [row(1)], **CPU))
    large = read_run(write(tmp_path / "b", [clipped(i) for i in range(1, 2000)], **GPU))
    live = LiveFigure(run_spec(small))
    live.show_spec(run_spec(large, theme=DARK))
    for drawn, wanted in zip(live.data, plot_run(large, theme=DARK).data, strict=True):
        assert np.array_equal(drawn.x, wanted.x) and np.array_equal(drawn.y, wanted.y, equal_nan=True)


def test_a_folder_without_a_run_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="superoffload train"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="not a run folder"):
        plot_loss(tmp_path / "missing")
