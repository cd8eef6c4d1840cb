from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from superoffload import graph, planner, planner_room, simulator
from superoffload.activation_costs import peaks
from superoffload.errors import DoesNotFit, InputError
from superoffload.estimating import estimate
from superoffload.fitting import nearest_fit, spread_layers
from superoffload.hardware import preset
from superoffload.loss_costs import MIN_CHUNK_TOKENS, enough_chunks, in_chunks
from superoffload.memory import HOST_RESERVE_BYTES, Ledger, ledger
from superoffload.model import ModelSpec
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.planner_pace import Pace
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile
from superoffload.units import GB, format_bytes

CHUNK_FIELDS = ("logits", "chunked_activation_bytes", "chunked_working_bytes")


@pytest.fixture(scope="module")
def bench() -> Profile:
    return estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")


def test_every_chosen_knob_has_a_reason_and_no_given_one(bench: Profile) -> None:
    plan = make_plan(bench)
    assert set(plan.reasons) == set(Plan.knobs())
    given = make_plan(bench, retained_buckets=10, cast_up="gpu", adam_threads=8)
    assert set(given.reasons) == set(Plan.knobs()) - {"retained_buckets", "cast_up", "adam_threads"}
    assert (given.retained_buckets, given.cast_up, given.adam_threads) == (10, "gpu", 8)
    for name in ("bucket_mb", "adam_threads", "cast_down", "cast_up", "retained_buckets", "activations"):
        assert re.search(r"\d", plan.reasons[name]), name


def test_a_split_master_by_hand_fixes_who_casts(bench: Profile) -> None:
    plan = make_plan(bench, master="split")
    assert (plan.master, plan.cast_up) == ("split", "fused")
    assert "split master" in plan.reasons["cast_up"]
    assert "master" not in plan.reasons
    with pytest.raises(InputError, match='master = "split" with cast_up = "gpu"'):
        make_plan(bench, master="split", cast_up="gpu")


def test_all_given_is_kept_as_given(bench: Profile) -> None:
    values = {
        "bucket_mb": 128.0, "retained_buckets": 3, "flow_blocks": (2, 5), "prefetch_blocks": 2, "cast_down": "cpu",
        "cast_up": "gpu", "speculate": "on", "adam_threads": 5, "activations": "full", "micro_batch": 2,
        "seq_len": 1024, "accumulation": 2, "accumulate_on": "cpu", "undo": "snapshot", "master": "plain",
        "activations_by_block": {4: "none"}, "undo_buckets": 4, "loss_chunks": 2, "compile_blocks": True,
        "data_parallel": 1, "sequence_parallel": 1,
    }  # fmt: skip
    assert make_plan(bench, **values) == Plan.model_validate(values)


def test_the_chosen_plan_beats_the_plain_ones(bench: Profile) -> None:
    plan = make_plan(bench)
    best = simulator.step_seconds(bench, plan)
    for change in ({"retained_buckets": 0}, {"activations": "full"}, {"cast_down": "cpu"}, {"adam_threads": 2}):
        assert best < simulator.step_seconds(bench, plan.model_copy(update=change)), change
    # The limit is forward and backward alone, 0.370 s measured; retained Adam on the GPU comes on top.
    assert 0.36 < best < 0.41


def test_retained_are_the_fewest_that_give_the_shortest_step(bench: Profile) -> None:
    plan = make_plan(bench, activations="none")
    total = len(graph.buckets_of(bench, plan.bucket_mb))
    tried = {
        n: simulator.step_seconds(bench, plan.model_copy(update={"retained_buckets": n})) for n in range(0, total, 6)
    }
    best = min(tried.values())
    assert simulator.step_seconds(bench, plan) <= best * 1.02
    fewest = min(n for n, s in tried.items() if s <= best * 1.003)
    assert plan.retained_buckets <= fewest + 12


def test_a_busy_gpu_needs_no_retained_buckets(tiny: ModuleType) -> None:
    # Adam of the whole model takes less than the next forward's first block.
    hw = tiny.hardware(down=1000.0, up=1000.0, adam=1e6, dram=1e9)
    plan = make_plan(tiny.profile(hw, layers=4, params=8 * tiny.BUCKET_PARAMS), bucket_mb=tiny.BUCKET_MB)
    assert plan.retained_buckets == 0


