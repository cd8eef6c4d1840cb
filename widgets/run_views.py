"""What a run folder says, read without touching the process that writes it."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superoffload.errors import InputError

MAX_POINTS = 2000
"""Most points drawn per curve; a longer run is thinned evenly, keeping its last step."""
SMOOTHING_STEPS = 20


@dataclass(frozen=True, slots=True)
class RunView:
    """Columns of equal length, one entry per drawn step."""

    folder: str
    status: Mapping[str, Any]
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    smooth_loss: tuple[float, ...]
    """Mean over SMOOTHING_STEPS neighbouring steps, half of them before and half after; fewer at the ends."""
    tokens_per_s: tuple[float, ...]
    grad_norm: tuple[float, ...]
    verdicts: tuple[str, ...]
    verdict_counts: tuple[tuple[str, int], ...]
    """Over all steps of the run, also those that are not drawn."""
    total_steps: int
    unreadable_lines: int

    @property
    def state(self) -> str:
        """What the run says of itself: running, done, failed ...; ``"unknown"`` where it says nothing."""
        return str(self.status.get("state", self.status.get("status", "unknown")))


def read_run(folder: str | os.PathLike[str]) -> RunView:
    """Read ``metrics.jsonl`` and ``status.json`` of a folder that ``superoffload train`` writes.

    A line that is being written, or was cut by a crash, is counted and left out. Of a step that was run twice (a run
    that was resumed) the last line counts.

    Raises:
        InputError: the folder does not exist or is not a run folder.
    """
    path = Path(folder)
    metrics, status_file = path / "metrics.jsonl", path / "status.json"
    if not path.is_dir() or not (metrics.exists() or status_file.exists()):
        raise InputError(
            f"{path} is not a run folder",
            expected="a folder with metrics.jsonl and status.json",
            remedy=f"Start a run with: superoffload train --config tuned.json --data FILE --out {path}",
        )
    rows: dict[int, dict[str, Any]] = {}
    bad = 0
    if metrics.exists():
        with metrics.open(encoding="utf-8", errors="replace") as f:
            for line in f:
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    rows[int(row["step"])] = row
                except (ValueError, TypeError, KeyError):
                    bad += 1
    status: dict[str, Any] = {}
    if status_file.exists():
        try:
            loaded = json.loads(status_file.read_text(encoding="utf-8"))
            status = loaded if isinstance(loaded, dict) else {}
        except (ValueError, OSError):
            bad += 1
    ordered = [rows[k] for k in sorted(rows)]
    losses = [_number(r.get("loss")) for r in ordered]
    smooth = _neighbour_mean(losses, SMOOTHING_STEPS)
    keep = _thin(len(ordered), MAX_POINTS)
    counts = Counter(str(r.get("verdict") or "") for r in ordered)
    return RunView(
        folder=str(path),
        status=status,
        steps=tuple(int(ordered[i]["step"]) for i in keep),
        loss=tuple(losses[i] for i in keep),
        smooth_loss=tuple(smooth[i] for i in keep),
        tokens_per_s=tuple(_number(ordered[i].get("tokens_per_s")) for i in keep),
        grad_norm=tuple(_number(ordered[i].get("grad_norm")) for i in keep),
        verdicts=tuple(str(ordered[i].get("verdict") or "") for i in keep),
        verdict_counts=tuple(sorted((k, v) for k, v in counts.items() if k)),
        total_steps=len(ordered),
        unreadable_lines=bad,
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _neighbour_mean(values: list[float], width: int) -> list[float]:
    finite = [v if math.isfinite(v) else 0.0 for v in values]
    sums = list(itertools.accumulate(finite, initial=0.0))
    counts = list(itertools.accumulate((int(math.isfinite(v)) for v in values), initial=0))
    out = []
    for i in range(len(values)):
        lo, hi = max(0, i - width // 2), min(len(values), i + width // 2 + 1)
        n = counts[hi] - counts[lo]
        out.append((sums[hi] - sums[lo]) / n if n else math.nan)
    return out


def _thin(n: int, most: int) -> list[int]:
    return list(range(n)) if n <= most else [round(i * (n - 1) / (most - 1)) for i in range(most)]
