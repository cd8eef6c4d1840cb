"""The measured steps that ship: what the recorded ones give, small, whole, and readable without torch."""

from __future__ import annotations

import gzip
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import superoffload as so
from superoffload.measured_step import FOLDER, SUFFIX, lanes_busy

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("busy", "clipped", "committed", "flow", "waited")


@pytest.fixture(scope="module")
def ship() -> ModuleType:
    """benchmarks/ship_traces.py, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("ship_traces", ROOT / "benchmarks" / "ship_traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_ships_is_what_the_recorded_steps_give(ship: ModuleType) -> None:
    wanted = {name: ship.shipped(step) for name, step in ship.newest().items()}
    there = {p.name.removesuffix(SUFFIX): gzip.decompress(p.read_bytes()).decode() for p in FOLDER.glob(f"*{SUFFIX}")}
    assert tuple(wanted) == so.measured_steps() == NAMES
    assert there == wanted, "run python benchmarks/ship_traces.py"


def test_they_are_small_and_the_newest_counts(ship: ModuleType, tmp_path: Path) -> None:
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 1_000_000
    old, new = (so.load_measured("busy").replace(date=date) for date in ("2020-01-01", "2020-01-02"))
    new.save(tmp_path / "measured_step_a.json")
    old.save(tmp_path / "measured_step_b.json")
    assert ship.newest(tmp_path) == {"busy": new}


def test_seconds_are_kept_to_a_tenth_of_a_microsecond(ship: ModuleType) -> None:
    for name, step in ship.newest().items():
        kept = so.load_measured(name)
        assert len(kept.trace.events) == len(step.trace.events)
        pairs = zip(kept.trace.events, step.trace.events, strict=True)
        assert all(abs(a.start_s - b.start_s) <= 0.6e-7 and a.bytes == b.bytes for a, b in pairs)
        assert (kept.plan, kept.profile.hardware, kept.machine) == (step.plan, step.profile.hardware, step.machine)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_says_what_it_takes_to_predict_it(name: str) -> None:
    step = so.load_measured(name)
    assert step.name == name and step.trace.source == "measured" and step.profile.source == "measured"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", step.date)
    assert step.machine["gpu"] == "NVIDIA H200" and step.machine["torch"] and step.machine["superoffload"]
    assert step.trace.hardware == step.profile.hardware.name and step.trace.model == step.profile.model
    assert step.plan.tokens_per_step == step.trace.tokens_per_step == 8192
    predicted = step.predicted()
    assert predicted.source == "modelled" and predicted.plan.replace(reasons={}) == step.plan.replace(reasons={})
    assert {e.lane for e in step.trace.events} == {"gpu", "link_down", "link_up", "cpu_adam", "validator"}
    assert step.steps_s[-1] == pytest.approx(step.trace.window_s, abs=1e-6)
    assert so.Trace.from_json(step.trace.to_json()) == step.trace


def test_they_show_what_they_are_for() -> None:
    committed, waited, clipped = (so.load_measured(n) for n in ("committed", "waited", "clipped"))
    assert committed.trace.step_s < 0.8 * waited.trace.step_s
    assert waited.trace.step_s < clipped.trace.step_s < 1.15 * waited.trace.step_s

    def events(step: so.MeasuredStep, kind: str) -> int:
        return sum(e.kind == kind for e in step.trace.events)

    assert (committed.verdict, clipped.verdict) == ("commit", "clip")
    assert events(clipped, "undo") > 50 and not events(committed, "undo") and not events(waited, "undo")
    flow = so.load_measured("flow")
    assert len(flow.plan.flow_blocks) == 16 and events(flow, "fetch") >= 2 * 16 - 2  # a block at the turn stays
    busy = {x.lane: x for x in so.load_measured("busy").lanes()}
    assert busy["gpu"].measured_s > 3 * busy["gpu"].modelled_s
    assert busy["cpu_adam"].measured_s < 1.1 * busy["cpu_adam"].modelled_s


@pytest.mark.parametrize(("name", "within"), [("committed", 0.05), ("waited", 0.08), ("flow", 0.12)])
def test_the_model_is_near_the_steps_that_it_is_about(name: str, within: float) -> None:
    """Clipped steps and steps beside a busy thread are not what it predicts."""
    step = so.load_measured(name)
    assert step.predicted().step_s == pytest.approx(step.trace.step_s, rel=within)
    found = so.calibrate(step.profile, step.trace)
    assert abs(found.calibrated_step_s / step.trace.step_s - 1) < 0.03 and not found.strange


def test_lanes_count_one_step_of_each_trace() -> None:
    step = so.load_measured("committed")
    predicted = step.predicted()
    lanes = {x.lane: x for x in lanes_busy(predicted, step.trace)}
    assert lanes["gpu"].modelled_s == predicted.busy_s("gpu", min(predicted.step_s, predicted.window_s))
    assert lanes["gpu"].measured_s <= step.trace.step_s
    assert lanes["gpu"].off == pytest.approx(lanes["gpu"].modelled_s / lanes["gpu"].measured_s - 1)
    text = step._repr_html_()
    assert "NVIDIA H200" in text and "Measured on" in text and "CPU Adam busy" in text and step.shows in text


def test_an_unknown_name_names_the_others() -> None:
    with pytest.raises(so.InputError, match='did you mean "clipped"') as caught:
        so.load_measured("clippd")
    assert caught.value.expected == f"one of {', '.join(NAMES)}"


def test_loading_and_predicting_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import superoffload as so; "
        "print(*[so.load_measured(n).predicted().step_s > 0 for n in so.measured_steps()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * len(NAMES)
