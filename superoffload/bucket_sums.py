"""Running totals over the buckets of a model. Planning asks for thousands of ledgers that differ in how many of the
last buckets are retained, and a model has thousands of buckets: no ledger counts these one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from superoffload.layout import Bucket, ring_slots_for
from superoffload.units import ADAM_STATE_BYTES, UNDO_BYTES

Kind = tuple[str, bool]
"""Dtype, and whether the weights flow."""

UNDO_TILE, UNDO_TILE_BYTES = 16384, 640 * 16 + 4
"""Elements that share an escape list, and its bytes; csrc/undo.h."""


class BucketSums:
    """Totals and largest values of the first n buckets, for every n, by kind; counts are elements.

    Args:
        buckets: in order.
        chips: over which each bucket's states are divided, padding included; the totals are of one chip.
    """

    def __init__(self, buckets: Sequence[Bucket], chips: int):
        def share(count: int) -> int:
            return -(-count // chips)

        self.count = len(buckets)
        self.kinds: list[Kind] = sorted({(b.dtype, b.flow) for b in buckets})
        self._total: dict[Kind, list[int]] = {}
        self._largest: dict[Kind, list[int]] = {}
        self._rest: dict[Kind, list[int]] = {}
        self.whole: dict[Kind, int] = {}
        """Elements of all buckets of a kind, undivided."""
        self.whole_largest: dict[Kind, int] = {}
        for kind in self.kinds:
            numels = [b.numel if (b.dtype, b.flow) == kind else 0 for b in buckets]
            shares = [share(n) for n in numels]
            self._total[kind] = [0, *itertools.accumulate(shares)]
            self._largest[kind] = [0, *itertools.accumulate(shares, max)]
            self._rest[kind] = [*reversed([0, *itertools.accumulate(reversed(shares), max)])]
            self.whole[kind], self.whole_largest[kind] = sum(numels), max(numels)
        self._undo = {
            undo: [0, *itertools.accumulate(share(undo_bytes(b, undo)) for b in buckets)]
            for undo in ("record", "snapshot")
        }
        completed: Counter[int] = Counter()
        self._together = [0]
        for b in buckets:
            completed[b.blocks[-1]] += 1
            self._together.append(max(self._together[-1], completed[b.blocks[-1]]))

    def first(self, kind: Kind, n: int) -> int:
        """Elements of one kind in the first n buckets."""
        return self._total[kind][n]

    def rest(self, kind: Kind, n: int) -> int:
        """Elements of one kind in the buckets after the first n."""
        return self._total[kind][-1] - self._total[kind][n]

    def largest_of_first(self, kind: Kind, n: int) -> int:
        return self._largest[kind][n]

    def largest_of_rest(self, kind: Kind, n: int) -> int:
        return self._rest[kind][n]

    def undo_of_first(self, undo: str, n: int) -> int:
        """Bytes of the undo memory of the first n buckets."""
        return self._undo[undo][n]

    def ring_slots(self, n: int, *, at_once: bool) -> int:
        """`layout.ring_slots` of the first n buckets."""
        return ring_slots_for(self._together[n], at_once=at_once)

    def over(self, of: Callable[[Kind], bool], value: Callable[[Kind], int]) -> int:
        """Sum of `value` over the kinds that are `of` it."""
        return sum(value(kind) for kind in self.kinds if of(kind))


class CutBuckets(list[Bucket]):
    """The buckets of a model, which nobody changes, with their totals, made once."""

    def __init__(self, buckets: Sequence[Bucket]):
        super().__init__(buckets)
        self._sums: dict[int, BucketSums] = {}

    def sums(self, chips: int) -> BucketSums:
        if chips not in self._sums:
            self._sums[chips] = BucketSums(self, chips)
        return self._sums[chips]


def sums_of(buckets: Sequence[Bucket], chips: int) -> BucketSums:
    return buckets.sums(chips) if isinstance(buckets, CutBuckets) else BucketSums(buckets, chips)


def undo_bytes(bucket: Bucket, undo: str) -> int:
    """A bucket's undo record: `UNDO_BYTES` for each element, an escape list for each tile of a segment. A snapshot is
    as large as the state."""
    if undo == "snapshot":
        return ADAM_STATE_BYTES * bucket.numel
    tiles = sum(-(-s.numel // UNDO_TILE) for s in bucket.segments)
    return UNDO_BYTES * bucket.numel + tiles * UNDO_TILE_BYTES


__all__ = ["BucketSums", "CutBuckets", "sums_of", "undo_bytes"]
