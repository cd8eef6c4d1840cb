"""Steps counted by hand on a machine where a bucket takes 0.5 s down, 3 s of Adam and 0.25 s up, then properties."""

from __future__ import annotations

import functools
import itertools
import random
import time
from types import ModuleType

import pytest

from superoffload import graph, simulator
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.graph import VERDICT_S
from superoffload.hardware import Curve, Hardware, preset
from superoffload.layout import NORM_CHUNK
from superoffload.plan import ACTIVATIONS, Plan
from superoffload.profiler import Profile
from superoffload.simulator import share_memory, simulate
from superoffload.tracing import Trace

EXACT = 1e-6


@pytest.fixture
def machine(tiny: ModuleType) -> Hardware:
    hw: Hardware = tiny.hardware(
        down=tiny.link_gb_per_s(0.5), up=tiny.link_gb_per_s(0.25), adam=tiny.adam_gb_per_s(3.0), dram=1e6
    )
    return hw


def spans(trace: Trace, lane: str, step: int) -> list[tuple[str, float, float]]:
    return [(e.name, round(e.start_s, 3), round(e.end_s, 3)) for e in trace.events if e.lane == lane and e.step == step]


def test_waiting_for_the_norm(tiny: ModuleType, machine: Hardware) -> None:
    # Backward ends at 6; the last gradient lands at 6.5; Adam of bucket 1 (layer 0) until 9.5, up at 9.75; Adam of
    # bucket 0 until 12.5, up at 12.75. Forward: layer 0 9.75-10.75, layer 1 12.75-13.75; backward until 17.75.
    trace = simulate(tiny.profile(machine), tiny.plan())
    assert trace.step_s == pytest.approx(17.75 - 6 + VERDICT_S, abs=EXACT)
    assert spans(trace, "gpu", 1) == [
        ("forward of layer 0", 3.75, 4.75),
        ("forward of layer 1", 6.75, 7.75),
        ("backward of layer 1", 7.75, 9.75),
        ("backward of layer 0", 9.75, 11.75),
    ]
    assert spans(trace, "cpu_adam", 0) == [("Adam of bucket 1", 0.5, 3.5), ("Adam of bucket 0", 3.5, 6.5)]
    assert spans(trace, "link_up", 0) == [("copy up of bucket 1", 3.5, 3.75), ("copy up of bucket 0", 6.5, 6.75)]
    assert spans(trace, "link_down", 1) == [
        ("copy down of bucket 0", 9.75, 10.25),
        ("copy down of bucket 1", 11.75, 12.25),
    ]
    assert trace.gpu_busy == pytest.approx(6 / 11.75, rel=1e-4)


def test_stalls_name_the_dependency_that_ended_last(tiny: ModuleType, machine: Hardware) -> None:
    trace = simulate(tiny.profile(machine), tiny.plan())
    gpu = [s for s in trace.stalls if s.lane == "gpu"]
    assert [(round(s.start_s, 3), round(s.duration_s, 3), s.waits_for) for s in gpu] == [
        (0.0, 3.75, "copy up of bucket 1"),
        (4.75, 2.0, "copy up of bucket 0"),
    ]
    assert gpu[0].cause == (
        "GPU waits 3.75 s: forward of layer 0 needs copy up of bucket 1, whose Adam could start only when the gradient "
        "norm was known and took 3 s"
    )
    assert gpu[1].cause == ("GPU waits 2 s: forward of layer 1 needs copy up of bucket 0, whose Adam took 3 s")
    cpu = [s for s in trace.stalls if s.lane == "cpu_adam"]
    assert cpu[-1].cause.endswith("needs the gradient norm, which is complete only when backward has ended")


def test_a_long_queue_is_counted(tiny: ModuleType, machine: Hardware) -> None:
    trace = simulate(tiny.profile(machine, layers=4, forward=0.1), tiny.plan())
    last = [s for s in trace.stalls if s.lane == "gpu"][-1]
    assert last.waits_for == "copy up of bucket 0"
    assert "whose Adam was queued behind 3 buckets for 9 s" in last.cause


