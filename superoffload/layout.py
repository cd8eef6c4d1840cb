"""How parameters are cut into buckets. The planner and the engine use this one function, so that the bucket
that a person sees in the timeline is the bucket that moves.

A bucket is a run of parameters of one dtype in backward-completion order, whose 16-bit weights either all stay on the
GPU or all flow from the host. A parameter may span buckets, but
is only cut at multiples of NORM_CHUNK elements from its own start: the partial sums of the gradient norm are taken
per chunk, so another bucket size cannot change a bit of the norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from superoffload.units import FP32_BYTES, MIB

NORM_CHUNK = 8192
"""Elements per partial sum of squares."""
ALIGN = 128
"""Every parameter starts at a multiple of this many elements in its bucket: 256 bytes in 16-bit, 512 in fp32."""

RING_SLOTS = 4
"""Gradient buckets on the GPU at a time: one fills while others are on their way. More would only hold memory, since
one copy runs at a time."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One parameter as the layout sees it; list them in backward-completion order (last used layer first)."""

    index: int
    """Position in the caller's own list."""
    block: int
    numel: int
    dtype: str = "bfloat16"
    flow: bool = False
    """Whether its block's weights flow."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one parameter inside a bucket; all counts are elements."""

    tensor: int
    offset: int
    """First element within the parameter, a multiple of NORM_CHUNK."""
    numel: int
    start: int
    """First element within the bucket, a multiple of ALIGN."""


@dataclass(frozen=True, slots=True)
class Bucket:
    index: int
    dtype: str
    numel: int
    """Elements including alignment padding."""
    segments: tuple[Segment, ...]
    blocks: tuple[int, ...]
    """Blocks that own a segment, in order of appearance."""
    flow: bool = False
    """Whether its weights live on the host and are fetched before each use."""
    params: int = field(init=False)
    """Parameters without padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", sum(s.numel for s in self.segments))


def bucket_elements(bucket_mb: float) -> int:
    """Capacity in elements of a bucket of `bucket_mb` MiB of fp32, at least one norm chunk."""
    return max(NORM_CHUNK, int(bucket_mb * MIB) // FP32_BYTES // NORM_CHUNK * NORM_CHUNK)


def cut_buckets(tensors: Sequence[TensorRef], bucket_mb: float) -> list[Bucket]:
    """Cut `tensors` into buckets of at most `bucket_mb` MiB of fp32.

    Buckets of different dtypes, and of blocks that flow and that stay, are filled side by side and numbered in the
    order in which backward completes them.
    """
    capacity = bucket_elements(bucket_mb)
    buckets: list[Bucket] = []
    open_: dict[tuple[str, bool], list[Segment]] = {}
    used: dict[tuple[str, bool], int] = {}
    block_of = {t.index: t.block for t in tensors}

    def close(kind: tuple[str, bool]) -> None:
        segments = open_.pop(kind, None)
        if segments:
            blocks = tuple(dict.fromkeys(block_of[s.tensor] for s in segments))
            dtype, flow = kind
            buckets.append(Bucket(len(buckets), dtype, used[kind], tuple(segments), blocks, flow))
        used[kind] = 0

    for t in tensors:
        kind, offset = (t.dtype, t.flow), 0
        while offset < t.numel:
            room = capacity - used.get(kind, 0)
            left = t.numel - offset
            take = left if left <= room else room // NORM_CHUNK * NORM_CHUNK
            if take == 0:
                close(kind)
                continue
            start = used.get(kind, 0)
            open_.setdefault(kind, []).append(Segment(t.index, offset, take, start))
            used[kind] = -(-(start + take) // ALIGN) * ALIGN
            offset += take
    for kind in list(open_):
        close(kind)
    position = {t.index: i for i, t in enumerate(tensors)}
    buckets.sort(key=lambda b: (position[b.segments[-1].tensor], b.segments[-1].offset))
    return [replace(b, index=i) for i, b in enumerate(buckets)]


def ring_slots(buckets: Sequence[Bucket], *, at_once: bool) -> int:
    """Slots of the ring in which gradients wait for their copy down.

    Args:
        buckets: those that go down.
        at_once: the gradients of a block come together, as those of a compiled layer do: there is a slot for each
            bucket that a block completes, or the GPU would wait for the copies of its own gradients.
    """
    most = max(Counter(b.blocks[-1] for b in buckets).values(), default=0)
    return ring_slots_for(most, at_once=at_once)


def ring_slots_for(together: int, *, at_once: bool) -> int:
    """`ring_slots` of buckets of which no block completes more than `together`."""
    return max(RING_SLOTS, 1 + together) if at_once else RING_SLOTS
