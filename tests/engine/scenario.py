"""Steps of every kind, trained again and again under different plans: what the speculation tests are made of.

A step's bound is given as a multiple of that step's own gradient norm, so that it is known what will happen: just below
1 most buckets have been updated when clipping becomes certain, far below 1 none has. The run that waits measures the
norms and sets the bounds; the others are given them before backward, as a user would.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from superoffload.engine import OffloadAdamW
from superoffload.engine.stats import StepRecord
from tests.engine.common import batches, digest, llama, train


class Step(NamedTuple):
    """One step of a scenario."""

    bound: float | None = 2.0
    """max_grad_norm over the step's norm; None does not clip."""
    factor: float = 1.0
    """What the loss is multiplied by."""
    bad: float | None = None
    """Put into one gradient: nan or inf."""
    where: float = 0.5
    """Whose gradient: 0 the first that backward makes, 1 the last."""


NAN, INF = float("nan"), float("inf")
KINDS = {
    "commit": Step(),
    "no bound": Step(bound=None),
    "clipped at once": Step(bound=0.01),
    "clipped half-way": Step(bound=0.7),
    "clipped at the end": Step(bound=0.9999),
    "spike": Step(factor=1000.0),
    "spike, clipped at the end": Step(bound=0.9999, factor=1000.0),
    "spike, clipped at once": Step(bound=0.001, factor=1000.0),
    "zero": Step(bound=None, factor=0.0),
    "nan first": Step(bound=None, bad=NAN, where=0.0),
    "nan last": Step(bound=None, bad=NAN, where=1.0),
    "inf": Step(bound=None, bad=INF),
    "-inf last": Step(bound=None, bad=-INF, where=1.0),
}


class Result(NamedTuple):
    digest: str
    losses: list[float]
    verdicts: list[tuple[str, float, float]]
    """Verdict, norm and coefficient of each step."""


class Run(NamedTuple):
    result: Result
    bounds: list[float | None]
    ledger: tuple[StepRecord, ...]


def model_of(dtype: torch.dtype) -> nn.Module:
    return llama(dtype, layers=2)


class Autocast(nn.Module):
    """bf16 matrices and fp32 norms in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama(torch.bfloat16, layers=2)
        for name, p in self.inner.named_parameters():
            if "norm" in name:
                p.data = p.data.float()

    def forward(self, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(**kwargs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: model_of(torch.float32),
    "bfloat16": lambda: model_of(torch.bfloat16),
    "float16": lambda: model_of(torch.float16),
    "mixed": Autocast,
}


def play(
    model: nn.Module,
    steps: Sequence[Step],
    *,
    bounds: Sequence[float | None] | None = None,
    accumulation: int = 1,
    hint: str = "no_sync",
    delay_us: int = 0,
    sleeps: int = 0,
    lockstep: bool = False,
    after_step: Callable[[int, OffloadAdamW], None] | None = None,
    **plan: Any,
) -> Run:
    """Train `model` over `steps`.

    Args:
        bounds: max_grad_norm of each step. None measures: it is set between backward and step, from the norm.
        hint: how accumulation is told: `no_sync`, `counter` or `none`.
        sleeps: seed of random sleeps inside backward; 0 for none.
        lockstep: backward waits at every gradient until the worker has nothing to do, so that it is known which buckets
            were speculated.
    """
    squares: dict[int, float] = {}
    params = [p for p in model.parameters() if p.requires_grad]

    def note(p: nn.Parameter) -> None:
        assert p.grad is not None
        squares[id(p)] = float(p.grad.double().square().sum())

    handles = [p.register_post_accumulate_grad_hook(note) for p in params] if bounds is None else []
    rng = random.Random(sleeps)
    if sleeps:
        handles += [p.register_hook(lambda g: time.sleep(rng.choice([0, 0, 2e-4, 2e-3]))) for p in params]
    data, losses, used = batches(len(steps) * accumulation), list[float](), list[float | None]()
    opt = OffloadAdamW(
        model, lr=1e-3, weight_decay=0.1, max_grad_norm=1.0,
        gradient_accumulation_steps=accumulation if hint == "counter" else 1, **plan,
    )  # fmt: skip
    with opt:
        opt.engine.worker.set_delay_us(delay_us)
        if lockstep:
            handles += [p.register_hook(lambda g: opt.engine.worker.wait_idle()) for p in params]
        for i, step in enumerate(steps):
            if bounds is not None:
                opt.max_grad_norm = bounds[i]
            culprit = params[-1 - round(step.where * (len(params) - 1))]
            bad = culprit.register_hook(lambda g, value=step.bad: _with_one(g, value)) if step.bad is not None else None
            for k in range(accumulation):
                quiet = hint == "no_sync" and k < accumulation - 1
                x = data[i * accumulation + k]
                with opt.no_sync() if quiet else contextlib.nullcontext():
                    loss = model(input_ids=x, labels=x).loss
                    (loss * (step.factor / accumulation)).backward()
                losses.append(float(loss.detach()))
            if bad is not None:
                bad.remove()
            if bounds is None:
                norm = sum(squares.values()) ** 0.5
                opt.max_grad_norm = None if step.bound is None else step.bound * norm
            used.append(opt.max_grad_norm)
            if lockstep:
                opt.engine.worker.wait_idle()
            opt.step()
            opt.zero_grad()
            if after_step is not None:
                after_step(i, opt)
        result = digest(model, opt)
        ledger = opt.ledger
    for handle in handles:
        handle.remove()
    verdicts = [(r.verdict, r.grad_norm, r.clip_coefficient) for r in ledger if r.verdict != "skip"]
    return Run(Result(result, losses, verdicts), used, ledger)


def _with_one(grad: torch.Tensor, value: float) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[grad.numel() // 2] = value
    return grad


# -- between backward and step ----------------------------------------------------------------------------------------

DATA = batches(8)


def make(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "weight_decay": 0.1, "speculate": "on", "bucket_mb": 0.05, **kwargs})


def small(dtype=torch.bfloat16, **kwargs):
    return llama(dtype, layers=2, **kwargs)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run_ahead(model, opt, x=DATA[6], loss=None):
    """Backward, and wait until every bucket has been updated."""
    before = weights(model)
    (model(input_ids=x, labels=x).loss if loss is None else loss).backward()
    opt.engine.worker.wait_idle()
    if opt.plan.speculate == "on":
        assert opt.engine.speculation.arrived and not equal(before, weights(model)), "nothing ran ahead"
    return before


def in_both_modes(scene, model=small, **kwargs):
    """`scene(model, opt)` must end in the same bits, and see the same, with and without speculation."""
    results = []
    for speculate in ("off", "on"):
        m = model()
        with make(m, speculate=speculate, **kwargs) as opt:
            train(m, opt, DATA[:2])
            opt.synchronize()
            seen = scene(m, opt)
            results.append((seen, digest(m, opt)))
    assert results[0] == results[1]
    return results[0]