def test_speculation_starts_adam_when_a_gradient_has_landed(tiny: ModuleType, machine: Hardware) -> None:
    # The undo record makes it 31 bytes: 3.321 s per bucket. Bucket 0 lands at 4.5 and is done at 7.821, bucket 1 at
    # 11.143, up at 11.393; then 1 + 1 + 4 s.
    adam = 3.0 * 31 / 28
    trace = simulate(tiny.profile(machine), tiny.plan(speculate="on"))
    assert trace.step_s == pytest.approx(4.5 + 2 * adam + 0.25 + 6 - 6, abs=EXACT)


def test_a_retained_bucket_leaves_only_the_other_on_the_cpu(tiny: ModuleType, machine: Hardware) -> None:
    # Forward of layer 0 starts at 6, when backward ends; bucket 0 landed at 4.5, Adam 6-9, up at 9.25.
    trace = simulate(tiny.profile(machine), tiny.plan(retained_buckets=1))
    assert trace.step_s == pytest.approx(9.25 + 1 + 4 - 6 + VERDICT_S, abs=EXACT)


def test_recomputation_runs_forward_again_in_backward(tiny: ModuleType, machine: Hardware) -> None:
    # Backward ends at 8; uploads at 11.75 and 14.75; forward of layer 1 until 15.75, then 2 x (1 + 2) s.
    trace = simulate(tiny.profile(machine), tiny.plan(activations="full"))
    assert trace.step_s == pytest.approx(21.75 - 8 + VERDICT_S, abs=EXACT)
    assert [n for n, *_ in spans(trace, "gpu", 1)].count("recompute of layer 1") == 1


def stall(trace: Trace, lane: str, needs: str) -> tuple[float, str]:
    """Duration and cause of the only stall of `lane` whose cause begins, after who waits, with `needs`."""
    found = [(round(s.duration_s, 3), s.cause.split(": ", 1)[1]) for s in trace.stalls if s.lane == lane]
    (one,) = [f for f in found if f[1].startswith(needs)]
    return one


def test_an_upload_behind_others(tiny: ModuleType) -> None:
    # Adam takes 0.1 s per bucket and an upload 3 s: that of layer 1 is ready when layer 0's has begun. Uploads end 3, 6
    # and 9 s after the first; forward of layer 0 ends at 4, so layer 1 waits 2 s, and layer 2 from 7 until 9.
    hw = tiny.hardware(down=tiny.link_gb_per_s(0.1), up=tiny.link_gb_per_s(3.0), adam=tiny.adam_gb_per_s(0.1))
    trace = simulate(tiny.profile(hw, layers=3), tiny.plan())
    queued = "copy up of bucket {}, which was queued behind {} on the link"
    assert stall(trace, "gpu", "forward of layer 1") == (
        2.0, "forward of layer 1 needs " + queued.format(1, "1 transfer")
    )  # fmt: skip
    assert stall(trace, "gpu", "forward of layer 2") == (
        2.0, "forward of layer 2 needs " + queued.format(0, "2 transfers")
    )  # fmt: skip


def test_gradients_behind_others(tiny: ModuleType) -> None:
    # Backward completes three buckets 0.1 s apart, each 3 s on the link; Adam, speculating, takes 0.5 s, 0.554 with the
    # record. Bucket 2 is complete 0.2 s after bucket 0, so it queues for 5.8 s, and Adam waits 3 - 0.554 s for it.
    hw = tiny.hardware(down=tiny.link_gb_per_s(3.0), up=1e6, adam=tiny.adam_gb_per_s(0.5))
    profile = tiny.profile(hw, layers=1, params=(tiny.BUCKET_PARAMS,) * 3, backward=0.3)
    waited, cause = stall(simulate(profile, tiny.plan(speculate="on")), "cpu_adam", "Adam of bucket 2")
    assert waited == pytest.approx(3 - 0.5 * 31 / 28, abs=1e-3)
    assert cause.endswith("copy down of bucket 2, whose 2.10 MB were queued behind 2 buckets on the link for 5.8 s")


