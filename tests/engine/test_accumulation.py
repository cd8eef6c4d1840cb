"""Gradients of several micro-batches, held on the GPU or on the CPU: the same bits, and torch's."""

import contextlib
import functools
import random
import signal
import warnings
from collections import Counter

import pytest
import torch

from superoffload.engine import OffloadAdamW, gradient_ring, gradients
from superoffload.layout import RING_SLOTS
from tests.engine.common import batches, digest, llama, run_plan, train

DATA = batches(12)
PLANS = {
    "one bucket": dict(bucket_mb=64),
    "many buckets": dict(bucket_mb=0.05),
    "half retained": dict(bucket_mb=0.05, retained_buckets=9),
    "all retained": dict(bucket_mb=64, retained_buckets=1),
    "casts on the GPU": dict(bucket_mb=0.1, cast_down="gpu", cast_up="gpu", retained_buckets=2),
    "speculating": dict(bucket_mb=0.05, speculate="on"),
    "slow worker": dict(bucket_mb=0.05, delay_us=500, speculate="on"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hint", [True, False])
def test_where_gradients_wait_changes_no_bit(dtype, hint):
    reference = run_plan(dtype, DATA, accumulation=3, bucket_mb=64)
    for name, plan in PLANS.items():
        if name == "all retained" and dtype == torch.float32:
            plan = {**plan, "retained_buckets": 1}
        got = run_plan(dtype, DATA, accumulation=3, accumulate_on="cpu", hint=hint, **plan)
        assert got == reference, name


def test_a_fixed_count_is_a_hint_too():
    reference = run_plan(torch.bfloat16, DATA, accumulation=3, bucket_mb=0.05)
    for where in ("gpu", "cpu"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = run_plan(
                torch.bfloat16, DATA, accumulation=3, hint=True, accumulate_on=where, bucket_mb=0.05,
                gradient_accumulation_steps=3, speculate="on",
            )  # fmt: skip
        assert got == reference, where


def test_only_the_last_micro_batch_speculates():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, bucket_mb=0.05, speculate="on", accumulate_on="cpu", gradient_accumulation_steps=2) as opt:
        for i in range(0, 8, 2):
            for x in DATA[i : i + 2]:
                model(input_ids=x, labels=x).loss.backward()
                assert all(p.grad is None for p in model.parameters()), "held on the CPU, not in p.grad"
                if x is DATA[i]:
                    assert not opt.engine.speculation.open
            opt.engine.worker.wait_idle()
            opt.step()
        opt.synchronize()
        opt.engine.worker.wait_idle()
        assert all(r.speculated for r in opt.ledger[1:])


def test_a_parameter_without_a_gradient_in_the_last_micro_batch(monkeypatch):
    """Its partial sums are missing until step() notices."""

    def run(where, **plan):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({n: torch.nn.Linear(300, 300) for n in ("a", "b", "c")})
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
        norms = []
        with OffloadAdamW(
            model, max_grad_norm=0.1, gradient_accumulation_steps=2, accumulate_on=where, bucket_mb=0.2, **plan
        ) as opt:
            for names in (("abc", "abc"), ("ab", "ac"), ("abc", "c"), ("b", "b")):
                for used in names:
                    sum(model[n](x).square().mean() for n in used).backward()
                opt.step()
                opt.zero_grad()
                norms.append(opt.stats.grad_norm)
            return digest(model, opt), norms

    reference = run("gpu", speculate="off")
    for plan in ({}, {"retained_buckets": 1}, {"speculate": "on"}, {"cast_down": "gpu"}):
        assert run("cpu", **plan) == reference, plan


def test_zero_grad_forgets_what_the_cpu_holds():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05, accumulate_on="cpu", gradient_accumulation_steps=2) as opt:
        model(input_ids=DATA[0], labels=DATA[0]).loss.backward()
        opt.zero_grad()
        losses = train(model, opt, DATA[:4], accumulation=2, hint=False)
        found = digest(model, opt)
    other = llama(torch.bfloat16)
    with OffloadAdamW(other, lr=1e-3, bucket_mb=0.05, gradient_accumulation_steps=2) as opt:
        assert train(other, opt, DATA[:4], accumulation=2, hint=False) == losses
        assert digest(other, opt) == found


def test_memory_on_the_device_does_not_grow_with_what_is_held():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, bucket_mb=0.05, accumulate_on="cpu", gradient_accumulation_steps=2) as opt:
        before = opt.memory()
        train(model, opt, DATA[:8], accumulation=2, hint=False)
        assert opt.memory() == before


def test_held_gradients_are_fetched_once_and_ahead_of_the_new_ones():
    model = llama(torch.bfloat16)
    with OffloadAdamW(
        model, bucket_mb=0.05, retained_buckets=2, accumulate_on="cpu", gradient_accumulation_steps=3, record_trace=True
    ) as opt:
        sent = len(opt.engine.arenas.cpu_buckets)
        assert sent > 2 * RING_SLOTS
        train(model, opt, DATA, accumulation=3)
        events = sorted(opt.trace().events, key=lambda e: e.start_s)
    moved = [(e.kind == "fetch", e.bucket) for e in events if e.bucket >= 0 and e.kind in ("fetch", "copy_down")]
    assert len(moved) == 5 * sent
    assert Counter(moved) == {(up, b): 2 if up else 3 for up in (True, False) for b in range(sent)}, "each once"
    for i, (up, bucket) in enumerate(moved):
        if up and bucket >= RING_SLOTS:  # the others come before the micro-batch
            between = moved[i : moved.index((False, bucket), i)]
            assert sum(not up for up, _ in between) >= 2, "it comes while two buckets before it have yet to go down"


