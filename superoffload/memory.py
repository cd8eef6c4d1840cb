"""Byte accounting: what a plan needs on the GPU and on the host, item by item, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from superoffload.activation_costs import IN_FLIGHT_BLOCKS, Choices, block_cost, choices_of, peaks, policies_of
from superoffload.bucket_sums import Kind, sums_of
from superoffload.loss_costs import in_chunks
from superoffload.plan import Activations, check_one_chip
from superoffload.quickly import remembered
from superoffload.record import Record
from superoffload.units import ADAM_STATE_BYTES, DTYPE_BYTES, FP32_BYTES, GB, REMAINDER_BYTES, format_bytes

if TYPE_CHECKING:
    from superoffload.layout import Bucket
    from superoffload.plan import Plan
    from superoffload.profiler import BlockProfile, Profile

Place = Literal["gpu", "host", "pinned"]

CUDA_CONTEXT_BYTES = 1_000_000_000
"""CUDA context, library workspaces and allocator slack kept free on a GPU; assumed."""
HOST_RESERVE_BYTES = 4_000_000_000
"""System, Python and PyTorch on the host; assumed."""
COLLECTIVES_BYTES = 1_000_000_000
"""Buffers of the library of collectives on the GPU, where there are several chips; assumed."""
EXCHANGE_COPIES = 2
"""Times that what an all-to-all sends exists beside what it brings: as it was made, and in order of the chips that it
goes to; assumed."""
SMALL_HOST_RESERVE_BYTES = 2_000_000_000
"""The same where GPU and CPU share one memory, as on a laptop; assumed."""


@dataclass(frozen=True, slots=True)
class LedgerItem:
    """One item. `pinned` items are host memory too: `host` totals include them."""

    place: Place
    name: str
    bytes: int


class Ledger(Record):
    """Items and capacities. `reserve` names what is kept free of each place (context, allocator, system)."""

    items: tuple[LedgerItem, ...] = ()
    gpu_capacity_bytes: int = 0
    """0 where unknown."""
    host_capacity_bytes: int = 0

    def total(self, place: Place) -> int:
        """Bytes at `place`; `host` includes what is pinned."""
        wanted = ("host", "pinned") if place == "host" else (place,)
        return sum(i.bytes for i in self.items if i.place in wanted)

    def largest(self, place: Place) -> LedgerItem | None:
        wanted = ("host", "pinned") if place == "host" else (place,)
        return max((i for i in self.items if i.place in wanted), key=lambda i: i.bytes, default=None)

    @property
    def fits(self) -> bool:
        return not self.overflow()

    def overflow(self) -> dict[str, int]:
        """Bytes over capacity by place, only where there are any."""
        caps: dict[Place, int] = {"gpu": self.gpu_capacity_bytes, "host": self.host_capacity_bytes}
        return {p: self.total(p) - c for p, c in caps.items() if c and self.total(p) > c}

    def shortage(self) -> str:
        """One sentence: which memory lacks how much, and what takes most of it; empty where everything fits."""
        over, parts = self.overflow(), []
        places: tuple[tuple[Place, str, int], ...] = (
            ("gpu", "GPU", self.gpu_capacity_bytes),
            ("host", "host", self.host_capacity_bytes),
        )
        for place, name, capacity in places:
            if place in over:
                largest = self.largest(place)
                what = f", of which {largest.name} takes {format_bytes(largest.bytes)}" if largest else ""
                parts.append(
                    f"the {name} lacks {format_bytes(over[place])} of {format_bytes(capacity + over[place])}{what}"
                )
        return " and ".join(parts)

    def summary(self) -> dict[str, object]:
        return {
            "gpu_gb": self.total("gpu") / GB,
            "host_gb": self.total("host") / GB,
            "pinned_gb": self.total("pinned") / GB,
            "gpu_capacity_gb": self.gpu_capacity_bytes / GB,
            "host_capacity_gb": self.host_capacity_bytes / GB,
            "fits": self.fits,
            "items": [{"place": i.place, "name": i.name, "gb": i.bytes / GB} for i in self.items],
        }


Items = dict[Place, dict[str, int]]
"""Place -> name -> bytes."""


def ledger(profile: Profile, plan: Plan) -> Ledger:
    """Account for every byte that the engine holds under `plan`, before anything runs. Of several chips, one.

    Where GPU and CPU share one memory, GPU items count as host memory and the GPU's capacity is left open.

    Raises:
        InputError: the plan does not belong to the profile.
    """
    from superoffload import graph

    profile = graph.fitted(profile, plan)
    graph.check_plan(profile, plan)
    hw = profile.hardware
    buckets = graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
    away = [_weights([profile.blocks[i]]) for i in plan.flow_blocks]
    items = state_items(buckets, plan, away, chips=plan.chips)
    activations = _activations(profile.blocks, choices_of(plan), plan.loss_chunks)
    gpu, pinned, host = items["gpu"], items["pinned"], items["host"]
    gpu |= {
        "buffers and frozen parameters": profile.buffers_bytes,
        "gradients while accumulating": _all_weights(profile.blocks)
        if plan.accumulation > 1 and plan.accumulate_on == "gpu"
        else 0,
        "gradient being produced": _largest_gradient(profile.blocks, plan.compile_blocks),
        **activations["gpu"],
    }
    pinned |= activations["pinned"]
    if plan.chips > 1:
        sent = max((b.exchange.before_bytes for b in profile.blocks if b.exchange), default=0)
        gpu |= {"all-to-all buffers": EXCHANGE_COPIES * sent, "buffers of collectives": COLLECTIVES_BYTES}
    if not hw.shared_memory or hw.gpu.peak_bf16_tflops:
        gpu["CUDA context and allocator"] = CUDA_CONTEXT_BYTES
    host["system and Python"] = SMALL_HOST_RESERVE_BYTES if hw.shared_memory else HOST_RESERVE_BYTES
    return Ledger.model_construct(
        items=ledger_items(items, one_memory=hw.shared_memory),
        gpu_capacity_bytes=0 if hw.shared_memory else round(hw.gpu.memory_gb * GB),
        host_capacity_bytes=round(hw.cpu.memory_gb * GB),
    )


def ledger_items(items: Items, *, one_memory: bool) -> tuple[LedgerItem, ...]:
    """The items that are not empty; those of the GPU on the host where both share `one_memory`."""
    return tuple(
        LedgerItem("host" if one_memory and where == "gpu" else where, name, n)
        for where in ("gpu", "pinned", "host")
        for name, n in items[where].items()
        if n
    )


def state_items(buckets: Sequence[Bucket], plan: Plan, flow_block_bytes: Sequence[int], *, chips: int = 1) -> Items:
    """What the engine allocates when it starts, and holds until it is closed.

    Args:
        buckets: cut as the plan says.
        flow_block_bytes: weights of each flow block.
        chips: over which the caller divides states. The engine, which trains on one, asks for one.

    Raises:
        NotSupported: the plan is for several chips and the caller is not.
    """
    from superoffload import graph

    if chips != plan.chips:
        check_one_chip(plan)
    sums = sums_of(buckets, plan.chips)
    n, at_once = max(0, sums.count - plan.retained_buckets), plan.compile_blocks
    costs = {dtype: graph.bucket_cost(plan, dtype) for dtype in DTYPE_BYTES}

    def on_cpu(kind: Kind) -> int:
        return sums.first(kind, n)

    def retained(kind: Kind) -> int:
        return sums.rest(kind, n)

    def every(kind: Kind) -> bool:
        return True

    def fp32(kind: Kind) -> bool:
        return kind[0] == "float32"

    def flow(kind: Kind) -> bool:
        return kind[1]

    def stays(kind: Kind) -> bool:
        return not flow(kind)

    def item(kind: Kind) -> int:
        return DTYPE_BYTES[kind[0]]

    # What goes up the link is pinned: the 16-bit copy, or the master where the GPU casts or weights are float32. A flow
    # block's 16-bit copy is its home, whoever casts; of float32 weights that flow the master is.
    goes_up = sums.over(lambda k: stays(k) and (fp32(k) or plan.cast_up == "gpu"), on_cpu)
    pinned_master = 4 * sums.over(every if goes_up else lambda k: flow(k) and fp32(k), on_cpu)
    cpu = sums.over(every, on_cpu)
    halved = sums.over(lambda k: plan.master == "split" and k[0] == "bfloat16", on_cpu)
    largest = {k: sums.largest_of_first(k, n) for k in sums.kinds}
    largest_down = max((largest[k] * costs[k[0]].down_bytes for k in sums.kinds), default=0)
    cast = max((largest[k] for k in sums.kinds if costs[k[0]].cast_down_bytes), default=0)
    whole = max((sums.whole_largest[k] * item(k) for k in sums.kinds), default=0) if chips > 1 else 0
    gpu = {
        "16-bit weights": sums.over(lambda k: stays(k) and not fp32(k), lambda k: 2 * sums.whole[k]),
        "float32 weights": sums.over(lambda k: stays(k) and fp32(k), lambda k: 4 * sums.whole[k]),
        "flow slots": min(plan.prefetch_blocks + 1, len(flow_block_bytes)) * max(flow_block_bytes, default=0),
        "new weights of retained flow buckets": 2
        * max((sums.largest_of_rest(k, n) * item(k) for k in sums.kinds if flow(k)), default=0),
        "gradients to reduce-scatter": sums.ring_slots(sums.count, at_once=at_once) * whole,
        "gradient ring": sums.ring_slots(n, at_once=at_once) * largest_down,
        "upload staging": 4 * max(largest.values(), default=0) if plan.cast_up == "gpu" else 0,
        "retained master weights and moments": sums.over(
            every, lambda k: retained(k) * (ADAM_STATE_BYTES - (4 if fp32(k) and stays(k) else 0))
        ),
        "retained gradients": sums.over(every, lambda k: retained(k) * item(k)),
    }
    pinned = {
        "held gradients": sums.over(every, lambda k: on_cpu(k) * costs[k[0]].down_bytes),
        "upload copy of new weights": sums.over(
            lambda k: stays(k) and not fp32(k) and plan.cast_up != "gpu", lambda k: on_cpu(k) * item(k)
        ),
        "home of flow blocks": sums.over(flow, lambda k: retained(k) * item(k))
        + sums.over(lambda k: flow(k) and not fp32(k), lambda k: on_cpu(k) * item(k)),
        "pinned master weights": pinned_master,
    }
    undone = 0 if plan.speculate == "off" else n if plan.undo_buckets is None else min(n, plan.undo_buckets)
    host = {
        ("moments" if pinned_master else "master weights and moments"): ADAM_STATE_BYTES * cpu
        - pinned_master
        - (FP32_BYTES - REMAINDER_BYTES) * halved,
        "float32 gradient of one bucket": 4 * cast,
        f"undo {plan.undo}s": sums.undo_of_first(plan.undo, undone),
    }
    return {"gpu": gpu, "pinned": pinned, "host": host}


def _weights(blocks: list[BlockProfile] | tuple[BlockProfile, ...]) -> int:
    return sum(b.params * DTYPE_BYTES[b.dtype] for b in blocks)


@remembered(64)
def _all_weights(blocks: tuple[BlockProfile, ...]) -> int:
    return _weights(blocks)


@remembered(64)
def _largest_gradient(blocks: tuple[BlockProfile, ...], compiled: bool) -> int:
    """The gradient of one tensor exists beside the ring while it is copied into it; of a compiled layer, all do."""

    def exists(b: BlockProfile) -> int:
        return b.params if compiled and b.kind == "layer" else max(b.tensor_numels, default=0)

    return max((exists(b) * DTYPE_BYTES[b.dtype] for b in blocks), default=0)


@remembered(1024)
def _activations(blocks: tuple[BlockProfile, ...], choices: Choices, chunks: int) -> dict[Place, dict[str, int]]:
    """What forward keeps for backward, by policy, and the largest extra of any one block.

    In backward one layer at a time has what its policy makes anew. The head's working memory (logits) exists while
    everything is kept; that of a layer when the later ones are gone already. What is offloaded is on the GPU for two
    blocks at a time.
    """
    plan = choices.plan()
    blocks = tuple(in_chunks(b, chunks) for b in blocks)
    gpu, pinned = dict.fromkeys(_KEPT.values(), 0), dict.fromkeys(_MOVED.values(), 0)
    kept, largest = 0, 0
    for block, policy in zip(blocks, policies_of(blocks, plan), strict=True):
        cost = block_cost(block, policy, compiled=plan.compile_blocks)
        kept += cost.kept
        gpu[_KEPT[policy if block.kind == "layer" else plan.activations]] += cost.kept
        if cost.moved:
            pinned[_MOVED[policy]] += cost.moved
            largest = max(largest, cost.moved)
    gpu["offloaded tensors in flight"] = IN_FLIGHT_BLOCKS * largest
    gpu["recomputed layer, logits and loss"] = max(0, max(peaks(blocks, plan), default=0) - kept)
    return {"gpu": gpu, "pinned": pinned}


_KEPT: dict[Activations, str] = {
    "none": "activations",
    "selective": "results kept by selective recomputation",
    "full": "layer inputs kept for recomputation",
    "offload_inputs": "layer inputs kept for recomputation",
    "offload_saved": "activations",
}
_MOVED: dict[Activations, str] = {"offload_inputs": "offloaded layer inputs", "offload_saved": "offloaded activations"}
