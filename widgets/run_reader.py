"""Reads a run folder again and again without reading a line twice, and without touching the process that writes it."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from superoffload.errors import InputError
from superoffload.widgets.run_views import NUMBERS, VERDICTS, RunRows, RunView, view_of

METRICS, STATUS = "metrics.jsonl", "status.json"
CHUNK_BYTES = 1 << 22
TAIL_BYTES = 1024
"""The last that were read, more than a row: where the file no longer has them there, it was written anew."""


def read_run(folder: str | os.PathLike[str]) -> RunView:
    """Read ``metrics.jsonl`` and ``status.json`` of a folder that ``superoffload train`` writes.

    Raises:
        InputError: the folder does not exist or is not a run folder.
    """
    return RunReader(folder).read()


class RunReader:
    """The rows of one run so far.

    A last line that is still being written is left for the next time. Where a step comes a second time (a run that was
    resumed from before it), that step and all later ones are those of the new line on. A file that was written anew
    (resuming cuts off what runs again) is read from its beginning.

    Args:
        folder: of the run; it may appear later.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._start_over()

    def _start_over(self) -> None:
        self._offset, self._tail, self._unreadable = 0, b"", 0
        self._steps = array("q")
        self._verdicts = array("b")
        self._numbers = {name: array("d") for name in NUMBERS}

    def read(self) -> RunView:
        """What the folder says now; reads only what has been added since the last call.

        Raises:
            InputError: the folder does not exist or is not a run folder.
        """
        metrics, status = self.folder / METRICS, self.folder / STATUS
        if not self.folder.is_dir() or not (metrics.exists() or status.exists()):
            raise InputError(
                f"{self.folder} is not a run folder",
                expected=f"a folder with {METRICS} and {STATUS}",
                remedy=f"Start a run with: superoffload train --config tuned.json --data FILE --out {self.folder}",
            )
        self._read_rows(metrics)
        return view_of(str(self.folder), read_status(self.folder), self._rows(), self._unreadable)

    def _rows(self) -> RunRows:
        # Copies: a view would keep the arrays from growing.
        return RunRows(
            steps=np.array(self._steps, dtype=np.int64),
            verdicts=np.array(self._verdicts, dtype=np.int8),
            numbers={name: np.array(column, dtype=np.float64) for name, column in self._numbers.items()},
        )

    def _read_rows(self, path: Path) -> None:
        try:
            with path.open("rb") as f:
                f.seek(self._offset - len(self._tail))
                if f.read(len(self._tail)) != self._tail:
                    self._start_over()
                    f.seek(0)
                rest = b""
                while chunk := f.read(CHUNK_BYTES):
                    rest += chunk
                    whole = rest[: rest.rfind(b"\n") + 1]
                    if not whole:
                        continue
                    rest = rest[len(whole) :]
                    for line in whole.splitlines():
                        self._add(line)
                    self._offset += len(whole)
                    self._tail = whole[-TAIL_BYTES:]
        except FileNotFoundError:
            self._start_over()

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = json.loads(line)
            numbers = [_number(row.get(name)) for name in self._numbers]
            step = array("q", [int(row["step"])])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            self._unreadable += 1
            return
        while self._steps and self._steps[-1] >= step[0]:
            for column in (self._steps, self._verdicts, *self._numbers.values()):
                column.pop()
        self._steps.extend(step)
        verdict = row.get("verdict")
        self._verdicts.append(VERDICTS.index(verdict) if verdict in VERDICTS else 0)
        for column, number in zip(self._numbers.values(), numbers, strict=True):
            column.append(number)


def read_status(folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What ``status.json`` says; empty where there is none that can be read."""
    try:
        found = json.loads((Path(folder) / STATUS).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Changes when the run writes."""
    out: list[int] = []
    for name in (METRICS, STATUS):
        try:
            info = os.stat(os.path.join(folder, name))
            out += [info.st_size, info.st_mtime_ns]
        except OSError:
            out += [0, 0]
    return tuple(out)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


__all__ = ["RunReader", "read_run", "read_status", "stamp"]
