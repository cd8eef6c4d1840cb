"""Step time of the 3.14B Llama-shaped model: this engine beside its peers, each in a process of its own, in one run.

    python benchmarks/bench_step.py --out results.json            # on a machine with a GPU
    python benchmarks/bench_step.py --size tiny --device cpu      # dry run anywhere

Modes: `limit` is forward and backward alone (`limit:compile=1:recompute=none`: compiled layers, nothing recomputed; of
several limits the others are compared with the shortest); `gpu` keeps everything on the GPU (fp32 master, torch's fused
AdamW); `fsdp2` is FSDP2 with CPU offload and fused AdamW; `offload` is torch's fused AdamW on the CPU with copies
and casts written by hand; `engine:N` is OffloadAdamW with N per cent of its buckets retained, and plan fields may
follow (`engine:40:speculate=off`; see step_modes.py for the others).
Step time is the median of the differences between the ends of successive steps, after a warm-up; what overlaps the next
forward is part of the steady state of every mode. Model FLOPs are 6·N·tokens plus causal attention, no recompute.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from step_modes import SIZES, Mode, build_mode, busy_thread

PEAK_BF16_TFLOPS = 990.0


class Clock:
    """Marks the end of each step on the device, without waiting for it."""

    def __init__(self, cuda: bool):
        self.cuda, self.marks = cuda, []  # type: ignore[var-annotated]

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]


def run_mode(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    torch.manual_seed(1)
    x = torch.randint(0, SIZES[args.size][4], (args.tokens // args.seq, args.seq), device=args.device)
    mode: Mode = build_mode(args, x)
    opt, extra = mode.optimizer, dict(mode.facts)
    clock = Clock(cuda)
    losses = []
    setup_peak = torch.cuda.max_memory_allocated() if cuda else 0
    for i in range(args.warmup + args.steps):
        if i == args.warmup - 1:  # the last step that is not timed
            gc.collect()
            gc.freeze()  # as `superoffload train` does: a full collection stops the host for 0.3 s
            if mode.interval_ms is not None:
                sys.setswitchinterval(mode.interval_ms / 1e3)
            if mode.busy:
                busy_thread()  # not before: beside it building a model takes minutes
                time.sleep(0.1)  # until it has had Python's lock once, a thread that never sleeps keeps it
        if i == args.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = mode.step(i)
        clock.mark()
        losses.append(loss.detach())
    times = clock.seconds()[args.warmup - 1 :]
    if opt is not None:
        extra.update(norm=opt.stats.grad_norm, pinned_gb=opt.stats.pinned_bytes / 1e9,
                     host_gb=opt.stats.host_bytes / 1e9, ledger=summary(opt.ledger[args.warmup:]))  # fmt: skip
        if extra["traced"]:
            trace = opt.trace(tokens_per_step=args.tokens, peak_bf16_tflops=PEAK_BF16_TFLOPS)
            Path(args.trace).write_text(trace.to_json(indent=None))
            extra["busy_s"] = {
                lane: round(trace.busy_s(lane), 4) for lane in ("gpu", "link_down", "link_up", "cpu_adam")
            }
            extra["stalls"] = [s.cause for s in sorted(trace.stalls, key=lambda s: -s.duration_s)[:3]]
    hidden, layers = SIZES[args.size][:2]
    flops = 6 * mode.params * args.tokens + 12 * layers * hidden * args.seq * args.tokens / 2
    median = statistics.median(times)
    return {
        "mode": args.mode, "size": args.size, "params": mode.params, "tokens": args.tokens, "seq": args.seq,
        "recompute": bool(args.recompute), "clip": args.clip, "step_s": round(median, 4),
        "mean_s": round(statistics.mean(times), 4), "min_s": round(min(times), 4), "max_s": round(max(times), 4),
        "tokens_per_s": round(args.tokens / median), "model_tflops": round(flops / median / 1e12, 1),
        "mfu": round(flops / median / 1e12 / PEAK_BF16_TFLOPS, 4),
        "steps_s": [round(t, 4) for t in times], "switch_interval_ms": round(sys.getswitchinterval() * 1e3, 3),
        "peak_gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if cuda else 0.0,
        "setup_peak_gpu_gb": round(setup_peak / 1e9, 1), "first_loss": round(float(losses[0]), 4),
        "last_loss": round(float(losses[-1]), 4), **extra,
    }  # fmt: skip


def summary(ledger: Any) -> dict[str, Any]:
    """Verdicts, and medians of what the steps cost."""
    verdicts = [r.verdict for r in ledger]
    names = ("speculated", "undone", "waiting_tiles", "speculated_s", "undo_s", "after_verdict_s", "waited_s")
    medians = {n: round(statistics.median(getattr(r, n) for r in ledger), 4) for n in names} if ledger else {}
    return {"verdicts": {v: verdicts.count(v) for v in dict.fromkeys(verdicts)}, **medians}


def machine(device: str) -> dict[str, str]:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())  # fmt: skip
    facts = {"cpu": cpu, "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version(),
             "torch": torch.__version__}  # fmt: skip
    if device == "cuda":
        facts.update(gpu=torch.cuda.get_device_name(), cuda=str(torch.version.cuda))
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="limit,gpu,fsdp2,engine:0,engine:40", help="comma-separated")
    parser.add_argument("--size", default="3b", choices=SIZES)
    parser.add_argument("--tokens", default="8192", help="comma-separated token counts per step")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--recompute", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--trace", default="", help="folder for measured traces of the engine modes")
    parser.add_argument("--mode-timeout", type=float, default=120, help="seconds that one mode may take")
    parser.add_argument("--out", default="")
    parser.add_argument("--mode", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:  # the child process: one mode
        args.tokens = int(args.tokens)
        print("RESULT " + json.dumps(run_mode(args)), flush=True)
        os._exit(0)  # FSDP2's process group needs no farewell
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens.split(","):
        for mode in args.modes.split(","):
            command = [sys.executable, __file__, "--mode", mode, "--tokens", tokens]
            for name in ("size", "seq", "steps", "warmup", "clip", "bucket_mb", "recompute", "device"):
                command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
            if args.threads is not None:
                command += ["--threads", str(args.threads)]
            if args.trace and mode.startswith("engine") and "trace=0" not in mode:
                Path(args.trace).mkdir(parents=True, exist_ok=True)
                name = f"step_{args.size}_{tokens}_{mode.replace(':', '_').replace('=', '-')}.json"
                command += ["--trace", str(Path(args.trace) / name)]
            row = run_child(command, args.mode_timeout) | {"mode": mode, "tokens": int(tokens)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.out:
                result = {"what": "step", "date": datetime.date.today().isoformat(), "status": "measured",
                          "machine": machine(args.device), "arguments": vars(args), "rows": rows}  # fmt: skip
                Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


def run_child(command: list[str], timeout: float) -> dict[str, Any]:
    """The row of one mode, or the end of what it complained about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {timeout:g} s"}
    line = next((r for r in done.stdout.splitlines() if r.startswith("RESULT ")), None)
    return json.loads(line[7:]) if line else {"failed": done.stderr[-1500:]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| tokens | mode | step s | of the limit | model TFLOPS | peak GPU GB |", "|---|---|---|---|---|---|"]
    limit: dict[int, float] = {}
    for r in rows:
        if r["mode"].split(":")[0] == "limit" and "step_s" in r:
            limit[r["tokens"]] = min(r["step_s"], limit.get(r["tokens"], r["step_s"]))
    for r in rows:
        if "step_s" not in r:
            lines.append(f"| {r['tokens']} | {r['mode']} | failed | | | |")
            continue
        share = f"{limit[r['tokens']] / r['step_s']:.1%}" if r["tokens"] in limit else ""
        lines.append(
            f"| {r['tokens']} | {r['mode']} | {r['step_s']:.3f} | {share} | {r['model_tflops']} | {r['peak_gpu_gb']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