def test_gpu_memory_bounds_retained_and_forces_recompute() -> None:
    profile = estimate("qwen3-14b", micro_batch=4, seq_len=4096, hardware="gh200")
    cpu = profile.hardware.cpu.replace(memory_gb=400)
    profile = profile.replace(hardware=profile.hardware.replace(cpu=cpu))
    plan = make_plan(profile, loss_chunks=1)
    assert plan.activations in ("full", "offload_inputs")
    assert "does not fit the memory: none, selective" in plan.reasons["activations"]
    assert ledger(profile, plan).fits
    plain = make_plan(profile, activations="full", flow=0)
    assert simulator.step_seconds(profile, plan) < 0.95 * simulator.step_seconds(profile, plain), "and flow makes room"


def test_a_wide_link_and_a_large_host_could_take_the_activations() -> None:
    """By hand only: no machine has confirmed the model of it."""
    profile = estimate("qwen3-14b", micro_batch=4, seq_len=4096, hardware="gh200")
    plan = make_plan(profile, loss_chunks=1)
    assert plan.activations != "offload_saved"
    moved = make_plan(profile, activations="offload_saved", loss_chunks=1)
    assert simulator.step_seconds(profile, moved) < 0.9 * simulator.step_seconds(profile, plan)


def test_selective_wins_where_everything_does_not_leave_room() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    plan = make_plan(profile, loss_chunks=1)
    assert plan.activations == "selective"
    divided = make_plan(profile)
    assert divided.loss_chunks > 1
    assert divided.activations == "none", "the logits' room serves the layers"
    assert "full and offload_inputs: the GPU alone would take as long" in plan.reasons["activations"]
    unknown = profile.replace(
        context={}, blocks=tuple(b.model_copy(update={"selective_bytes": None}) for b in profile.blocks)
    )
    assert make_plan(unknown).activations == "none"
    with pytest.raises(InputError, match="does not say what layer 0 keeps"):
        make_plan(unknown, activations="selective")


def test_compiling_is_for_a_person_to_choose_and_its_gain_is_told() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    plan = make_plan(profile)
    assert plan.compile_blocks is False
    why = plan.reasons["compile_blocks"]
    assert why.startswith("off: compiling changes the bits of the results")
    told = re.search(
        r"work in a step is modelled at (\d+) ms with it(?: and activations = none)?, (\d+) ms without$", why
    )
    assert told, why
    compiled = make_plan(profile, compile_blocks=True)
    assert "compile_blocks" not in compiled.reasons
    assert compiled.activations == "none", "selective is no choice"
    assert "selective" not in compiled.reasons["activations"]
    kept = sum(b.compiled_bytes or b.activation_bytes for b in profile.blocks)
    assert format_bytes(kept) in compiled.reasons["activations"]
    pace = Pace(profile)
    assert float(told[1]) / 1e3 == pytest.approx(pace.gpu_seconds(compiled), rel=0.05)
    assert float(told[2]) / 1e3 == pytest.approx(pace.gpu_seconds(plan), rel=0.01)
    assert simulator.step_seconds(profile, compiled) < 0.95 * simulator.step_seconds(profile, plan)
    with pytest.raises(InputError, match=r'compile_blocks = True with activations = selective.*"none"'):
        make_plan(profile, compile_blocks=True, activations="selective")
    fixed = make_plan(profile, activations="selective")
    assert "cannot be used" in fixed.reasons["compile_blocks"]


def test_a_profile_that_does_not_know_compiled_layers() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    unknown = profile.replace(
        context={}, blocks=tuple(b.model_copy(update={"compiled_forward_s": None}) for b in profile.blocks)
    )
    assert "does not say what it would gain" in make_plan(unknown).reasons["compile_blocks"]
    with pytest.raises(InputError, match="does not say what layer 0 costs under compile_blocks"):
        make_plan(unknown, compile_blocks=True)


