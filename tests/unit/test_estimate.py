from __future__ import annotations

import pytest

from superoffload import model
from superoffload.errors import InputError
from superoffload.profiler import Profile, estimate, rescale, retarget


def seconds(profile: Profile, recompute: bool) -> float:
    return sum(b.forward_s * (2 if recompute and b.kind == "layer" else 1) + b.backward_s for b in profile.blocks)


@pytest.mark.parametrize(
    ("name", "batch", "seq", "recompute", "measured"),
    [
        ("bench-3b", 4, 2048, True, 0.466),
        ("bench-3b", 16, 2048, True, 1.784),
        ("bench-3b", 4, 2048, False, 0.370),
        ("llama-3-8b", 1, 8192, True, 1.062),
    ],
)
def test_estimates_meet_the_h200_measurements(
    name: str, batch: int, seq: int, recompute: bool, measured: float
) -> None:
    profile = estimate(name, micro_batch=batch, seq_len=seq, hardware="h200-pcie5")
    assert seconds(profile, recompute) == pytest.approx(measured, rel=0.025)


def test_one_forward_of_the_layers_meets_the_difference_between_recompute_and_none() -> None:
    profile = estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="h200-pcie5")
    forward = sum(b.forward_s for b in profile.blocks if b.kind == "layer")
    assert forward == pytest.approx(0.466 - 0.370, rel=0.05)


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
    assert "95%" in profile.context["rate"]
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
    assert "1 x 512" in double.context["rescaled"]


def test_retargeting() -> None:
    here = estimate("bench-3b", micro_batch=1, seq_len=512, hardware="h200-pcie5")
    assert retarget(here, "gb200") == estimate("bench-3b", micro_batch=1, seq_len=512, hardware="gb200")
    measured = here.replace(source="measured", context={})
    there = retarget(measured, "gb200")
    assert there.source == "modelled"
    assert there.hardware.name == "gb200"
    assert seconds(there, False) == pytest.approx(seconds(here, False) * 773 / there.hardware.gpu.matmul_bf16_tflops)


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
