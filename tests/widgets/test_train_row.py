"""Train in the Tuner's Export: what is shown is what runs, and what is missing is said before anything is started."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from superoffload import run_control
from superoffload.config import TunedConfig
from superoffload.estimating import estimate
from superoffload.memory import Ledger, LedgerItem
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.train import ready
from superoffload.widgets import Tuner
from superoffload.widgets.export_panel import ExportPanel
from tests.widgets.conftest import Sent


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("llama-7b", micro_batch=1, seq_len=512, hardware="gh200")


@pytest.fixture
def panel(tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExportPanel:
    """The Tuner's Export in an empty folder, on a machine with memory enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ready, "memory_bytes", lambda: (10**12, 10**12))
    tuner.export.value = True
    assert tuner.export_panel is not None
    return tuner.export_panel


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the processes that would have been started."""
    out: list[list[str]] = []

    class Process:
        pid = 4711

        def __init__(self, command: list[str], **_: Any):
            out.append(command)

        def poll(self) -> None:
            return None

    class Subprocess:
        Popen = Process
        DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    monkeypatch.setattr(run_control, "subprocess", Subprocess)
    return out


def test_what_is_shown_is_what_runs(panel: ExportPanel, tuner: Tuner, started: list[list[str]]) -> None:
    panel.path.value, panel.data.value, panel.steps.value = "my plan.json", "sample", 7
    panel.train.out.value = "runs/first try"
    tuner.controls.retained.value += 2
    assert panel.command() in panel.lines.value.replace("&#x27;", "'")
    panel.train.start.click()
    (command,) = started
    assert command[1:3] == ["-m", "superoffload"]
    assert ["superoffload", *command[3:]] == shlex.split(panel.command())
    config = TunedConfig.load("my plan.json")
    assert config == tuner.config and config.plan == tuner.plan and config.training.steps == 7
    run = panel.train.run
    assert run is not None and run.folder == Path("runs/first try") and "Started as process 4711" in run.messages.value
    assert run in panel.train.place.children
    assert "Wrote <b>my plan.json</b>" in panel.messages.value


@pytest.mark.parametrize(("data", "said"), [("", "no text to train on"), ("absent.txt", "no such data file")])
def test_without_a_text_nothing_is_started(panel: ExportPanel, started: list[list[str]], data: str, said: str) -> None:
    panel.data.value = data
    panel.train.start.click()
    assert said in panel.messages.value and "sample" in panel.messages.value
    assert not started and not Path("tuned.json").exists() and panel.train.run is None


def test_a_model_of_ones_own_is_trained_from_python(
    small_profile: Profile, sent: Sent, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tuner = Tuner(small_profile, autosave=False)
    tuner.export.value = True
    panel = tuner.export_panel
    assert panel is not None
    panel.data.value = "sample"
    panel.train.start.click()
    assert "no model &quot;toy&quot;" in panel.messages.value and "OffloadAdamW.from_config" in panel.messages.value
    assert not started and not Path("tuned.json").exists()
    tuner.close_all()


def test_a_plan_for_several_chips_is_refused(
    sent: Sent, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    several = estimate("llama-7b", micro_batch=1, seq_len=512, hardware="gh200-quad-x8")
    tuner = Tuner(several, make_plan(several, data_parallel=2), autosave=False)
    tuner.export.value = True
    panel = tuner.export_panel
    assert panel is not None
    panel.data.value = "sample"
    panel.train.start.click()
    assert "2 Superchips" in panel.messages.value and not started
    tuner.close_all()


def test_a_machine_without_the_memory_is_spared(
    panel: ExportPanel, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "memory_bytes", lambda: (16 * 10**9, 8 * 10**9))
    panel.data.value = "sample"
    panel.train.start.click()
    assert "this machine has 16.00 GB of main memory" in panel.messages.value and "modelled" in panel.messages.value
    assert not started


@pytest.mark.parametrize(
    ("has", "gpu", "fits"), [(0, False, True), (99, False, False), (99, True, True), (69, True, False)]
)
def test_main_memory_holds_all_where_there_is_no_gpu(has: int, gpu: bool, fits: bool) -> None:
    items = (LedgerItem("gpu", "weights", 40), LedgerItem("host", "states", 50), LedgerItem("pinned", "held", 20))
    need = Ledger(items=items, gpu_capacity_bytes=0, host_capacity_bytes=0)
    if fits:
        ready._check_memory(need, has, gpu)
    else:
        with pytest.raises(ready.InputError, match="main memory"):
            ready._check_memory(need, has, gpu)


def test_a_folder_with_a_run_is_not_written_over_but_attached_to(
    panel: ExportPanel, started: list[list[str]], write_run: Callable[..., Path]
) -> None:
    write_run(Path("run"), 3)
    (Path("run") / "status.json").write_text(json.dumps({"state": "finished", "step": 3, "steps": 3}))
    panel.data.value = "sample"
    panel.train.start.click()
    assert "already holds a run" in panel.messages.value
    assert not started and not Path("tuned.json").exists()
    panel.train.look.click()
    run = panel.train.run
    assert run is not None and run.view is not None and run.view.steps == (1, 2, 3)
    panel.train.out.value = "nowhere"
    panel.train.look.click()
    assert "no folder nowhere" in panel.messages.value and panel.train.run is run


def test_the_folder_offered_is_free(tuner: Tuner, write_run: Callable[..., Path], tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("run", "run-2"):
        write_run(tmp_path / name, 1)
    tuner.export.value = True
    assert tuner.export_panel is not None and tuner.export_panel.train.folder == "run-3"