def test_the_nearest_plan_of_compiled_layers_is_not_selective() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="gh200")
    given = {"compile_blocks": True, "activations": "none", "flow_blocks": (), "retained_buckets": 0, "loss_chunks": 8}
    asked = make_plan(profile, **given)
    gpu = profile.hardware.gpu.replace(memory_gb=ledger(profile, asked).total("gpu") / GB - 1)
    nearest = nearest_fit(profile.replace(hardware=profile.hardware.replace(gpu=gpu)), asked)
    assert nearest is not None
    assert nearest.compile_blocks and nearest.activations == "full"


def test_the_inputs_of_a_long_sequence_go_to_the_host_before_a_block_flows() -> None:
    profile = estimate("qwen3-14b", micro_batch=1, seq_len=32768, hardware="gh200")
    asked = make_plan(profile, activations="full", flow_blocks=(), retained_buckets=0, check=False)
    inputs = sum(b.input_bytes for b in profile.blocks if b.kind == "layer")
    gpu = profile.hardware.gpu.replace(memory_gb=(ledger(profile, asked).total("gpu") - inputs / 2) / GB)
    smaller = profile.replace(hardware=profile.hardware.replace(gpu=gpu))
    assert not ledger(smaller, asked).fits
    nearest = nearest_fit(smaller, asked)
    assert nearest is not None
    assert (nearest.activations, nearest.flow_blocks) == ("offload_inputs", ())


def test_flow_is_used_only_where_memory_demands_it() -> None:
    profile = estimate("paper-25b", micro_batch=1, seq_len=1024, hardware="gh200")
    assert make_plan(profile).flow_blocks == ()
    gpu = profile.hardware.gpu.replace(memory_gb=48)
    small = profile.replace(hardware=profile.hardware.replace(gpu=gpu), context={})
    plan = make_plan(small)
    assert 0 < len(plan.flow_blocks) < 30
    assert "GPU lacks" in plan.reasons["flow_blocks"]
    assert ledger(small, plan).fits
    fewer = spread_layers(small, len(plan.flow_blocks) - 1)
    assert not ledger(small, plan.model_copy(update={"flow_blocks": fewer, "retained_buckets": 0})).fits


