"""Running totals over the buckets of a model. Planning asks for thousands of ledgers that differ in how many of the
last buckets are retained, and a model has thousands of buckets: no ledger counts these one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from superoffload.layout import Bucket, BucketCut, TensorRef, Whole, ring_slots_for
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
        def share(count: Whole) -> Whole:
            return -(-count // chips)

        cut = buckets if isinstance(buckets, BucketCut) else _Columns.of(buckets)
        self.count = len(cut.kind)
        self.kinds: list[Kind] = sorted(cut.kinds)
        self._total: dict[Kind, Whole] = {}
        self._largest: dict[Kind, Whole] = {}
        self._rest: dict[Kind, Whole] = {}
        self._params: dict[Kind, Whole] = {}
        self.whole: dict[Kind, int] = {}
        """Elements of all buckets of a kind, undivided."""
        self.whole_largest: dict[Kind, int] = {}
        self.whole_params: dict[Kind, int] = {}
        """Parameters of all buckets of a kind, undivided and without padding."""
        for number, kind in enumerate(cut.kinds):
            of_kind = cut.kind == number
            numels, params = cut.numel * of_kind, cut.params * of_kind
            shares = share(numels)
            self._total[kind] = _running(np.add, shares)
            self._largest[kind] = _running(np.maximum, shares)
            self._rest[kind] = _running(np.maximum, shares[::-1])[::-1]
            self._params[kind] = _running(np.add, share(params))
            self.whole[kind], self.whole_largest[kind] = int(numels.sum()), int(numels.max())
            self.whole_params[kind] = int(params.sum())
        tiles = cut.sum_of_segments(-(-cut.segment_numel // UNDO_TILE))
        self._undo = {
            "record": _running(np.add, share(UNDO_BYTES * cut.numel + tiles * UNDO_TILE_BYTES)),
            "snapshot": _running(np.add, share(ADAM_STATE_BYTES * cut.numel)),
        }
        self._of_a_block = _most_together(cut.last_blocks())
        self._of_a_parameter = _most_together(cut.last_tensor)

    def first(self, kind: Kind, n: int) -> int:
        """Elements of one kind in the first n buckets."""
        return int(self._total[kind][n])

    def rest(self, kind: Kind, n: int) -> int:
        """Elements of one kind in the buckets after the first n."""
        return int(self._total[kind][-1] - self._total[kind][n])

    def params_of_rest(self, kind: Kind, n: int) -> int:
        """Parameters of one kind, padding left out, in the buckets after the first n."""
        return int(self._params[kind][-1] - self._params[kind][n])

    def largest_of_first(self, kind: Kind, n: int) -> int:
        return int(self._largest[kind][n])

    def largest_of_rest(self, kind: Kind, n: int) -> int:
        return int(self._rest[kind][n])

    def undo_of_first(self, undo: str, n: int) -> int:
        """Bytes of the undo memory of the first n buckets."""
        return int(self._undo[undo][n])

    def ring_slots(self, n: int, *, at_once: bool) -> int:
        """`layout.ring_slots` of the first n buckets."""
        together = self._of_a_block if at_once else self._of_a_parameter
        largest = max((self.largest_of_first(kind, n) for kind in self.kinds), default=1)
        return ring_slots_for(int(together[n]), largest, at_once=at_once)

    def over(self, of: Callable[[Kind], bool], value: Callable[[Kind], int]) -> int:
        """Sum of `value` over the kinds that are `of` it."""
        return sum(value(kind) for kind in self.kinds if of(kind))


class CutBuckets(BucketCut):
    """The buckets of a model with their totals, made once."""

    def __init__(self, tensors: Sequence[TensorRef], bucket_mb: float):
        super().__init__(tensors, bucket_mb)
        self._sums: dict[int, BucketSums] = {}

    def sums(self, chips: int) -> BucketSums:
        if chips not in self._sums:
            self._sums[chips] = BucketSums(self, chips)
        return self._sums[chips]


def sums_of(buckets: Sequence[Bucket], chips: int) -> BucketSums:
    return buckets.sums(chips) if isinstance(buckets, CutBuckets) else BucketSums(buckets, chips)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What the totals need of buckets that somebody else has cut: the columns of a `BucketCut`."""

    kinds: list[Kind]
    kind: Whole
    numel: Whole
    params: Whole
    segment_numel: Whole
    begins: Whole
    last: Whole
    last_tensor: Whole

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> _Columns:
        kinds = list(dict.fromkeys((b.dtype, b.flow) for b in buckets))
        segments = [len(b.segments) for b in buckets]

        def column(values: Iterable[int]) -> Whole:
            return np.fromiter(values, dtype=np.int64)

        return cls(
            kinds,
            column(kinds.index((b.dtype, b.flow)) for b in buckets),
            column(b.numel for b in buckets),
            column(b.params for b in buckets),
            column(s.numel for b in buckets for s in b.segments),
            np.cumsum(column(segments)) - column(segments),
            column(b.blocks[-1] for b in buckets),
            column(b.segments[-1].tensor for b in buckets),
        )

    def sum_of_segments(self, values: Whole) -> Whole:
        return np.add.reduceat(values, self.begins) if len(values) else values

    def last_blocks(self) -> Whole:
        return self.last


def _running(add: np.ufunc, values: Whole) -> Whole:
    """Of the first 0, 1, 2, ... values."""
    return np.append(np.zeros(1, dtype=np.int64), add.accumulate(values))


def _most_together(last: Whole) -> Whole:
    """How many of the first n buckets one block, or parameter, completes at most, for every n.

    Args:
        last: the block or parameter that completes each bucket.
    """
    order = np.argsort(last, kind="stable")
    ordered = last[order]
    begins = np.searchsorted(ordered, ordered)
    completed = np.empty_like(last)
    completed[order] = np.arange(1, len(last) + 1) - begins  # by the same, with this one
    return _running(np.maximum, completed)


__all__ = ["BucketSums", "CutBuckets", "sums_of"]
