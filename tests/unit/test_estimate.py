from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from superoffload import model
from superoffload.activation_costs import block_cost, block_seconds
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.model import ModelSpec
from superoffload.plan import Activations
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profiles_h200_2026-11-30"
SHAPES = {
    "1b_8x2048": ModelSpec(name="llama-1b", hidden=2048, layers=18, mlp=5632, heads=16, kv_heads=16, head_dim=128,
                           vocab=32000),
    "3b_4x2048": ModelSpec(name="llama-3.14b", hidden=3072, layers=26, mlp=8192, heads=24, kv_heads=24, head_dim=128,
                           vocab=32000),
}  # fmt: skip


def seconds(profile: Profile, recompute: bool, compiled: bool = False) -> float:
    policy: Activations = "full" if recompute else "none"
    return sum(
        sum(block_seconds(b, compiled=compiled)) + block_cost(b, policy, compiled=compiled).recompute_s
        for b in profile.blocks
    )


@pytest.mark.parametrize(
    ("name", "batch", "seq", "recompute", "measured"),
    [
        ("bench-3b", 4, 2048, True, 0.457),
        ("bench-3b", 16, 2048, True, 1.80),
        ("bench-3b", 4, 2048, False, 0.370),
        ("llama-3-8b", 1, 8192, True, 1.062),
    ],
)
def test_estimates_meet_the_h200_measurements(
    name: str, batch: int, seq: int, recompute: bool, measured: float
) -> None:
    profile = estimate(name, micro_batch=batch, seq_len=seq, hardware="h200-pcie5")
    assert seconds(profile, recompute) == pytest.approx(measured, rel=0.025)


@pytest.mark.parametrize("stem", SHAPES)
def test_each_time_of_a_block_is_what_was_measured_of_it(stem: str) -> None:
    """Forward, backward and recompute each for itself: what overlaps with what hangs on their shares."""
    measured = Profile.load(RESULTS / f"profile_{stem}.json")
    modelled = estimate(SHAPES[stem], micro_batch=measured.micro_batch, seq_len=measured.seq_len, hardware="h200-pcie5")
    times = ("forward_s", "backward_s", "full_recompute_s", "selective_recompute_s", "compiled_forward_s",
             "compiled_backward_s")  # fmt: skip
    compared = 0
    for kind in ("layer", "head"):
        for name in times:
            found = [getattr(b, name) for b in measured.blocks if b.kind == kind]
            if None in found:
                continue
            said = next(getattr(b, name) for b in modelled.blocks if b.kind == kind)
            assert said == pytest.approx(statistics.median(found), rel=0.05), (kind, name)
            compared += 1
    assert compared >= 6
    assert [b.working_bytes for b in modelled.blocks if b.kind == "layer"] == pytest.approx(
        [b.working_bytes for b in measured.blocks if b.kind == "layer"], rel=0.03
    )


def test_activations_meet_the_h200_peak_without_recompute() -> None:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")
    weights = 2 * profile.params
    held = sum(b.activation_bytes for b in profile.blocks) + profile.blocks[-1].working_bytes
    assert (weights + held) / 1e9 == pytest.approx(39, rel=0.03)


def test_selective_keeps_products_and_attention_and_repeats_the_rest() -> None:
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    layer = profile.blocks[1]
    # Per token: input, query, key and value, attention, its way out, gate and up; 32 float32 log-sum-exp.
    elements = 4096 + (4096 + 2 * 1024) + 4096 + 4096 + 2 * 14336
    assert layer.selective_bytes == 8192 * (2 * elements + 4 * 32)
    assert layer.selective_recompute_s is not None
    assert 0.1 * layer.forward_s < layer.selective_recompute_s < 0.3 * layer.forward_s
    narrow = estimate("smollm2-135m", micro_batch=1, seq_len=256, hardware="laptop", dtype="float32").blocks[1]
    assert narrow.selective_bytes is not None
    assert narrow.selective_bytes < narrow.activation_bytes


def test_the_profile_says_that_it_is_modelled_and_how() -> None:
    profile = estimate("llama-7b", micro_batch=2, seq_len=512, hardware="gh200")
    assert profile.source == "modelled"
    assert profile.params == model.spec("llama-7b").parameters
    assert profile.model_fingerprint == model.spec("llama-7b").fingerprint("bfloat16")
    assert "H200" in profile.context["method"]
    assert "96%" in profile.context["rate"]
    assert [b.kind for b in profile.blocks] == ["embedding", *["layer"] * 32, "head"]
    assert Profile.from_json(profile.to_json()) == profile


def test_a_tied_head_owns_no_second_weight() -> None:
    profile = estimate("smollm2-135m", micro_batch=1, seq_len=256, hardware="laptop", dtype="float32")
    assert profile.blocks[-1].params == 576
    assert profile.params == 134_515_008
    assert profile.blocks[-1].forward_flops == 2 * 576 * 49152 * 256


