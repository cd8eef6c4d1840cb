"""Experiments on several Superchips: what chips send each other, and what that leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superoffload import graph
from superoffload.estimating import estimate
from superoffload.plan import Plan
from superoffload.plan_presets import pcie_era_plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.simulator import simulate, step_seconds
from superoffload.tracing import Trace

LONG_MODEL, LONG_CHIPS = "paper-13b", 8
"""The paper trained this model with sequences of a million tokens on so many chips."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-alls of one step, modelled."""

    seconds: float
    """In which a chip waits for them."""
    share: float
    """Of the step, 0 to 1."""
    sent_bytes: int
    """By one chip."""


def on_chips(model: str, family: str, chips: Sequence[int], *, micro_batch: int, seq_len: int) -> dict[int, Trace]:
    """The planner's own step with the same micro-batch on each of ever more chips (data parallel), modelled.

    Args:
        family: a preset of one chip that is known to be joined, such as ``"gh200-quad"``.

    Raises:
        DoesNotFit: the model does not fit the first of them.
    """
    found = {}
    for n in chips:
        name = family if n == 1 else f"{family}-x{n}"
        profile = estimate(model, micro_batch=micro_batch, seq_len=seq_len, hardware=name)
        found[n] = simulate(profile, make_plan(profile))
    return found


def long_profile(hardware: str, tokens: int, chips: int = LONG_CHIPS) -> Profile:
    """The paper's 13B model with one sequence that all chips share."""
    return estimate(LONG_MODEL, micro_batch=1, seq_len=tokens, hardware=hardware, sequence_parallel=chips)


def plain_plan(profile: Profile, **knobs: Any) -> Plan:
    """States on the CPUs, layers recomputed, the loss in chunks; memory is not checked."""
    fused = {"cast_down": "fused", "cast_up": "fused", "loss_chunks": 32}
    return pcie_era_plan(profile, **{**fused, **knobs})


def exchange(profile: Profile, plan: Plan) -> Exchange:
    """What the all-to-alls of a step are."""
    ops = [op for op in graph.build(profile, plan).ops if op.kind == "all_to_all"]
    seconds = sum(op.seconds for op in ops)
    return Exchange(seconds, seconds / step_seconds(profile, plan), sum(op.link_bytes for op in ops))
