"""What a training run shows, as frozen records computed from the rows of its log.

Every number is measured; `status` says by what (``gpu_busy_source`` and the like, see `superoffload.train.gauges`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_POINTS = 1000
"""Most points drawn per curve. A longer run is thinned; the highest and lowest loss between two points are kept."""
MAX_MARKS = 300
"""Most steps of one verdict that are marked; of more, evenly spread ones."""
SMOOTHING_STEPS = 20
RECENT_STEPS = 20
"""Steps whose mean the headline shows."""
SHOWN_UNDONE = 20
"""Undone steps that are listed, the newest first."""

VERDICTS = ("", "commit", "clip", "skip")
"""As rows spell them, the first where they do not say."""
NUMBERS = (
    "loss", "tokens_per_s", "grad_norm", "clip_coefficient", "step_s", "speculated", "undone", "speculated_s", "undo_s",
    "after_verdict_s", "waited_s", "cpu_busy", "gpu_busy", "gpu_peak_bytes", "gpu_reserved_bytes", "host_bytes",
)  # fmt: skip
"""What is read of a row besides its step and verdict; NaN where it does not say."""


@dataclass(frozen=True, slots=True)
class RunRows:
    """Every row of a run as columns of equal length, steps rising."""

    steps: NDArray[np.int64]
    verdicts: NDArray[np.int8]
    """Indices into VERDICTS."""
    numbers: Mapping[str, Floats]
    """By the names of NUMBERS."""


@dataclass(frozen=True, slots=True)
class UndoneStep:
    """A step in which Adam ran before the verdict, and the verdict took some of it back."""

    step: int
    verdict: str
    grad_norm: float
    """NaN where a gradient was not finite."""
    clip_coefficient: float
    undone: int
    """Buckets taken back, or taken anew with other arguments."""
    speculated: int
    """Buckets that had run."""
    undo_s: float
    """Seconds of taking back and taking anew."""
    waited_s: float
    """Host seconds that the next forward waited for weights: an upper bound of the exposed optimizer time."""


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """The ledger of what speculation had to take back."""

    last: tuple[UndoneStep, ...]
    """The newest first."""
    steps: int
    """Undone steps of the whole run; the sums below are of them."""
    buckets: int
    undo_s: float
    waited_s: float
    speculated_steps: int
    """Of the steps that have a row."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps with one verdict, and where the loss was then."""

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    """Smoothed where the step's own is not finite."""


@dataclass(frozen=True, slots=True)
class Recent:
    """Means over the last RECENT_STEPS rows, memory of the last row; NaN where the run does not say. Shares run from 0
    to 1."""

    loss: float
    tokens_per_s: float
    gpu_busy: float
    """Share of time in which a kernel ran."""
    adam_busy: float
    """Share of time in which the optimizer's thread worked."""
    cpu_busy: float
    """Share of the CPU time of all the run's cores that its process used."""
    gpu_peak_bytes: float
    host_bytes: float


@dataclass(frozen=True, slots=True)
class RunView:
    """Columns of equal length, one entry per drawn step."""

    folder: str
    status: Mapping[str, Any]
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    smooth_loss: tuple[float, ...]
    """Mean over `smoothing_steps` neighbouring rows, half of them before and half after; fewer at the ends."""
    tokens_per_s: tuple[float, ...]
    gpu_busy: tuple[float, ...]
    adam_busy: tuple[float, ...]
    cpu_busy: tuple[float, ...]
    """Smoothed like the loss; see `Recent` for what each is."""
    gpu_bytes: tuple[float, ...]
    """Most that torch had allocated in the step."""
    host_bytes: tuple[float, ...]
    clipped: Marks
    skipped: Marks
    verdict_counts: tuple[tuple[str, int], ...]
    """Over all rows of the run, also those that are not drawn."""
    total_steps: int
    """Rows; a run that logs every tenth step has a tenth of its steps."""
    smoothing_steps: int
    first_loss: float
    recent: Recent
    rollbacks: Rollbacks
    unreadable_lines: int

    @property
    def state(self) -> str:
        """What the run says of itself: running, finished, failed ...; ``"unknown"`` where it says nothing."""
        return str(self.status.get("state", "unknown"))

    @property
    def has_gpu(self) -> bool | None:
        """Whether a GPU computes the model; None where the run does not say."""
        return self.status["gpu_name"] is not None if "gpu_name" in self.status else None

    def capacity(self, place: str) -> float:
        """Bytes that there are of ``"gpu"`` or ``"host"`` memory; 0 where the run does not say."""
        return float(self.status.get(f"{place}_capacity_bytes") or 0)


