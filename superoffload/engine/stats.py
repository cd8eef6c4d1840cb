"""What a step did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    cpu_params: int
    gpu_params: int
    """Parameters whose master weights and moments live on the CPU and on the GPU."""
    pinned_bytes: int
    host_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
