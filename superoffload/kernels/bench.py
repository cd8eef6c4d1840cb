"""CPU Adam beside its peers: interleaved in one process, on the same arrays, medians, with the Adam-shaped stream as
the ceiling. What `superoffload bench adam` prints.

Bandwidth on a shared machine drifts by tens of per cent within minutes, so only ratios within one round are compared:
every round runs every contender once, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from superoffload import kernels
from superoffload.kernels.undo import UndoRecord, adam_record, adam_undo, adam_undo_redo
from superoffload.units import ADAM_STREAM_BYTES, GB

HYPER: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
PATH_BYTES = {"ours": 28, "torch": 40}
"""Bytes per parameter of a whole step with 16-bit gradient and weights: one pass, or cast + Adam + cast."""


def bench_adam(
    *,
    params: int = 64_000_000,
    threads: Sequence[int] | None = None,
    rounds: int = 7,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time the kernels against torch (and DeepSpeed's CPU Adam, where it is installed).

    Args:
        params: elements of each array; several times the last-level cache.
        threads: thread counts; default: one and all cores.
        rounds: interleaved rounds per thread count, after one that is thrown away.

    Returns:
        Machine, configuration, and per thread count the median seconds of each contender and the ratios.
    """
    counts = list(threads) if threads else sorted({1, kernels.available_cores()})
    before = torch.get_num_threads()
    arrays = _Arrays(params)
    results = []
    try:
        for n in counts:
            if progress:
                progress(f"{n} threads, {rounds} rounds over {params / 1e6:.0f}M parameters")
            torch.set_num_threads(n)
            results.append(_measure(arrays, n, rounds))
    finally:
        torch.set_num_threads(before)
    top = results[-1]
    headline = ("vs_torch_fused", "path_vs_torch", "ceiling_fraction", "undo_overhead")
    return {
        "what": "adam",
        "status": "measured",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "params": params,
        "rounds": rounds,
        "isa": kernels.capabilities()["active"],
        **{key: top["ratios"][key] for key in headline},
        "threads": results,
    }


class _Arrays:
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
        self.record = UndoRecord(n)


def _contenders(a: _Arrays, threads: int) -> dict[str, Callable[[], None]]:
    state = (a.p, a.m, a.v)
    parameter = torch.nn.Parameter(a.p)
    step = torch.tensor(10.0)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    optimizer.state[parameter] = {"step": step, "exp_avg": a.m, "exp_avg_sq": a.v}

    def fused(gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        optimizer.step()

    def torch_path() -> None:
        a.scratch.copy_(a.g16)
        a.scratch.mul_(0.7)  # unscale and clip
        fused(a.scratch)
        a.w16.copy_(a.p)

    def undo() -> None:
        adam_undo(*state, a.g16, a.record, out16=a.w16, threads=threads)

    p, m, v, g = (int(x.data_ptr()) for x in (*state, a.g32))
    found: dict[str, Callable[[], None]] = {
        "stream": lambda: kernels.native.adam_stream(p, m, v, g, a.n, threads),
        "ours_fp32": lambda: kernels.adam_step(*state, a.g32, **HYPER, step=11, threads=threads),
        "torch_fused_fp32": lambda: fused(a.g32),
        "ours_path": lambda: kernels.adam_step(
            *state, a.g16, **HYPER, step=11, grad_scale=0.7, out16=a.w16, threads=threads
        ),
        "torch_path": torch_path,
        "ours_record": lambda: adam_record(
            *state, a.g16, a.record, **HYPER, step=11, grad_scale=0.7, out16=a.w16, threads=threads
        ),
        "ours_undo": undo,
    }
    deepspeed = _deepspeed(parameter)
    if deepspeed is not None:

        def deepspeed_fp32() -> None:
            parameter.grad = a.g32
            deepspeed()

        def deepspeed_path() -> None:
            a.scratch.copy_(a.g16)
            a.scratch.mul_(0.7)
            parameter.grad = a.scratch
            deepspeed()
            a.w16.copy_(a.p)

        found.update(deepspeed_fp32=deepspeed_fp32, deepspeed_path=deepspeed_path)
    return found


def _deepspeed(parameter: torch.nn.Parameter) -> Callable[[], None] | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except Exception:  # not installed, or its extension cannot be built here
        return None
    step: Callable[[], None] = DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.01, adamw_mode=True).step
    return step


def _measure(a: _Arrays, threads: int, rounds: int) -> dict[str, Any]:
    contenders = _contenders(a, threads)
    seconds: dict[str, list[float]] = {name: [] for name in [*contenders, "ours_undo_redo"]}

    def timed(name: str, run: Callable[[], None]) -> None:
        start = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - start)

    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, run in contenders.items():
                timed(name, run)
            adam_record(
                *(a.p, a.m, a.v), a.g16, a.record, **HYPER, step=11, grad_scale=0.7, out16=a.w16, threads=threads
            )
            timed(
                "ours_undo_redo",
                lambda: adam_undo_redo(a.p, a.m, a.v, a.g16, a.record, grad_scale=0.3, out16=a.w16, threads=threads),
            )
    kept = {name: times[1:] for name, times in seconds.items()}  # the first round warms up

    def ratio(slow: str, fast: str) -> float:
        return round(statistics.median(s / f for s, f in zip(kept[slow], kept[fast], strict=True)), 3)

    ratios = {
        "vs_torch_fused": ratio("torch_fused_fp32", "ours_fp32"),
        "path_vs_torch": ratio("torch_path", "ours_path"),
        "ceiling_fraction": ratio("stream", "ours_fp32"),
        "undo_overhead": round(ratio("ours_record", "ours_path") - 1, 3),
        "undo_vs_step": ratio("ours_undo", "ours_path"),
        "undo_redo_vs_step": ratio("ours_undo_redo", "ours_path"),
    }
    if "deepspeed_fp32" in kept:
        ratios["vs_deepspeed"] = ratio("deepspeed_fp32", "ours_fp32")
        ratios["path_vs_deepspeed"] = ratio("deepspeed_path", "ours_path")
    median = {name: statistics.median(times) for name, times in kept.items()}
    return {
        "threads": threads,
        "seconds": {name: round(t, 6) for name, t in median.items()},
        "gb_per_s": {
            name: round(ADAM_STREAM_BYTES * a.n / median[name] / GB, 1)
            for name in ("stream", "ours_fp32", "torch_fused_fp32", "ours_path")
        },
        "ratios": ratios,
    }


def machine() -> dict[str, str]:
    """What the figures belong to."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": name,
        "cores": str(kernels.available_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def as_table(result: dict[str, Any]) -> str:
    """Markdown, one line per thread count."""
    head = "| threads | ours GB/s | stream GB/s | vs torch fused | path vs torch | record | undo | undo-redo |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in result["threads"]:
        r, b = row["ratios"], row["gb_per_s"]
        lines.append(
            f"| {row['threads']} | {b['ours_fp32']} | {b['stream']} | {r['vs_torch_fused']:.2f}x | "
            f"{r['path_vs_torch']:.2f}x | {r['undo_overhead']:+.1%} | {r['undo_vs_step']:.2f} | "
            f"{r['undo_redo_vs_step']:.2f} |"
        )
    return "\n".join(lines)
