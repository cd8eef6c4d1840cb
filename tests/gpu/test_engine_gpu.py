"""The engine on a GPU: no plan changes a bit, whatever the delays; memory stays flat; torch is matched."""

import gc
import warnings

import pytest
import torch

from superoffload.engine import OffloadAdamW
from tests.engine.common import batches, checkpointed, digest, llama, run_plan, train

PLANS = {
    "one bucket": dict(bucket_mb=64),
    "many buckets": dict(bucket_mb=0.05),
    "half retained": dict(bucket_mb=0.05, retained_buckets=12),
    "all retained": dict(bucket_mb=0.2, retained_buckets=99),
    "casts on the CPU": dict(bucket_mb=0.1, cast_down="cpu", cast_up="cpu"),
    "casts on the GPU": dict(bucket_mb=0.1, cast_down="gpu", cast_up="gpu"),
    "down on the GPU, up fused": dict(bucket_mb=0.1, cast_down="gpu", cast_up="fused", retained_buckets=3),
    "many threads": dict(bucket_mb=0.3, adam_threads=8),
    "slow worker": dict(bucket_mb=0.05, delay_us=2000),
}


pytestmark = pytest.mark.usefixtures("deterministic")


def _plan(kwargs: dict) -> dict:
    """`retained_buckets = 99` stands for all of them."""
    if kwargs.get("retained_buckets") == 99:
        with OffloadAdamW(llama(torch.bfloat16, device="cuda"), bucket_mb=kwargs["bucket_mb"]) as probe:
            return {**kwargs, "retained_buckets": len(probe.engine.arenas.buckets)}
    return kwargs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_plan_changes_a_bit(dtype):
    data = batches(6, device="cuda")
    reference = run_plan(dtype, data, device="cuda")
    assert run_plan(dtype, data, device="cuda") == reference, "control: the model itself must repeat"
    for name, kwargs in PLANS.items():
        assert run_plan(dtype, data, device="cuda", **_plan(kwargs)) == reference, name


@pytest.mark.parametrize("hint", [True, False])
def test_accumulation_under_any_plan(hint):
    data = batches(8, device="cuda")
    reference = run_plan(torch.bfloat16, data, device="cuda", accumulation=2, bucket_mb=64)
    for name in ("many buckets", "half retained", "casts on the GPU", "slow worker"):
        for where in ("gpu", "cpu"):
            got = run_plan(
                torch.bfloat16, data, device="cuda", accumulation=2, hint=hint, accumulate_on=where, speculate="on",
                **PLANS[name],
            )  # fmt: skip
            assert got == reference, (name, where)


def test_delayed_streams_change_nothing(hold_up_streams):
    data = batches(6, device="cuda")
    reference = run_plan(torch.bfloat16, data, device="cuda", bucket_mb=0.05, retained_buckets=5)
    hold_up_streams()
    for delay in (0, 1000):
        kwargs = dict(bucket_mb=0.05, retained_buckets=5, delay_us=delay)
        assert run_plan(torch.bfloat16, data, device="cuda", **kwargs) == reference


def test_same_losses_as_torch():
    data = batches(10, device="cuda")
    theirs, ours = llama(device="cuda"), llama(device="cuda")
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1), data, clip=1.0)
    with OffloadAdamW(ours, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.1, retained_buckets=4) as opt:
        got = train(ours, opt, data)
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) < 1e-5
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert (p - q).abs().max() < 0.05 * 1e-3


@pytest.mark.parametrize("retained", [0, 6])
def test_a_bad_gradient_skips_the_step(retained):
    model, data = llama(torch.bfloat16, device="cuda"), batches(4, device="cuda")
    with OffloadAdamW(model, max_grad_norm=1.0, bucket_mb=0.05, retained_buckets=retained) as opt:
        train(model, opt, data[:2])
        before = digest(model, opt)
        loss = model(input_ids=data[2], labels=data[2]).loss
        (loss * float("nan")).backward()
        opt.step()
        opt.zero_grad()
        assert opt.stats.verdict == "skip"
        assert digest(model, opt) == before
        train(model, opt, data[3:])
        assert opt.stats.verdict in ("commit", "clip")
        assert digest(model, opt) != before


def test_memory_is_flat_after_the_second_step():
    torch.use_deterministic_algorithms(False)  # its workspace is not ours
    model, data = llama(torch.bfloat16, device="cuda", layers=4), batches(12, device="cuda")
    with OffloadAdamW(model, max_grad_norm=1.0, bucket_mb=0.1, retained_buckets=3) as opt:
        train(model, opt, data[:4])
        opt.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        host = opt.stats.host_bytes
        train(model, opt, data[4:])
        opt.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        assert opt.stats.host_bytes == host


def test_five_engines_leave_memory_flat():
    model, data = llama(torch.bfloat16, device="cuda"), batches(2, device="cuda")
    sizes = []
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            opt = OffloadAdamW(model, max_grad_norm=1.0, retained_buckets=1)
        train(model, opt, data)
        opt.synchronize()
        gc.collect()
        sizes.append(torch.cuda.memory_allocated())
    opt.close()
    assert len(set(sizes[1:])) == 1, sizes