def test_flow_and_buckets_aliases(bench: Profile) -> None:
    plan = make_plan(bench, flow=3, buckets=10)
    assert plan.flow_blocks == (5, 14, 22)
    assert len(graph.buckets_of(bench, plan.bucket_mb)) in (10, 11)
    assert make_plan(bench, flow=(1, 2), retained_buckets=0).flow_blocks == (1, 2)
    assert make_plan(bench, flow=0).flow_blocks == ()
    with pytest.raises(InputError, match="0 to 26"):
        make_plan(bench, flow=27)
    with pytest.raises(InputError, match="both given"):
        make_plan(bench, flow=1, flow_blocks=(1,))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"retained_bucket": 3}, 'unknown knob "retained_bucket"; did you mean "retained_buckets"'),
        ({"reasons": {}}, "unknown knob"),
        ({"bucket_mb": -1}, "bucket_mb = -1"),
        ({"cast_up": "npu"}, "cast_up = 'npu'"),
        ({"retained_buckets": 10**6}, "Expected at most 188"),
        ({"buckets": 0}, "buckets = 0"),
        ({"flow_blocks": (99,)}, "flow_blocks names block 99"),
    ],
)
def test_bad_knobs_are_refused(bench: Profile, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_plan(bench, **knobs)


@pytest.mark.parametrize("speculate", ["on", "auto"])
def test_where_snapshots_do_not_fit_records_are_nearest(tiny: ModuleType, speculate: str) -> None:
    n = tiny.BUCKET_PARAMS
    asked = tiny.plan(speculate=speculate, undo="snapshot", activations="full")
    host = (HOST_RESERVE_BYTES + 8 * n * (16 + 4)) / GB  # state and transit 16, a record 3.6, a snapshot 12
    gpu = ledger(tiny.profile(tiny.hardware(), layers=8), asked).total("gpu") / GB  # no room to retain more buckets
    profile = tiny.profile(tiny.hardware(host_gb=host, gpu_gb=gpu), layers=8)
    assert not ledger(profile, asked).fits
    assert nearest_fit(profile, asked) == asked.model_copy(update={"undo": "record"})


@pytest.mark.parametrize(("room", "nearest"), [(1.0, {"undo_buckets": 2}), (0.4, {"speculate": "off"})])
@pytest.mark.parametrize("speculate", ["on", "auto"])
def test_where_records_do_not_fit_fewer_or_none_are_nearest(
    tiny: ModuleType, speculate: str, room: float, nearest: dict[str, object]
) -> None:
    """`auto` allocates records too, so giving them up is a way out for it as well."""
    asked = tiny.plan(speculate=speculate, activations="full")
    host = (HOST_RESERVE_BYTES + 8 * tiny.BUCKET_PARAMS * (16 + room)) / GB
    gpu = ledger(tiny.profile(tiny.hardware(), layers=8), asked).total("gpu") / GB
    profile = tiny.profile(tiny.hardware(host_gb=host, gpu_gb=gpu), layers=8)
    assert not ledger(profile, asked).fits
    assert nearest_fit(profile, asked) == asked.model_copy(update=nearest)


def test_a_plan_that_does_not_fit_names_the_largest_item_and_the_nearest_that_fits() -> None:
    profile = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(profile, retained_buckets=402, activations="none")
    error = caught.value
    assert "largest item is retained master weights and moments with 80.8" in str(error)
    nearest = error.nearest
    assert isinstance(nearest, Plan)
    assert ledger(profile, nearest).fits
    assert nearest.activations == "none"
    assert 100 < nearest.retained_buckets < 130
    assert f"retained_buckets={nearest.retained_buckets} instead of 402" in str(error)
    assert error.ledger is not None
    assert make_plan(profile, retained_buckets=402, activations="none", check=False).retained_buckets == 402


def test_a_smaller_micro_batch_is_proposed_where_nothing_else_helps() -> None:
    profile = estimate("llama-7b", micro_batch=64, seq_len=4096, hardware="h100-pcie5")
    with pytest.raises(DoesNotFit, match="micro_batch=16 instead of 64"):
        make_plan(profile)


def test_a_hopeless_model_is_told_so() -> None:
    with pytest.raises(DoesNotFit, match=r"host memory: needs .*No plan of this model fits"):
        make_plan(estimate("llama-70b", micro_batch=1, seq_len=512, hardware="gh200"))


def test_another_machine_and_another_batch(bench: Profile) -> None:
    assert make_plan(bench, "gh200").adam_threads == 64
    plan = make_plan(bench, micro_batch=1, seq_len=512)
    assert (plan.micro_batch, plan.seq_len) == (1, 512)
    assert simulator.simulate(bench, plan).tokens_per_step == 512


def test_a_laptop_plan_fits_and_retains_nothing() -> None:
    profile = estimate("smollm2-135m", micro_batch=1, seq_len=256, hardware="laptop", dtype="float32")
    plan = make_plan(profile)
    assert plan.retained_buckets == 0
    assert (plan.cast_down, plan.cast_up) == ("fused", "fused")
    assert len(graph.buckets_of(profile, plan.bucket_mb)) >= planner.MIN_BUCKETS


def large(layers: int, *, gpu_gb: float, host_gb: float, **shape: int) -> Profile:
    """A Llama of hidden size 5,120 on an H200 with this much memory on either side."""
    hw = preset("h200-pcie5")
    hw = hw.replace(gpu=hw.gpu.replace(memory_gb=gpu_gb), cpu=hw.cpu.replace(memory_gb=host_gb))
    fields = {"hidden": 5120, "mlp": 13824, "heads": 40, "kv_heads": 40, "head_dim": 128, "vocab": 32000, **shape}
    return estimate(ModelSpec(name="large", layers=layers, **fields), micro_batch=1, seq_len=4096, hardware=hw)


def test_what_gives_way_as_memory_runs_out() -> None:
    """First the plain master, then speculation's records bucket by bucket; weights flow where their state lies on the
    host."""
    roomy = make_plan(large(36, gpu_gb=146, host_gb=260))
    assert (roomy.speculate, roomy.master, roomy.flow_blocks) == ("auto", "plain", ())
    profile = large(50, gpu_gb=149, host_gb=131)
    few = make_plan(profile)
    assert (few.speculate, few.master) == ("auto", "split")
    assert "all that may lie there" in few.reasons["master"] and "on the CPU: a step of" in few.reasons["undo_buckets"]
    assert few.undo_buckets is not None and ledger(profile, few).fits
    profile = large(54, gpu_gb=148.5, host_gb=125.12)
    split = make_plan(profile, loss_chunks=1)
    assert (split.speculate, split.master, split.cast_up) == ("off", "split", "fused")
    assert "no plan has memory left" in split.reasons["speculate"] and "nothing" in split.reasons["undo_buckets"]
    assert "no plan with a plain one fits" in split.reasons["master"]
    assert ledger(profile, split).fits
    buckets = graph.buckets_of(profile, split.bucket_mb, split.flow_blocks)
    on_host = {b for bucket in buckets[: len(buckets) - split.retained_buckets] for b in bucket.blocks}
    assert split.flow_blocks and set(split.flow_blocks) <= on_host
    kept = make_plan(profile, master="plain", check=False)
    assert not ledger(profile, kept).fits
    with pytest.raises(DoesNotFit, match="large does not fit"):
        make_plan(large(70, gpu_gb=148.5, host_gb=133))


def test_speculation_by_hand_does_not_keep_the_master_whole() -> None:
    """With few undo records a split one fits: what is given says that there are some, not how many."""
    hw = preset("h200-pcie5")
    hw = hw.replace(gpu=hw.gpu.replace(memory_gb=24), cpu=hw.cpu.replace(memory_gb=131))
    profile = estimate("llama-3-8b", micro_batch=2, seq_len=8192, hardware=hw)
    by_hand, free = (make_plan(profile, accumulation=8, **knobs) for knobs in ({"speculate": "on"}, {}))
    assert by_hand.speculate == "on" and by_hand.undo_buckets and by_hand.master == free.master == "split"
    assert simulator.step_seconds(profile, by_hand) == pytest.approx(simulator.step_seconds(profile, free), rel=0.01)


def test_undo_memory_goes_to_the_buckets_that_adam_reaches() -> None:
    """What backward gives it no time for waits for the verdict anyway."""
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    plan = make_plan(profile, retained_buckets=0, accumulation=4)
    total = len(graph.buckets_of(profile, plan.bucket_mb))
    assert plan.speculate == "auto"
    assert plan.undo_buckets is not None and 0 < plan.undo_buckets < total
    every = plan.model_copy(update={"undo_buckets": None})
    assert simulator.step_seconds(profile, plan) <= simulator.step_seconds(profile, every) * planner.GOOD_ENOUGH**2
    assert f"{plan.undo_buckets} of {total}" in plan.reasons["undo_buckets"]
    saved = ledger(profile, every).total("host") - ledger(profile, plan).total("host")
    assert saved > 3.5 * 16.7e6 * (total - plan.undo_buckets - 1)
    assert make_plan(profile, speculate="off").undo_buckets is None


def test_some_layers_keep_more_where_not_all_can() -> None:
    """What memory is left goes to layers under a faster policy."""
    hw = preset("h200-pcie5")
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware=hw.replace(gpu=hw.gpu.replace(memory_gb=36)))
    plan = make_plan(profile, accumulation=8, loss_chunks=1)
    assert plan.activations_by_block, plan.reasons
    assert len(set(plan.activations_by_block.values()) | {plan.activations}) == 2
    assert f"{len(plan.activations_by_block)} of 32 layers" in plan.reasons["activations_by_block"]
    assert ledger(profile, plan).fits
    alike = make_plan(profile, accumulation=8, loss_chunks=1, activations=plan.activations)
    assert simulator.step_seconds(profile, plan) < simulator.step_seconds(profile, alike)


