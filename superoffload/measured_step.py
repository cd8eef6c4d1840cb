"""Measured steps that ship with the package: what one machine did, beside what the model says of the same plan.

Each is one real optimizer step with the profile, the plan and the machine that it was taken with, so that a laptop
without GPU or torch can draw it, lay the prediction over it and calibrate by it. `benchmarks/ship_traces.py` makes
the files from `benchmarks/results`, where `benchmarks/record_steps.py` puts them.
"""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from superoffload.errors import InputError, did_you_mean
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.simulator import resolve_speculation, simulate
from superoffload.tracing import Lane, Trace, drawn_lanes

FOLDER = Path(__file__).with_name("recorded")
SUFFIX = ".json.gz"


@dataclass(frozen=True, slots=True)
class LaneBusy:
    """Seconds in which a lane works in one step."""

    lane: Lane
    modelled_s: float
    measured_s: float

    @property
    def off(self) -> float | None:
        """By which share the model is off, 0.1 where it says 10 % more; None where the machine did nothing there."""
        return self.modelled_s / self.measured_s - 1.0 if self.measured_s else None


class MeasuredStep(Record):
    """One optimizer step as a machine took it, with all that it takes to predict it.

    `trace` is the last step of a run: the update of the step before it, the forward that this overlaps, and its own
    forward and backward.
    """

    schema_name: ClassVar[str] = "superoffload.measured_step"

    name: str
    title: str
    """What was run, in a line."""
    shows: str
    """What to look for, in a sentence or two."""
    date: str
    """On which it was measured, ISO."""
    machine: dict[str, str]
    """Processors, versions of Python, torch, CUDA and this package."""
    verdict: str
    """Of the step whose update the trace shows: `commit` or `clip`."""
    steps_s: tuple[float, ...]
    """Seconds of all steps of the run that were timed, the last being the trace's."""
    profile: Profile
    """Of the model, measured on the same machine before the run."""
    trace: Trace

    @property
    def plan(self) -> Plan:
        return self.trace.plan

    def predicted(self) -> Trace:
        """The step that the model of this version predicts for the plan: one that commits, alone on its machine."""
        return simulate(self.profile, resolve_speculation(self.plan))

    def lanes(self) -> tuple[LaneBusy, ...]:
        """What each lane works in a step, modelled and measured."""
        return lanes_busy(self.predicted(), self.trace)

    def _repr_html_(self) -> str:
        from superoffload.html_views import measured_step_html

        return measured_step_html(self)


def lanes_busy(modelled: Trace, measured: Trace) -> tuple[LaneBusy, ...]:
    """What each lane works in a step of one trace and of the other; the validator's is left out, a moment in the model
    and the wait for the last partial sum in a measurement."""
    return tuple(
        LaneBusy(lane, *(t.busy_s(lane, min(t.step_s, t.window_s)) for t in (modelled, measured)))
        for lane in drawn_lanes([*modelled.events, *measured.events])
        if lane != "validator"
    )


def measured_steps() -> tuple[str, ...]:
    """Names of the measured steps that ship with the package, for `load_measured`."""
    return tuple(sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}")))


@functools.cache
def load_measured(name: str) -> MeasuredStep:
    """A measured step that ships with the package; needs neither torch nor a GPU.

    Args:
        name: one of `measured_steps()`.

    Raises:
        InputError: there is none of this name.
    """
    names = measured_steps()
    if name not in names:
        raise InputError(
            f'no measured step "{name}"{did_you_mean(str(name), names)}', expected=f"one of {', '.join(names)}"
        )
    path = FOLDER / f"{name}{SUFFIX}"
    return MeasuredStep.from_json(gzip.decompress(path.read_bytes()), where=str(path))
