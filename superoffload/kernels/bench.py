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
from superoffload.kernels.peers import (
    HYPER,
    SCALE,
    STEPS_BEFORE,
    Arrays,
    Contender,
    deepspeed_contenders,
    torch_contenders,
)
from superoffload.kernels.undo import UndoRecord, adam_record, adam_undo, adam_undo_redo
from superoffload.units import ADAM_STREAM_BYTES, GB

RECORD_BYTES = 3
"""Per parameter, written by a recorded step and read to take it back; the escape list is nearly empty."""
HEADLINE = (
    "vs_torch_fused",
    "path_vs_torch",
    "vs_deepspeed",
    "path_vs_deepspeed",
    "ceiling_fraction",
    "undo_overhead",
    "undo_vs_step",
    "undo_redo_vs_step",
)
CALLS = 500
REST_US = 300
"""Between calls that are to find the threads asleep."""


def bench_adam(
    *,
    params: int = 64_000_000,
    threads: Sequence[int] | None = None,
    rounds: int = 7,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time the kernels against torch and DeepSpeed's CPU Adam.

    Args:
        params: elements of each array; several times the last-level cache.
        threads: thread counts; default: one and all cores.
        rounds: interleaved rounds per thread count, after one that is thrown away.

    Returns:
        Machine, configuration, and per thread count the median seconds of each contender, bytes per parameter, GB/s,
        ratios and the overhead of a call. `deepspeed` is its version, or why it does not take part; its ratios are
        then None. The headline figures are those of the last thread count.
    """
    counts = list(threads) if threads else sorted({1, kernels.available_cores()})
    before = torch.get_num_threads()
    arrays = Arrays(params)
    record = UndoRecord(params)
    if progress:
        progress("DeepSpeed's CPU Adam is compiled at its first use: a minute")
    theirs, deepspeed = deepspeed_contenders(arrays)
    theirs = {**torch_contenders(arrays), **theirs}
    results = []
    try:
        for n in counts:
            if progress:
                progress(f"{n} threads, {rounds} rounds over {params / 1e6:.0f}M parameters")
            torch.set_num_threads(n)
            results.append(_measure(arrays, record, theirs, n, rounds))
    finally:
        torch.set_num_threads(before)
    top = results[-1]
    return {
        "what": "adam",
        "status": "measured",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "params": params,
        "rounds": rounds,
        "isa": kernels.capabilities()["active"],
        "deepspeed": deepspeed,
        **{key: top["ratios"][key] for key in HEADLINE},
        "call_overhead_us": top["call_overhead_us"]["total"],
        "threads": results,
    }


def _ours(a: Arrays, record: UndoRecord, threads: int) -> dict[str, Contender]:
    """In this order: the undo takes back what the recorded step before it did."""
    state = (a.p, a.m, a.v)
    p, m, v, g = (int(x.data_ptr()) for x in (*state, a.g32))
    step: dict[str, Any] = {**HYPER, "step": STEPS_BEFORE + 1, "threads": threads}

    def recorded() -> None:
        adam_record(*state, a.g16, record, **step, grad_scale=SCALE, out16=a.w16)

    return {
        "stream": Contender(lambda: kernels.native.adam_stream(p, m, v, g, a.n, threads), ADAM_STREAM_BYTES),
        "ours_fp32": Contender(lambda: kernels.adam_step(*state, a.g32, **step), ADAM_STREAM_BYTES),
        "ours_path": Contender(lambda: kernels.adam_step(*state, a.g16, **step, grad_scale=SCALE, out16=a.w16), 28),
        "ours_record": Contender(recorded, 28 + RECORD_BYTES),
        "ours_undo": Contender(
            lambda: adam_undo(*state, a.g16, record, out16=a.w16, threads=threads), 28 + RECORD_BYTES
        ),
        "ours_record_again": Contender(recorded, 28 + RECORD_BYTES),
        "ours_undo_redo": Contender(
            lambda: adam_undo_redo(*state, a.g16, record, grad_scale=0.3, out16=a.w16, threads=threads),
            28 + RECORD_BYTES,
        ),
    }


def _measure(a: Arrays, record: UndoRecord, theirs: dict[str, Contender], threads: int, rounds: int) -> dict[str, Any]:
    ours = _ours(a, record, threads)
    # Each step next to the peer that it is compared with: what drifts, drifts for both.
    order = ("stream", "ours_fp32", *(k for k in theirs if k.endswith("fp32")))
    contenders = {**ours, **theirs}
    contenders = {k: contenders[k] for k in (*order, *(k for k in contenders if k not in order))}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for i in range(rounds + 1):
            for name, contender in contenders.items():
                start, cpu = time.perf_counter(), time.process_time()
                contender.run()
                taken = time.perf_counter() - start
                if i:  # the first round warms up
                    seconds[name].append(taken)
                    busy[name].append((time.process_time() - cpu) / taken)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "threads": threads,
        "seconds": {name: round(t, 6) for name, t in median.items()},
        "bytes_per_param": {name: c.bytes_per_param for name, c in contenders.items()},
        "gb_per_s": {name: round(c.bytes_per_param * a.n / median[name] / GB, 1) for name, c in contenders.items()},
        "cores_busy": {name: round(statistics.median(shares), 2) for name, shares in busy.items()},
        "ratios": ratios(seconds),
        "call_overhead_us": call_overhead_us(threads),
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, float | None]:
    """Medians over the rounds of the ratios within a round.

    Args:
        seconds: contender -> seconds of each round, in the order of the rounds.

    Returns:
        `vs_` and `path_vs_`: how many times longer the peer takes, of several ways of the peer the best of each
        round; the rest: how many times longer than a step. None where the peer is absent.
    """

    def ratio(slow: Sequence[str], fast: Sequence[str]) -> float | None:
        if not all(name in seconds for name in (*slow, *fast)):
            return None
        rounds = range(len(seconds[fast[0]]))
        best = [(min(seconds[s][i] for s in slow), min(seconds[f][i] for f in fast)) for i in rounds]
        return round(statistics.median(s / f for s, f in best), 3)

    overhead = ratio(["ours_record"], ["ours_path"])
    return {
        "vs_torch_fused": ratio(["torch_fused_fp32"], ["ours_fp32"]),
        "vs_deepspeed": ratio(["deepspeed_fp32"], ["ours_fp32"]),
        "path_vs_torch": ratio(["torch_path", "torch_path_grad_scale"], ["ours_path"]),
        "path_vs_torch_unscaled": ratio(["torch_path_unscaled"], ["ours_path"]),
        "path_vs_deepspeed": ratio(["deepspeed_path"], ["ours_path"]),
        "path_vs_deepspeed_unscaled": ratio(["deepspeed_path_unscaled"], ["ours_path"]),
        "ceiling_fraction": ratio(["stream"], ["ours_fp32"]),
        "undo_overhead": None if overhead is None else round(overhead - 1, 3),
        "undo_vs_step": ratio(["ours_undo"], ["ours_path"]),
        "undo_vs_recorded": ratio(["ours_undo"], ["ours_record"]),
        "undo_redo_vs_step": ratio(["ours_undo_redo"], ["ours_path"]),
        "undo_redo_vs_recorded": ratio(["ours_undo_redo"], ["ours_record_again"]),
    }


def call_overhead_us(threads: int) -> dict[str, float]:
    """What a step costs besides its work: medians in µs, by part.

    Returns:
        ``python``: `adam_step` of one element with all checks; ``native``: the same without Python's checks;
        ``pool`` and ``pool_asleep``: sharing four empty tiles with threads that worked just now, and that sleep;
        ``total``: a native call that finds the threads asleep, the dearest there is.
    """
    p, m, v, g = (torch.rand(1) for _ in range(4))
    at = tuple(int(x.data_ptr()) for x in (p, m, v, g))

    def median_us(call: Callable[[], None]) -> float:
        taken = []
        for _ in range(CALLS):
            start = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - start)
        return statistics.median(taken) / 1e3

    found = {
        "python": median_us(lambda: kernels.adam_step(p, m, v, g, **HYPER, step=11, threads=threads)),
        "native": median_us(
            lambda: kernels.native.adam_step(
                at[0], at[1], at[2], at[3], 0, 0, 0, 1, 1e-4, 0.9, 0.999, 1e-8, 0.01, 11, 1.0, threads
            )
        ),
    }
    if kernels.capabilities()["compiled"]:
        pool = kernels.native.Pool(threads)
        found["pool"] = statistics.median(pool.call_ns(4, CALLS, 0)) / 1e3
        found["pool_asleep"] = statistics.median(pool.call_ns(4, CALLS, REST_US)) / 1e3
    found["total"] = found["native"] + found.get("pool_asleep", 0.0)
    return {name: round(us, 2) for name, us in found.items()}


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
    """Markdown, one line per thread count, and who is missing."""
    columns = ("threads", "ours GB/s", "stream GB/s", "vs torch fused", "vs DeepSpeed", "path vs torch",
               "path vs DeepSpeed", "record", "undo", "undo-redo", "call µs")  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]

    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}x"

    for row in result["threads"]:
        r, b = row["ratios"], row["gb_per_s"]
        cells = (
            row["threads"], b["ours_fp32"], b["stream"], times(r["vs_torch_fused"]), times(r["vs_deepspeed"]),
            times(r["path_vs_torch"]), times(r["path_vs_deepspeed"]), f"{r['undo_overhead']:+.1%}",
            f"{r['undo_vs_step']:.2f}", f"{r['undo_redo_vs_step']:.2f}", f"{row['call_overhead_us']['total']:.1f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if any(row["ratios"]["vs_deepspeed"] is None for row in result["threads"]):
        lines += ["", f"DeepSpeed's CPU Adam: {result['deepspeed']}"]
    return "\n".join(lines)