def test_an_adam_whose_gradient_came_late(tiny: ModuleType, machine: Hardware) -> None:
    # 4 s per download: bucket 0's, begun 2 s before backward ends, then bucket 1's until 6 s after it; Adam 3.321 s, up
    # 0.25 s.
    hw = machine.replace(link=machine.link.replace(down=Curve(size_mb=(1.0,), gb_per_s=(tiny.link_gb_per_s(4.0),))))
    trace = simulate(tiny.profile(hw), tiny.plan(speculate="on"))
    waited, cause = stall(trace, "gpu", "forward of layer 0")
    assert waited == pytest.approx(6.0 + 3.0 * 31 / 28 + 0.25, abs=1e-3)
    assert "whose Adam could start only when copy down of bucket 1 had landed and took 3.32 s" in cause


def test_a_fetch_that_waits_for_a_slot(tiny: ModuleType) -> None:
    # Two slots. Forwards of 3, 0.1, 3 and 0.1 s, fetches of 1 s: layer 2 goes where layer 0 was, so it is fetched from
    # the end of layer 0 on, and layer 1 covers 0.1 s of that.
    hw = tiny.hardware(down=1e6, up=tiny.link_gb_per_s(1.0), adam=1e6, dram=1e9)
    profile = tiny.profile(hw, layers=4)
    blocks = tuple(b.model_copy(update={"forward_s": 0.1 if i % 2 else 3.0}) for i, b in enumerate(profile.blocks))
    trace = simulate(profile.replace(blocks=blocks), tiny.plan(flow_blocks=(0, 1, 2, 3)))
    waited, cause = stall(trace, "gpu", "forward of layer 2")
    assert waited == 0.9
    assert cause.endswith(
        "(2.10 MB, 1 s on the link), which had to wait for a free slot until forward of layer 0 had ended"
    )


def test_a_fetch_behind_uploads(tiny: ModuleType) -> None:
    # Only the last layer flows. Its Adam is done after 0.4 s, its fetch behind three uploads of 3 s each: from 9 to
    # 12 s, and forward of layer 2 ends at 10.
    hw = tiny.hardware(down=tiny.link_gb_per_s(0.1), up=tiny.link_gb_per_s(3.0), adam=tiny.adam_gb_per_s(0.1))
    waited, cause = stall(
        simulate(tiny.profile(hw, layers=4), tiny.plan(flow_blocks=(3,))), "gpu", "forward of layer 3"
    )
    assert waited == 2.0
    assert cause.endswith("fetch of layer 3 (2.10 MB, 3 s on the link), which was queued behind 3 transfers")


def test_offloaded_inputs_that_come_late(tiny: ModuleType) -> None:
    # The case above with 4 s copies: forward of 2 waits for the copy of 0, and backward of 1 for what backward of 3
    # asked for.
    hw = tiny.hardware(down=0.25, up=0.25, adam=1e6)
    profile = tiny.profile(hw, layers=4, params=NORM_CHUNK)
    profile = profile.replace(blocks=tuple(b.model_copy(update={"input_bytes": 10**9}) for b in profile.blocks))
    trace = simulate(profile, tiny.plan(activations="offload_inputs"))
    assert stall(trace, "gpu", "forward of layer 2") == (
        3.0, "forward of layer 2 needs activations of layer 0 down, whose 1.00 GB take 4 s on the link"
    )  # fmt: skip
    waited, cause = stall(trace, "gpu", "recompute of layer 1")
    assert waited == 1.0
    assert cause.endswith("(1.00 GB, 4 s on the link), which is asked for only when backward of layer 3 has ended")


def starts(profile: Profile, plan: Plan) -> dict[str, float]:
    """When each operator of the first step starts, by name (of several, the first)."""
    timeline = simulator.run(graph.build(profile, plan))
    return {op.name: timeline.start[i] for i, op in reversed(list(enumerate(timeline.graph.ops)))}


