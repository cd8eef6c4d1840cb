"""Asking a training run for something from another process: pause, go on, save a checkpoint, stop.

A run folder may hold `control.jsonl`, one request a line, appended by whoever asks. The run reads it between two steps;
what was there before it started is not for it. Nothing else is needed: no port, no signal, no parent process, so that
any notebook or shell that sees the folder can ask.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from superoffload.errors import InputError

CONTROL = "control.jsonl"
TRAIN_LOG = "train.log"
"""What a run that `start` began prints."""
ENDED = ("finished", "interrupted", "failed")
"""States of a run in which nobody listens."""

Request = Literal["pause", "go on", "checkpoint", "stop"]
REQUESTS: tuple[Request, ...] = get_args(Request)


def ask(folder: str | os.PathLike[str], request: Request) -> None:
    """Ask the run in `folder`. It answers after the step in progress; status.json then says so.

    Raises:
        InputError: there is no run, it has ended, or the request is not one.
    """
    path = Path(folder)
    if request not in REQUESTS:
        raise InputError(f'"{request}" is no request', expected=f"one of {', '.join(REQUESTS)}")
    try:
        status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path} holds no run that says how it is", expected="a folder with status.json") from None
    if not is_going_on(status):
        raise InputError(
            f"the run in {path} has ended (it said: {status.get('state')})",
            remedy=f"Continue it with: superoffload train --resume {path} ...",
        )
    line = json.dumps({"request": request, "time": time.time()}) + "\n"
    with (path / CONTROL).open("a", encoding="utf-8") as f:  # one short write: requests of two askers do not mix
        f.write(line)


def is_going_on(status: Mapping[str, Any]) -> bool:
    """Whether the run of a status file goes on: it does not say that it has ended, and where its process was one of
    this machine that process is there. (A run on another machine that was killed cannot be told from a slow one.)"""
    if status.get("state") in ENDED:
        return False
    if os.name != "posix" or status.get("host") != platform.node():
        return True
    try:
        pid = int(status["pid"])
        os.kill(pid, 0)  # asks, and sends nothing
    except (KeyError, TypeError, ValueError, PermissionError):
        return True
    except ProcessLookupError:
        return False
    try:  # one that has ended is listed until whoever started it has asked how
        listed = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    return listed.rpartition(")")[2].split()[0] != "Z"


class Requests:
    """The run's side.

    Args:
        folder: what lies in its control file now is of an earlier run.
    """

    def __init__(self, folder: Path):
        self._path = folder / CONTROL
        self._read = self._path.stat().st_size if self._path.is_file() else 0

    def take(self) -> list[Request]:
        """What was asked since the last call, oldest first; a line that is still being written comes next time."""
        try:
            if self._path.stat().st_size <= self._read:
                return []
            with self._path.open("rb") as f:
                f.seek(self._read)
                text = f.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found: list[Request] = []
        for line in whole.splitlines():
            try:
                request = json.loads(line)["request"]
            except (ValueError, TypeError, KeyError):
                continue
            if request in REQUESTS:
                found.append(request)
        return found


def train_arguments(
    config: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    steps: int | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> list[str]:
    """What follows ``superoffload train`` on the command line, without ``--out``."""
    arguments = ["--config", str(config), "--data", str(data)]
    arguments += [] if steps is None else ["--steps", str(steps)]
    return arguments + ([] if resume is None else ["--resume", str(resume)])


def command_line(arguments: Sequence[str], folder: str | os.PathLike[str]) -> str:
    """The line for a shell that does what `start` does, except that it stays in the foreground."""
    return shlex.join(["superoffload", "train", *arguments, "--out", str(folder)])


def start(arguments: Sequence[str], folder: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
    """Start `superoffload train` as a process of its own, which goes on when the caller ends.

    Args:
        arguments: see `train_arguments`.
        folder: of the run. What the process prints goes to `TRAIN_LOG` in it.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "superoffload", "train", *arguments, "--out", str(path)]
    with (path / TRAIN_LOG).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


__all__ = [
    "CONTROL",
    "ENDED",
    "REQUESTS",
    "TRAIN_LOG",
    "Request",
    "Requests",
    "ask",
    "command_line",
    "is_going_on",
    "start",
    "train_arguments",
]
