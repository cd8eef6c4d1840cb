"""A measured step corrects the profile: what the model says of each kind of work, beside what the machine took.

A trace of `OffloadAdamW` or of the Tuner's Measure panel holds every span of one step. The model's graph of the same
plan holds what each of them should take alone. Their ratios correct the profile's blocks, the link's curves and Adam's
bandwidth, and nothing else: what is left between the corrected prediction and the measured step is waiting that the
model does not know, or does not know well, and is shown as such.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from superoffload import graph
from superoffload.calibration_spans import Correction, compare, compare_beside
from superoffload.errors import InputError
from superoffload.graph import StepGraph
from superoffload.hardware import Curve
from superoffload.plan import Plan
from superoffload.profile_scaling import corrected_blocks
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.simulator import resolve_speculation, simulate
from superoffload.tracing import LANE_TITLES, Lane, Trace, drawn_lanes
from superoffload.units import format_off, format_seconds

STRANGE = (0.4, 2.5)
"""Factors beyond these are no matter of drift: another machine, another model, or a machine that others used."""

DRIFT = 0.05
"""Change of a factor over time from which it is pointed out."""


class LaneTime(Record):
    """Seconds that a lane works in a step."""

    lane: Lane
    modelled_s: float
    """Before the correction."""
    calibrated_s: float
    """After it."""
    measured_s: float


class Calibration(Record):
    """Corrections from one measured step, and the corrected profile."""

    schema_name: ClassVar[str] = "superoffload.calibration"

    date: str
    """Of the calibration, ISO."""
    model: str
    hardware: str
    corrections: tuple[Correction, ...]
    lanes: tuple[LaneTime, ...]
    modelled_step_s: float
    calibrated_step_s: float
    measured_step_s: float
    profile: Profile
    base: str = ""
    """Digest of the profile that was corrected: corrections of one and the same can be compared."""
    context: dict[str, str] = Field(default_factory=dict)
    """Where the trace was taken."""

    @property
    def unexplained(self) -> float:
        """Share of the measured step that the corrected model does not account for; negative where it says more."""
        return 1.0 - self.calibrated_step_s / self.measured_step_s

    @property
    def strange(self) -> tuple[Correction, ...]:
        """Corrections too large to be the drift of one machine."""
        return tuple(c for c in self.corrections if not STRANGE[0] <= c.factor <= STRANGE[1])

    def lines(self) -> list[str]:
        """For people: the steps, each correction, each lane."""
        measured, before, after = self.measured_step_s, self.modelled_step_s, self.calibrated_step_s
        found = [
            f"step: {format_seconds(measured)} measured",
            f"      {format_seconds(before)} modelled ({format_off(before, measured)})",
            f"      {format_seconds(after)} with the corrections ({format_off(after, measured)})",
            f"{'corrected':18}{'factor':>8}{'modelled':>12}{'measured':>12}{'compared':>10}",
        ]
        found += [
            f"{c.part:18}{c.factor:8.3f}{format_seconds(c.modelled_s):>12}{format_seconds(c.measured_s):>12}"
            f"{c.samples:10}{'  beside others' if c.beside else ''}"
            for c in self.corrections
        ]
        found.append(f"{'busy in a step':18}{'':8}{'modelled':>12}{'measured':>12}{'corrected':>12}")
        found += [
            f"{LANE_TITLES[t.lane]:18}{'':8}{format_seconds(t.modelled_s):>12}{format_seconds(t.measured_s):>12}"
            f"{format_seconds(t.calibrated_s):>12}"
            for t in self.lanes
        ]
        found += [
            f"{c.part} is {c.factor:.2f} times what the profile says: too far for drift; was this trace taken of this "
            "model, on this machine, with nobody else on it?"
            for c in self.strange
        ]
        return found

    def summary(self) -> dict[str, Any]:
        """Everything but the profile, as `superoffload calibrate --json` prints it."""
        return self.model_dump(mode="json", exclude={"profile"}) | {"unexplained": self.unexplained}

    def remember(self, history: str | os.PathLike[str]) -> None:
        """Append the corrections, without the profile, as one line to a file, which `drift` reads."""
        entry = HistoryEntry(date=self.date, model=self.model, hardware=self.hardware, base=self.base,
                             factors={c.part: c.factor for c in self.corrections},
                             modelled_step_s=self.modelled_step_s, measured_step_s=self.measured_step_s)  # fmt: skip
        path = Path(history)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as f:
            f.write(entry.model_dump_json() + "\n")


class HistoryEntry(Record):
    """One line of a history of calibrations."""

    date: str
    model: str
    hardware: str
    base: str
    factors: dict[str, float]
    modelled_step_s: float
    measured_step_s: float


def drift(history: str | os.PathLike[str], calibration: Calibration) -> list[str]:
    """How the corrections of the same profile went over time, as a table for people; oldest first.

    Args:
        history: the file that `Calibration.remember` writes; it may hold other models and machines too.
        calibration: says which profile.

    Raises:
        InputError: a line of the file is not one of a history.
    """
    entries: list[HistoryEntry] = []
    for number, line in enumerate(Path(history).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = HistoryEntry.model_validate_json(line)
        except ValidationError as error:
            raise InputError(
                f"line {number} of {history} is not of a history of calibrations ({error.errors()[0]['msg']})",
                remedy="Remove that line, or name another file",
            ) from error
        if entry.base == calibration.base:
            entries.append(entry)
    parts = list(dict.fromkeys(part for e in entries for part in e.factors))
    found = [f"{'factors of ' + calibration.model:28}" + "".join(f"{p:>17}" for p in parts) + f"{'step':>12}"]
    for e in entries:
        cells = "".join(f"{e.factors[p]:17.3f}" if p in e.factors else f"{'':17}" for p in parts)
        found.append(f"{e.date:28}{cells}{format_seconds(e.measured_step_s):>12}")
    if len(entries) > 1:
        first, last = entries[0].factors, entries[-1].factors
        moved = [p for p in parts if p in first and p in last and abs(last[p] / first[p] - 1) > DRIFT]
        found += [f"{p} has drifted by {format_off(last[p], first[p])} since {entries[0].date}" for p in moved]
    return found


def calibrate(profile: Profile, trace: Trace) -> Calibration:
    """Correct `profile` by a measured step.

    Args:
        profile: of the model that was measured, for the machine it was measured on; its micro-batch may be another.
        trace: from `OffloadAdamW.trace()` or `measure_steps`, with the plan that was run.

    Raises:
        InputError: the trace is modelled, is of another model, or holds nothing that could be compared.
    """
    if trace.source != "measured":
        raise InputError(
            f"the trace of {trace.model} is {trace.source}",
            expected="a measured one",
            remedy="Record it: OffloadAdamW(..., record_trace=True), some steps, then opt.trace().save(FILE)",
        )
    if trace.step_s <= 0:
        raise InputError(f"the trace of {trace.model} says that a step takes {trace.step_s:g} s", expected="more")
    plan = _as_run(profile, trace)
    step = graph.build(profile, plan)
    _check_same_model(profile, step, trace)
    before = simulate(profile, plan)
    corrections = compare(profile, step, before, trace)
    if not any(c.part in ("layers forward", "layers backward") for c in corrections):
        raise InputError(
            "the trace holds no span that could be compared with the model",
            expected="the layers of at least one whole step",
            remedy="Run three steps or more before taking the trace",
        )
    today = datetime.date.today().isoformat()
    note = f"measured step of {today}"
    # The others first: what copies and Adam share depends on them.
    halfway = simulate(_apply(profile, corrections, compiled=plan.compile_blocks, note=note), plan)
    corrections += compare_beside(halfway, trace, [c.part for c in corrections])
    corrected = _apply(profile, corrections, compiled=plan.compile_blocks, note=note)
    after = simulate(corrected, plan)
    lanes = tuple(
        LaneTime(lane=lane, modelled_s=_busy(before, lane), calibrated_s=_busy(after, lane),
                 measured_s=_busy(trace, lane))
        for lane in drawn_lanes([*before.events, *trace.events])
    )  # fmt: skip
    return Calibration(
        date=today, model=profile.model, hardware=profile.hardware.name, corrections=tuple(corrections), lanes=lanes,
        modelled_step_s=before.step_s, calibrated_step_s=after.step_s, measured_step_s=trace.step_s,
        profile=corrected, base=_digest(profile), context=dict(trace.context),
    )  # fmt: skip


def _as_run(profile: Profile, trace: Trace) -> Plan:
    """The plan of the trace; where an optimizer was made without one, with the profile's batch."""
    plan = resolve_speculation(trace.plan)
    if trace.plan.speculate == "auto" and not _speculated(trace):
        plan = plan.replace(speculate="off")
    if plan.tokens_per_step == trace.tokens_per_step:
        return plan
    if profile.tokens * plan.accumulation != trace.tokens_per_step:
        raise InputError(
            f"the trace is of {trace.tokens_per_step:,} tokens a step, its plan says {plan.tokens_per_step:,} and the "
            f"profile {profile.tokens * plan.accumulation:,}",
            expected="one of the two to be what was run",
            remedy="Profile or estimate the model with the micro-batch and sequence length that were run",
        )
    return plan.replace(micro_batch=profile.micro_batch, seq_len=profile.seq_len)