@pytest.mark.parametrize(
    ("copy_s", "forwards", "fetches", "backwards"),
    [
        (1.0, [0, 1, 2, 3], [10, 7], [13, 10, 7, 4]),  # the link keeps up: as without offloading
        # Forward of 2 waits for the copy of 0 (5), of 3 for that of 1 (9). Backward of 1 is asked for when that of 2
        # begins (13), of 0 when that of 1 could (16), but the link is busy until 17.
        (4.0, [0, 1, 5, 9], [17, 13], [21, 17, 13, 10]),
    ],
)
def test_layer_inputs_go_down_and_come_back(
    tiny: ModuleType, copy_s: float, forwards: list[float], fetches: list[float], backwards: list[float]
) -> None:
    size = 10**9
    hw = tiny.hardware(down=1.0 / copy_s, up=1.0 / copy_s, adam=1e6, dram=1e9)
    profile = tiny.profile(hw, layers=4, params=NORM_CHUNK)
    profile = profile.replace(blocks=tuple(b.model_copy(update={"input_bytes": size}) for b in profile.blocks))
    at = starts(profile, tiny.plan(activations="offload_inputs"))
    near = functools.partial(pytest.approx, abs=0.1)  # the gradients cross too, 16 kB each
    assert [at[f"forward of layer {i}"] for i in range(4)] == near(forwards)
    assert [at[f"activations of layer {i} up"] for i in range(2)] == near(fetches)
    assert "activations of layer 2 up" not in at, "the last two never left"
    assert [at[f"recompute of layer {i}"] for i in range(4)] == near(backwards)


def test_policies_differ_by_block(tiny: ModuleType, machine: Hardware) -> None:
    profile = tiny.profile(machine, layers=4)
    known = {"selective_bytes": 2000, "selective_recompute_s": 0.25}
    profile = profile.replace(blocks=tuple(b.model_copy(update=known) for b in profile.blocks))
    plan = tiny.plan(activations="none", activations_by_block={1: "full", 2: "selective"})
    again = {op.block: op.seconds for op in graph.build(profile, plan).ops if op.kind == "recompute"}
    assert again == {1: 1.0, 2: 0.25}


def test_compiled_layers_take_their_own_time(tiny: ModuleType, machine: Hardware) -> None:
    profile = tiny.profile(machine, layers=4)
    with pytest.raises(InputError, match=r"does not say what layer 0 costs under compile_blocks.*--compile-blocks"):
        graph.build(profile, tiny.plan(compile_blocks=True))
    known = {"compiled_forward_s": 0.5, "compiled_backward_s": 1.25, "compiled_bytes": 3000}
    profile = profile.replace(blocks=tuple(b.model_copy(update=known) for b in profile.blocks))
    plan = tiny.plan(compile_blocks=True, activations="none", activations_by_block={1: "full"})
    seconds: dict[tuple[str, int], float] = {}
    for op in graph.build(profile, plan).ops:
        seconds[op.kind, op.block] = seconds.get((op.kind, op.block), 0.0) + op.seconds
    assert [seconds["forward", b] for b in range(4)] == [0.5] * 4
    assert [seconds["backward", b] for b in range(4)] == pytest.approx([1.25] * 4, abs=EXACT)
    assert [b for kind, b in seconds if kind == "recompute"] == [1]
    assert seconds["recompute", 1] == 0.5


def test_the_gradients_of_a_compiled_layer_come_at_its_end(tiny: ModuleType) -> None:
    # Three buckets in one layer: eager they leave after 2, 4 and 6 s of its backward.
    hw = tiny.hardware(down=1e6, up=1e6, adam=1e6)
    profile = tiny.profile(hw, layers=1, params=(tiny.BUCKET_PARAMS,) * 3, backward=6.0)
    known = {"compiled_forward_s": 1.0, "compiled_backward_s": 6.0, "compiled_bytes": 3000}
    profile = profile.replace(blocks=tuple(b.model_copy(update=known) for b in profile.blocks))
    ends = {}
    for compiled in (False, True):
        pieces = [op for op in graph.build(profile, tiny.plan(compile_blocks=compiled)).ops if op.kind == "backward"]
        ends[compiled] = [round(sum(op.seconds for op in pieces[: i + 1]), 3) for i in range(len(pieces))]
        assert [op.bucket for op in pieces] == [0, 1, 2]
    assert ends == {False: [2.0, 4.0, 6.0], True: [6.0, 6.0, 6.0]}