def test_tokens_choose_micro_batch_and_accumulation(bench: Profile) -> None:
    step = 16 * bench.seq_len
    plan = make_plan(bench, tokens=step)
    assert plan.tokens_per_step == step and plan.micro_batch > 1
    assert "a step of" in plan.reasons["micro_batch"] and f"{step:,} tokens" in plan.reasons["accumulation"]
    seconds = simulator.step_seconds(rescale(bench, micro_batch=plan.micro_batch), plan)
    for batch in (1, 2, 4, 8):
        other = make_plan(bench, tokens=step, micro_batch=batch)
        assert (other.micro_batch, other.accumulation) == (batch, 16 // batch)
        assert seconds <= 1.004 * simulator.step_seconds(rescale(bench, micro_batch=batch), other)
    for wrong, words in (
        ({"tokens": step + 1}, "a multiple of the sequence length"),
        ({"tokens": step, "accumulation": 2}, "both given"),
        ({"tokens": step, "micro_batch": 3}, "a multiple of 3 x"),
        ({"tokens": step, "micro_batch": "2"}, "a whole number"),
        ({"tokens": step, "seq_len": "x"}, "a whole number"),
        ({"flow": 3.5}, "how many layers, or which"),
        ({"flow": True}, "how many layers, or which"),
        ({"buckets": True}, "a whole number"),
        ({"flow_blocks": (1, 1)}, "block 1 is named twice"),
    ):
        with pytest.raises(InputError, match=words):
            make_plan(bench, **wrong)


@pytest.mark.parametrize("activations", ["full", "offload_inputs"])
def test_given_activations_do_not_keep_gradients_where_they_do_not_fit(activations: str) -> None:
    hw = preset("h200-pcie5")
    hw = hw.replace(gpu=hw.gpu.replace(memory_gb=18), cpu=hw.cpu.replace(memory_gb=160))
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=4096, hardware=hw)
    plan = make_plan(profile, accumulation=8, activations=activations)
    assert plan.accumulate_on == "cpu" and ledger(profile, plan).fits
    nearest = nearest_fit(profile, plan.model_copy(update={"accumulate_on": "gpu"}))
    assert nearest is not None and (nearest.accumulation, nearest.accumulate_on) == (8, "cpu")


