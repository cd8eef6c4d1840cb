"""What the benchmark measures CPU Adam against: torch's fused AdamW and DeepSpeed's CPU Adam, on the same arrays, with
the casts that a step with 16-bit gradient and weights needs around them.

torch and DeepSpeed run on OpenMP threads; `torch.set_num_threads` sets them for both as long as they share one OpenMP
runtime. The result says how many cores each contender kept busy, so that a setting that was not followed is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
STEPS_BEFORE = 10
SCALE = 0.7
"""Unscaling and clipping of the gradient, in one factor."""
_TORCH_HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Contender(NamedTuple):
    """One way to take a step."""

    run: Callable[[], Any]
    bytes_per_param: int
    """What it reads and writes, without reads for ownership of arrays that are only written."""


class Arrays:
    """The arrays all contenders work on, with realistic contents (zeros would run faster)."""

    def __init__(self, n: int):
        g = torch.Generator().manual_seed(0)
        self.n = n
        self.p = torch.randn(n, generator=g) * 0.02
        self.m = torch.randn(n, generator=g) * 1e-4
        self.v = torch.rand(n, generator=g) * 1e-7
        self.g32 = torch.randn(n, generator=g) * 1e-3
        self.g16 = self.g32.to(torch.bfloat16)
        self.w16 = self.p.to(torch.bfloat16)
        self.scratch = torch.empty(n)


CAST, SCALE_PASS, ADAM, WRITE_BACK = 2 + 4, 4 + 4, 28, 4


def torch_contenders(a: Arrays) -> dict[str, Contender]:
    """torch's fused AdamW, alone and as a whole step.

    Two ways to scale are tried, a pass of its own and the `grad_scale` of the fused kernel (which writes the gradient
    back); ``torch_path_unscaled`` leaves it out, which is less than the step needs. Fresh results (``g16.float()``)
    and promotion inside ``torch.mul`` are several times slower than ``copy_``: their memory comes from the system.
    """
    parameter = torch.nn.Parameter(a.p)
    optimizer = torch.optim.AdamW([parameter], fused=True, **_TORCH_HYPER)
    state = {"step": torch.tensor(float(STEPS_BEFORE)), "exp_avg": a.m, "exp_avg_sq": a.v}
    optimizer.state[parameter] = state
    inside: Any = torch.optim.AdamW([parameter], fused=True, **_TORCH_HYPER)
    inside.state[parameter] = state
    inside.grad_scale, inside.found_inf = torch.tensor(1 / SCALE), torch.tensor(0.0)  # as GradScaler sets them

    def step(gradient: torch.Tensor, which: Any = optimizer) -> None:
        parameter.grad = gradient
        which.step()

    def path(scaled: bool, which: Any = optimizer) -> None:
        a.scratch.copy_(a.g16)
        if scaled:
            a.scratch.mul_(SCALE)
        step(a.scratch, which)
        a.w16.copy_(a.p)

    casts = 2 * CAST + ADAM
    return {
        "torch_fused_fp32": Contender(lambda: step(a.g32), ADAM),
        "torch_path": Contender(lambda: path(True), casts + SCALE_PASS),
        "torch_path_grad_scale": Contender(lambda: path(False, inside), casts + WRITE_BACK),
        "torch_path_unscaled": Contender(lambda: path(False), casts),
    }


def deepspeed_contenders(a: Arrays) -> tuple[dict[str, Contender], str]:
    """DeepSpeed's CPU Adam, alone and as a whole step, with its version; or nothing, with the reason. The first use
    compiles its extension, which takes a minute and needs g++ and ninja."""
    # Its CPU build: the extension for a GPU machine is the same Adam, but asks for nvcc.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    try:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ModuleNotFoundError as e:
        return {}, "not installed" if e.name == "deepspeed" else f"not usable: no module {e.name}"
    except Exception as e:
        return {}, f"not usable: {_told(e)}"
    parameter = torch.nn.Parameter(a.p)
    try:
        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **_TORCH_HYPER)
    except Exception as e:  # whatever a compiler may say
        return {}, f"{deepspeed.__version__}, not built: {_told(e)}"
    # Its own state would be zeros, in other memory.
    optimizer.state[parameter] = {"step": STEPS_BEFORE, "exp_avg": a.m, "exp_avg_sq": a.v}

    def step(gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        optimizer.step()

    def path(scaled: bool) -> None:
        a.scratch.copy_(a.g16)
        if scaled:
            a.scratch.mul_(SCALE)
        step(a.scratch)
        a.w16.copy_(a.p)

    casts = 2 * CAST + ADAM
    found = {
        "deepspeed_fp32": Contender(lambda: step(a.g32), ADAM),
        "deepspeed_path": Contender(lambda: path(True), casts + SCALE_PASS),
        "deepspeed_path_unscaled": Contender(lambda: path(False), casts),
    }
    return found, str(deepspeed.__version__)


def _told(e: BaseException) -> str:
    """The last line of the innermost cause: what a compiler or a loader said."""
    while e.__cause__ is not None:
        e = e.__cause__
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[-1].strip()[:300] if lines else ''}"


__all__ = ["HYPER", "SCALE", "STEPS_BEFORE", "Arrays", "Contender", "deepspeed_contenders", "torch_contenders"]
