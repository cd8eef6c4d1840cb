"""What to say and propose when a plan needs more memory than there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superoffload import graph
from superoffload.errors import DoesNotFit, InputError
from superoffload.loss_costs import enough_chunks
from superoffload.memory import Ledger, Place, ledger
from superoffload.plan import Plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.units import ADAM_STATE_BYTES, DTYPE_BYTES, format_bytes


def spread_layers(profile: Profile, count: int) -> tuple[int, ...]:
    """Return `count` layer blocks, evenly spread over the model.

    Raises:
        InputError: a negative count, or more than there are layers.
    """
    layers = [i for i, b in enumerate(profile.blocks) if b.kind == "layer"]
    if not 0 <= count <= len(layers):
        raise InputError(f"flow = {count}", expected=f"0 to {len(layers)}, the layers of {profile.model}")
    return evenly(layers, count)


def evenly(items: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of `items` at equal distances, so that each fetch has the longest time to hide."""
    return tuple(items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count))


def nearest_fit(profile: Profile, plan: Plan) -> Plan | None:
    """Return the plan nearest to one that does not fit, changing as few knobs as possible, or None."""
    layers = sum(b.kind == "layer" for b in profile.blocks)

    account = ledger(profile, plan)
    room = account.gpu_capacity_bytes + account.host_capacity_bytes
    states = sum(plan.share(b.params) * (ADAM_STATE_BYTES + DTYPE_BYTES[b.dtype]) for b in profile.blocks)
    if states > room:  # no plan can help: do not search
        return None

    def fits(p: Plan) -> bool:
        return ledger(rescale(profile, micro_batch=p.micro_batch, seq_len=p.seq_len), p).fits

    def retained(p: Plan) -> Plan | None:
        """The nearest number of retained buckets that fits: a scan outwards in 32 strides."""
        total = len(graph.buckets_of(profile, p.bucket_mb, p.flow_blocks))
        here, stride = p.retained_buckets, max(1, total // 32)
        counts = sorted({0, total, *range(here % stride, total + 1, stride)}, key=lambda n: abs(n - here))
        return next((q for n in counts if fits(q := p.model_copy(update={"retained_buckets": n}))), None)

    cut = max(4, len(graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks)))
    selective = not plan.compile_blocks and all(
        b.selective_bytes is not None for b in profile.blocks if b.kind == "layer"
    )
    chunks = enough_chunks(profile, plan)
    changes: tuple[tuple[bool, dict[str, Any]], ...] = (
        (chunks > plan.loss_chunks, {"loss_chunks": chunks}),
        (plan.activations == "none" and selective, {"activations": "selective", "activations_by_block": {}}),
        (
            plan.activations in ("none", "selective", "offload_saved") or bool(plan.activations_by_block),
            {"activations": "full", "activations_by_block": {}},
        ),
        (plan.speculate != "off" and plan.undo == "snapshot", {"undo": "record"}),
        *(
            (plan.speculate != "off" and n < (plan.undo_buckets or cut), {"undo_buckets": n})
            for n in (cut // 2, cut // 4)
        ),
        (plan.speculate != "off", {"speculate": "off", "undo_buckets": None}),
        ("gpu" in (plan.cast_down, plan.cast_up), {"cast_down": "fused", "cast_up": "fused"}),
        (
            plan.master == "plain" and any(b.dtype == "bfloat16" for b in profile.blocks),
            {"master": "split", "cast_up": "fused"},
        ),
        (
            plan.accumulation > 1 and plan.accumulate_on == "gpu" and not profile.hardware.shared_memory,
            {"accumulate_on": "cpu"},
        ),
        (plan.accumulation > 1, {"accumulation": 1}),
    )
    bases: list[Plan] = [plan]
    for applies, change in changes:
        if applies:
            bases.append(bases[-1].model_copy(update=change))
    # Layer inputs go to the host once nothing else helps: that costs link time, but no flow block and no smaller batch.
    offloading = bases[-1].model_copy(update={"activations": "offload_inputs", "activations_by_block": {}})
    if plan.activations != "offload_inputs" and not ledger(profile, offloading).overflow().get("host"):
        bases.append(offloading)
    for base in bases:
        if fits(base):
            return base
        found = retained(base)
        if found:
            return found
    frugal = bases[-1]
    for count in range(len(frugal.flow_blocks) + 1, layers + 1, max(1, layers // 8)):
        found = retained(frugal.model_copy(update={"flow_blocks": spread_layers(profile, count)}))
        if found:
            return found
    batch = frugal.micro_batch
    while batch > 1:
        batch //= 2
        smaller = frugal.model_copy(update={"micro_batch": batch, "accumulation": 1})
        found = smaller if fits(smaller) else retained(smaller)
        if found:
            return found
    return None


def does_not_fit(profile: Profile, plan: Plan, account: Ledger) -> DoesNotFit:
    """Build the error for a plan that needs more memory than there is."""
    parts = []
    places: tuple[tuple[Place, str, int], ...] = (
        ("gpu", "GPU", account.gpu_capacity_bytes),
        ("host", "host", account.host_capacity_bytes),
    )
    for place, word, capacity in places:
        if place in account.overflow():
            largest = account.largest(place)
            assert largest is not None
            parts.append(
                f"{word} memory: needs {format_bytes(account.total(place))} of {format_bytes(capacity)}, "
                f"{format_bytes(account.overflow()[place])} too much; largest item is {largest.name} with "
                f"{format_bytes(largest.bytes)}"
            )
    nearest = nearest_fit(profile, plan)
    if nearest:
        changes = ", ".join(
            f"{k}={_short(getattr(nearest, k))} instead of {_short(getattr(plan, k))}"
            for k in Plan.knobs()
            if getattr(nearest, k) != getattr(plan, k)
        )
        remedy = f"Nearest plan that fits: {changes}"
    else:
        remedy = "No plan of this model fits this machine: take a smaller model, a shorter sequence or more memory"
    error = DoesNotFit(
        f"the plan for {profile.model} does not fit {profile.hardware.name}. " + ". ".join(parts),
        ledger=account,
        remedy=remedy,
    )
    error.nearest = nearest
    return error


def _short(value: object) -> str:
    if isinstance(value, dict):
        return f"{len(value)} blocks"
    if isinstance(value, tuple):
        return f"{len(value)} blocks" if len(value) > 4 else str(list(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
