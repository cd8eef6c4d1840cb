"""What a run writes: one JSON line per step, one status file, one line of progress on stderr."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from superoffload.progress import progress_bar
from superoffload.record import finite, write_atomic

METRICS = "metrics.jsonl"
STATUS = "status.json"


class RunLog:
    """Writes ``metrics.jsonl`` (appended, one flushed line per step) and ``status.json`` (replaced as a whole).

    Both are read by other processes while the run goes on, see `superoffload.widgets.RunPanel`.
    """

    def __init__(self, folder: Path, *, steps: int, resume_at: int = 0, progress: bool = True) -> None:
        """`resume_at`: lines of later steps are dropped, since those steps run again."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._cut(resume_at)
        self._file: TextIO = (folder / METRICS).open("a", encoding="utf-8")
        self.status: dict[str, Any] = {
            "state": "starting", "step": resume_at, "steps": steps, "pid": os.getpid(), "host": platform.node(),
            "started": time.time(),
        }  # fmt: skip
        self._bar = progress_bar(steps, unit="step", initial=resume_at) if progress else None
        self._written = 0.0
        self.set(state="starting")

    def _cut(self, resume_at: int) -> None:
        path = self.folder / METRICS
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= resume_at:
                    kept.append(line)
            except (ValueError, KeyError):  # a line cut short by a crash
                continue
        write_atomic(path, "".join(line + "\n" for line in kept))

    def step(self, row: dict[str, Any]) -> None:
        """Write one step. Numbers that are not finite become null, which every JSON reader takes."""
        clean = finite(row)
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        self.status |= {k: clean.get(k) for k in ("step", "loss", "lr", "tokens_per_s", "tokens")}
        if time.monotonic() - self._written > 0.5:  # a reader polls every few seconds
            self.set(state="running")
        if self._bar is not None:
            self._bar.update(row["step"] - self._bar.n)
            self._bar.set_postfix_str(f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s", refresh=False)

    def set(self, **fields: Any) -> None:
        """Change the status file."""
        self.status |= {**fields, "updated": time.time()}
        write_atomic(self.folder / STATUS, json.dumps(finite(self.status), indent=2, allow_nan=False) + "\n")
        self._written = time.monotonic()

    def note(self, line: str) -> None:
        """One line for the person, on stderr, without tearing the progress bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._file.close()
        if self._bar is not None:
            self._bar.close()