def test_float32_is_slower_and_larger_on_a_gpu() -> None:
    half, single = (
        estimate("llama-7b", micro_batch=1, seq_len=2048, hardware="gh200", dtype=d) for d in ("bfloat16", "float32")
    )
    assert seconds(single, False) > 5 * seconds(half, False)
    assert single.blocks[1].activation_bytes > half.blocks[1].activation_bytes
    assert single.model_fingerprint != half.model_fingerprint


@pytest.mark.parametrize(
    ("name", "batch", "seq", "measured_s", "peak_gb"),
    [("bench-3b", 4, 2048, 0.272, 31), ("llama-3-8b", 1, 8192, 0.727, 66)],
)
def test_compiled_layers_against_an_h200(name: str, batch: int, seq: int, measured_s: float, peak_gb: float) -> None:
    """Forward and backward alone with compiled layers and nothing recomputed."""
    profile = estimate(name, micro_batch=batch, seq_len=seq, hardware="h200-pcie5")
    estimated = sum(sum(block_seconds(b, compiled=True)) for b in profile.blocks)
    assert estimated == pytest.approx(measured_s, rel=0.02)
    # The peak is at the loss: weights, what is kept, logits.
    kept = sum(block_cost(b, "none", compiled=True).kept for b in profile.blocks)
    held = 2 * profile.params + kept + profile.blocks[-1].working_bytes
    assert held / 1e9 == pytest.approx(peak_gb, rel=0.015)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-14b", "gpt-oss-20b", "paper-5b"])
def test_a_compiled_layer_is_faster_and_keeps_no_more(name: str) -> None:
    for dtype in ("bfloat16", "float32"):
        layer = estimate(name, micro_batch=1, seq_len=1024, hardware="gh200", dtype=dtype).blocks[1]
        assert layer.compiled_forward_s is not None and layer.compiled_backward_s is not None
        assert 0.3 * layer.forward_s < layer.compiled_forward_s < layer.forward_s
        assert 0.3 * layer.backward_s < layer.compiled_backward_s < layer.backward_s
        assert layer.compiled_bytes is not None
        assert layer.input_bytes < layer.compiled_bytes <= layer.activation_bytes


def test_rescaling_an_estimate_is_estimating_anew() -> None:
    small = estimate("llama-7b", micro_batch=1, seq_len=512, hardware="gh200")
    large = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    assert rescale(small, micro_batch=4, seq_len=2048) == large
    assert rescale(small) is small


def test_rescaling_a_measurement_is_proportional_and_says_so() -> None:
    measured = estimate("bench-3b", micro_batch=1, seq_len=512, hardware="gh200").replace(source="measured", context={})
    double = rescale(measured, micro_batch=2)
    assert seconds(double, True) == pytest.approx(2 * seconds(measured, True))
    assert double.blocks[1].activation_bytes == 2 * measured.blocks[1].activation_bytes
    assert double.blocks[1].selective_bytes == 2 * (measured.blocks[1].selective_bytes or 0)
    assert double.blocks[1].compiled_bytes == 2 * (measured.blocks[1].compiled_bytes or 0)
    for key in ("compiled_forward_s", "compiled_backward_s"):
        assert getattr(double.blocks[1], key) == 2 * getattr(measured.blocks[1], key)
    assert "1 x 512" in double.context["rescaled"]
    bare = measured.replace(blocks=tuple(b.replace(compiled_bytes=None) for b in measured.blocks))
    assert rescale(bare, micro_batch=2).blocks[1].compiled_bytes is None


def test_retargeting() -> None:
    here = estimate("bench-3b", micro_batch=1, seq_len=512, hardware="h200-pcie5")
    assert retarget(here, "gb200") == estimate("bench-3b", micro_batch=1, seq_len=512, hardware="gb200")
    measured = here.replace(source="measured", context={})
    there = retarget(measured, "gb200")
    assert there.source == "modelled"
    assert there.hardware.name == "gb200"
    ratio = 773 / there.hardware.gpu.matmul_bf16_tflops
    assert seconds(there, False) == pytest.approx(seconds(here, False) * ratio)
    for old, new in zip(here.blocks[1:-1], there.blocks[1:-1], strict=True):
        assert block_seconds(new, compiled=True) == pytest.approx(
            [s * ratio for s in block_seconds(old, compiled=True)]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": 0}, "micro_batch = 0"),
        ({"seq_len": -5}, "seq_len = -5"),
        ({"dtype": "int8"}, 'unknown dtype "int8"'),
        ({"hardware": "gh-200"}, 'did you mean "gh200"'),
        ({"model": "llama"}, "unknown model preset"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    values = {"model": "llama-7b", "micro_batch": 1, "seq_len": 128, "hardware": "gh200", **change}
    with pytest.raises(InputError, match=message):
        estimate(values.pop("model"), **values)  # type: ignore[arg-type]
