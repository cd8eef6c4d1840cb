"""Runs real optimizer steps with a plan and leaves the model as it was, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from superoffload.config import TunedConfig, headline
from superoffload.engine import OffloadAdamW
from superoffload.engine.optimizer import optimizer_of
from superoffload.errors import InputError, SuperOffloadError
from superoffload.host_load import HostWatch
from superoffload.model_source import fingerprint
from superoffload.model_source import load as load_model
from superoffload.plan import Plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.profiling import batch_arguments, loss_of
from superoffload.profiling_state import untouched
from superoffload.search_result import Measured, SearchResult, Trial, ranked
from superoffload.simulator import resolve_speculation
from superoffload.tracing import Trace

WARMUP_STEPS = 2
"""Steps that are not timed. The first of an optimizer never speculates, and the second waits for its late Adam."""
MAX_GRAD_NORM = 1e9
"""Clipping is part of the step that is measured, and its bound is far above any norm: a step that commits is the one
that is predicted, and random weights or a learning rate of 0 would else clip every one."""


class Cancelled(SuperOffloadError):
    """The measurement was stopped by the person who started it."""


def measure_steps(
    model: nn.Module,
    batch: Any,
    profile: Profile,
    plan: Plan,
    *,
    steps: int = 3,
    stop: threading.Event | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Run `WARMUP_STEPS` steps to warm up and `steps` more with this plan, at a learning rate of 0.

    Weights, gradients, buffers, random state, modes and dtype are bit-identical afterwards, also after an error,
    running out of memory, or a cancel.

    Args:
        model: on the device and in the dtype in which it will train.
        batch: as for `superoffload.profile`; every micro-batch is this one.
        profile: of the model: names the machine and counts its FLOPs.
        plan: which the engine must be able to run.
        steps: measured steps, at least 2.
        stop: set it to cancel at the end of the present micro-batch.
        progress: called with the number of steps done.

    Returns:
        The last step as events; `step_s` is the median of the measured steps, of the last eight where there are more.

    Raises:
        InputError: too few steps, a plan that is not this model's, or an optimizer of this package is attached to it.
        Cancelled: `stop` was set.
    """
    if steps < 2:
        raise InputError(f"steps = {steps}", expected="at least 2")
    if optimizer_of(model) is not None:
        raise InputError(
            "an OffloadAdamW is attached to this model, and measuring would need a second one",
            remedy="Close it first (opt.close()), or measure before training",
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InputError("the model has no trainable parameter", remedy="Set requires_grad on what shall train")
    device = trainable[0].device
    args, kwargs = batch_arguments(model, batch, device)
    with _weights_kept(model), untouched(model, device):
        opt = OffloadAdamW(
            model,
            lr=0.0,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_accumulation_steps=plan.accumulation,
            plan=resolve_speculation(plan),  # `auto` would wait for the first steps, and what is predicted does not
            record_trace=True,
        )
        try:
            for step in range(WARMUP_STEPS + steps):
                if step == WARMUP_STEPS:
                    watch = HostWatch()
                    opt.engine.recorder.start_over()
                for k in range(plan.accumulation):
                    if stop is not None and stop.is_set():
                        raise Cancelled("the measurement was cancelled", remedy="The model is as it was before")
                    with opt.no_sync() if k < plan.accumulation - 1 else contextlib.nullcontext():
                        loss_of(model(*args, **kwargs)).backward()
                opt.step()
                opt.zero_grad()
                if progress is not None:
                    progress(step + 1)
            opt.synchronize()
            beside = watch.noted("the step")
            trace = opt.trace(
                tokens_per_step=profile.tokens * plan.accumulation,
                model_flops_per_step=profile.model_flops * plan.accumulation,
                peak_bf16_tflops=profile.hardware.gpu.peak_bf16_tflops,
                hardware=profile.hardware.name,
            )
        finally:
            opt.close()
    return trace.replace(model=profile.model, plan=plan, context={**trace.context, **beside})


def measure_best(
    result: SearchResult,
    count: int,
    *,
    steps: int = 3,
    progress: Callable[[Trial, int, int], None] | None = None,
) -> SearchResult:
    """Run the `count` best plans of a search on this machine, each for a few steps at a learning rate of 0.

    The model is loaded from where the profile says; the micro-batches are random tokens.

    Args:
        result: of a profile that was measured here.
        count: how many of the best plans that fit and are fast enough.
        steps: measured steps of each, after `WARMUP_STEPS` to warm up.
        progress: called with (trial, steps done, steps of the trial with the warm-up).

    Returns:
        The same result with `measured`, in the order of the prediction. A plan that fails here is noted with its
        error, and does not end the others.

    Raises:
        InputError: the model of the profile cannot be loaded, or is another one.
    """
    best = ranked(result.settings, result.trials)[:count]
    if not best:
        return result
    config = TunedConfig.create(result.profile, best[0].plan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, words = load_model(config.model, config.training.dtype, device)
    config.check_model(fingerprint(model), config.model.source)
    found = []
    for trial in best:
        plan = trial.plan
        profile = rescale(result.profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len)
        shape = (plan.micro_batch, plan.seq_len)
        ids = torch.randint(len(words), shape, generator=torch.Generator().manual_seed(0))
        say = None if progress is None else functools.partial(_say, progress, trial, WARMUP_STEPS + steps)
        noted = Measured(number=trial.number, predicted_s=trial.step_s or 0.0)
        try:
            trace = measure_steps(model, ids, profile, plan, steps=steps, progress=say)
        except (SuperOffloadError, torch.OutOfMemoryError) as error:
            found.append(noted.replace(failure=str(error)))
            continue
        found.append(noted.replace(measured_s=trace.step_s, tokens_per_s=trace.tokens_per_s, headline=headline(trace)))
    return result.model_copy(update={"measured": tuple(found)})


def _say(progress: Callable[[Trial, int, int], None], trial: Trial, steps: int, done: int) -> None:
    progress(trial, done, steps)


@contextlib.contextmanager
def _weights_kept(model: nn.Module) -> Iterator[None]:
    """Put back every parameter whose bits have changed. A learning rate of 0 should leave none; this makes sure."""
    kept = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept:
                if not torch.equal(_bits(p.detach().cpu()), _bits(value)):
                    p.copy_(value)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
