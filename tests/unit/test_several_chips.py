"""Several Superchips: steps of two chips counted by hand, properties on random plans, memory, the planner."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from superoffload import graph, hardware, simulator
from superoffload.autotune import search
from superoffload.errors import InputError, NotSupported
from superoffload.estimating import estimate
from superoffload.export import chrome_trace
from superoffload.graph import VERDICT_S
from superoffload.hardware import Curve, Hardware, Interconnect, Wire
from superoffload.interconnect_presets import CHIPS, FAMILIES
from superoffload.memory import EXCHANGE_COPIES, ledger, state_items
from superoffload.plan import ACTIVATIONS, Plan, check_one_chip
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Exchange, Profile
from superoffload.simulator import simulate
from superoffload.tracing import Lane, Trace, drawn_lanes

EXACT = 1e-6
NEAR = 1e-3
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/many_superchips_2026-11-30.json"
FOUR_LANES: tuple[Lane, ...] = ("gpu", "link_down", "link_up", "cpu_adam")


def flat(gb_per_s: float) -> Curve:
    return Curve(size_mb=(1.0,), gb_per_s=(gb_per_s,))


def board(gb_per_s: float, *, all_to_all: float | None = None, latency_s: float = 0.0, mesh: bool = False) -> Wire:
    return Wire(ring=flat(gb_per_s), all_to_all=flat(all_to_all or gb_per_s), latency_s=latency_s, mesh=mesh)


def pair(hw: Hardware, gb_per_s: float, **more: Any) -> Hardware:
    """Two of `hw` on one board."""
    return hw.replace(interconnect=Interconnect(chips=2, board_chips=2, board=board(gb_per_s, **more)))


def ring_gb_per_s(tiny: ModuleType, seconds: float) -> float:
    """Rate at which two chips reduce-scatter one 16-bit bucket in that time: each sends half of it."""
    rate: float = tiny.link_gb_per_s(seconds) / 2
    return rate


def spans(trace: Trace, lane: str, step: int) -> list[tuple[str, float, float]]:
    return [(e.name, round(e.start_s, 3), round(e.end_s, 3)) for e in trace.events if e.lane == lane and e.step == step]


# -- steps counted by hand ---------------------------------------------------------------------------------------------


@pytest.fixture
def two(tiny: ModuleType) -> Hardware:
    """Two chips: whole buckets would take 0.5 s down, 3 s of Adam and 0.25 s up; half of one takes half of that. A
    reduce-scatter or an all-gather takes 0.3 s."""
    hw = tiny.hardware(
        down=tiny.link_gb_per_s(0.5), up=tiny.link_gb_per_s(0.25), adam=tiny.adam_gb_per_s(3.0), dram=1e6
    )
    return pair(hw, ring_gb_per_s(tiny, 0.3))


def test_each_of_two_chips_updates_half_of_a_bucket(tiny: ModuleType, two: Hardware) -> None:
    # Backward ends at 6; bucket 1 (layer 0) is reduced at 6.3 and down at 6.55; Adam until 8.05, up at 8.175, gathered
    # at 8.475. Adam of bucket 0 until 9.55, up at 9.675, gathered at 9.975. Forward: 8.475-9.475, 9.975-10.975, then
    # backward until 14.975.
    trace = simulate(tiny.profile(two), tiny.plan(data_parallel=2))
    assert trace.step_s == pytest.approx(14.975 - 6 + VERDICT_S, abs=EXACT)
    assert spans(trace, "interconnect", 0) == [
        ("reduce-scatter of bucket 1", 0.0, 0.3),
        ("all-gather of bucket 1", 2.175, 2.475),
        ("all-gather of bucket 0", 3.675, 3.975),
    ]
    assert spans(trace, "cpu_adam", 0) == [("Adam of bucket 1", 0.55, 2.05), ("Adam of bucket 0", 2.05, 3.55)]
    assert spans(trace, "link_up", 0) == [("copy up of bucket 1", 2.05, 2.175), ("copy up of bucket 0", 3.55, 3.675)]
    assert trace.tokens_per_step == 2
    assert trace.model_flops_per_step == 2e12
    assert trace.mfu == pytest.approx(1e12 / trace.step_s / 100e12), "FLOPs and peak are both those of two chips"
    gathered = [e for e in trace.events if e.kind == "all_gather"]
    assert {e.bytes for e in gathered} == {tiny.BUCKET_PARAMS}, "half of 2 bytes per parameter"
    assert trace.summary()["chips"] == 2


def test_a_wait_for_new_weights_names_the_whole_chain(tiny: ModuleType, two: Hardware) -> None:
    trace = simulate(tiny.profile(two), tiny.plan(data_parallel=2))
    first, second = (s for s in trace.stalls if s.lane == "gpu")
    assert (first.waits_for, round(first.duration_s, 3)) == ("all-gather of bucket 1", 2.475)
    assert first.cause == (
        "GPU waits 2.48 s: forward of layer 0 needs all-gather of bucket 1, which sends 1.05 MB in 300 ms after copy "
        "up of bucket 1, whose Adam could start only when the gradient norm was known and took 1.5 s"
    )
    assert "forward of layer 1 needs all-gather of bucket 0" in second.cause
    assert "after copy up of bucket 0, whose Adam" in second.cause


def test_gathers_that_queue_are_counted(tiny: ModuleType) -> None:
    # Adam takes no time and an all-gather 3 s: that of bucket 1 (layer 1) waits for that of bucket 2, and so on.
    hw = pair(tiny.hardware(down=1e6, up=1e6, adam=1e6, dram=1e9), ring_gb_per_s(tiny, 3.0))
    trace = simulate(tiny.profile(hw, layers=3), tiny.plan(data_parallel=2))
    last = [s.cause for s in trace.stalls if s.lane == "gpu"][-1]
    assert "needs all-gather of bucket 0, which sends 1.05 MB in 3 s and was queued behind 2 collectives" in last


def test_the_chips_agree_on_the_norm(tiny: ModuleType, two: Hardware) -> None:
    # The sum of the partial norms goes around the ring twice; the curves have the first step of a collective in them.
    late = two.replace(interconnect=Interconnect(chips=2, board_chips=2, board=two.interconnect.board.replace(  # type: ignore[union-attr]
        latency_s=0.125)))  # fmt: skip
    base = simulate(tiny.profile(two), tiny.plan(data_parallel=2)).step_s
    assert simulate(tiny.profile(late), tiny.plan(data_parallel=2)).step_s == pytest.approx(base + 2 * 0.125, abs=EXACT)


def test_retained_states_are_divided_too(tiny: ModuleType, two: Hardware) -> None:
    # All retained: backward ends at 6, the last reduce-scatter and with it the GPU's Adam at 6.3, where a step is cut.
    # The all-gathers follow, that of layer 0's bucket first, until 6.6 and 6.9. Forward 6.6-8.6, backward until 12.6.
    trace = simulate(tiny.profile(two), tiny.plan(data_parallel=2, retained_buckets=2))
    assert trace.step_s == pytest.approx(6.6, abs=EXACT)
    assert spans(trace, "interconnect", 0) == [
        ("all-gather of bucket 1", 0.0, 0.3), ("all-gather of bucket 0", 0.3, 0.6)
    ]  # fmt: skip
    assert spans(trace, "interconnect", 1)[-3:-2] == [("reduce-scatter of bucket 1", 6.3, 6.6)]
    assert spans(trace, "cpu_adam", 0) == []


def test_flow_blocks_are_fetched_in_halves_and_gathered(tiny: ModuleType) -> None:
    # As in test_simulator, but each chip fetches half a block (0.25 s of the 0.5) and the halves are gathered (0.3 s):
    # backward ends at 6.55 in the cold step. Reduced at 6.85, down at 7.1, Adam of bucket 1 until 8.6, fetch 8.85,
    # gathered 9.15, forward until 10.15; Adam of bucket 0 until 10.1, fetch 10.35, gathered 10.65, forward 11.65,
    # backward 15.65 (layer 0 is still there).
    hw = tiny.hardware(down=tiny.link_gb_per_s(0.5), up=tiny.link_gb_per_s(0.5), adam=tiny.adam_gb_per_s(3.0))
    trace = simulate(tiny.profile(pair(hw, ring_gb_per_s(tiny, 0.3))), tiny.plan(flow_blocks=(0, 1), data_parallel=2))
    assert trace.step_s == pytest.approx(15.65 - 6.55 + VERDICT_S, abs=EXACT)
    assert spans(trace, "link_up", 1)[0] == ("fetch of layer 0", 2.05, 2.3)
    assert next(s for s in spans(trace, "interconnect", 1) if "layer" in s[0]) == ("all-gather of layer 0", 2.3, 2.6)


def shared(tiny: ModuleType, hw: Hardware, before: int, after: int, **more: Any) -> Profile:
    """Two chips share each sequence: attention is the second quarter of forward and the third of backward."""
    exchange = Exchange(before_bytes=before, after_bytes=after, forward=(0.25, 0.5), backward=(0.5, 0.75))
    profile: Profile = tiny.profile(hw, **more)
    blocks = tuple(b.model_copy(update={"exchange": exchange}) for b in profile.blocks)
    return profile.replace(seq_len=2, sequence_parallel=2, blocks=blocks)


def test_all_to_alls_stand_between_the_parts_of_a_layer(tiny: ModuleType) -> None:
    # 0.4 s before attention and 0.2 s after it (each chip sends half of 0.8 and 0.4 GB at 1 GB/s), backward alike: 1.6
    # and 2.6 s instead of 1 and 2. Everything else is retained and next to free.
    hw = pair(tiny.hardware(dram=1e9), 1e6, all_to_all=1.0)
    profile = shared(tiny, hw, 800_000_000, 400_000_000)
    plan = tiny.plan(sequence_parallel=2, seq_len=2, retained_buckets=2)
    trace = simulate(profile, plan)
    assert trace.step_s == pytest.approx(2 * 1.6 + 2 * 2.6, abs=NEAR)
    assert trace.tokens_per_step == 2, "one sequence, on two chips"
    assert spans(trace, "gpu", 1)[:4] == [
        ("forward of layer 0", 0.0, 0.25), ("forward of layer 0", 0.65, 0.9), ("forward of layer 0", 1.1, 1.6),
        ("forward of layer 1", 1.6, 1.85),
    ]  # fmt: skip
    backward = [s for s in spans(trace, "gpu", 1) if s[0] == "backward of layer 1"]
    assert backward == [
        ("backward of layer 1", 3.2, 4.2), ("backward of layer 1", 4.4, 4.9), ("backward of layer 1", 5.3, 5.8)
    ]  # fmt: skip
    recomputed = simulate(profile, plan.model_copy(update={"activations": "full"}))
    assert recomputed.step_s == pytest.approx(4 * 1.6 + 2 * 2.6, abs=NEAR), "what is recomputed is exchanged again"
    causes = [s.cause for s in trace.stalls if s.lane == "gpu"]
    assert causes[0] == (
        "GPU waits 400 ms: forward of layer 0 needs all-to-all of query, key and value in layer 0, which sends 400.00 "
        "MB in 400 ms"
    )


def test_an_all_to_all_goes_before_gradients_that_wait(tiny: ModuleType) -> None:
    # Three buckets in a layer, complete at 0.5, 1.0 and 1.5 s of the compute of its backward. The all-to-alls come at
    # 1.0 (before the second bucket) and 1.5: each takes 0.2 s and a reduce-scatter 1 s. That of bucket 0 is under way
    # when the first all-to-all comes; those of buckets 1 and 2 have to wait for both.
    hw = pair(tiny.hardware(down=1e6, up=1e6, adam=1e6, dram=1e9), ring_gb_per_s(tiny, 1.0), all_to_all=1.0)
    profile = shared(tiny, hw, 400_000_000, 400_000_000, layers=1, params=(tiny.BUCKET_PARAMS,) * 3)
    timeline = simulator.run(graph.build(profile, tiny.plan(sequence_parallel=2, seq_len=2)))
    net = sorted(
        (round(timeline.start[i], 2), op.name)
        for i, op in enumerate(timeline.graph.ops)
        if op.lane == "interconnect" and "all-gather" not in op.name
    )
    names = [name.removesuffix(" in layer 0") for _, name in net]
    assert names[2:] == [
        "reduce-scatter of bucket 0", "all-to-all of gradients", "reduce-scatter of bucket 1",
        "all-to-all of gradients", "reduce-scatter of bucket 2",
    ]  # fmt: skip


def test_gradients_held_on_the_host_are_reduced_in_each_micro_batch(tiny: ModuleType, two: Hardware) -> None:
    counts = {}
    for held in ("gpu", "cpu"):
        plan = tiny.plan(data_parallel=2, accumulation=3, accumulate_on=held, retained_buckets=1)
        counts[held] = Counter(op.kind for op in graph.build(tiny.profile(two), plan).ops)
    assert counts["gpu"]["reduce_scatter"] == 2
    assert counts["cpu"]["reduce_scatter"] == 6
    assert counts["gpu"]["all_gather"] == counts["cpu"]["all_gather"] == 2


# -- properties --------------------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Profile, Plan]:
    rng = random.Random(seed)
    hw = hardware.preset(f"{rng.choice(list(FAMILIES))}-x{rng.choice(CHIPS)}")
    assert hw.interconnect is not None
    group = rng.choice([n for n in (1, 2, 4, 8) if n <= hw.interconnect.chips])
    profile = estimate(
        rng.choice(["paper-1b", "bench-3b"]), micro_batch=rng.choice([1, 4]), seq_len=rng.choice([2048, 8192]),
        hardware=hw, sequence_parallel=group,
    )  # fmt: skip
    bucket_mb = rng.choice([32.0, 64.0, 200.0])
    total = len(graph.buckets_of(profile, bucket_mb))
    plan = Plan(
        micro_batch=profile.micro_batch, seq_len=profile.seq_len, bucket_mb=bucket_mb,
        retained_buckets=rng.choice([0, rng.randint(0, total)]), cast_down=rng.choice(["fused", "gpu", "cpu"]),
        cast_up=rng.choice(["fused", "gpu", "cpu"]), speculate=rng.choice(["on", "off"]),
        adam_threads=rng.choice([2, 16]), activations=rng.choice(ACTIVATIONS),
        flow_blocks=tuple(sorted(rng.sample(range(1, 15), rng.choice([0, 0, 3])))),
        prefetch_blocks=rng.choice([1, 2]), accumulation=rng.choice([1, 2]),
        accumulate_on=rng.choice(["gpu", "cpu"]), sequence_parallel=group,
        data_parallel=hw.interconnect.chips // group,
    )  # fmt: skip
    return profile, plan


def wires(hw: Hardware, change: Any) -> Hardware:
    """`hw` with each wire of its interconnect changed."""
    net = hw.interconnect
    assert net is not None
    new = {k: change(w) for k in ("board", "network") if (w := getattr(net, k)) is not None}
    return hw.replace(interconnect=net.replace(**new))


@pytest.mark.parametrize("seed", range(16))
def test_no_step_is_shorter_than_the_load_of_a_lane(seed: int) -> None:
    g = graph.build(*random_case(seed))
    step = simulator.run(g).step_s
    for lane in (*FOUR_LANES, "interconnect"):
        assert step >= g.load(lane) * (1 - 1e-9), lane  # type: ignore[arg-type]
    assert step >= sum(op.dram_bytes for op in g.ops) / g.dram_bytes_per_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(16))
def test_no_step_is_shorter_than_its_critical_path(seed: int) -> None:
    g = graph.build(*random_case(seed))
    before = dict(itertools.pairwise(reversed([op.index for op in g.ops if op.lane == "gpu"])))

    @functools.cache
    def end(i: int) -> float:
        op = g.ops[i]
        waits = [*op.deps, *([before[i]] if i in before else [])]
        return op.seconds + max((end(d) for d in waits), default=0.0 if op.lane == "gpu" else float("-inf"))

    for op in sorted(g.ops, key=lambda op: op.lane != "gpu"):
        end(op.index)
    assert simulator.run(g).step_s >= max(end(op.index) for op in g.ops if op.lane == "gpu") * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(16))
def test_a_faster_interconnect_is_never_slower(seed: int) -> None:
    profile, plan = random_case(seed)

    def twice(c: Curve) -> Curve:
        return c.replace(gb_per_s=tuple(2 * b for b in c.gb_per_s))

    def step(hw: Hardware) -> float:
        return simulator.step_seconds(profile.replace(hardware=hw), plan)

    base = step(profile.hardware)
    for change in (
        lambda w: w.replace(ring=twice(w.ring)),
        lambda w: w.replace(all_to_all=twice(w.all_to_all)),
        lambda w: w.replace(latency_s=w.latency_s / 2),
    ):
        assert step(wires(profile.hardware, change)) <= base * 1.001


@pytest.mark.parametrize("seed", range(16))
def test_fewer_bytes_between_chips_are_never_slower(seed: int) -> None:
    profile, plan = random_case(seed)
    g = graph.build(profile, plan)
    base = simulator.run(g).step_s
    for op in g.ops:
        if op.lane == "interconnect":
            op.seconds, op.link_bytes = op.seconds / 2, op.link_bytes // 2
    assert simulator.run(g).step_s <= base * 1.001


@pytest.mark.parametrize("seed", range(6))
def test_one_chip_of_several_is_that_chip_alone(seed: int) -> None:
    """An interconnect that a plan does not use changes nothing."""
    profile, plan = random_case(seed)
    plan = plan.model_copy(update={"data_parallel": 1, "sequence_parallel": 1})
    profile = rescale(profile, sequence_parallel=1)
    name = profile.hardware.name.rpartition("-x")[0]
    alone = profile.replace(hardware=hardware.preset(name))
    several, one = simulate(profile, plan), simulate(alone, plan)
    assert several.replace(hardware=name, context=one.context) == one
    assert drawn_lanes(one.events) == (*FOUR_LANES, "validator")
    assert "chips" not in one.summary()


def test_it_repeats_itself_and_draws_one_lane_more() -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=8192, hardware="gh200-quad-x8", sequence_parallel=4)
    plan = make_plan(profile)
    trace = simulate(profile, plan)
    assert trace.to_json() == simulate(profile, plan).to_json()
    assert Trace.from_json(trace.to_json()) == trace
    assert drawn_lanes(trace.events)[-1] == "interconnect"
    mine = [e for e in trace.events if e.lane == "interconnect"]
    for a, b in itertools.pairwise(mine):
        assert b.start_s >= a.end_s - 1e-9
    assert {e.kind for e in mine} == {"reduce_scatter", "all_gather", "all_to_all"}
    threads = [e["args"]["name"] for e in chrome_trace(trace)["traceEvents"] if e["name"] == "thread_name"]
    assert len(threads) == 6
    assert "engine trains on one" in trace.context["chips"]


# -- memory ------------------------------------------------------------------------------------------------------------


def by_name(profile: Profile, plan: Plan) -> dict[str, int]:
    return {f"{i.place}: {i.name}": i.bytes for i in ledger(profile, plan).items}


def test_states_are_divided_over_all_chips_and_weights_are_not() -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=8192, hardware="gh200-quad-x8")
    fields: dict[str, Any] = {
        "seq_len": 8192, "retained_buckets": 8, "flow_blocks": (3, 9), "speculate": "on", "cast_down": "gpu",
    }  # fmt: skip
    one, eight = (by_name(profile, Plan(**fields, data_parallel=n)) for n in (1, 8))
    divided = {
        "gpu: retained master weights and moments", "gpu: retained gradients", "gpu: gradient ring",
        "pinned: held gradients", "pinned: upload copy of new weights", "pinned: home of flow blocks",
        "host: master weights and moments", "host: undo records",
    }  # fmt: skip
    assert divided <= set(one)
    for name in divided:
        assert eight[name] == pytest.approx(one[name] / 8, rel=1e-4), name
    new = {"gpu: gradients to reduce-scatter", "gpu: buffers of collectives"}
    assert set(eight) - set(one) == new
    assert eight["gpu: gradients to reduce-scatter"] == 8 * 2 * 2**24  # the head alone fills seven buckets at once
    for name in set(one) - divided:
        assert eight[name] == one[name], name


def test_a_shared_sequence_divides_activations_and_needs_buffers() -> None:
    fields: dict[str, Any] = {"seq_len": 65536, "activations": "full", "loss_chunks": 4}
    profile = estimate("paper-13b", micro_batch=1, seq_len=65536, hardware="gh200-quad-x8")
    one, eight = by_name(profile, Plan(**fields)), by_name(profile, Plan(**fields, sequence_parallel=8))
    kept = "gpu: layer inputs kept for recomputation"
    assert eight[kept] == pytest.approx(one[kept] / 8, rel=1e-6)
    assert eight["gpu: all-to-all buffers"] == EXCHANGE_COPIES * 3 * 4096 * 2 * 65536 // 8
    states = "host: master weights and moments"
    assert eight[states] == pytest.approx(one[states] / 8, rel=NEAR)


def test_the_engine_asks_for_one_chip(tiny: ModuleType) -> None:
    plan = tiny.plan(data_parallel=2)
    buckets = graph.buckets_of(tiny.profile(tiny.hardware()), plan.bucket_mb)
    state_items(buckets, plan, [], chips=2)
    with pytest.raises(NotSupported, match=r"for 2 Superchips \(data_parallel = 2, .*this version trains on one"):
        state_items(buckets, plan, [])
    check_one_chip(tiny.plan())


# -- the planner -------------------------------------------------------------------------------------------------------


def test_the_planner_takes_the_arrangement_and_chooses_the_rest() -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=8192, hardware="gh200-quad-x8")
    plan = make_plan(profile)
    assert (plan.data_parallel, plan.sequence_parallel, plan.chips) == (8, 1, 8)
    assert set(plan.reasons) == set(Plan.knobs())
    assert "8 chips, of which 1 shares a sequence" in plan.reasons["data_parallel"]
    shared = make_plan(profile, sequence_parallel=4)
    assert (shared.data_parallel, shared.tokens_per_step) == (2, 2 * 8192)
    assert "sequence_parallel" not in shared.reasons
    assert ledger(profile, shared).fits
    part = rescale(profile, sequence_parallel=4)
    assert make_plan(part).sequence_parallel == 4, "the profile's own"
    half = make_plan(profile, data_parallel=2, sequence_parallel=2)
    assert half.chips == 4
    with pytest.raises(InputError, match="are 16 chips, and gh200-quad-x8 has 8"):
        make_plan(profile, data_parallel=8, sequence_parallel=2)
    with pytest.raises(InputError, match=r"are 2 chips, and gh200 has 1.*--chips 8"):
        make_plan(retarget(profile, "gh200"), sequence_parallel=2)


def test_tokens_of_a_step_are_those_of_all_groups() -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=2048, hardware="gh200-quad-x4")
    plan = make_plan(profile, tokens=16 * 2048)
    assert plan.tokens_per_step == 16 * 2048
    assert plan.micro_batch * plan.accumulation == 4
    with pytest.raises(InputError, match=r"tokens = 12288 with data_parallel = 4. Expected a multiple of 4 x 2048"):
        make_plan(profile, tokens=6 * 2048)


def test_states_that_one_chip_has_no_room_for_fit_several() -> None:
    """A 3B model needs 14 bytes per parameter, 43 GB, beside activations: here a chip has 24 + 24 GB."""

    def small(name: str) -> Profile:
        hw = hardware.preset(name)
        hw = hw.replace(gpu=hw.gpu.replace(memory_gb=24), cpu=hw.cpu.replace(memory_gb=24))
        return estimate("paper-3b", micro_batch=1, seq_len=2048, hardware=hw)

    with pytest.raises(InputError, match="does not fit"):
        make_plan(small("gh200-quad"))
    four = small("gh200-quad-x4")
    assert ledger(four, make_plan(four)).fits


def test_more_chips_share_the_optimizer() -> None:
    """CPU Adam of a small batch binds one chip; with its states divided the step comes near the GPU's own time."""
    seconds = {}
    for name in ("gh200-quad", "gh200-quad-x2", "gh200-quad-x4"):
        profile = estimate("llama-7b", micro_batch=1, seq_len=2048, hardware=name)
        seconds[name] = simulator.step_seconds(profile, make_plan(profile, retained_buckets=0, activations="full"))
    assert seconds["gh200-quad"] > seconds["gh200-quad-x2"] > seconds["gh200-quad-x4"]


