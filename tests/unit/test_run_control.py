"""Requests to a run through its folder, without a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload.errors import InputError
from superoffload.run_control import CONTROL, Requests, ask, is_going_on


def say(folder: Path, state: str, **more: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"state": state, **more}))


def test_requests_arrive_once_and_in_order(tmp_path: Path) -> None:
    say(tmp_path, "running")
    ask(tmp_path, "stop")  # to an earlier run
    requests = Requests(tmp_path)
    assert requests.take() == []
    ask(tmp_path, "checkpoint")
    ask(tmp_path, "pause")
    assert requests.take() == ["checkpoint", "pause"]
    assert requests.take() == []


def test_a_line_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    say(tmp_path, "running")
    requests = Requests(tmp_path)
    with (tmp_path / CONTROL).open("a") as f:
        f.write('{"request": "pau')
        f.flush()
        assert requests.take() == []
        f.write('se"}\nnonsense\n{"request": "explode"}\n[1]\n{"request": "go on"}\n')
        f.flush()
    assert requests.take() == ["pause", "go on"]


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run that says"):
        ask(tmp_path / "none", "stop")
    say(tmp_path, "finished")
    with pytest.raises(InputError, match=r"has ended \(it said: finished\)"):
        ask(tmp_path, "pause")
    say(tmp_path, "running")
    with pytest.raises(InputError, match="no request"):
        ask(tmp_path, "explode")  # type: ignore[arg-type]
    assert not (tmp_path / CONTROL).exists()


@pytest.mark.skipif(os.name != "posix", reason="asks the system for a process")
def test_a_run_whose_process_is_gone_has_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = platform.node()
    assert not is_going_on({"state": "running", "pid": gone.pid, "host": here})
    assert is_going_on({"state": "running", "pid": os.getpid(), "host": here})
    assert is_going_on({"state": "paused", "pid": gone.pid, "host": "elsewhere"}), "nobody can know"
    assert is_going_on({"state": "running"})
    assert not is_going_on({"state": "interrupted", "pid": os.getpid(), "host": here})
