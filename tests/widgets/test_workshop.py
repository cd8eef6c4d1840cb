"""The workshop's widgets without a browser: guesses, the link knob, the storm, the self-check and their figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.widgets import theme
from superoffload.widgets import workshop as ws
from superoffload.widgets.workshop_figures import bar_figure, line_figure, link_spec, storm_spec
from superoffload.workshop import StepTimes, link_sweep, run_storm, storm_verdicts

TIMES = StepTimes(commit_s=1.0, wait_s=1.4, adam_s=0.5, buckets=10)


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ws.Lesson:
    monkeypatch.chdir(tmp_path)
    return ws.Lesson("06")


@pytest.fixture(scope="module")
def knob() -> ws.LinkKnob:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200")
    return ws.LinkKnob(profile, (16.0, 64.0, 450.0))


def test_a_guess_is_laid_beside_the_number(lesson: ws.Lesson) -> None:
    guess = lesson.predict("How long?", unit="s", low=0, high=10, default=4)
    untouched = lesson.reveal(guess, 2.0, "modelled, gh200")
    assert "Nobody guessed" in repr(untouched) and "2 times too high" in repr(untouched)
    assert "modelled, gh200" in repr(untouched)
    guess.box.value = 1.99
    assert "Your guess of 1.99 s: close" in repr(lesson.reveal(guess, 2.0, "modelled"))
    guess.box.value = 99
    assert guess.value == 10, "kept within its bounds"
    share = lesson.predict("Which share?", unit="%", low=0, high=100, default=20)
    assert "60 points too low" in repr(lesson.reveal(share, 80.0, "modelled"))
    change = lesson.predict("How much?", unit="%", low=-50, high=50, default=20)
    assert "33.8 points too high" in repr(lesson.reveal(change, -13.8, "modelled"))
    zero = lesson.predict("How long?", unit="s", low=0, high=10, default=0)
    assert "2 s away" in repr(lesson.reveal(zero, 2.0, "modelled"))


def test_reports_escape_what_they_show(lesson: ws.Lesson) -> None:
    report = lesson.check("<b>", None)
    assert "&lt;b&gt;" in report._repr_html_() and "<b>" not in report._repr_html_()
    assert repr(report).endswith("0 of 3 right")
    assert "exercise 2: open" in repr(report)


def test_answers_are_counted(lesson: ws.Lesson) -> None:
    assert repr(lesson.check(27.0, 39.0, ("fused", "fused"))).endswith("2 of 3 right")


def test_making_a_lesson_anew_empties_its_folder_and_no_other(lesson: ws.Lesson) -> None:
    mine, other = lesson.place("tuned.json"), ws.Lesson("08").place("kept.json")
    mine.write_text("{}")
    other.write_text("{}")
    again = ws.Lesson("06")
    assert not mine.exists() and other.exists()
    assert again.place("x") == mine.parent / "x" and mine.parent.is_dir()


def test_without_a_gpu_this_machine_is_not_measured(
    lesson: ws.Lesson, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for device, words in ((None, "not installed"), ("cpu", "nothing to measure")):
        if device is None:
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
            assert lesson.device() is None
        else:
            monkeypatch.setattr(ws.Lesson, "device", lambda self: "cpu")
            assert lesson.this_machine() is None
        assert words in capsys.readouterr().out


def test_dragging_the_link_moves_the_mark_and_the_plan(knob: ws.LinkKnob) -> None:
    knob.slider.value = 0
    slow = knob.text.value
    line = dict(knob.figure.layout.shapes[0].to_plotly_json())
    assert line["x0"] == 16.0 and "At 16 GB/s" in slow
    knob.slider.value = 2
    assert knob.figure.layout.shapes[0].x0 == 450.0
    fast = knob.text.value
    assert "At 450 GB/s" in fast and "modelled" in fast
    first, last = knob.points[0].best.plan, knob.points[2].best.plan
    assert first.retained_buckets != last.retained_buckets
    assert f"<b>{last.retained_buckets}</b>" in fast
    assert "<b>" not in slow.split("</tr>")[1], "the first stop differs from nothing"
    assert [o[0] for o in knob.slider.options] == ["16 GB/s PCIe 3 x16", "64 GB/s PCIe 5 x16", "450 GB/s NVLink-C2C"]


def test_the_link_figure_has_the_traces_of_the_records(knob: ws.LinkKnob) -> None:
    spec = link_spec(knob.points, 1)
    assert spec["data"][0]["y"] == [p.era.step_s for p in knob.points]
    assert spec["data"][1]["y"] == [p.best.step_s for p in knob.points]
    assert "modelled" in spec["layout"]["title"]["text"]
    assert len(link_spec(knob.points, 2, theme=theme.DARK)["data"]) == len(spec["data"])
    assert knob.points == link_sweep(
        estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200"), (16.0, 64.0, 450.0)
    )


def test_the_storm_can_be_switched_on() -> None:
    switch = ws.StormSwitch(TIMES, steps=60, machine="gh200")
    switch.rate.value = 0.0
    calm = switch.totals()
    assert switch.length.disabled and "clip" not in switch.verdicts()
    switch.storm.value = True
    switch.length.value = 20
    assert switch.verdicts()[20:40] == ("clip",) * 20
    stormy = switch.totals()
    assert not switch.length.disabled
    assert stormy["off"] == calm["off"] == pytest.approx(60 * 1.4)
    assert stormy["on"] > calm["on"]
    assert "modelled, gh200" in switch.figure.layout.title.text
    switch.rate.value = 1.0
    assert switch.totals()["auto"] == pytest.approx(60 * 1.4), "the gate stays closed"
    with pytest.raises(InputError, match="at least 10"):
        ws.StormSwitch(TIMES, steps=3)


def test_the_storm_figure_draws_seconds_and_marks_clipped_steps() -> None:
    verdicts = storm_verdicts(30, storm=(10, 5), rate=0.0)
    runs = {mode: run_storm(TIMES, verdicts, mode) for mode in ("off", "on")}
    spec = storm_spec(runs, title="modelled")
    assert len(spec["data"]) == 3
    assert np.allclose(spec["data"][1]["y"], [s.step_s for s in runs["on"]])
    assert spec["data"][2]["x"] == [11, 12, 13, 14, 15]
    assert spec["data"][0]["name"].startswith("off: 42 s")


def test_lines_and_bars_draw_what_they_are_given() -> None:
    series = {"a": {16.0: 3.0, 64.0: 2.0}, "b": {16.0: 1.0, 64.0: 1.5}}
    lines = line_figure(series, title="t (modelled)", x="GB/s", y="s", log_x=True, mark=(32.0, "here"))
    assert [list(t.y) for t in lines.data] == [[3.0, 2.0], [1.0, 1.5]]
    assert lines.data[0].line.dash != lines.data[1].line.dash, "told apart without colours"
    assert lines.layout.xaxis.type == "log" and lines.layout.annotations[0].x == pytest.approx(np.log10(32))
    bars = bar_figure({"down": {"cpu": 1.0, "gpu": 2.0}, "up": {"cpu": 3.0, "gpu": 4.0}}, title="t", y="ns")
    assert [(t.name, list(t.y)) for t in bars.data] == [("cpu", [1.0, 3.0]), ("gpu", [2.0, 4.0])]
    one = bar_figure({"s": {"short": 1.0, "a name that is far too long for a tick of an axis": 2.0}}, title="t", y="s")
    assert list(one.data[0].x) == [1.0, 2.0] and "<br>" in one.data[0].y[1]
    assert len(json.dumps(one.to_plotly_json(), default=list)) < 10_000
