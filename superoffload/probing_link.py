"""Measures the link between GPU and CPU, and what it and CPU Adam leave to each other of the host's memory."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from superoffload import kernels
from superoffload.hardware import Curve, Link
from superoffload.profiling_state import Clock
from superoffload.units import ADAM_STREAM_BYTES, GB, MB

LINK_SIZES_MB = (1, 4, 16, 64, 256)
ADAM_PARAMS = 1 << 26
"""Parameters of the Adam measurement where memory is scarce: 1.07 GB of state and gradient."""
LARGE_MEMORY_BYTES = 64e9
"""Host memory from which on four times as much is read and written: a server's last cache of 0.26 GB would else serve a
part of it again and again, which a training's 16 bytes for each parameter are too many for."""

Progress = Callable[[str], None]


def measure_link(device: torch.device, progress: Progress) -> tuple[Link, str]:
    """Bandwidth over transfer size in both directions and at once, and one phrase on how it was measured."""
    largest = int(LINK_SIZES_MB[-1] * MB)
    host, pinned = _host_buffers(largest, device)
    near = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    curves: dict[str, list[float]] = {"down": [], "up": []}
    clock = Clock(device)
    for size_mb in LINK_SIZES_MB:
        progress(f"link, {size_mb} MB")
        n = int(size_mb * MB)
        repeat = max(1, int(128 / size_mb))
        for way in ("down", "up"):
            target, source = (host[0], near[0]) if way == "down" else (near[1], host[1])
            # one piece after another, so that without a GPU no piece is still in a cache
            targets = [target[i * n : (i + 1) * n] for i in range(repeat)]
            sources = [source[i * n : (i + 1) * n] for i in range(repeat)]

            def copies(pairs: tuple[Any, ...] = tuple(zip(targets, sources, strict=True))) -> None:
                for t, s in pairs:
                    t.copy_(s, non_blocking=True)

            curves[way].append(n * repeat / median_seconds(copies, clock) / GB)
    progress("link, both ways at once")
    both = _measure_both(device, host, near)
    sizes = tuple(float(s) for s in LINK_SIZES_MB)
    how = "copies from and to pinned memory" if pinned else "copies from and to pageable memory"
    link = Link(
        down=Curve(size_mb=sizes, gb_per_s=tuple(curves["down"])),
        up=Curve(size_mb=sizes, gb_per_s=tuple(curves["up"])),
        both_gb_per_s=both,
    )
    return link, how if device.type == "cuda" else "there is no GPU: memory copies within the host"


def _host_buffers(n: int, device: torch.device) -> tuple[list[torch.Tensor], bool]:
    buffers = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a low memlock limit: measured as it is, and said in `sources`
            return [b.pin_memory() for b in buffers], True
    return buffers, False


def _measure_both(device: torch.device, host: list[torch.Tensor], near: list[torch.Tensor]) -> float:
    """Sum of both directions in GB/s while both run."""
    n, repeat = host[0].numel(), 4
    if device.type == "cuda":
        streams = _streams(device)
        rates = []
        for _ in range(3):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            _enqueue(streams, host, near, 4 * repeat)
            torch.cuda.synchronize(device)
            rates.append(2 * n * 4 * repeat / (time.perf_counter() - start) / GB)
        return statistics.median(rates)

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(repeat):
            target.copy_(source)

    workers = [threading.Thread(target=run, args=pair) for pair in ((host[0], near[0]), (near[1], host[1]))]
    start = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return 2 * n * repeat / (time.perf_counter() - start) / GB


def _streams(device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(2)]


def _enqueue(
    streams: list[Any], host: list[torch.Tensor], near: list[torch.Tensor], repeat: int, ways: str = "both"
) -> None:
    pairs = {"down": (host[0], near[0]), "up": (near[1], host[1])}
    for stream, (way, (target, source)) in zip(streams, pairs.items(), strict=True):
        if ways in (way, "both"):
            with torch.cuda.stream(stream):
                for _ in range(repeat):
                    target.copy_(source, non_blocking=True)


def scale_for(memory_bytes: float) -> int:
    """How many times the small measurements' memory is used on a machine with so much."""
    return 4 if memory_bytes >= LARGE_MEMORY_BYTES else 1


def measure_contention(device: torch.device, threads: int, adam_alone: float, scale: int = 1) -> tuple[float, float]:
    """DRAM cap in GB/s and what a downloaded byte costs of it, from Adam on all threads beside copies.

    Uploads only read memory: Adam beside them shows the cap. Beside downloads the same cap is shared with writes; where
    less is left to Adam than their bytes explain, each of them costs more than one. Without a GPU there is no DMA.
    """
    if device.type != "cuda":
        return adam_alone, 1.0
    n = int(scale * LINK_SIZES_MB[-1] * MB)
    host, _ = _host_buffers(n, device)
    near = [torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2)]
    state = [torch.zeros(scale * ADAM_PARAMS) for _ in range(4)]
    run_adam(state, threads)
    streams = _streams(device)
    rates: dict[str, tuple[float, float]] = {}
    for ways in ("down", "up", "both"):
        rates[ways] = _adam_beside(device, streams, host, near, state, threads, ways)
    cap = max(adam_alone, sum(rates["up"]), sum(rates["both"]))
    adam, down = rates["down"]
    slowed = adam < 0.95 * adam_alone
    return cap, max(1.0, (cap - adam) / down) if slowed else 1.0


def _adam_beside(
    device: torch.device,
    streams: list[Any],
    host: list[torch.Tensor],
    near: list[torch.Tensor],
    state: list[torch.Tensor],
    threads: int,
    ways: str,
) -> tuple[float, float]:
    """GB/s of Adam and of the copies while both run for about a third of a second."""
    n = host[0].numel()
    repeat = int(60 * LINK_SIZES_MB[-1] * MB) // n
    copied, ended = threading.Event(), [0.0]
    torch.cuda.synchronize(device)
    start = time.perf_counter()

    def wait() -> None:
        torch.cuda.synchronize(device)
        ended[0] = time.perf_counter()
        copied.set()

    _enqueue(streams, host, near, repeat, ways)
    waiter = threading.Thread(target=wait)
    waiter.start()
    steps = 0
    while not copied.is_set():
        run_adam(state, threads)
        steps += 1
    adam_seconds = time.perf_counter() - start
    waiter.join()
    moved = n * repeat * (2 if ways == "both" else 1)
    return steps * state[0].numel() * ADAM_STREAM_BYTES / adam_seconds / GB, moved / (ended[0] - start) / GB


def run_adam(state: list[torch.Tensor], threads: int) -> None:
    """One AdamW step of the project's own kernel on master weights, moments and gradient."""
    p, m, v, g = state
    kernels.adam_step(
        p, m, v, g, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, threads=threads
    )


def median_seconds(work: Callable[[], object], clock: Clock, repeats: int = 5) -> float:
    """Median seconds of `work` after two warm-up calls."""
    seconds: list[float] = []
    for i in range(repeats + 2):
        start = clock.now()
        work()
        stop = clock.now()
        clock.synchronize()
        if i >= 2:
            seconds.append(clock.seconds(start, stop))
    return max(statistics.median(seconds), 1e-9)
