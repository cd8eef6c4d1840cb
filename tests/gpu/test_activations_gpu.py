"""Activation policies on a GPU: the copies' streams change no bit, memory is really given up, nothing grows."""

import gc

import pytest
import torch

from superoffload.engine import OffloadAdamW, activations, selective
from superoffload.engine.activation_store import ActivationStore
from superoffload.plan import ACTIVATIONS
from tests.engine.common import batches, digest, llama, run_plan, train
from tests.engine.test_activations import dropping

POLICIES = tuple(p for p in ACTIVATIONS if p != "none")
OFFLOADS = ("offload_inputs", "offload_saved")

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(activations, "OFFLOAD_MIN_BYTES", 512)
    monkeypatch.setattr(selective, "KEEP_FLOPS_PER_BYTE", 16)


@pytest.fixture
def slow_copies(monkeypatch):
    """Call it to hold up the store's streams at random, before and after each copy, and the compute stream at times."""

    def hold_up():
        g = torch.Generator().manual_seed(5)

        def sleep(stream):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(torch.randint(0, 2_000_000, (1,), generator=g)))

        def slow(method, name):
            def wrapped(self, *args):
                sleep(getattr(self, name))
                result = method(self, *args)
                sleep(getattr(self, name))
                return result

            return wrapped

        monkeypatch.setattr(ActivationStore, "_copy_down", slow(ActivationStore._copy_down, "_out"))
        monkeypatch.setattr(ActivationStore, "_fetch", slow(ActivationStore._fetch, "_back"))

    return hold_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [llama, dropping])
def test_no_policy_changes_a_bit(dtype, model):
    def run(policy, **kwargs):
        torch.manual_seed(7)
        torch.cuda.manual_seed(7)
        return run_plan(dtype, batches(6, device="cuda"), device="cuda", model=model, bucket_mb=0.1,
                        activations=policy, **kwargs)  # fmt: skip

    reference = run("none")
    assert run("none") == reference, "control: the model itself must repeat"
    for policy in POLICIES:
        assert run(policy) == reference, policy
        assert run(policy, speculate="on", accumulation=2) == run("none", accumulation=2), policy


@pytest.mark.parametrize("policy", OFFLOADS)
def test_slow_copies_change_nothing(policy, slow_copies):
    data = batches(6, device="cuda", size=8, seq=64)
    reference = run_plan(torch.bfloat16, data, device="cuda", bucket_mb=0.1, activations="none")
    slow_copies()
    for _ in range(3):
        assert run_plan(torch.bfloat16, data, device="cuda", bucket_mb=0.1, activations=policy) == reference


@pytest.mark.parametrize("policy", OFFLOADS)
def test_memory_of_dropped_graphs_is_not_used_too_early(policy, slow_copies):
    """Graphs that are dropped while their copies run, and fresh tensors at once in their memory."""
    x = batches(1, device="cuda", size=8, seq=64)[0]

    def run(activations, disturb):
        model = llama(torch.bfloat16, device="cuda")
        with OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, bucket_mb=0.1, activations=activations) as opt:
            for _ in range(4):
                if disturb:
                    loss = model(input_ids=x, labels=x).loss
                    del loss
                    torch.full((1 << 20,), float("nan"), device="cuda")
                train(model, opt, [x])
            return digest(model, opt)

    reference = run("none", disturb=False)
    slow_copies()
    assert run(policy, disturb=True) == reference


@pytest.mark.parametrize("policy", OFFLOADS)
def test_training_on_changing_streams(policy):
    data = batches(6, device="cuda")
    reference = run_plan(torch.bfloat16, data, device="cuda", bucket_mb=0.1, activations="none")
    model, side = llama(torch.bfloat16, device="cuda"), torch.cuda.Stream()
    with OffloadAdamW(
        model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.1, activations=policy
    ) as opt:  # fmt: skip
        losses = []
        for i, x in enumerate(data):
            stream, other = (side, torch.cuda.default_stream()) if i % 2 else (torch.cuda.default_stream(), side)
            stream.wait_stream(other)
            with torch.cuda.stream(stream):
                losses += train(model, opt, [x])
        torch.cuda.synchronize()
        assert (digest(model, opt), losses) == reference


def peak_bytes(policy):
    model, data = llama(torch.bfloat16, device="cuda", layers=8), batches(4, device="cuda", size=64, seq=64)
    with OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, bucket_mb=1, activations=policy) as opt:
        train(model, opt, data[:2])
        opt.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(model, opt, data[2:])
        return torch.cuda.max_memory_allocated() - before


def test_each_policy_lowers_the_peak():
    peaks = {policy: peak_bytes(policy) for policy in ACTIVATIONS}
    tokens, width, item = 64 * 64, 64, 2
    inputs = 8 * tokens * width * item
    assert peaks["offload_saved"] < peaks["none"] - 4 * 22 * tokens * width * item, "at least four layers of eight"
    assert peaks["selective"] < peaks["none"]
    assert peaks["full"] < peaks["selective"]
    assert peaks["offload_inputs"] < peaks["full"] - inputs / 2, peaks


@pytest.mark.parametrize("policy", OFFLOADS)
def test_nothing_is_allocated_after_the_second_step(policy):
    model, data = llama(torch.bfloat16, device="cuda"), batches(8, device="cuda", size=8, seq=64)
    with OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, bucket_mb=0.1, activations=policy) as opt:
        pool = opt.engine.activations.store.pool
        train(model, opt, data[:3])
        opt.synchronize()
        gc.collect()
        before = pool.made, pool.bytes, opt.stats.host_bytes, opt.stats.pinned_bytes, torch.cuda.memory_reserved()
        assert pool.bytes > 0
        train(model, opt, data[3:])
        opt.synchronize()
        after = pool.made, pool.bytes, opt.stats.host_bytes, opt.stats.pinned_bytes, torch.cuda.memory_reserved()
        assert after == before
        assert pool.idle_bytes == pool.bytes, "every buffer came back"


@pytest.mark.parametrize("policy", OFFLOADS)
def test_the_copies_are_in_the_trace(policy):
    model, data = llama(torch.bfloat16, device="cuda", layers=4), batches(5, device="cuda", size=8, seq=64)
    with OffloadAdamW(
        model, max_grad_norm=1.0, bucket_mb=0.1, activations=policy, record_trace=True
    ) as opt:  # fmt: skip
        train(model, opt, data)
        events = opt.trace().events
    down = {e.block for e in events if e.kind == "copy_down" and e.block >= 0}
    up = {e.block for e in events if e.kind == "fetch"}
    assert down == {1, 2, 3, 4}
    assert {1, 2} <= up
    assert not up & {4}, "what the last layer saved never left"
