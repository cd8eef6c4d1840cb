from __future__ import annotations

from types import ModuleType

import pytest

from superoffload import graph
from superoffload.errors import InputError
from superoffload.plan import Plan


def by_kind(g: graph.StepGraph, kind: str) -> list[graph.Operator]:
    return [op for op in g.ops if op.kind == kind]


def test_buckets_follow_backward_and_are_completed_by_their_last_block(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=3)
    g = graph.build(profile, tiny.plan())
    assert [b.blocks for b in g.buckets] == [(2,), (1,), (0,)]
    backward = by_kind(g, "backward")
    assert [(op.block, op.bucket) for op in backward] == [(2, 0), (1, 1), (0, 2)]


def test_a_bucket_over_two_blocks_completes_inside_the_second(tiny: ModuleType) -> None:
    n = tiny.BUCKET_PARAMS
    profile = tiny.profile(tiny.hardware(), layers=2, params=(n // 2, n // 4))
    g = graph.build(profile, tiny.plan())
    backward = by_kind(g, "backward")
    # 0.75 of a bucket from layer 1, then 0.25 from layer 0: a third of its backward; the rest closes at its end.
    assert [(op.block, op.bucket) for op in backward] == [(1, -1), (0, 0), (0, 1)]
    assert [round(op.seconds, 6) for op in backward] == [2.0, round(2 / 3, 6), round(4 / 3, 6)]


def test_a_parameter_completes_all_its_buckets_when_its_gradient_comes(tiny: ModuleType) -> None:
    n = tiny.BUCKET_PARAMS
    g = graph.build(tiny.profile(tiny.hardware(), layers=1, params=(n, 3 * n)), tiny.plan())
    backward = by_kind(g, "backward")
    assert [op.bucket for op in backward] == [0, 1, 2, 3]
    assert [round(op.seconds, 6) for op in backward] == [1.5, 0.0, 0.0, 0.5]


def test_forward_waits_for_the_uploads_of_its_buckets(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=2), tiny.plan())
    for op in by_kind(g, "forward"):
        assert [g.ops[i].name for i in op.previous] == [f"copy up of bucket {1 - op.block}"]


def test_retained_buckets_are_the_last_and_cross_no_link(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=4), tiny.plan(retained_buckets=3))
    assert [op.bucket for op in by_kind(g, "copy_down")] == [0]
    assert [op.bucket for op in by_kind(g, "adam")] == [0]
    assert g.ops[g.last_gpu].name == "GPU Adam of 3 retained buckets"


@pytest.mark.parametrize(
    ("down", "up", "down_bytes", "up_bytes", "adam", "cast"),
    [
        ("fused", "fused", 2, 2, 28, 0),
        ("gpu", "fused", 4, 2, 30, 0),
        ("cpu", "fused", 2, 2, 30, 6),
        ("fused", "gpu", 2, 4, 26, 0),
        ("fused", "cpu", 2, 2, 26, 6),
        ("cpu", "cpu", 2, 2, 28, 12),
    ],
)
def test_bytes_per_parameter_of_each_cast(
    tiny: ModuleType, down: str, up: str, down_bytes: int, up_bytes: int, adam: int, cast: int
) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=1), tiny.plan(cast_down=down, cast_up=up))
    n = tiny.BUCKET_PARAMS
    assert by_kind(g, "copy_down")[0].link_bytes == down_bytes * n
    assert by_kind(g, "copy_up")[0].link_bytes == up_bytes * n
    step = by_kind(g, "adam")[0]
    assert step.dram_bytes == (adam + cast) * n
    assert step.seconds == pytest.approx((adam + cast) * n / 1e9)  # both rates are 1 GB/s here


