"""How parameters are cut into buckets. The planner and the engine use this one function, so that the bucket
that a person sees in the timeline is the bucket that moves.

A bucket is a dtype-homogeneous run of parameters in backward-completion order. A parameter may span buckets, but
is only cut at multiples of NORM_CHUNK elements from its own start: the partial sums of the gradient norm are taken
per chunk, so another bucket size cannot change a bit of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superoffload.units import FP32_BYTES, MIB

NORM_CHUNK = 8192
"""Elements per partial sum of squares."""
ALIGN = 128
"""Every parameter starts at a multiple of this many elements in its bucket: 256 bytes in 16-bit, 512 in fp32."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One parameter as the layout sees it; list them in backward-completion order (last used layer first)."""

    index: int
    """Position in the caller's own list."""
    block: int
    numel: int
    dtype: str = "bfloat16"


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

    @property
    def params(self) -> int:
        """Parameters without padding."""
        return sum(s.numel for s in self.segments)


def bucket_elements(bucket_mb: float) -> int:
    """Capacity in elements of a bucket of `bucket_mb` MiB of fp32, at least one norm chunk."""
    return max(NORM_CHUNK, int(bucket_mb * MIB) // FP32_BYTES // NORM_CHUNK * NORM_CHUNK)


def cut_buckets(tensors: Sequence[TensorRef], bucket_mb: float) -> list[Bucket]:
    """Cut `tensors` into buckets of at most `bucket_mb` MiB of fp32.

    Buckets of different dtypes are filled side by side and numbered in the order in which they close, which is the
    order in which backward completes them.
    """
    capacity = bucket_elements(bucket_mb)
    buckets: list[Bucket] = []
    open_: dict[str, list[Segment]] = {}
    used: dict[str, int] = {}
    block_of = {t.index: t.block for t in tensors}

    def close(dtype: str) -> None:
        segments = open_.pop(dtype, None)
        if segments:
            blocks = tuple(dict.fromkeys(block_of[s.tensor] for s in segments))
            buckets.append(Bucket(len(buckets), dtype, used[dtype], tuple(segments), blocks))
        used[dtype] = 0

    for t in tensors:
        offset = 0
        while offset < t.numel:
            room = capacity - used.get(t.dtype, 0)
            left = t.numel - offset
            take = left if left <= room else room // NORM_CHUNK * NORM_CHUNK
            if take == 0:
                close(t.dtype)
                continue
            start = used.get(t.dtype, 0)
            open_.setdefault(t.dtype, []).append(Segment(t.index, offset, take, start))
            used[t.dtype] = -(-(start + take) // ALIGN) * ALIGN
            offset += take
    for dtype in list(open_):
        close(dtype)
    return buckets
