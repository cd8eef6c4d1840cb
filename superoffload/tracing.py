"""What happened, or would happen, in a training step. Simulated and measured steps are this same type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from superoffload.memory import Ledger
from superoffload.plan import Plan
from superoffload.record import Record
from superoffload.units import TERA

Lane = Literal["gpu", "link_down", "link_up", "cpu_adam", "validator", "interconnect"]
LANES: tuple[Lane, ...] = ("gpu", "link_down", "link_up", "cpu_adam", "validator", "interconnect")
"""In the order in which they are drawn; the last one only where there are several chips (`drawn_lanes`)."""
LANE_TITLES: dict[str, str] = {
    "gpu": "GPU",
    "link_down": "Link GPU→CPU",
    "link_up": "Link CPU→GPU",
    "cpu_adam": "CPU Adam",
    "validator": "Validator",
    "interconnect": "GPU↔GPUs",
}

Kind = Literal[
    "forward", "recompute", "backward", "gpu_adam", "cast", "norm", "copy_down", "copy_up", "fetch", "adam",
    "cpu_cast", "verdict", "undo", "launch", "reduce_scatter", "all_gather", "all_to_all",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One span of work on one lane."""

    lane: Lane
    kind: Kind
    name: str
    start_s: float
    """Seconds from the start of the trace."""
    duration_s: float
    bytes: int = 0
    block: int = -1
    bucket: int = -1
    step: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap on a lane between two spans of the same step, named by the dependency that ended last."""

    lane: Lane
    start_s: float
    duration_s: float
    waits_for: str
    """Short name of the event that ended the wait."""
    cause: str
    """One sentence: who waits how long for what, and why that was late."""


class Trace(Record):
    """A window of one or more steps; `step_s` is the steady-state time of one step.

    Of several chips, events, stalls and memory are those of one (all are alike), tokens, FLOPs and peak those of all.
    """

    schema_name: ClassVar[str] = "superoffload.trace"

    source: Literal["measured", "modelled"]
    step_s: float
    """Seconds per optimizer step: steady state when modelled, median when measured."""
    tokens_per_step: int
    model_flops_per_step: float
    """6·N·tokens plus causal attention, no recompute counted."""
    peak_bf16_tflops: float
    """Dense bf16 peak that MFU is counted against; 0 where it is not known (MFU is then 0)."""
    hardware: str
    model: str
    plan: Plan
    memory: Ledger
    events: tuple[TraceEvent, ...] = ()
    stalls: tuple[Stall, ...] = ()
    window_s: float = 0.0
    """Length of the drawn window."""
    context: dict[str, str] = Field(default_factory=dict)
    """Machine, versions and configuration of a measurement; the constants' origin of a model."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s if self.step_s else 0.0

    @property
    def model_tflops(self) -> float:
        """Model TFLOP/s: useful work only."""
        return self.model_flops_per_step / self.step_s / TERA if self.step_s else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, against `peak_bf16_tflops`."""
        return self.model_tflops / self.peak_bf16_tflops if self.peak_bf16_tflops else 0.0

    def busy_s(self, lane: Lane, until_s: float = float("inf")) -> float:
        """Seconds in which `lane` was at work in the window, up to `until_s` (overlapping spans counted once)."""
        spans = sorted((e.start_s, min(e.end_s, until_s)) for e in self.events if e.lane == lane)
        total, reach = 0.0, float("-inf")
        for start, end in spans:
            total += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        return total

    @property
    def gpu_busy(self) -> float:
        """Share of one step in which the GPU computes, 0 to 1 (what is drawn after `step_s` is the next step)."""
        period = min(self.step_s, self.window_s)
        return self.busy_s("gpu", period) / period if period else 0.0

    def _repr_html_(self) -> str:
        from superoffload.html_views import trace_html

        return trace_html(self)

    def summary(self) -> dict[str, Any]:
        """The keys that `superoffload simulate --json` prints."""
        return {
            "source": self.source,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "model_tflops": self.model_tflops,
            "mfu": self.mfu,
            "gpu_busy": self.gpu_busy,
            "stalls": [
                {"lane": s.lane, "start_s": s.start_s, "duration_s": s.duration_s, "waits_for": s.waits_for,
                 "cause": s.cause}
                for s in self.stalls
            ],
            "memory": self.memory.summary(),
            "plan": self.plan.model_dump(mode="json", exclude={"reasons"}),
            "reasons": dict(self.plan.reasons),
            "hardware": self.hardware,
            "model": self.model,
            **({"chips": self.plan.chips} if self.plan.chips > 1 else {}),
        }  # fmt: skip


def drawn_lanes(events: Iterable[TraceEvent]) -> tuple[Lane, ...]:
    """The lanes to draw: all of one chip, and the interconnect's where it has events."""
    return LANES if any(e.lane == "interconnect" for e in events) else LANES[:-1]
