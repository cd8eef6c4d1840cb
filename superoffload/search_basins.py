"""Where the descents of a search may begin: combinations of the fields with which so much else changes that a single
step rarely gets across (docs/search.md)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from superoffload import graph
from superoffload.planner_pace import Pace
from superoffload.search_space import AXES, Space, plan_key
from superoffload.search_trying import QUICK_BUCKETS

Basin = tuple[float, dict[int, int]]
"""Tokens/s that the GPU would reach if it never waited; the combination, as axis -> candidate."""


def basins(space: Space, check: Callable[[], None]) -> list[Basin]:
    """All combinations that differ as plans, the most promising first.

    Args:
        check: called before each is looked at; raises where the search is to end.
    """
    axes = [i for i, name in enumerate(space.values) if AXES[name].basin]
    sizes = [len(v) for v in space.values.values()]
    found: dict[tuple[Any, ...], Basin] = {}
    for combination in itertools.product(*(range(sizes[i]) for i in axes)):
        chosen = dict(zip(axes, combination, strict=True))
        plan = space.plan(tuple(chosen.get(i, k) for i, k in enumerate(space.start)))
        plan = plan.model_copy(update={"flow_blocks": (), "retained_buckets": 0})
        if (key := plan_key(plan)) in found:
            continue
        check()
        pace = Pace(space.task.of(plan))
        short = (pace.coarse(plan.model_copy(update={"accumulation": n}), QUICK_BUCKETS) for n in (1, 2))
        one, two = (graph.build(pace.profile, p).load("gpu") for p in short)
        found[key] = plan.tokens_per_step / (one + (plan.accumulation - 1) * (two - one)), chosen
    return sorted(found.values(), key=lambda b: -b[0])
