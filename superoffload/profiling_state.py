"""What measuring must not change, and how it reads the time."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from superoffload.engine.activations import plain_forwards


class Clock:
    """Time stamps on the device's own time line: CUDA events on a GPU, the processor's counter elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two stamps; both must have passed (`synchronize`)."""
        return float(start.elapsed_time(stop)) / 1e3 if self.cuda else float(stop - start)


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the body in training mode without activation checkpointing, then restore everything it can have changed.

    Kept: gradients (the same tensors), buffers (bits and identity), random states of Python, numpy, torch and the
    device, train/eval mode of each module, checkpointing and cache switches. Hooks that others set on parameters are
    lifted meanwhile, so that an optimizer attached to the model sees nothing of it.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    accumulate_hooks = [(p, dict(h)) for p, _ in gradients if (h := p._post_accumulate_grad_hooks)]
    modes = [(m, m.training) for m in model.modules()]
    buffers = [
        (m, key, b, None if b is None else b.detach().clone()) for m in model.modules() for key, b in m._buffers.items()
    ]
    switches: list[tuple[Any, str, Any]] = [
        (m, "gradient_checkpointing", m.gradient_checkpointing)
        for m in model.modules()
        if isinstance(getattr(m, "gradient_checkpointing", None), bool)
    ]
    config = getattr(model, "config", None)
    if isinstance(getattr(config, "use_cache", None), bool):
        switches.append((config, "use_cache", config.use_cache))  # type: ignore[union-attr]
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        for p, _ in gradients:
            p.grad = None
        for p, _ in accumulate_hooks:
            p._post_accumulate_grad_hooks.clear()
        for owner, name, _ in switches:
            setattr(owner, name, False)
        model.train()
        with plain_forwards(model):
            yield
    finally:
        for owner, name, value in switches:
            setattr(owner, name, value)
        for p, hooks in accumulate_hooks:
            p._post_accumulate_grad_hooks.update(hooks)
        for p, grad in gradients:
            p.grad = grad
        for m, training in modes:
            m.training = training
        with torch.no_grad():
            for m, key, buffer, value in buffers:
                if buffer is not None and value is not None and not _same_bits(buffer, value):
                    buffer.copy_(value)
                m._buffers[key] = buffer
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A buffer that did not change is not written, so that its version counter stays too."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