def test_accumulation_adds_a_whole_micro_batch(tiny: ModuleType, machine: Hardware) -> None:
    trace = simulate(tiny.profile(machine), tiny.plan(accumulation=2))
    assert trace.step_s == pytest.approx(11.75 + 6 + VERDICT_S, abs=EXACT)
    assert trace.tokens_per_step == 2


def test_the_ring_holds_backward_back(tiny: ModuleType) -> None:
    # Six buckets in one layer, 1 s of backward and 3 s of download each. The fifth piece waits for bucket 0 (5 s), the
    # sixth for bucket 1 (8 s): backward ends at 9, the downloads at 20, then the next step's 1 + 8 s.
    hw = tiny.hardware(down=tiny.link_gb_per_s(3.0), up=1e6, adam=1e6, dram=1e9)
    profile = tiny.profile(hw, layers=1, params=(tiny.BUCKET_PARAMS,) * 6, backward=6.0)
    trace = simulate(profile, tiny.plan())
    assert trace.step_s == pytest.approx(20.0 + VERDICT_S, abs=1e-3)
    causes = [s.cause for s in trace.stalls if "gradient ring" in s.cause]
    assert causes[-1].startswith("GPU waits 2 s: backward of layer 0 needs copy down of bucket 1 to free a slot")


def test_flow_blocks_are_fetched_after_their_adam(tiny: ModuleType) -> None:
    # Two slots for two blocks. Backward ends at 6.5 in the cold step (fetch 0.5 s). Adam of bucket 1 7-10, fetch of
    # layer 0 until 10.5, forward until 11.5; Adam of bucket 0 until 13, fetch of layer 1 until 13.5, forward 14.5,
    # backward until 18.5 (layer 0 was fetched again meanwhile).
    hw = tiny.hardware(down=tiny.link_gb_per_s(0.5), up=tiny.link_gb_per_s(0.5), adam=tiny.adam_gb_per_s(3.0))
    trace = simulate(tiny.profile(hw), tiny.plan(flow_blocks=(0, 1)))
    assert trace.step_s == pytest.approx(12.0 + VERDICT_S, abs=EXACT)
    assert spans(trace, "link_up", 1)[0] == ("fetch of layer 0", 3.5, 4.0)
    assert all(e.kind == "fetch" for e in trace.events if e.lane == "link_up")


def test_both_directions_share_the_link(tiny: ModuleType) -> None:
    # Alone 1 s each; together the link gives what one of them would take, so both run at half speed.
    rate = tiny.link_gb_per_s(1.0)
    hw = tiny.hardware(down=rate, up=rate, both=rate, adam=1e6, dram=1e9)
    ops = [
        graph.Operator(0, "link_down", "copy_down", "d", 1.0, int(rate * 1e9), rate * 1e9),
        graph.Operator(1, "link_up", "copy_up", "u", 1.0, int(rate * 1e9), rate * 1e9),
        graph.Operator(2, "gpu", "forward", "f", 0.25),
    ]
    g = graph.StepGraph(ops, [], 1e18, hw.link.both_gb_per_s * 1e9)
    t = simulator.run(g, full_steps=1)
    assert t.end[:2] == [pytest.approx(2.0), pytest.approx(2.0)]


