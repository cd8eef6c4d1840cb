"""What steps did, in numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

KEEP_RECORDS = 4096
"""Records of finished steps that are kept."""

NativeRecord = tuple[int, float, float, bool, int, int, int, int, int, int]
"""As the worker gives it: sequence, norm, coefficient, skipped, speculated, undone, waiting tiles, and nanoseconds of
speculated work, of undoing, and of everything after the verdict."""


def verdict_word(*, skipped: bool, coefficient: float) -> str:
    return "skip" if skipped else "clip" if coefficient < 1.0 else "commit"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one finished step did and cost."""

    step: int
    """Counted from 1, skipped steps included."""
    verdict: str
    """`commit`, `clip` (gradients were scaled down) or `skip` (one was not finite)."""
    grad_norm: float
    clip_coefficient: float
    speculated: int
    """Buckets whose Adam ran before the verdict."""
    undone: int
    """Of these, how many the verdict took back, or took anew with other arguments."""
    waiting_tiles: int
    """Tiles of 16,384 elements that speculation left alone, because too many of their elements needed more than the
    record holds."""
    speculated_s: float
    """Adam seconds before the verdict: what a commit saves."""
    undo_s: float
    """Seconds of taking back and taking anew."""
    after_verdict_s: float
    """From the verdict until the last bucket's new weights were on their way, undoing included."""
    waited_s: float = 0.0
    """Host seconds that the next forward waited for weights: an upper bound of the exposed optimizer time, since the
    GPU may have been busy meanwhile. The bound of a trace is tight."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class StepLog:
    """Records of the last steps, across engines."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=KEEP_RECORDS)
        self.steps_before = 0
        """Steps of the engines that came before this one."""

    def extend(self, native: Iterable[NativeRecord], waited_s: float) -> list[StepRecord]:
        """Add finished steps; the wait is put down to the last of them."""
        new = [
            StepRecord(self.steps_before + sequence, verdict_word(skipped=skipped, coefficient=coefficient), norm,
                       coefficient, speculated, undone, waiting, work / 1e9, undo / 1e9, after / 1e9)
            for sequence, norm, coefficient, skipped, speculated, undone, waiting, work, undo, after in native
        ]  # fmt: skip
        if new:
            new[-1] = replace(new[-1], waited_s=waited_s)
        self.records.extend(new)
        return new


@dataclass(frozen=True, slots=True)
class Stats:
    """What the last judged step did."""

    step: int
    """Steps submitted so far, skipped ones included."""
    verdict: str
    """`none` before the first step; `commit`, `clip` (gradients were scaled down) or `skip` (one was not finite)."""
    grad_norm: float | None
    """Global L2 norm of the gradients before clipping; None before the first step."""
    clip_coefficient: float
    skipped: int
    """Steps skipped so far."""
    loss_scale: float
    """What `scale_loss` multiplies by; 1 where no trained weight is float16."""
    speculated: int
    """Steps, of those in the optimizer's ledger, in which Adam ran before the verdict."""
    undone: int
    """Of these, how many were taken back or taken anew."""
    cpu_params: int
    gpu_params: int
    """Parameters whose master weights and moments live on the CPU and on the GPU."""
    pinned_bytes: int
    host_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