@pytest.mark.parametrize(("undo", "written"), [("record", 3), ("snapshot", 12)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_speculative_step_writes_beside_the_state(tiny: ModuleType, dtype: str, undo: str, written: int) -> None:
    profile = tiny.profile(tiny.hardware(), layers=1)
    profile = profile.replace(blocks=tuple(b.replace(dtype=dtype) for b in profile.blocks))
    for speculate, more in (("on", written), ("off", 0)):
        step = by_kind(graph.build(profile, tiny.plan(speculate=speculate, undo=undo)), "adam")[0]
        assert step.dram_bytes == (28 + more) * tiny.BUCKET_PARAMS


def test_float32_weights_cross_as_float32_whatever_the_casts(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=1)
    profile = profile.replace(blocks=tuple(b.replace(dtype="float32") for b in profile.blocks))
    for cast in ("fused", "cpu", "gpu"):
        g = graph.build(profile, tiny.plan(cast_down=cast, cast_up=cast))
        assert by_kind(g, "copy_down")[0].link_bytes == 4 * tiny.BUCKET_PARAMS
        assert by_kind(g, "copy_up")[0].link_bytes == 4 * tiny.BUCKET_PARAMS
        assert by_kind(g, "adam")[0].dram_bytes == 28 * tiny.BUCKET_PARAMS


def test_adam_waits_for_the_verdict_only_without_speculation(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=2)
    for speculate, kinds in (("off", ["copy_down", "verdict"]), ("on", ["copy_down"])):
        g = graph.build(profile, tiny.plan(speculate=speculate))
        for op in by_kind(g, "adam"):
            assert sorted(g.ops[d].kind for d in op.deps) == kinds


def test_only_buckets_with_undo_memory_run_before_the_verdict(tiny: ModuleType) -> None:
    built = graph.build(tiny.profile(tiny.hardware()), tiny.plan(speculate="on", undo_buckets=1))
    verdict = next(op.index for op in built.ops if op.lane == "validator")
    first, *others = sorted((op for op in built.ops if op.kind == "adam"), key=lambda op: op.bucket)
    assert others and verdict not in first.deps and all(verdict in op.deps for op in others)
    written = graph.bucket_cost(tiny.plan(), built.buckets[0].dtype).undo_bytes
    per_param = [op.dram_bytes / built.buckets[op.bucket].params for op in (first, others[0])]
    assert per_param[0] - per_param[1] == pytest.approx(written)


def test_only_the_last_micro_batch_completes_buckets(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=2), tiny.plan(accumulation=3))
    assert len(by_kind(g, "backward")) == 6
    assert [op.bucket for op in by_kind(g, "backward")][-2:] == [0, 1]
    assert sum(op.bucket >= 0 for op in by_kind(g, "backward")) == 2
    assert sum(op.in_forward for op in g.ops) == 2


def test_held_gradients_come_up_ahead_into_the_ring(tiny: ModuleType) -> None:
    """What is held of a bucket comes up once it has gone down and a slot of the ring is free; its gradient is added to
    it, which reads a third time what packing reads and writes. A slot is written again once its last bucket has gone
    down, whichever micro-batch that was of."""
    profile = tiny.profile(tiny.hardware(), layers=6)
    g = graph.build(profile, tiny.plan(accumulation=2, accumulate_on="cpu"))
    n = len(g.buckets)
    downs = [op.index for op in by_kind(g, "copy_down")]
    assert n > 5 and len(downs) == 2 * n
    fetches = by_kind(g, "fetch")
    assert [op.bucket for op in fetches] == list(range(n)), "the first micro-batch finds nothing held"
    first, second = by_kind(g, "backward")[:n], by_kind(g, "backward")[-n:]
    assert [op.bucket for op in first] == [op.bucket for op in second] == list(range(n))
    for k, op in enumerate(fetches):
        assert op.deps == [downs[k], downs[n + k - 4]]
        assert op.index in second[k].deps and op.index not in g.ops[downs[n + k]].deps
        read_again = 2 * g.buckets[k].params / (profile.hardware.gpu.hbm_gb_per_s * 1e9)
        assert second[k].seconds - first[k].seconds == pytest.approx(read_again)
    for k in range(4, n):
        assert downs[k - 4] in first[k].deps


def test_flow_blocks_are_fetched_for_forward_and_backward_and_not_copied_up(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=4), tiny.plan(flow_blocks=(0, 2)))
    fetches = by_kind(g, "fetch")
    assert [op.block for op in fetches] == [0, 2]  # two slots: both are still there when their backward comes
    assert sorted(op.bucket for op in by_kind(g, "copy_up")) == [0, 2]
    assert [g.ops[i].kind for i in fetches[0].previous if g.ops[i].lane == "cpu_adam"] == ["adam"]


def test_what_lies_in_its_slot_is_not_fetched_again(tiny: ModuleType) -> None:
    def fetched(**fields: object) -> list[int]:
        g = graph.build(tiny.profile(tiny.hardware(), layers=6), tiny.plan(flow_blocks=(1, 2, 4, 5), **fields))
        return [op.block for op in by_kind(g, "fetch")]

    assert fetched() == [1, 2, 4, 5, 2, 1]
    assert fetched(prefetch_blocks=2) == [1, 2, 4, 5, 1]  # three slots, block 5 took that of block 1
    assert fetched(prefetch_blocks=9) == [1, 2, 4, 5]
    assert fetched(accumulation=2) == [1, 2, 4, 5, 2, 1, 4, 5, 2, 1]  # blocks 1 and 2 wait for the next micro-batch


def test_a_fetch_waits_for_the_last_use_of_its_slot(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=6), tiny.plan(flow_blocks=(1, 2, 4, 5)))
    third = by_kind(g, "fetch")[2]
    assert {(g.ops[d].kind, g.ops[d].block) for d in third.deps} == {("forward", 1), ("fetch", 2)}
    first = by_kind(g, "fetch")[0]  # of the step before, the backward of the block that had its slot last
    assert ("backward", 1) in {(g.ops[i].kind, g.ops[i].block) for i in first.previous}


def test_a_flow_block_in_a_retained_bucket_sends_its_new_weights_home(tiny: ModuleType) -> None:
    g = graph.build(tiny.profile(tiny.hardware(), layers=2), tiny.plan(flow_blocks=(0,), retained_buckets=1))
    home = [op for op in by_kind(g, "copy_down") if op.bucket == 1]
    assert [op.link_bytes for op in home] == [2 * tiny.BUCKET_PARAMS]
    assert [g.ops[d].kind for d in home[0].deps] == ["gpu_adam"]


def test_impossible_plans_are_refused(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=2)
    with pytest.raises(InputError, match=r"retained_buckets = 3\. Expected at most 2"):
        graph.build(profile, tiny.plan(retained_buckets=3))
    with pytest.raises(InputError, match=r"flow_blocks names block 2\. Expected 0 to 1"):
        graph.build(profile, tiny.plan(flow_blocks=(2,)))


def test_another_batch_rescales_the_profile(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=2)
    plan: Plan = tiny.plan(micro_batch=3)
    assert [op.seconds for op in graph.build(profile, plan).ops if op.kind == "forward"] == [3.0, 3.0]