def test_a_search_keeps_the_arrangement_and_counts_the_tokens_of_all_groups() -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=2048, hardware="gh200-quad-x8")
    found = search(profile, tokens=8 * 2048, trials=30, sequence_parallel=2)
    assert found.best is not None
    assert {(t.plan.data_parallel, t.plan.sequence_parallel) for t in found.trials} == {(4, 2)}
    assert {t.plan.tokens_per_step for t in found.trials} == {8 * 2048}
    assert found.best.tokens_per_s == pytest.approx(simulate(profile, found.best.plan).tokens_per_s, rel=1e-9)
    assert found.best.mfu == pytest.approx(simulate(profile, found.best.plan).mfu, rel=1e-9)
    with pytest.raises(InputError, match="a multiple of 4 x seq_len = 2048"):
        search(profile, tokens=6 * 2048, sequence_parallel=2)


def test_the_published_results_are_those_of_this_model() -> None:
    """The plan of the results file, simulated again: a change of the model makes the file and the page out of date."""
    results = json.loads(RESULTS.read_text())
    assert results["status"] == "modelled"
    row = next(r for r in results["a_million_tokens"] if r["hardware"] == "gh200-quad-x8")
    plan = Plan.from_dict(row["plan"])
    profile = estimate("paper-13b", micro_batch=1, seq_len=2**20, hardware=row["hardware"], sequence_parallel=8)
    trace = simulate(profile, plan)
    assert trace.step_s == pytest.approx(row["step_s"], abs=0.05)
    assert trace.mfu == pytest.approx(row["mfu"]["causal"], abs=1e-4)
    assert trace.memory.fits
    assert plan.chips == 8
