"""Speculation on a GPU: the same bits as waiting, for any pattern of clipped and non-finite steps, whatever is late."""

import pytest
import torch

from superoffload.engine import OffloadAdamW
from tests.engine.common import batches, digest, llama

FACTORS = (1.0, 1.0, 30.0, 1.0, float("nan"), 1.0, 1.0, 3e3, 1.0, float("inf"), 1.0, 1.0)
"""What the loss of each step is multiplied by: commits, clipped steps, spikes, gradients that are not finite."""

PLANS = {
    "one bucket": dict(bucket_mb=64),
    "many buckets": dict(bucket_mb=0.05),
    "half retained": dict(bucket_mb=0.05, retained_buckets=12),
    "casts on the CPU": dict(bucket_mb=0.1, cast_down="cpu", cast_up="cpu"),
    "casts on the GPU": dict(bucket_mb=0.1, cast_down="gpu", cast_up="gpu", retained_buckets=3),
    "many threads": dict(bucket_mb=0.3, adam_threads=8),
    "slow worker": dict(bucket_mb=0.05, delay_us=2000),
    "snapshots": dict(bucket_mb=0.05, retained_buckets=4, undo="snapshot"),
    "few undo buckets": dict(bucket_mb=0.05, retained_buckets=4, undo_buckets=5),
}


pytestmark = pytest.mark.usefixtures("deterministic")


def run(dtype, max_norm, *, delay_us=0, factors=FACTORS, between=None, **plan):
    """Train over `factors`; returns (digest, losses, ledger)."""
    model = llama(dtype, device="cuda")
    losses = []
    with OffloadAdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=max_norm, **plan) as opt:
        opt.engine.worker.set_delay_us(delay_us)
        for i, (x, factor) in enumerate(zip(batches(len(factors), device="cuda"), factors, strict=True)):
            loss = model(input_ids=x, labels=x).loss
            (loss * factor).backward()
            losses.append(float(loss.detach()))
            if between is not None:
                between(i, model, opt)
            opt.step()
            opt.zero_grad()
        found = digest(model, opt)
        return found, losses, opt.ledger


def bound(dtype):
    """A bound over most norms of this model, and under those of the steps whose loss is multiplied."""
    _, _, ledger = run(dtype, None, factors=[1.0] * len(FACTORS), speculate="off")
    return 1.05 * max(r.grad_norm for r in ledger)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_speculating_changes_no_bit(dtype):
    max_norm = bound(dtype)
    reference = run(dtype, max_norm, speculate="off")
    assert run(dtype, max_norm, speculate="off")[:2] == reference[:2], "control: the model itself must repeat"
    verdicts = [r.verdict for r in reference[2]]
    assert {"commit", "clip", "skip"} == set(verdicts)
    for name, plan in PLANS.items():
        found, losses, ledger = run(dtype, max_norm, speculate="on", **plan)
        assert (found, losses) == reference[:2], name
        assert [r.verdict for r in ledger] == verdicts
        if name != "one bucket":
            assert sum(r.speculated for r in ledger) > 0, name


def test_a_late_verdict_undoes_what_was_speculated():
    """A bound just under a step's norm: nearly everything has been updated when clipping becomes certain."""
    dtype = torch.bfloat16
    _, _, ledger = run(dtype, None, factors=[1.0] * 6, speculate="off")
    max_norm = 0.999 * min(r.grad_norm for r in ledger)
    reference = run(dtype, max_norm, factors=[1.0] * 6, speculate="off", bucket_mb=0.05)
    found, losses, ledger = run(dtype, max_norm, factors=[1.0] * 6, speculate="on", bucket_mb=0.05)
    assert (found, losses) == reference[:2]
    assert sum(r.undone for r in ledger) > 0
    assert all(r.verdict == "clip" for r in ledger)


def test_held_up_streams_change_nothing(hold_up_streams):
    dtype = torch.bfloat16
    max_norm = bound(dtype)
    reference = run(dtype, max_norm, speculate="off")
    hold_up_streams()
    for delay in (0, 1000):
        found = run(dtype, max_norm, speculate="on", bucket_mb=0.05, retained_buckets=5, delay_us=delay)
        assert found[:2] == reference[:2]


BETWEEN = {
    "a forward": lambda i, model, opt: model(input_ids=batches(1, device="cuda", seed=9)[0]),
    "state_dict": lambda i, model, opt: model.state_dict(),
    "synchronize": lambda i, model, opt: opt.synchronize(),
    "another learning rate": lambda i, model, opt: opt.param_groups[0].update(lr=1e-3 / (i + 1)),
    "another bound": lambda i, model, opt: setattr(opt, "max_grad_norm", opt.max_grad_norm * 0.9),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_comes_between_backward_and_step(what):
    dtype, plan = torch.bfloat16, dict(bucket_mb=0.05, retained_buckets=4, between=BETWEEN[what])
    max_norm = bound(dtype)
    reference = run(dtype, max_norm, speculate="off", **plan)
    for delay in (0, 1000):
        assert run(dtype, max_norm, speculate="on", delay_us=delay, **plan)[:2] == reference[:2]


def test_zero_grad_takes_speculation_back():
    model = llama(torch.bfloat16, device="cuda")
    data = batches(6, device="cuda")
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05, speculate="on") as opt:
        for x in data[:3]:
            model(input_ids=x, labels=x).loss.backward()
            opt.step()
        before = digest(model, opt)
        model(input_ids=data[3], labels=data[3]).loss.backward()
        assert opt.engine.speculation.arrived
        opt.zero_grad()
        assert digest(model, opt) == before
        stream = torch.cuda.Stream()  # whoever reads the weights next, on whatever stream, reads the old ones
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            a = model(input_ids=data[4]).logits
        torch.cuda.synchronize()
        assert torch.equal(a, model(input_ids=data[4]).logits)


def test_memory_stays_flat():
    model = llama(torch.bfloat16, device="cuda")
    seen = []
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05, retained_buckets=3, speculate="on", max_grad_norm=5.0) as opt:
        for i, x in enumerate(batches(12, device="cuda")):
            (model(input_ids=x, labels=x).loss * (100.0 if i % 3 == 2 else 1.0)).backward()
            opt.step()
            opt.zero_grad()
            if i >= 4:
                opt.synchronize()
                seen.append((torch.cuda.memory_allocated(), opt.stats.host_bytes, opt.stats.pinned_bytes))
    assert len(set(seen)) == 1
