"""How long plans take, quickly: simulations for comparing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from superoffload import graph, simulator
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.units import FP32_BYTES, MIB

GOOD_ENOUGH = 1.003
"""A cheaper choice wins where it costs less than 0.3 % of a step."""
SEARCH_BUCKETS = 96
"""Buckets in the simulations of a search; the chosen plan is simulated with its own."""

CLOSE_BUCKETS = 384
"""In those that decide between plans that are close to each other."""
CLOSE = 1.03
"""Steps of `SEARCH_BUCKETS` buckets within 3 % of each other may be in the wrong order."""

SEARCH_MICRO_BATCHES = 3
"""Micro-batches that are simulated; a search takes those beyond for repetitions of the last."""


class Pace:
    """Answers for one profile."""

    def __init__(self, profile: Profile):
        self.profile = profile

    def coarse(self, plan: Plan, buckets: int = SEARCH_BUCKETS) -> Plan:
        """The same plan with at most so many buckets, for quick simulations."""
        size = max(plan.bucket_mb, self.profile.params * FP32_BYTES / MIB / buckets)
        if size == plan.bucket_mb:
            return plan
        total = len(graph.buckets_of(self.profile, size, plan.flow_blocks))
        whole = len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks))
        changes: dict[str, Any] = {"retained_buckets": min(total, round(plan.retained_buckets * total / whole))}
        if plan.undo_buckets is not None:
            changes["undo_buckets"] = max(1, round(plan.undo_buckets * total / whole))
        return plan.model_copy(update={"bucket_mb": size, **changes})

    def seconds(self, plan: Plan) -> float:
        """Of a step, simulated with few buckets."""
        return seconds_of(self.profile, self.coarse(plan))

    def closer(self, plan: Plan) -> float:
        """Of a step, simulated with more buckets."""
        return seconds_of(self.profile, self.coarse(plan, CLOSE_BUCKETS))

    def gpu_seconds(self, plan: Plan) -> float:
        """What the GPU alone needs for a step: no plan with this policy is faster."""
        return graph.gpu_seconds(self.profile, plan)


def seconds_of(profile: Profile, plan: Plan) -> float:
    """Seconds of a step, simulated with few micro-batches: those in the middle of a step are alike."""
    more = plan.accumulation - SEARCH_MICRO_BATCHES
    if more <= 1:
        return simulator.step_seconds(profile, plan)
    one_less, few = (
        simulator.step_seconds(profile, plan.model_copy(update={"accumulation": n}))
        for n in (SEARCH_MICRO_BATCHES - 1, SEARCH_MICRO_BATCHES)
    )
    return few + more * (few - one_less)


def first(test: Callable[[int], bool], low: int, high: int) -> int:
    """Smallest n in [low, high] for which the monotone `test` holds; `high` is known to pass."""
    while low < high:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle + 1
    return low
