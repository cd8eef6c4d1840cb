"""Starting and steering a run from a notebook. That the run answers is tested in tests/train/test_loop.py."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from superoffload.errors import InputError
from superoffload.run_control import CONTROL, TRAIN_LOG
from superoffload.widgets import RunPanel


def set_status(folder: Path, **fields: object) -> None:
    path = folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def usable(panel: RunPanel) -> set[str]:
    return {name for name, widget in panel.requests.items() if not widget.disabled}


def asked(folder: Path) -> list[str]:
    return [json.loads(line)["request"] for line in (folder / CONTROL).read_text().splitlines()]


def test_buttons_ask_and_follow_the_state(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run(tmp_path / "run", 3)
    set_status(folder, state="running")
    panel = RunPanel(folder)
    assert usable(panel) == {"pause", "checkpoint", "stop"}
    panel.requests["pause"].click()
    assert "after the step in progress" in panel.messages.value
    set_status(folder, state="paused")
    panel.refresh()
    assert usable(panel) == {"go on", "checkpoint", "stop"}
    for name in ("checkpoint", "go on", "stop"):
        panel.requests[name].click()
    assert asked(folder) == ["pause", "checkpoint", "go on", "stop"]
    set_status(folder, state="interrupted")
    panel.requests["stop"].click()  # it has ended since the panel has looked
    assert 'role="alert"' in panel.messages.value and "has ended" in panel.messages.value
    panel.refresh()
    assert usable(panel) == set()
    assert len(asked(folder)) == 4
    assert all(b.tooltip for b in panel.requests.values())
    panel.close()


@pytest.mark.skipif(os.name != "posix", reason="asks the system for a process")
def test_a_run_that_was_killed_is_told(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = write_run(tmp_path / "run", 3)
    set_status(folder, state="running", pid=gone.pid, host=platform.node())
    panel = RunPanel(folder)
    assert "process is gone" in panel.messages.value and "--resume" in panel.messages.value
    assert panel.figure is not None, "what it did is still shown"
    assert usable(panel) == set()


def test_a_run_that_cannot_begin_says_why(tmp_path: Path) -> None:
    panel = RunPanel.start(tmp_path / "missing.json", "sample", tmp_path / "run", steps=2)
    assert "Started as process" in panel.messages.value
    assert panel.refresh() is None or panel.view is None, "nothing to show while it loads"
    assert panel._process is not None
    panel._process.wait(120)
    with pytest.raises(InputError, match=r"exit code 2 before its first step: .*missing\.json"):
        panel.refresh()
    assert "missing.json" in (tmp_path / "run" / TRAIN_LOG).read_text()


def test_a_second_start_in_one_folder_is_refused(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run(tmp_path / "run", 3)
    set_status(folder, state="running")
    with pytest.raises(InputError, match="holds a run that is running"):
        RunPanel.start("tuned.json", "sample", folder)
    set_status(folder, state="finished")
    with pytest.raises(InputError, match="resume="):
        RunPanel.start("tuned.json", "sample", folder)
    assert not (folder / TRAIN_LOG).exists()


def test_what_an_earlier_run_said_is_not_shown_as_this_ones(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run(tmp_path / "run", 3)
    set_status(folder, state="finished", started=time.time() - 100)
    panel = RunPanel.start(tmp_path / "missing.json", "sample", folder, resume=folder)
    assert panel.view is None or panel.view.state == "finished"
    assert panel._process is not None
    panel._process.wait(120)
    with pytest.raises(InputError, match="before its first step"):
        panel.refresh()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished", "nothing is lost"
