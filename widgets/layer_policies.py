"""Plan fields for what a person marks on the layer map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from superoffload.plan import Plan


def recomputing(plan: Plan, layers: Sequence[int], wanted: Iterable[int]) -> dict[str, Any]:
    """Fields of the plan with which `wanted` of these layers, and no others, are computed again; the policies of all
    others stay, except that what was recomputed keeps everything then."""
    full = set(wanted)
    others = "none" if plan.activations == "full" else plan.activations
    policies = {i: plan.activations_of(i) for i in layers}
    policies = {i: "full" if i in full else others if p == "full" else p for i, p in policies.items()}
    common = next(iter(policies.values())) if len(set(policies.values())) == 1 else others
    by_block = {i: p for i, p in policies.items() if p != common}
    return {"activations": common, "activations_by_block": by_block}