@pytest.mark.parametrize("seed", range(12))
def test_gradients_in_an_unexpected_order(seed):
    """What was fetched ahead makes room for what comes, and stays right where nothing comes."""
    rng = random.Random(seed)
    names = "abcdefghijkl"
    steps = [[rng.sample(names, rng.randrange(1, 13)) for _ in range(rng.randrange(1, 5))] for _ in range(5)]

    def run(where: str, **plan: object) -> str:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({n: torch.nn.Linear(150, 150) for n in names}).to(torch.bfloat16)
        x = torch.randn(8, 150, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        with OffloadAdamW(model, max_grad_norm=0.1, accumulate_on=where, bucket_mb=0.05, **plan) as opt:
            for micros in steps:
                for i, used in enumerate(micros):
                    with opt.no_sync() if i < len(micros) - 1 else contextlib.nullcontext():
                        functools.reduce(lambda y, n: model[n](y), used, x).square().mean().backward()
                opt.step()
                opt.zero_grad()
            return digest(model, opt)

    reference = run("gpu", speculate="off")
    for plan in ({}, {"retained_buckets": 4}, {"speculate": "on", "cast_down": "gpu"}):
        assert run("cpu", **plan) == reference, plan


@pytest.mark.parametrize("retained", [0, 3])
def test_an_interrupted_wait_loses_no_gradient(monkeypatch, retained):
    """Ctrl-C while a bucket of the last step is waited for: what was being taken is there, or still in p.grad."""
    model = torch.nn.ModuleDict({n: torch.nn.Linear(100, w) for n, w in zip("abcdefgh", (300, 150) * 4, strict=True)})
    for nth in range(1, 24):
        rng = random.Random(nth)
        with OffloadAdamW(
            model, accumulate_on="cpu", bucket_mb=0.0625, retained_buckets=retained, speculate="off"
        ) as opt:
            engine, calls, expected = opt.engine, [], {}
            wait = engine.worker.wait_bucket

            def interrupted(state, wait=wait, calls=calls, nth=nth):
                calls.append(state.index)
                if len(calls) == nth:
                    raise KeyboardInterrupt
                return wait(state)

            monkeypatch.setattr(engine.worker, "wait_bucket", interrupted)
            order = rng.sample(engine.params, len(engine.params))
            for p in [*order, *order]:
                grad = torch.randn(p.param.shape)
                expected[p.name] = grad + expected[p.name] if p.name in expected else grad
                p.param.grad = grad.clone()
                try:
                    engine.collector.take(p, last=False)
                except KeyboardInterrupt:
                    engine.collector.take(p, last=False)
            monkeypatch.undo()
            engine.collector.give_back()
            for p in engine.params:
                assert torch.equal(p.param.grad, expected[p.name]), (nth, p.name)
            opt.zero_grad()


@pytest.mark.parametrize("retained", [0, 3])
def test_an_interrupted_copy_or_sum_counts_once(monkeypatch, request, retained):
    """Ctrl-C while a gradient is copied or added, also half-way through one that spans buckets: it is taken whole and
    once, or still in p.grad."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    model = torch.nn.ModuleDict({n: torch.nn.Linear(100, w) for n, w in zip("abcd", (400, 150) * 2, strict=True)})
    done, nth, calls = False, 0, []

    def interrupting(work):
        def worked(*args):
            work(*args)
            calls.append(work)
            if len(calls) == nth:
                signal.raise_signal(signal.SIGINT)

        return worked

    for module in (gradients, gradient_ring):
        monkeypatch.setattr(module, "copy", interrupting(module.copy))
    monkeypatch.setattr(gradients, "_add", interrupting(gradients._add))
    while not done:
        nth, caught, expected = nth + 1, 0, {}
        calls.clear()
        with OffloadAdamW(
            model, accumulate_on="cpu", bucket_mb=0.0625, retained_buckets=retained, speculate="off"
        ) as opt:
            collector, params = opt.engine.collector, opt.engine.params
            assert any(len(p.places) > 2 for p in params)
            for p in [*params, *params, *params[::-1]]:
                grad = torch.randn(p.param.shape)
                expected[p.name] = grad + expected[p.name] if p.name in expected else grad
                p.param.grad = grad.clone()
                try:
                    collector.take(p, last=False)
                except KeyboardInterrupt:
                    caught += 1
                if p.param.grad is not None:
                    collector.take(p, last=False)
            done = len(calls) < nth
            assert caught == (not done)
            collector.give_back()
            for p in params:
                assert torch.equal(p.param.grad, expected[p.name]), (nth, p.name)
            opt.zero_grad()
    assert nth > 50
