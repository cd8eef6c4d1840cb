"""Why the best plan of a search has the values that it has: what the other values would have cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superoffload.search_result import SAME, SearchSettings, Trial, difference
from superoffload.search_space import AXES, Point, Space
from superoffload.search_trying import Trying


def reasons_of(
    best: Trial,
    settings: SearchSettings,
    space: Space,
    points: Mapping[Point, int],
    trials: Sequence[Trial],
    trying: Trying,
) -> dict[str, str]:
    """One sentence for each field that was not given: what its other values would have cost.

    Args:
        points: number of the trial at each point that was tried.
        trials: by number; 0 is the planner's own plan.
        trying: simulates quickly what is compared.
    """
    plan, start = best.plan, space.task.start
    reasons = {k: v for k, v in start.reasons.items() if k not in space.values}
    if best.number == 0:
        reasons = dict(start.reasons)
    if "accumulation" not in settings.knobs:
        reasons["accumulation"] = (
            f"{plan.accumulation}: {plan.tokens_per_step:,} tokens per step in micro-batches of "
            f"{plan.micro_batch} x {plan.seq_len:,}"
        )
    if plan.chips > 1:
        group = plan.sequence_parallel
        sharing = f"{plan.chips} chips, of which {group} share{'s' * (group == 1)} a sequence"
        for name in ("data_parallel", "sequence_parallel"):
            if name not in settings.knobs:
                reasons[name] = f"{getattr(plan, name)}: {sharing}"
    point = next((p for p, n in points.items() if n == best.number), None)
    for i, (name, values) in enumerate(space.values.items()):
        if point is None or name in space.task.fixed:
            continue
        others = [(k, points.get((*point[:i], k, *point[i + 1 :]))) for k in range(len(values)) if k != point[i]]
        tried = [(k, n) for k, n in others if n is not None and n != best.number]
        if AXES[name].ordered:  # the nearest on either side
            below, above = [x for x in tried if x[0] < point[i]], [x for x in tried if x[0] > point[i]]
            tried = [*below[-1:], *above[:1]]
        told = [f"{_short(getattr(trials[n].plan, name))} is {_against(trials[n], best, trying)}" for _, n in tried]
        if AXES[name].only(plan) is not None:
            told = ["the only one that makes sense beside the other fields"]
        value = _short(getattr(plan, name))
        reasons[name] = f"{value}: " + ("; ".join(told) or "no other value was tried beside the other fields")
    return reasons


def _against(other: Trial, best: Trial, trying: Trying) -> str:
    """What is worse about another trial. Both from quick simulations, so that they compare."""
    if not other.ran:
        return other.reason.replace("does not fit: ", "too much, ")
    told = difference(trying.quick(other), trying.quick(best))
    return "no different" if told == SAME else told


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value)} layers {next(iter(value.values()))}" if value else "none"
    if isinstance(value, tuple):
        return f"{len(value)} blocks" if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
