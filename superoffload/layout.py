"""How parameters are cut into buckets. The planner and the engine use this one function, so that the bucket
that a person sees in the timeline is the bucket that moves.

A bucket is a run of parameters of one dtype in backward-completion order, whose 16-bit weights either all stay on the
GPU or all flow from the host. A parameter may span buckets, but
is only cut at multiples of NORM_CHUNK elements from its own start: the partial sums of the gradient norm are taken
per chunk, so another bucket size cannot change a bit of the norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from superoffload.units import FP32_BYTES, MIB

NORM_CHUNK = 8192
"""Elements per partial sum of squares."""
ALIGN = 128
"""Every parameter starts at a multiple of this many elements in its bucket: 256 bytes in 16-bit, 512 in fp32."""

Whole = NDArray[np.int64]

RING_SLOTS = 4
"""Gradient buckets on the GPU at a time: one fills while others are on their way. More would only hold memory, since
one copy runs at a time."""
MOST_RING_ELEMENTS = 1 << 28
"""Gradient elements in the ring at most for the buckets that one parameter fills, whose gradient comes whole: beyond
that, as for the head of a large vocabulary, memory is worth more than what the GPU waits once in each backward."""


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


class BucketCut(Sequence[Bucket]):
    """The buckets of `tensors`, each of at most `bucket_mb` MiB of fp32, which nobody changes.

    Buckets of different dtypes, and of blocks that flow and that stay, are filled side by side and numbered in the
    order in which backward completes them. They are kept as columns, one entry a bucket: a large model has millions of
    small ones, and planning asks for their totals alone. A `Bucket` is made where one is looked at.
    """

    def __init__(self, tensors: Sequence[TensorRef], bucket_mb: float):
        self.tensors = tensors
        capacity = bucket_elements(bucket_mb)
        numbers: dict[tuple[str, bool], int] = {}
        runs, counts = _runs(tensors, capacity, numbers)
        self.kinds: list[tuple[str, bool]] = list(numbers)
        """(dtype, whether weights flow), by what `kind` counts."""
        run, position, offset, numel, start, bucket, count = np.asarray(runs, dtype=np.int64).reshape(-1, 7).T
        of = np.repeat(np.arange(len(runs)), count)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        kind_of = run[of]
        # Segments come in the order in which backward completes them, and so do buckets by their last ones.
        given = (np.cumsum(counts) - counts)[kind_of] + bucket[of] + nth if len(of) else of
        last = np.zeros(int(np.sum(counts)), dtype=np.int64)
        last[given] = np.arange(len(of))
        rank = np.empty_like(last)
        rank[np.argsort(last, kind="stable")] = np.arange(len(last))
        order = np.argsort(rank[given], kind="stable")
        of, nth = of[order], nth[order]
        self._position, self._numel, self._start = position[of], numel[of], start[of]
        self._offset = offset[of] + nth * numel[of]
        self._ends = np.append(np.flatnonzero(np.diff(rank[given][order])) + 1, len(of)) if len(of) else of
        self._begins = np.append(0, self._ends[:-1]) if len(of) else of
        at = self._ends - 1
        self.kind = kind_of[order][at]
        self.numel = -(-(self._start[at] + self._numel[at]) // ALIGN) * ALIGN
        """Elements including alignment padding."""
        self.params = self.sum_of_segments(self._numel)
        self.last_tensor, self.last_end = self._position[at], self._offset[at] + self._numel[at]
        """The tensor, by its place in `tensors`, whose gradient completes the bucket, and how far into it."""
        self._made: list[Bucket] | None = None

    def sum_of_segments(self, values: Whole) -> Whole:
        """Totals by bucket of what is given by segment."""
        return np.add.reduceat(values, self._begins) if len(values) else values

    @property
    def segment_numel(self) -> Whole:
        """Elements of every segment, bucket after bucket."""
        return self._numel

    def blocks_of(self) -> list[tuple[int, ...]]:
        """Blocks that own a segment of each bucket, in order of appearance."""
        owners = np.asarray([t.block for t in self.tensors], dtype=np.int64)[self._position].tolist()
        spans = zip(self._begins.tolist(), self._ends.tolist(), strict=True)
        return [(owners[a],) if b - a == 1 else tuple(dict.fromkeys(owners[a:b])) for a, b in spans]

    def last_blocks(self) -> Whole:
        """The last of those blocks, which completes the bucket."""
        owners = np.asarray([t.block for t in self.tensors], dtype=np.int64)[self._position]
        last = owners[self._ends - 1]
        for k in np.flatnonzero(self._ends - self._begins > 1).tolist():  # no more than there are tensors
            last[k] = list(dict.fromkeys(owners[self._begins[k] : self._ends[k]].tolist()))[-1]
        return last

    def blocks_of_first(self, n: int) -> set[int]:
        """Blocks that own a segment of one of the first n buckets."""
        positions = np.unique(self._position[: self._ends[n - 1]]) if n else ()
        return {self.tensors[p].block for p in positions}

    def params_by_block(self, first: int) -> dict[int, int]:
        """Parameters of each block in the buckets from `first` on."""
        begin = self._begins[first] if first < len(self) else len(self._position)
        found: dict[int, int] = {}
        for p, n in enumerate(np.bincount(self._position[begin:], self._numel[begin:], len(self.tensors)).tolist()):
            block = self.tensors[p].block
            found[block] = found.get(block, 0) + round(n)
        return found

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, at: int) -> Bucket: ...
    @overload
    def __getitem__(self, at: slice) -> list[Bucket]: ...
    def __getitem__(self, at: int | slice) -> Bucket | list[Bucket]:
        return self._all()[at]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all())

    def _all(self) -> list[Bucket]:
        if self._made is None:
            index = [t.index for t in self.tensors]
            columns = (self._position, self._offset, self._numel, self._start)
            of, offset, numel, start = (column.tolist() for column in columns)
            segments = [Segment(index[p], o, n, s) for p, o, n, s in zip(of, offset, numel, start, strict=True)]
            rows = zip(self.kind.tolist(), self.numel.tolist(), self._begins.tolist(), self._ends.tolist(),
                       self.blocks_of(), strict=True)  # fmt: skip
            self._made = [
                Bucket(i, self.kinds[kind][0], padded, tuple(segments[a:b]), blocks, self.kinds[kind][1])
                for i, (kind, padded, a, b, blocks) in enumerate(rows)
            ]
        return self._made


def _runs(
    tensors: Sequence[TensorRef], capacity: int, numbers: dict[tuple[str, bool], int]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Cut one tensor after another: segments as (kind, place of the tensor, offset, elements, start, bucket, count),
    where `count` full buckets in a row have one each, and how many buckets there are of each kind.

    Args:
        numbers: filled with the number of each kind.
    """
    runs: list[tuple[int, ...]] = []
    counts: list[int] = []
    fill: list[int] = []
    for position, t in enumerate(tensors):
        if not t.numel:
            continue
        kind = numbers.setdefault((t.dtype, t.flow), len(numbers))
        if kind == len(counts):
            counts.append(1)
            fill.append(0)
        offset = 0
        while offset < t.numel:
            start, left = fill[kind], t.numel - offset
            room = capacity - start
            take = left if left <= room else room // NORM_CHUNK * NORM_CHUNK
            if take == 0:
                counts[kind] += 1
                fill[kind] = 0
                continue
            whole = (left - 1) // capacity if start == 0 and left > capacity else 1
            runs.append((kind, position, offset, take, start, counts[kind] - 1, whole))
            counts[kind] += whole - 1
            fill[kind] = -(-(start + take) // ALIGN) * ALIGN
            offset += take * whole
    return runs, counts


def cut_buckets(tensors: Sequence[TensorRef], bucket_mb: float) -> list[Bucket]:
    """Cut `tensors` into buckets of at most `bucket_mb` MiB of fp32; see `BucketCut`."""
    return list(BucketCut(tensors, bucket_mb))


def ring_slots(buckets: Sequence[Bucket], *, at_once: bool) -> int:
    """Slots of the ring in which gradients wait for their copy down. There is one for each bucket that is completed
    together with others, or the GPU would wait for the copies of its own gradients.

    Args:
        buckets: those that go down.
        at_once: the gradients of a block come together, as those of a compiled layer do. Else those of a parameter do.
    """
    last = Counter(b.blocks[-1] if at_once else b.segments[-1].tensor for b in buckets)
    largest = max((b.numel for b in buckets), default=1)
    return ring_slots_for(max(last.values(), default=0), largest, at_once=at_once)


def ring_slots_for(together: int, largest: int, *, at_once: bool) -> int:
    """`ring_slots` of buckets of which no block, or no parameter, completes more than `together`, the largest of so
    many elements."""
    return max(RING_SLOTS, 1 + together if at_once else min(1 + together, MOST_RING_ELEMENTS // max(1, largest)))
