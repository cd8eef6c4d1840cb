"""What clipping costs a run that speculates: modelled step times, a storm of clipped steps, and the engine's own gate.

A step that waits for its norm costs the same whether it is clipped or not. One that has speculated and is clipped is
undone and redone when the norm is known: one pass over the CPU's buckets, as the step that was due then would have
been, but longer by what was measured on the H200 machine (`REDO_VS_STEP`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from superoffload import graph
from superoffload.errors import InputError
from superoffload.gate import Gate
from superoffload.plan import Plan, Speculate
from superoffload.profiler import Profile
from superoffload.simulator import step_seconds

REDO_VS_STEP = 1.063
"""Undo-and-redo of a bucket over a plain step of it: measured on 14 cores of the H200 machine with AVX-512, huge pages
and pinned gradients (benchmarks/results/undo_h200_2026-11-30.json)."""
BLOOM_CLIP_RATE = 93 / 79_000
"""Clipped or non-finite steps in a run of BLOOM-176B, steps 1,000 to 80,000 (SuperOffload paper)."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step of one plan, modelled."""

    commit_s: float
    """Speculated, and the guess was right."""
    wait_s: float
    """Not speculated; clipped or not."""
    adam_s: float
    """CPU Adam alone."""
    buckets: int
    """CPU buckets."""

    @property
    def clip_s(self) -> float:
        """Speculated, then undone and redone, since the norm was above the limit."""
        return self.wait_s + (REDO_VS_STEP - 1) * self.adam_s


@dataclass(frozen=True, slots=True)
class StormStep:
    """One step of a run; what the gate reads of it has the names of the engine's own record."""

    verdict: str
    speculated: int
    undone: int
    speculated_s: float
    undo_s: float
    step_s: float


def step_times(profile: Profile, plan: Plan) -> StepTimes:
    """Model what the steps of `plan` take, whatever it says about speculation."""
    ahead, waiting = (plan.model_copy(update={"speculate": word}) for word in ("on", "off"))
    total = len(graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks))
    return StepTimes(
        commit_s=step_seconds(profile, ahead),
        wait_s=step_seconds(profile, waiting),
        adam_s=graph.build(profile, waiting).load("cpu_adam"),
        buckets=max(0, total - plan.retained_buckets),
    )


def break_even_clip_rate(times: StepTimes) -> float:
    """Share of clipped steps, 0 to 1, above which speculating on every step takes longer than waiting on every step:
    the p of commit · (1 - p) + clip · p = wait."""
    if times.clip_s <= times.wait_s or times.wait_s <= times.commit_s:
        return float(times.wait_s > times.commit_s)
    return (times.wait_s - times.commit_s) / (times.clip_s - times.commit_s)


def storm_verdicts(
    steps: int, *, storm: tuple[int, int] | None = None, rate: float = BLOOM_CLIP_RATE, seed: int = 0
) -> tuple[str, ...]:
    """`commit` or `clip` for each step: clipped at random with `rate`, and all through the storm.

    Args:
        steps: length of the run.
        storm: first step (from 0) and length of a stretch in which every step is clipped; None for none.
        rate: clipped steps outside the storm, 0 to 1.

    Raises:
        InputError: a rate outside 0 to 1 or a storm that lies outside the run.
    """
    if not 0 <= rate <= 1:
        raise InputError(f"rate = {rate:g}", expected="a share from 0 to 1")
    first, length = storm or (0, 0)
    if first < 0 or length < 0 or first + length > steps:
        raise InputError(f"storm = ({first}, {length})", expected=f"a stretch within the {steps} steps of the run")
    draw = random.Random(seed)
    clipped = [draw.random() < rate or first <= i < first + length for i in range(steps)]
    return tuple("clip" if c else "commit" for c in clipped)


def run_storm(times: StepTimes, verdicts: Sequence[str], mode: Speculate = "auto") -> tuple[StormStep, ...]:
    """Play the verdicts through the engine's gate: each step speculates or waits as the engine would."""
    gate = Gate(mode, clips=True)
    run = []
    for verdict in verdicts:
        clipped, ahead = verdict == "clip", gate.open
        step = StormStep(
            verdict=verdict,
            speculated=times.buckets if ahead else 0,
            undone=times.buckets if ahead and clipped else 0,
            speculated_s=times.adam_s if ahead else 0.0,
            undo_s=REDO_VS_STEP * times.adam_s if ahead and clipped else 0.0,
            step_s=(times.clip_s if clipped else times.commit_s) if ahead else times.wait_s,
        )
        gate.observe(step)
        run.append(step)
    return tuple(run)