def test_memory_is_shared_as_measured_beside_the_h200() -> None:
    """The measured loop: Adam alone 116 GB/s; DMA in rounds of equal bytes both ways, then a wait for both."""
    cpu = preset("h200-pcie5").cpu
    dram, weight = cpu.dram_gb_per_s, cpu.dma_write_cost
    down, _, adam = share_memory(55.0, 0.0, 116.0, weight, dram)
    assert adam == pytest.approx(82, rel=0.1)
    assert down == pytest.approx(54, rel=0.05)
    _, up, adam = share_memory(0.0, 55.0, 116.0, weight, dram)
    assert adam == pytest.approx(98, rel=0.1)
    assert up == pytest.approx(46, rel=0.1)
    d, u, a = share_memory(50.0, 50.0, 116.0, weight, dram)  # until the downloads of a round are done
    first = 1 / d
    _, u2, a2 = share_memory(0.0, 55.0, 116.0, weight, dram)
    second = (1 - u * first) / u2
    round_s = first + second
    assert 2 / round_s == pytest.approx(75, rel=0.1)
    assert (a * first + a2 * second) / round_s == pytest.approx(77, rel=0.1)


def test_sharing_never_exceeds_either_cap() -> None:
    rng = random.Random(1)
    for _ in range(500):
        down, up, adam = (rng.choice([0.0, rng.uniform(1, 500)]) for _ in range(3))
        weight, dram = rng.uniform(1, 2), rng.uniform(20, 600)
        d, u, a = share_memory(down, up, adam, weight, dram)
        assert d * weight + u + a <= dram * (1 + 1e-9) or (d, u, a) == (down, up, adam)
        assert 0 <= d <= down * (1 + 1e-9)
        assert 0 <= u <= up * (1 + 1e-9)
        assert 0 <= a <= adam * (1 + 1e-9)


def test_a_cpu_that_plays_the_gpu_is_slowed_by_adam(tiny: ModuleType) -> None:
    hw = tiny.hardware(down=1e6, up=1e6, adam=tiny.adam_gb_per_s(3.0), dram=1e9, peak=0).replace(shared_memory=True)
    free = simulate(tiny.profile(hw.replace(shared_memory=False)), tiny.plan()).step_s
    assert free == pytest.approx(3 + 3 + 1 + 4 + VERDICT_S, abs=1e-3)
    # 4 Adam threads on 8 cores: while Adam of bucket 0 runs beside forward of layer 0, both run at 1 / 1.5. Forward's
    # 1 s of work takes 1.5 s, in which Adam does 1 s of its 3.
    shared = simulate(tiny.profile(hw), tiny.plan()).step_s
    assert shared == pytest.approx(free + 0.5, abs=1e-3)


def test_the_window_is_tidy(tiny: ModuleType) -> None:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")
    for fields in ({}, {"speculate": "on"}, {"flow_blocks": (3, 9)}, {"cast_down": "cpu", "cast_up": "gpu"}):
        plan = Plan.model_validate({"micro_batch": 4, "seq_len": 2048, "adam_threads": 12, **fields})
        trace = simulate(profile, plan)
        assert min(e.start_s for e in trace.events) == 0.0
        assert max(e.end_s for e in trace.events) == pytest.approx(trace.window_s)
        assert trace.window_s >= trace.step_s
        for lane in ("gpu", "link_down", "link_up", "cpu_adam"):
            mine = [e for e in trace.events if e.lane == lane]
            for before, after in itertools.pairwise(mine):
                assert after.start_s >= before.end_s - 1e-9, (lane, before, after)
        assert Trace.from_json(trace.to_json()) == trace


def test_gpu_time_is_busy_plus_named_stalls() -> None:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")
    trace = simulate(profile, Plan(micro_batch=4, seq_len=2048, adam_threads=12))
    stalled = sum(s.duration_s for s in trace.stalls if s.lane == "gpu")
    assert trace.gpu_busy + stalled / trace.step_s == pytest.approx(1.0, abs=0.01)


def test_more_steps_change_nothing(tiny: ModuleType, machine: Hardware) -> None:
    for plan in (tiny.plan(), tiny.plan(speculate="on"), tiny.plan(flow_blocks=(0, 1)), tiny.plan(retained_buckets=1)):
        profile = tiny.profile(machine)
        three, seven = simulate(profile, plan), simulate(profile, plan, steps=7)
        assert seven.step_s == pytest.approx(three.step_s, rel=1e-9)
        assert seven.window_s == pytest.approx(three.window_s, rel=1e-9)
    with pytest.raises(InputError, match="steps = 2"):
        simulate(tiny.profile(machine), tiny.plan(), steps=2)