def test_layers_that_shall_be_alike_stay_alike() -> None:
    hw = preset("h200-pcie5")
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware=hw.replace(gpu=hw.gpu.replace(memory_gb=36)))
    plan = make_plan(profile, accumulation=8, loss_chunks=1, activations_by_block={})
    assert plan.activations_by_block == {} and "activations_by_block" not in plan.reasons


def test_what_fits_nowhere_has_its_reasons_too() -> None:
    profile = large(70, gpu_gb=80, host_gb=133)
    plan = make_plan(profile, tokens=8 * 4096, check=False)
    assert not ledger(profile, plan).fits
    assert set(plan.reasons) == set(Plan.knobs())


def test_gradients_wait_on_the_host_where_the_gpu_has_no_room_for_them() -> None:
    profile = large(40, gpu_gb=24, host_gb=400)
    plan = make_plan(profile, accumulation=4)
    assert plan.accumulate_on == "cpu"
    assert "without which no plan with these activations fits" in plan.reasons["accumulate_on"]
    assert plan.flow_blocks
    assert ledger(profile, plan).fits
    assert make_plan(large(16, gpu_gb=146, host_gb=400), accumulation=4).accumulate_on == "gpu"


def test_the_loss_is_divided_where_its_logits_cost_time_elsewhere() -> None:
    long = estimate("llama-3-8b", micro_batch=1, seq_len=32768, hardware="h200-pcie5")
    plan = make_plan(long)
    assert plan.loss_chunks == enough_chunks(long, plan.model_copy(update={"activations": "full"})) > 1
    assert re.search(r"GB for logits and loss in passing instead of 54.\d+ GB; a step of", plan.reasons["loss_chunks"])
    with_one = make_plan(long, loss_chunks=1)
    assert "loss_chunks" not in with_one.reasons
    assert simulator.step_seconds(long, plan) < 0.95 * simulator.step_seconds(long, with_one)


