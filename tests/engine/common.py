"""A small real transformer, its data, and a training loop that serves torch's optimizer and ours alike."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from superoffload.engine import OffloadAdamW

VOCAB = 384


def llama(dtype: torch.dtype = torch.float32, *, device: str | None = "cpu", tied: bool = False, layers: int = 3, seed: int = 0) -> nn.Module:  # fmt: skip  # noqa: E501
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=layers, intermediate_size=144, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, tie_word_embeddings=tied, use_cache=False, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    return (model if device is None else model.to(device)).train()


def checkpointed(model: Any, reentrant: bool) -> Any:
    """Recompute every layer in backward; the method's name changed within transformers 5."""
    new = getattr(model, "activation_checkpointing_enable", None)
    if new is not None:
        new({"use_reentrant": reentrant})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def batches(n: int, *, device: str = "cpu", size: int = 2, seq: int = 24, seed: int = 1) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (size, seq), generator=g).to(device) for _ in range(n)]


def train(
    model: nn.Module,
    optimizer: Any,
    data: list[torch.Tensor],
    *,
    accumulation: int = 1,
    clip: float | None = None,
    scheduler: Any = None,
    hint: bool = True,
    before_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train over `data`; returns the loss of each step. `clip` is for torch's optimizer, ours has its own."""
    losses = []
    for i in range(len(data) // accumulation):
        total = 0.0
        for k in range(accumulation):
            x = data[i * accumulation + k]
            last = k == accumulation - 1
            quiet = hint and not last and isinstance(optimizer, OffloadAdamW)
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                loss = model(input_ids=x, labels=x).loss / accumulation
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if before_step is not None:
            before_step(i)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def digest(model: nn.Module, optimizer: OffloadAdamW) -> str:
    """Hash of weights, masters, moments and step counts: equal digests mean equal bits."""
    optimizer.synchronize()
    engine, h = optimizer.engine, hashlib.sha256()
    for p in engine.params:
        h.update(p.name.encode() + int(engine.steps[p.index]).to_bytes(8, "little"))
        h.update(p.param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            h.update(engine.weights.gather(p, kind).contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


class Interrupted(NamedTuple):
    """What came of trainings that SIGINT was sent to."""

    interrupted: int
    """How many it stopped."""
    ahead: int
    """How many of them stood before a step that had begun to speculate."""


def interrupt_at_random(
    request: pytest.FixtureRequest,
    make: Callable[[], tuple[nn.Module, OffloadAdamW]],
    data: list[torch.Tensor],
    *,
    rounds: int,
    between_s: tuple[float, float],
    seed: int,
) -> Interrupted:
    """Train over `data` again and again with a SIGINT at a random moment; after zero_grad() the bits must be those of
    a step boundary, and training must go on from there as if nothing had been."""
    expected: dict[int, str] = {}
    model, opt = make()
    with opt:
        for i, x in enumerate(data):
            train(model, opt, [x])
            expected[i + 1] = digest(model, opt)
    rng, interrupted, ahead = random.Random(seed), 0, 0
    # A process started in the background ignores SIGINT, and Python leaves it so.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    for _ in range(rounds):
        model, opt = make()
        with opt:
            opt.engine.worker.set_delay_us(300)
            timer = threading.Timer(rng.uniform(*between_s), os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                train(model, opt, data)
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            ahead += opt.engine.speculation.open
            opt.zero_grad()
            done = opt.stats.step
            if done:
                assert digest(model, opt) == expected[done]
            train(model, opt, data[done:])
            assert digest(model, opt) == expected[len(data)]
    return Interrupted(interrupted, ahead)


def run_plan(dtype: torch.dtype, data: list[torch.Tensor], *, device: str = "cpu", delay_us: int = 0, accumulation: int = 1, hint: bool = True, lr: float = 1e-3, model: Callable[..., nn.Module] = llama, **kwargs: Any) -> tuple[str, list[float]]:  # fmt: skip  # noqa: E501
    """Train a fresh model under a plan; returns (digest, losses)."""
    m = model(dtype, device=device)
    with OffloadAdamW(m, lr=lr, weight_decay=0.1, max_grad_norm=1.0, **kwargs) as opt:
        opt.engine.worker.set_delay_us(delay_us)
        with warnings.catch_warnings():
            if not hint:
                warnings.simplefilter("ignore", UserWarning)
            losses = train(m, opt, data, accumulation=accumulation, hint=hint)
        return digest(m, opt), losses


class Autocast(nn.Module):
    """Runs `inner` under autocast to bf16."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(**kwargs)


def ctrl_c(*_):
    """In place of a call that Ctrl-C comes into."""
    raise KeyboardInterrupt
