"""Byte accounting: what a plan needs on the GPU and on the host, item by item, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from superoffload.activation_costs import IN_FLIGHT_BLOCKS, block_cost, peaks, policies_of
from superoffload.layout import ring_slots
from superoffload.loss_costs import in_chunks
from superoffload.plan import Activations
from superoffload.record import Record
from superoffload.units import (
    ADAM_STATE_BYTES,
    DTYPE_BYTES,
    FP32_BYTES,
    GB,
    REMAINDER_BYTES,
    UNDO_BYTES,
    format_bytes,
)

if TYPE_CHECKING:
    from superoffload.layout import Bucket
    from superoffload.plan import Plan
    from superoffload.profiler import BlockProfile, Profile

Place = Literal["gpu", "host", "pinned"]

CUDA_CONTEXT_BYTES = 1_000_000_000
"""CUDA context, library workspaces and allocator slack kept free on a GPU; assumed."""
HOST_RESERVE_BYTES = 4_000_000_000
"""System, Python and PyTorch on the host; assumed."""
UNDO_TILE, UNDO_TILE_BYTES = 16384, 640 * 16 + 4
"""Elements that share an escape list, and its bytes; csrc/undo.h."""
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
    """Account for every byte that the engine holds under `plan`, before anything runs.

    Where GPU and CPU share one memory, GPU items count as host memory and the GPU's capacity is left open.

    Raises:
        InputError: the plan does not belong to the profile.
    """
    from superoffload import graph
    from superoffload.profiler import rescale

    profile = rescale(profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len)
    graph.check_plan(profile, plan)
    hw = profile.hardware
    buckets = graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
    away = [_weights([profile.blocks[i]]) for i in plan.flow_blocks]
    items, activations = state_items(buckets, plan, away), _activations(profile.blocks, plan)
    gpu, pinned, host = items["gpu"], items["pinned"], items["host"]
    gpu |= {
        "buffers and frozen parameters": profile.buffers_bytes,
        "gradients while accumulating": _weights(profile.blocks)
        if plan.accumulation > 1 and plan.accumulate_on == "gpu"
        else 0,
        "gradient being produced": _largest_gradient(profile.blocks, plan),
        **activations["gpu"],
    }
    pinned |= activations["pinned"]
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


def state_items(buckets: Sequence[Bucket], plan: Plan, flow_block_bytes: Sequence[int]) -> Items:
    """What the engine allocates when it starts, and holds until it is closed.

    Args:
        buckets: cut as the plan says.
        flow_block_bytes: weights of each flow block.
    """
    from superoffload import graph

    first_retained = max(0, len(buckets) - plan.retained_buckets)
    on_cpu, retained = buckets[:first_retained], buckets[first_retained:]
    costs = {dtype: graph.bucket_cost(plan, dtype) for dtype in DTYPE_BYTES}

    # What goes up the link is pinned: the 16-bit copy, or the master where the GPU casts or weights are float32. A flow
    # block's 16-bit copy is its home, whoever casts.
    copied = [b for b in on_cpu if b.dtype != "float32" and (plan.cast_up != "gpu" or b.flow)]
    homes = [b for b in copied if b.flow]
    retained_homes = sum(b.numel * DTYPE_BYTES[b.dtype] for b in retained if b.flow)
    own = [b for b in on_cpu if b.flow and b.dtype == "float32"]  # of these the master is the home
    goes_up = any(not b.flow and (b.dtype == "float32" or plan.cast_up == "gpu") for b in on_cpu)
    pinned_master = 4 * sum(b.numel for b in (on_cpu if goes_up else own))
    numel = {"cpu": sum(b.numel for b in on_cpu), "largest": max((b.numel for b in on_cpu), default=0)}
    halved = sum(b.numel for b in on_cpu if plan.master == "split" and b.dtype == "bfloat16")
    casts = [b.numel for b in on_cpu if costs[b.dtype].cast_down_bytes]
    largest_down = max((b.numel * costs[b.dtype].down_bytes for b in on_cpu), default=0)
    gpu = {
        "16-bit weights": sum(2 * b.numel for b in buckets if b.dtype != "float32" and not b.flow),
        "float32 weights": sum(4 * b.numel for b in buckets if b.dtype == "float32" and not b.flow),
        "flow slots": min(plan.prefetch_blocks + 1, len(flow_block_bytes)) * max(flow_block_bytes, default=0),
        "new weights of retained flow buckets": 2
        * max((b.numel * DTYPE_BYTES[b.dtype] for b in retained if b.flow), default=0),
        "gradient ring": ring_slots(on_cpu, at_once=plan.compile_blocks) * largest_down,
        "upload staging": 4 * numel["largest"] if plan.cast_up == "gpu" else 0,
        "retained master weights and moments": sum(
            b.numel * (ADAM_STATE_BYTES - (4 if b.dtype == "float32" and not b.flow else 0)) for b in retained
        ),
        "retained gradients": sum(b.numel * DTYPE_BYTES[b.dtype] for b in retained),
        "fetched gradient bucket": largest_down if plan.accumulate_on == "cpu" else 0,
    }
    pinned = {
        "held gradients": sum(b.numel * costs[b.dtype].down_bytes for b in on_cpu),
        "upload copy of new weights": sum(b.numel * DTYPE_BYTES[b.dtype] for b in copied if not b.flow),
        "home of flow blocks": retained_homes + sum(b.numel * DTYPE_BYTES[b.dtype] for b in homes),
        "pinned master weights": pinned_master,
    }
    host = {
        ("moments" if pinned_master else "master weights and moments"): ADAM_STATE_BYTES * numel["cpu"]
        - pinned_master
        - (FP32_BYTES - REMAINDER_BYTES) * halved,
        "float32 gradient of one bucket": 4 * max(casts, default=0),
        f"undo {plan.undo}s": sum(_undo_bytes(b, plan.undo) for b in on_cpu if plan.may_undo(b.index)),
    }
    return {"gpu": gpu, "pinned": pinned, "host": host}


def _undo_bytes(bucket: Bucket, undo: str) -> int:
    """A bucket's undo record: `UNDO_BYTES` for each element, an escape list for each tile of a segment. A snapshot is
    as large as the state."""
    if undo == "snapshot":
        return ADAM_STATE_BYTES * bucket.numel
    tiles = sum(-(-s.numel // UNDO_TILE) for s in bucket.segments)
    return UNDO_BYTES * bucket.numel + tiles * UNDO_TILE_BYTES


def _weights(blocks: list[BlockProfile] | tuple[BlockProfile, ...]) -> int:
    return sum(b.params * DTYPE_BYTES[b.dtype] for b in blocks)


def _largest_gradient(blocks: tuple[BlockProfile, ...], plan: Plan) -> int:
    """The gradient of one tensor exists beside the ring while it is copied into it; of a compiled layer, all do."""

    def exists(b: BlockProfile) -> int:
        return b.params if plan.compile_blocks and b.kind == "layer" else max(b.tensor_numels, default=0)

    return max((exists(b) * DTYPE_BYTES[b.dtype] for b in blocks), default=0)


def _activations(blocks: tuple[BlockProfile, ...], plan: Plan) -> dict[Place, dict[str, int]]:
    """What forward keeps for backward, by policy, and the largest extra of any one block.

    In backward one layer at a time has what its policy makes anew. The head's working memory (logits) exists while
    everything is kept; that of a layer when the later ones are gone already. What is offloaded is on the GPU for two
    blocks at a time.
    """
    blocks = tuple(in_chunks(b, plan.loss_chunks) for b in blocks)
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