def test_checkpoint_resumes_under_another_plan(tmp_path):
    data = batches(6, device="cuda")
    straight, _ = run_plan(torch.bfloat16, data, device="cuda")
    model = llama(torch.bfloat16, device="cuda")
    with OffloadAdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.05) as opt:
        train(model, opt, data[:3])
        opt.save(tmp_path / "opt.safetensors")
    other = llama(torch.bfloat16, device="cuda", seed=9)
    with OffloadAdamW(other, lr=1.0, max_grad_norm=1.0, bucket_mb=0.1, retained_buckets=5, cast_down="gpu") as opt:
        opt.load(tmp_path / "opt.safetensors")
        train(other, opt, data[3:])
        assert digest(other, opt) == straight


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    data = batches(4, device="cuda")

    def model(dtype, device):
        return checkpointed(llama(dtype, device=device), reentrant)

    reference = run_plan(torch.bfloat16, data, device="cuda", model=model)
    for name in ("many buckets", "half retained", "slow worker"):
        assert run_plan(torch.bfloat16, data, device="cuda", model=model, **PLANS[name]) == reference, name


def test_measured_trace_has_both_processors():
    model, data = llama(torch.bfloat16, device="cuda", layers=4), batches(5, device="cuda", size=8, seq=64)
    with OffloadAdamW(model, max_grad_norm=1.0, bucket_mb=0.1, retained_buckets=2, record_trace=True) as opt:
        train(model, opt, data)
        trace = opt.trace()
    lanes = {e.lane for e in trace.events}
    assert {"gpu", "link_down", "link_up", "cpu_adam"} <= lanes
    kinds = {e.kind for e in trace.events}
    assert {"forward", "backward", "norm", "gpu_adam", "copy_down", "copy_up", "adam"} <= kinds
    assert all(e.start_s >= 0 and e.end_s <= trace.window_s + 1e-9 for e in trace.events)
    assert trace.source == "measured" and trace.step_s > 0


def test_a_forward_on_another_stream_sees_the_new_weights():
    """The stream that enters a block first must not be the only one that waits."""
    model, data = llama(torch.bfloat16, device="cuda", layers=4), batches(6, device="cuda")
    side = torch.cuda.Stream()
    with OffloadAdamW(model, lr=1e-2, max_grad_norm=1.0, bucket_mb=0.05, retained_buckets=4) as opt:
        for x in data:
            train(model, opt, [x])
            with torch.no_grad():
                first = model(input_ids=x).logits
                side.wait_stream(torch.cuda.default_stream())
                with torch.cuda.stream(side):
                    second = model(input_ids=x).logits
                torch.cuda.synchronize()
                opt.synchronize()
                settled = model(input_ids=x).logits
            assert torch.equal(first, settled) and torch.equal(second, settled)


def test_training_on_a_side_stream_gives_the_same_bits():
    data = batches(5, device="cuda")
    reference = run_plan(torch.bfloat16, data, device="cuda", bucket_mb=0.05, retained_buckets=3)
    model = llama(torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with OffloadAdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.05, retained_buckets=3) as opt:
        opt.engine.worker.set_delay_us(500)
        losses = []
        for i, x in enumerate(data):  # every second step on another stream
            stream = side if i % 2 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.default_stream() if i % 2 else side)
            with torch.cuda.stream(stream):
                losses += train(model, opt, [x])
        torch.cuda.synchronize()
        assert (digest(model, opt), losses) == reference


def test_a_model_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: another one would have to be current")
    device = f"cuda:{torch.cuda.device_count() - 1}"
    data = batches(3, device=device)
    plans = ({"bucket_mb": 64}, {"bucket_mb": 0.05, "retained_buckets": 3, "cast_up": "gpu"})
    assert run_plan(torch.bfloat16, data, device=device, **plans[0]) == run_plan(
        torch.bfloat16, data, device=device, **plans[1]
    )


def test_a_model_that_fills_more_than_half_of_the_gpu_can_be_taken_over():
    """Its weights cannot be there twice: they wait on the host while their arena is made."""
    from torch import nn

    def wide() -> nn.Module:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return nn.Sequential(*(nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(16)))  # 2.1 GB

    def run() -> tuple[int, str]:
        gc.collect()
        torch.cuda.empty_cache()
        model = wide()
        torch.cuda.reset_peak_memory_stats()
        with OffloadAdamW(model, lr=1e-3, retained_buckets=0) as opt:
            setup = torch.cuda.max_memory_allocated()
            model(torch.ones(4, 8192, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
            opt.step()
            return setup, digest(model, opt)

    weights = 16 * 8192 * 8193 * 2
    at_ease, reference = run()
    assert at_ease > 1.9 * weights, "nothing is to be shown where the arena comes in pieces"
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.6 * weights / total)
    try:
        tight, result = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result == reference
    assert tight < 1.6 * weights
