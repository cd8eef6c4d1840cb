"""Buckets: every element exactly once, in order, cut only where the norm's chunks allow it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superoffload import layout
from superoffload.bucket_sums import CutBuckets
from superoffload.layout import (
    ALIGN,
    NORM_CHUNK,
    RING_SLOTS,
    TensorRef,
    bucket_elements,
    cut_buckets,
    ring_slots,
)

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 6 * NORM_CHUNK), st.sampled_from([NORM_CHUNK, 2 * NORM_CHUNK]))
TENSORS = st.lists(st.tuples(SIZES, st.sampled_from(["bfloat16", "float32"]), st.booleans()), max_size=12)
BUCKET_MB = st.sampled_from([1e-6, 0.03125, 0.0625, 0.1, 0.5])


@given(TENSORS, BUCKET_MB)
def test_every_element_is_in_exactly_one_place(sizes: list[tuple[int, str, bool]], bucket_mb: float) -> None:
    tensors = [TensorRef(i, block=i // 2, numel=n, dtype=d, flow=f) for i, (n, d, f) in enumerate(sizes)]
    buckets = cut_buckets(tensors, bucket_mb)
    seen: dict[int, int] = {}
    for bucket in buckets:
        end = 0
        for s in bucket.segments:
            assert s.start % ALIGN == 0
            assert s.offset % NORM_CHUNK == 0
            assert s.start >= end  # no overlap
            assert s.offset == seen.get(s.tensor, 0)  # in order, nothing skipped
            assert (tensors[s.tensor].dtype, tensors[s.tensor].flow) == (bucket.dtype, bucket.flow)
            seen[s.tensor] = s.offset + s.numel
            end = s.start + s.numel
        assert end <= bucket.numel <= bucket_elements(bucket_mb)
        assert bucket.segments
        assert bucket.blocks == tuple(dict.fromkeys(tensors[s.tensor].block for s in bucket.segments))
    assert seen == {t.index: t.numel for t in tensors}
    assert [b.index for b in buckets] == list(range(len(buckets)))


@given(TENSORS, BUCKET_MB)
def test_buckets_are_numbered_as_backward_completes_them(sizes: list[tuple[int, str, bool]], bucket_mb: float) -> None:
    tensors = [TensorRef(i, 0, n, d, f) for i, (n, d, f) in enumerate(sizes)]
    buckets = cut_buckets(tensors, bucket_mb)
    ends = [(b.segments[-1].tensor, b.segments[-1].offset) for b in buckets]
    assert ends == sorted(ends)
    for kind in {(b.dtype, b.flow) for b in buckets}:
        order = [s.tensor for b in buckets if (b.dtype, b.flow) == kind for s in b.segments]
        assert order == sorted(order)


def test_bucket_size_is_mib_of_fp32_and_never_below_one_chunk() -> None:
    assert bucket_elements(64) == 2**26 // 4
    assert bucket_elements(0.001) == NORM_CHUNK
    assert bucket_elements(0.0626) % NORM_CHUNK == 0


def test_a_parameter_larger_than_a_bucket_spans_buckets() -> None:
    buckets = cut_buckets([TensorRef(7, 0, 5 * NORM_CHUNK + 3)], 2 * NORM_CHUNK * 4 / 2**20)
    assert [[(s.tensor, s.offset, s.numel) for s in b.segments] for b in buckets] == [
        [(7, 0, 2 * NORM_CHUNK)],
        [(7, 2 * NORM_CHUNK, 2 * NORM_CHUNK)],
        [(7, 4 * NORM_CHUNK, NORM_CHUNK + 3)],
    ]
    assert sum(b.params for b in buckets) == 5 * NORM_CHUNK + 3


@pytest.mark.parametrize("bucket_mb", [0.03125, 1.0])
def test_no_tensors_no_buckets(bucket_mb: float) -> None:
    assert cut_buckets([], bucket_mb) == []


def test_the_ring_has_a_slot_for_each_bucket_of_a_block_whose_gradients_come_together() -> None:
    tensors = [TensorRef(i, block=1 - i // 10, numel=NORM_CHUNK) for i in range(20)]
    buckets = cut_buckets(tensors, 4 * NORM_CHUNK / 2**20)  # one parameter each
    assert len(buckets) == 20
    assert ring_slots(buckets, at_once=False) == RING_SLOTS == 4
    assert ring_slots(buckets, at_once=True) == 11
    assert ring_slots(buckets[:13], at_once=True) == 11, "the fuller block decides"
    assert ring_slots(cut_buckets(tensors, 1), at_once=True) == ring_slots([], at_once=True) == RING_SLOTS


def test_the_ring_has_a_slot_for_each_bucket_that_one_parameter_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [TensorRef(0, 0, NORM_CHUNK), TensorRef(1, 0, 9 * NORM_CHUNK), TensorRef(2, 0, 3 * NORM_CHUNK)]
    buckets = cut_buckets(tensors, 4 * NORM_CHUNK / 2**20)
    assert len(buckets) == 13
    sums = CutBuckets(tensors, 4 * NORM_CHUNK / 2**20).sums(1)
    for most, slots in ((1 << 28, 10), (6 * NORM_CHUNK, 6), (1, RING_SLOTS)):
        monkeypatch.setattr(layout, "MOST_RING_ELEMENTS", most)
        assert ring_slots(buckets, at_once=False) == sums.ring_slots(13, at_once=False) == slots
        assert ring_slots(buckets[:4], at_once=False) == sums.ring_slots(4, at_once=False) == RING_SLOTS
