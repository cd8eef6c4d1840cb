"""A step simulated with fewer buckets than it has: a picture at once, where the exact one takes its time."""

from __future__ import annotations

import re

from superoffload.activation_costs import block_cost, policies_of
from superoffload.graph import buckets_of, fitted
from superoffload.memory import ledger
from superoffload.plan import Plan
from superoffload.planner_pace import Pace
from superoffload.profiler import Profile
from superoffload.quickly import without_collecting
from superoffload.simulator import resolve_speculation, simulate
from superoffload.tracing import Trace, TraceEvent

DRAFT_OPERATORS = 2500
"""About as many operators as are simulated and drawn in 40 ms on one core."""
LEAST_BUCKETS = 64
"""A draft has no fewer."""
WORTH_DRAFTING = 0.6
"""A draft that would have more than this part of the operators is none."""
KEY = "draft"
"""Of a trace's context, where the trace is a draft: what was left out."""


def operators(profile: Profile, plan: Plan, buckets: int) -> int:
    """About how many operators a step has, with this many buckets in place of the plan's own."""
    profile = fitted(profile, plan)
    cut = buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
    whole = max(1, len(cut))
    on_cpu = buckets * (1.0 - min(1.0, plan.retained_buckets / whole))
    flow = buckets * sum(int((cut.kind == i).sum()) for i, (_, flows) in enumerate(cut.kinds) if flows) / whole
    sent = plan.accumulation if plan.accumulate_on == "cpu" else 1
    each = 2 * len(profile.blocks) + 2 * len(plan.flow_blocks)
    for b, p in zip(profile.blocks, policies_of(profile.blocks, plan), strict=True):
        cost = block_cost(b, p, compiled=plan.compile_blocks)
        again = bool(cost.recompute_s)
        each += again + 2 * bool(cost.moved)
        if b.exchange:  # each pass waits for two all-to-alls, and is cut where it does
            each += 4 * (2 + again)
    # A bucket that flows does not go up; where it is retained, its new weights go down.
    of_buckets = sent * buckets + (2 * sent + 1) * on_cpu + flow * (1.0 - 2.0 * on_cpu / max(1, buckets))
    if plan.chips > 1:  # gradients are scattered and new weights gathered, as are those that have been fetched
        of_buckets += (sent + 1) * buckets - flow
        each += 2 * len(plan.flow_blocks)
    return round(plan.accumulation * each + of_buckets)


def drafted(profile: Profile, plan: Plan, above: int = DRAFT_OPERATORS) -> Plan | None:
    """The plan to simulate for a draft, with fewer and larger buckets; None where the step itself has no more than
    `above` operators, or a draft would have nearly as many."""
    profile = fitted(profile, plan)
    whole = len(buckets_of(profile, plan.bucket_mb, plan.flow_blocks))
    exact, none = operators(profile, plan, whole), operators(profile, plan, 0)
    if exact <= above:
        return None
    few = max(LEAST_BUCKETS, round((DRAFT_OPERATORS - none) * whole / max(1, exact - none)))
    if few >= whole or operators(profile, plan, few) > WORTH_DRAFTING * exact:
        return None
    # A cut has at least as many buckets as the parameters fill, and some more where kinds are filled side by side.
    coarse = Pace(profile).coarse(plan, few)
    return coarse if coarse.bucket_mb > plan.bucket_mb else None


@without_collecting()
def draft(profile: Profile, plan: Plan, above: int = DRAFT_OPERATORS) -> Trace | None:
    """Simulate a draft of a step that has more than `above` operators; None where `simulate` is quick enough.

    Returns:
        A trace of `plan`, with the plan's own memory, whose times are those of fewer buckets: `context["draft"]` says
        so. Buckets are named by the numbers that they have in the plan.
    """
    coarse = drafted(profile, plan, above)
    if coarse is None:
        return None
    trace = simulate(profile, coarse)
    few = len(buckets_of(profile, coarse.bucket_mb, plan.flow_blocks))
    many = len(buckets_of(profile, plan.bucket_mb, plan.flow_blocks))
    named = _Names(few, many, plan.retained_buckets)
    note = f"cut into {few:,} buckets of {coarse.bucket_mb:.3g} MiB in place of {many:,} of {plan.bucket_mb:g} MiB"
    resolved = resolve_speculation(plan)
    return trace.model_copy(
        update={
            "plan": resolved,
            "memory": ledger(profile, resolved),
            "events": tuple(map(named.event, trace.events)),
            "stalls": tuple(
                type(s)(s.lane, s.start_s, s.duration_s, named(s.waits_for), named(s.cause)) for s in trace.stalls
            ),
            "context": {
                **trace.context, "schedule": f"{many} buckets, {plan.retained_buckets} of them retained", KEY: note,
            },
        }
    )  # fmt: skip


class _Names:
    """Names of a draft's buckets in the plan: of those that one stands for, the last, which completes it."""

    def __init__(self, few: int, many: int, retained: int):
        self._few, self._many, self._retained = few, many, retained

    def bucket(self, k: int) -> int:
        return (k + 1) * self._many // self._few - 1

    def __call__(self, text: str) -> str:
        text = re.sub(r"\bbucket (\d+)", lambda m: f"bucket {self.bucket(int(m[1]))}", text)
        text = re.sub(r"\bbehind (\d+) (bucket|transfer|collective)s?", self._behind, text)
        return re.sub(r"\b\d+ retained buckets", f"{self._retained} retained buckets", text)

    def _behind(self, m: re.Match[str]) -> str:
        return f"behind about {round(int(m[1]) * self._many / self._few)} {m[2]}s"

    def event(self, e: TraceEvent) -> TraceEvent:
        if e.bucket < 0:
            if e.kind != "gpu_adam":
                return e
            return TraceEvent(e.lane, e.kind, self(e.name), e.start_s, e.duration_s, e.bytes, e.block, -1, e.step)
        at = self.bucket(e.bucket)
        name = e.name.removesuffix(str(e.bucket))
        name = e.name if name is e.name else f"{name}{at}"
        return TraceEvent(e.lane, e.kind, name, e.start_s, e.duration_s, e.bytes, e.block, at, e.step)