def view_of(folder: str, status: Mapping[str, Any], rows: RunRows, unreadable_lines: int = 0) -> RunView:
    """The view of a run's rows and its status file."""
    n, numbers = len(rows.steps), rows.numbers
    keep = thin(numbers["loss"], MAX_POINTS)
    width = max(SMOOTHING_STEPS, n // (MAX_POINTS // 2))
    adam = adam_busy(rows)

    def column(values: Floats) -> tuple[float, ...]:
        return tuple(values[keep].tolist())

    def smooth(values: Floats) -> tuple[float, ...]:
        return column(neighbour_mean(values, width))

    where = np.where(np.isfinite(numbers["loss"]), numbers["loss"], neighbour_mean(numbers["loss"], width))

    def marks(verdict: str) -> Marks:
        at = np.flatnonzero(rows.verdicts == VERDICTS.index(verdict))
        if len(at) > MAX_MARKS:
            at = at[np.linspace(0, len(at) - 1, MAX_MARKS).astype(np.int64)]
        return Marks(tuple(rows.steps[at].tolist()), tuple(where[at].tolist()))

    counts = np.bincount(rows.verdicts, minlength=len(VERDICTS)).tolist()
    return RunView(
        folder=folder,
        status=status,
        steps=tuple(rows.steps[keep].tolist()),
        loss=column(numbers["loss"]),
        smooth_loss=smooth(numbers["loss"]),
        tokens_per_s=column(numbers["tokens_per_s"]),
        gpu_busy=smooth(numbers["gpu_busy"]),
        adam_busy=smooth(adam),
        cpu_busy=smooth(numbers["cpu_busy"]),
        gpu_bytes=column(numbers["gpu_peak_bytes"]),
        host_bytes=column(numbers["host_bytes"]),
        clipped=marks("clip"),
        skipped=marks("skip"),
        verdict_counts=tuple(sorted((v, c) for v, c in zip(VERDICTS, counts, strict=True) if v and c)),
        total_steps=n,
        smoothing_steps=width,
        first_loss=float(numbers["loss"][0]) if n else np.nan,
        recent=Recent(
            loss=_mean(numbers["loss"]),
            tokens_per_s=_mean(numbers["tokens_per_s"]),
            gpu_busy=_mean(numbers["gpu_busy"]),
            adam_busy=_mean(adam),
            cpu_busy=_mean(numbers["cpu_busy"]),
            gpu_peak_bytes=float(numbers["gpu_peak_bytes"][-1]) if n else np.nan,
            host_bytes=float(numbers["host_bytes"][-1]) if n else np.nan,
        ),
        rollbacks=rollbacks(rows),
        unreadable_lines=unreadable_lines,
    )


def adam_busy(rows: RunRows) -> Floats:
    """Share of each step in which the optimizer's thread worked, 0 to 1: before the verdict on speculated buckets, and
    from the verdict until the last upload was enqueued. What comes after the verdict runs beside the next step, so
    that single steps may be off, and their mean is not."""
    numbers = rows.numbers
    with np.errstate(divide="ignore", invalid="ignore"):
        busy = (numbers["speculated_s"] + numbers["after_verdict_s"]) / numbers["step_s"]
    return np.where(np.isfinite(busy), np.minimum(busy, 1.0), np.nan)


def rollbacks(rows: RunRows) -> Rollbacks:
    """The ledger of undone steps."""
    n = rows.numbers
    # A row that says no whole number of either, as a file that somebody wrote may, tells of no undone step.
    undone = np.flatnonzero((n["undone"] > 0) & np.isfinite(n["undone"] + n["speculated"]))
    last = tuple(
        UndoneStep(
            step=int(rows.steps[i]),
            verdict=VERDICTS[rows.verdicts[i]],
            grad_norm=float(n["grad_norm"][i]),
            clip_coefficient=float(n["clip_coefficient"][i]),
            undone=int(n["undone"][i]),
            speculated=int(n["speculated"][i]),
            undo_s=float(n["undo_s"][i]),
            waited_s=float(n["waited_s"][i]),
        )
        for i in undone[-SHOWN_UNDONE:][::-1]
    )
    return Rollbacks(
        last=last,
        steps=len(undone),
        buckets=int(n["undone"][undone].sum()),
        undo_s=float(np.nansum(n["undo_s"][undone])),
        waited_s=float(np.nansum(n["waited_s"][undone])),
        speculated_steps=int(np.count_nonzero(n["speculated"] > 0)),
    )


def neighbour_mean(values: Floats, width: int) -> Floats:
    """Mean over `width` neighbours, half of them before and half after, of those that are numbers."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    at = np.arange(len(values))
    low, high = np.maximum(0, at - width // 2), np.minimum(len(values), at + width // 2 + 1)
    with np.errstate(invalid="ignore"):
        mean: Floats = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return mean


def thin(values: Floats, most: int) -> NDArray[np.int64]:
    """Indices of at most `most` entries that look like all of them: the first, the last, and of each stretch between
    the lowest and the highest."""
    n = len(values)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(1, n - 1, (most - 2) // 2 + 1).astype(np.int64)
    low, high = np.where(np.isfinite(values), values, np.inf), np.where(np.isfinite(values), values, -np.inf)
    kept = {0, n - 1}
    for a, b in itertools.pairwise(edges):
        kept |= {int(a + low[a:b].argmin()), int(a + high[a:b].argmax())}
    return np.array(sorted(kept))


def _mean(values: Floats) -> float:
    recent = values[-RECENT_STEPS:]
    recent = recent[np.isfinite(recent)]
    return float(recent.mean()) if len(recent) else np.nan


__all__ = ["Marks", "Recent", "Rollbacks", "RunRows", "RunView", "UndoneStep", "rollbacks", "thin", "view_of"]