def test_it_is_deterministic() -> None:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200")
    plan = Plan(micro_batch=4, seq_len=2048, adam_threads=65, speculate="on")
    assert simulate(profile, plan).to_json() == simulate(profile, plan).to_json()


def test_auto_is_simulated_as_on_and_says_so() -> None:
    profile = estimate("smollm2-135m", micro_batch=1, seq_len=512, hardware="gh200")
    trace = simulate(profile, Plan(micro_batch=1, seq_len=512, adam_threads=65))
    assert trace.plan.speculate == "on"
    assert "neither clipped nor skipped" in trace.context["speculate"]
    assert trace.step_s == simulate(profile, trace.plan).step_s


def random_case(seed: int) -> tuple[Profile, Plan]:
    rng = random.Random(seed)
    hw = preset(rng.choice(["gh200", "gh200-quad", "h200-pcie5", "gb200"]))
    profile = estimate(
        rng.choice(["smollm2-135m", "paper-1b", "bench-3b"]), micro_batch=rng.choice([1, 4]),
        seq_len=rng.choice([512, 2048]), hardware=hw,
    )  # fmt: skip
    bucket_mb = rng.choice([32.0, 64.0, 200.0])
    total = len(graph.buckets_of(profile, bucket_mb))
    plan = Plan(
        micro_batch=profile.micro_batch, seq_len=profile.seq_len, bucket_mb=bucket_mb,
        retained_buckets=rng.randint(0, total // 2), cast_down=rng.choice(["fused", "gpu", "cpu"]),
        cast_up=rng.choice(["fused", "gpu", "cpu"]), speculate=rng.choice(["on", "off"]),
        adam_threads=rng.choice([8, 16]), activations=rng.choice(ACTIVATIONS),
        flow_blocks=tuple(sorted(rng.sample(range(1, 15), rng.choice([0, 0, 3])))),
        prefetch_blocks=rng.choice([1, 2]), accumulation=rng.choice([1, 2]),
    )  # fmt: skip
    return profile, plan


@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_shorter_than_the_load_of_a_lane(seed: int) -> None:
    profile, plan = random_case(seed)
    g = graph.build(profile, plan)
    step = simulator.run(g).step_s
    for lane in ("gpu", "link_down", "link_up", "cpu_adam"):
        assert step >= g.load(lane) * (1 - 1e-9), lane  # type: ignore[arg-type]
    assert step >= sum(op.dram_bytes for op in g.ops) / g.dram_bytes_per_s * (1 - 1e-9)


@pytest.mark.parametrize("scarce_memory", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_more_bandwidth_is_never_slower(seed: int, scarce_memory: bool) -> None:
    profile, plan = random_case(seed)
    hw = profile.hardware
    if not scarce_memory:
        hw = hw.replace(cpu=hw.cpu.replace(dram_gb_per_s=1e5))

    def faster(c: Curve) -> Curve:
        return Curve(size_mb=c.size_mb, gb_per_s=tuple(2 * b for b in c.gb_per_s))

    def step(hardware: Hardware) -> float:
        return simulator.step_seconds(profile.replace(hardware=hardware), plan)

    base = step(hw)
    adam = tuple(2 * b for b in hw.cpu.adam_gb_per_s)
    # Where memory is scarce, a faster copy takes more away from Adam while it lasts, which may cost a per cent.
    link = 1.02 if scarce_memory else 1.001
    assert step(hw.replace(cpu=hw.cpu.replace(dram_gb_per_s=2 * hw.cpu.dram_gb_per_s))) <= base * 1.001
    assert step(hw.replace(cpu=hw.cpu.replace(adam_gb_per_s=adam))) <= base * 1.001
    assert step(hw.replace(link=hw.link.replace(up=faster(hw.link.up)))) <= base * link
    assert step(hw.replace(link=hw.link.replace(down=faster(hw.link.down)))) <= base * link
    assert step(hw.replace(link=hw.link.replace(both_gb_per_s=2 * hw.link.both_gb_per_s))) <= base * link


def critical_path(g: graph.StepGraph) -> float:
    """Seconds of the longest chain of dependencies within one step that begins with a GPU operator, the GPU's own order
    among them. (A fetch that waits only for the step before may begin in that step.)"""
    never = float("-inf")
    before = dict(itertools.pairwise(reversed([op.index for op in g.ops if op.lane == "gpu"])))

    @functools.cache
    def end(i: int) -> float:
        op = g.ops[i]
        waits = [*op.deps, *([before[i]] if i in before else [])]
        return op.seconds + max((end(d) for d in waits), default=0.0 if op.lane == "gpu" else never)

    for op in g.ops:  # in order, so that no chain is too deep for Python
        end(op.index)
    return max(end(op.index) for op in g.ops if op.lane == "gpu")


@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_shorter_than_its_critical_path(seed: int) -> None:
    g = graph.build(*random_case(seed))
    assert simulator.run(g).step_s >= critical_path(g) * (1 - 1e-9)


@pytest.mark.parametrize("scarce_memory", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_less_work_is_never_slower(seed: int, scarce_memory: bool) -> None:
    """Faster arithmetic, a faster HBM, and fewer bytes of the same copies; the bounds are those of more bandwidth."""
    profile, plan = random_case(seed)
    hw = profile.hardware
    if not scarce_memory:
        hw = hw.replace(cpu=hw.cpu.replace(dram_gb_per_s=1e5))
        profile = profile.replace(hardware=hw)

    def step(p: Profile) -> float:
        return simulator.step_seconds(p, plan)

    base, bound = step(profile), 1.02 if scarce_memory else 1.001
    quicker = tuple(b.model_copy(update={"forward_s": b.forward_s / 2, "backward_s": b.backward_s / 2})
                    for b in profile.blocks)  # fmt: skip
    assert step(profile.replace(blocks=quicker)) <= base * bound
    hbm = hw.replace(gpu=hw.gpu.replace(hbm_gb_per_s=2 * hw.gpu.hbm_gb_per_s))
    assert step(profile.replace(hardware=hbm)) <= base * bound
    fewer = ("input_bytes", "activation_bytes")
    smaller = tuple(b.model_copy(update={name: getattr(b, name) // 2 for name in fewer}) for b in profile.blocks)
    assert step(profile.replace(blocks=smaller)) <= base * bound
    g = graph.build(profile, plan)
    for op in g.ops:
        op.link_bytes, op.seconds = op.link_bytes // 2, op.seconds / (2 if op.link_bytes else 1)
        op.dram_bytes /= 2
    assert simulator.run(g).step_s <= base * bound


def test_the_worst_exception_is_the_one_in_the_documents() -> None:
    """With a faster Adam weights go up during backward, and fetches that backward waits for queue behind them."""
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")
    plan = Plan(
        micro_batch=4, seq_len=2048, bucket_mb=200, retained_buckets=8, cast_up="cpu", speculate="on", adam_threads=8,
        activations="offload_saved",
    )  # fmt: skip
    cpu = profile.hardware.cpu
    faster = cpu.replace(adam_gb_per_s=tuple(2 * b for b in cpu.adam_gb_per_s))
    trace = simulate(profile.replace(hardware=profile.hardware.replace(cpu=faster)), plan)
    assert 1.0 < trace.step_s / simulator.step_seconds(profile, plan) < 1.1
    assert any("activations of" in s.cause and "was queued behind" in s.cause for s in trace.stalls)


def test_a_7b_plan_takes_tens_of_milliseconds() -> None:
    profile = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    plan = Plan(micro_batch=4, seq_len=2048, adam_threads=65)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        simulate(profile, plan)
        best = min(best, time.process_time() - start)
    assert best < 0.1, f"{best * 1e3:.0f} ms of CPU time"