def _speculated(trace: Trace) -> bool:
    """Whether CPU Adam began under the last backward."""
    gpu = [e for e in trace.events if e.lane == "gpu"]
    begin = max((e.start_s for e in gpu if e.kind == "forward"), default=0.0)
    end = max((e.end_s for e in gpu if e.kind == "backward"), default=0.0)
    return any(e.lane == "cpu_adam" and begin < e.start_s < end for e in trace.events)


def _check_same_model(profile: Profile, step: StepGraph, trace: Trace) -> None:
    blocks = 1 + max((e.block for e in trace.events), default=-1)
    buckets = 1 + max((e.bucket for e in trace.events), default=-1)
    if blocks > len(profile.blocks) or buckets > len(step.buckets):
        raise InputError(
            f"the trace has {blocks} blocks and {buckets} buckets, {profile.model} under its plan "
            f"{len(profile.blocks)} and {len(step.buckets)}",
            expected="a trace of this model",
        )


def _digest(profile: Profile) -> str:
    return hashlib.sha256(profile.to_json(indent=None).encode()).hexdigest()[:16]


def _busy(trace: Trace, lane: Lane) -> float:
    return trace.busy_s(lane, min(trace.step_s, trace.window_s))


def _apply(profile: Profile, corrections: Sequence[Correction], *, compiled: bool, note: str) -> Profile:
    factor: dict[str, float] = {c.part: c.factor for c in corrections}
    prefix = "compiled_" if compiled else ""  # what was not run is not corrected
    keys = {"layers forward": f"{prefix}forward", "layers backward": f"{prefix}backward", "head": "head"}
    blocks = {keys[part]: f for part, f in factor.items() if part in keys}
    all_ = {k: blocks.get(k, 1.0) * profile.corrections.get(k, 1.0) for k in {**profile.corrections, **blocks}}
    hw, adam = profile.hardware, factor.get("CPU Adam", 1.0)
    down, up = factor.get("link down", 1.0), factor.get("link up", 1.0)
    link = hw.link.replace(
        down=_slower(hw.link.down, down),
        up=_slower(hw.link.up, up),
        both_gb_per_s=hw.link.both_gb_per_s * 2 / (down + up),
    )
    cpu = hw.cpu.replace(adam_gb_per_s=tuple(x / adam for x in hw.cpu.adam_gb_per_s))
    told = {
        "link.down": down, "link.up": up, "cpu.adam_gb_per_s": adam,
    }  # fmt: skip
    sources = {
        **hw.sources,
        **{k: f"{hw.sources.get(k, '')}; calibrated: time x {f:.3f} by a {note}".lstrip("; ")
           for k, f in told.items() if f != 1.0},
    }  # fmt: skip
    context = {
        **profile.context,
        "calibrated": "; ".join(f"{c.part} x {c.factor:.3f}" for c in corrections) + f" by a {note}",
    }
    hw = hw.replace(link=link, cpu=cpu, sources=sources)
    return profile.replace(
        blocks=corrected_blocks(profile.blocks, blocks), corrections=all_, hardware=hw, context=context
    )


def _slower(curve: Curve, factor: float) -> Curve:
    return curve.replace(gb_per_s=tuple(x / factor for x in curve.gb_per_s))


__all__ = ["Calibration", "Correction", "LaneTime", "calibrate", "drift"]
