"""Starting and steering a run from a notebook. That the run answers is tested in tests/train/test_loop.py."""

from __future__ import annotations

import asyncio
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
from superoffload.widgets import RunPanel, run_panel


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


def test_the_answer_is_told_when_it_comes(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run(tmp_path / "run", 3)
    set_status(folder, state="running", checkpoint="old")
    panel = RunPanel(folder)
    panel.ask("pause")
    panel._look()
    assert "Asked the run to pause" in panel.messages.value, "it has not answered yet"
    set_status(folder, state="paused")
    panel._look()
    assert "Paused after step 3" in panel.messages.value
    panel.ask("checkpoint")
    panel._look()
    assert "Asked the run to save" in panel.messages.value
    set_status(folder, checkpoint="run/checkpoints/step-3")
    panel._look()
    assert "Saved run/checkpoints/step-3" in panel.messages.value
    panel.ask("go on")
    set_status(folder, state="finished")
    panel._look()
    assert "ended before it could answer" in panel.messages.value
    panel.close()


def test_an_error_goes_when_the_folder_can_be_read(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    panel = RunPanel(tmp_path / "run")
    assert "not a run folder" in panel.messages.value
    write_run(tmp_path / "run", 3)
    panel._look()
    assert panel.messages.value == "" and panel.view is not None
    panel.close()


@pytest.mark.skipif(os.name != "posix", reason="asks the system for a process")
def test_following_notices_a_process_that_ends_without_a_word(
    tmp_path: Path, write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_panel, "REFRESH_S", 0.02)
    folder = write_run(tmp_path / "run", 3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    set_status(folder, state="running", pid=process.pid, host=platform.node())

    async def follow() -> RunPanel:
        panel = RunPanel(folder)
        await asyncio.sleep(0.2)
        assert panel.follow.value and panel.messages.value == ""
        process.kill()  # and nobody waits for it: it stays listed
        for _ in range(200):
            await asyncio.sleep(0.02)
            if not panel.follow.value:
                break
        return panel

    panel = asyncio.run(follow())
    process.wait()
    assert not panel.follow.value and "process is gone" in panel.messages.value


def test_following_notices_a_run_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_panel, "REFRESH_S", 0.05)

    async def follow() -> RunPanel:
        panel = RunPanel.start(tmp_path / "missing.json", "sample", tmp_path / "run", steps=2)
        for _ in range(1000):
            await asyncio.sleep(0.05)
            if not panel.follow.value:
                break
        return panel

    panel = asyncio.run(follow())
    assert not panel.follow.value and "before its first step" in panel.messages.value