def test_the_models_own_loss_where_the_memory_does_not_ask(bench: Profile) -> None:
    roomy = make_plan(bench)
    assert roomy.loss_chunks == 1
    assert "fit the GPU's memory beside everything" in roomy.reasons["loss_chunks"]
    short = make_plan(estimate("bench-3b", micro_batch=1, seq_len=512, hardware="h200-pcie5"))
    assert short.loss_chunks == 1
    assert "too few tokens" in short.reasons["loss_chunks"]
    same = make_plan(estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="gh200"))
    assert same.loss_chunks == 1
    assert "would not be shorter" in same.reasons["loss_chunks"]


def test_chunks_are_enough_once_a_layer_takes_more_than_the_head() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    plan = Plan(activations="full", micro_batch=1, seq_len=8192)
    chunks = enough_chunks(profile, plan)

    def head_decides(n: int) -> bool:
        *others, head = peaks([in_chunks(b, n) for b in profile.blocks], plan)
        return head > max(others)

    assert [head_decides(n) for n in (chunks // 2, chunks)] == [True, False]
    without = profile.replace(blocks=tuple(b.model_copy(update=dict.fromkeys(CHUNK_FIELDS)) for b in profile.blocks))
    assert enough_chunks(without, plan) == 1
    tokens = profile.tokens // enough_chunks(profile, plan.model_copy(update={"activations": "none"}))
    assert tokens == MIN_CHUNK_TOKENS


def test_chunks_are_refused_for_a_model_that_is_not_known_to_have_them(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware())
    assert "no other loss" in make_plan(profile).reasons["loss_chunks"]
    with pytest.raises(InputError, match=r"loss_chunks = 2.*superoffload\.chunked_cross_entropy"):
        make_plan(profile, loss_chunks=2)


def test_what_fits_only_with_a_divided_loss_is_found() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=16384, hardware="h200-pcie5")
    gpu = profile.hardware.gpu.model_copy(update={"memory_gb": 16.0})
    cpu = profile.hardware.cpu.model_copy(update={"memory_gb": 400.0})
    small = retarget(profile, profile.hardware.replace(name="small", gpu=gpu, cpu=cpu))
    plan = make_plan(small)
    assert plan.loss_chunks > 1
    assert "1 does not fit" in plan.reasons["loss_chunks"]
    with pytest.raises(DoesNotFit):
        make_plan(small, loss_chunks=1)
    nearest = nearest_fit(small, plan.model_copy(update={"loss_chunks": 1}))
    assert nearest is not None
    assert nearest.loss_chunks > 1


@pytest.mark.parametrize("undo_buckets", [None, 250])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 1.0])
def test_the_fewest_retained_buckets_that_relieve_the_host_are_found_quickly(
    share: float, undo_buckets: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only some buckets have undo memory, so that not each retained one saves as much."""
    profile = estimate("paper-8b", micro_batch=1, seq_len=512, hardware="gh200")
    plan = Plan(micro_batch=1, seq_len=512, speculate="on", undo_buckets=undo_buckets)
    total = len(graph.buckets_of(profile, plan.bucket_mb))

    def host(n: int) -> int:
        return ledger(profile, plan.model_copy(update={"retained_buckets": n})).total("host")

    most, least = host(0), host(total)
    capacity = (least + share * (most - least)) / GB
    cpu = profile.hardware.cpu.replace(memory_gb=capacity)
    small = profile.replace(hardware=profile.hardware.replace(cpu=cpu), context={})
    expected = next(n for n in range(total + 1) if host(n) <= round(small.hardware.cpu.memory_gb * GB))
    asked = 0

    def counted(*given: Any) -> Ledger:
        nonlocal asked
        asked += 1
        return ledger(*given)

    monkeypatch.setattr(planner_room, "ledger", counted)
    assert planner_room.Room(small, ()).relieving_host(plan).retained_buckets == expected
    assert asked < 16, "walks from one number to the next"


def test_speculation_is_not_given_up_where_only_offloaded_inputs_fit() -> None:
    """Inputs of layers fill the GPU there, and the host has room for them and for undo records."""
    profile = estimate("paper-13b", micro_batch=1, seq_len=196_608, hardware="gh200")
    chosen = make_plan(profile)
    assert chosen.activations == "offload_inputs"
    assert "no plan has memory" not in chosen.reasons["speculate"]
    assert ledger(profile, make_plan(profile, speculate="on")).fits
