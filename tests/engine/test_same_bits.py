"""I2 on the CPU: bucket size, retained count, casts, threads, delays and accumulation never change a bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from superoffload.engine import OffloadAdamW
from tests.engine.common import Autocast, batches, checkpointed, digest, llama, run_plan, train

DATA = batches(4)
_reference: dict[torch.dtype, tuple[str, list[float]]] = {}


def reference(dtype: torch.dtype) -> tuple[str, list[float]]:
    if dtype not in _reference:
        _reference[dtype] = run_plan(dtype, DATA)
        assert run_plan(dtype, DATA) == _reference[dtype], "control: the model itself must repeat"
    return _reference[dtype]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    bucket_mb=st.sampled_from([0.04, 0.07, 0.3, 64]),
    retained=st.floats(0, 1),
    down=st.sampled_from(["gpu", "cpu", "fused"]),
    up=st.sampled_from(["gpu", "cpu", "fused"]),
    threads=st.integers(1, 3),
    delay_us=st.sampled_from([0, 300, 3000]),
)
def test_any_plan(dtype, bucket_mb, retained, down, up, threads, delay_us):
    with OffloadAdamW(llama(dtype), bucket_mb=bucket_mb) as probe:
        count = len(probe.engine.arenas.buckets)
    got = run_plan(
        dtype, DATA, bucket_mb=bucket_mb, retained_buckets=round(retained * count), cast_down=down, cast_up=up,
        adam_threads=threads, delay_us=delay_us,
    )  # fmt: skip
    assert got == reference(dtype)


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("bucket_mb", [0.05, 64])
def test_accumulation(bucket_mb, hint):
    expected = run_plan(torch.bfloat16, DATA, accumulation=2)
    got = run_plan(
        torch.bfloat16, DATA, accumulation=2, hint=hint, bucket_mb=bucket_mb, retained_buckets=1, delay_us=500
    )
    assert got == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    def model(dtype, device):
        return checkpointed(llama(dtype, device=device), reentrant)

    expected = run_plan(torch.bfloat16, DATA, model=model)
    assert expected[1] == reference(torch.bfloat16)[1], "recomputing changes no loss on a CPU"
    assert run_plan(torch.bfloat16, DATA, model=model, bucket_mb=0.05, retained_buckets=4, delay_us=1000) == expected


def test_mixed_dtypes_have_buckets_of_their_own():
    def model(dtype, device):
        m = llama(torch.bfloat16, device=device)
        for name, p in m.named_parameters():
            if "norm" in name:
                p.data = p.data.float()
        return m

    def wrapped(dtype, device):
        return Autocast(model(dtype, device))

    with OffloadAdamW(wrapped(None, "cpu"), bucket_mb=0.05) as opt:
        assert {b.layout.dtype for b in opt.engine.arenas.buckets} == {"bfloat16", "float32"}
    expected = run_plan(torch.bfloat16, DATA, model=wrapped)
    assert (
        run_plan(torch.bfloat16, DATA, model=wrapped, bucket_mb=0.05, retained_buckets=5, cast_down="gpu") == expected
    )


def test_a_checkpoint_resumes_under_another_plan(tmp_path):
    straight, _ = run_plan(torch.bfloat16, DATA)
    for how in ("file", "state_dict"):
        model = llama(torch.bfloat16)
        with OffloadAdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.05) as opt:
            train(model, opt, DATA[:2])
            opt.save(tmp_path / "opt.safetensors")
            state = opt.state_dict()
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            state = {**state, "state": {k: {n: x.clone() for n, x in s.items()} for k, s in state["state"].items()}}
        other = llama(torch.bfloat16, seed=9)
        with OffloadAdamW(other, lr=1.0, max_grad_norm=1.0, bucket_mb=0.1, retained_buckets=3, cast_up="gpu") as opt:
            if how == "file":
                opt.load(tmp_path / "opt.safetensors")
            else:
                other.load_state_dict(weights)
                opt.load_state_dict(state)
            train(other, opt, DATA[2:])
            assert digest(other, opt) == straight, how


def test_the_fallback_trains_to_the_same_bits(monkeypatch):
    from superoffload.engine import arenas, device, submission, worker
    from superoffload.kernels import fallback as numpy_kernels

    expected = reference(torch.bfloat16)
    for module in (arenas, device, submission, worker):
        monkeypatch.setattr(module, "native", numpy_kernels)
    for kwargs in ({}, {"bucket_mb": 0.05, "cast_up": "gpu", "cast_down": "cpu", "retained_buckets": 2}):
        assert run_plan(torch.bfloat16, DATA, **kwargs) == expected
