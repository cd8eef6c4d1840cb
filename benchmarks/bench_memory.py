"""Memory: the plan that the cost model makes for a model and a memory, trained for a few steps, beside its prediction.

    python benchmarks/bench_memory.py --hardware probe.json --layers 52 --steps 3            # the largest model
    python benchmarks/bench_memory.py --model llama-3-8b --seq 8192 --tokens 131072 --gpu-gb 24,48,96,130 \
        --kinds limit,engine                                                                 # less GPU memory
    python benchmarks/bench_memory.py --kinds zero-offload --layers 20,22,24                 # the peer's largest
    python benchmarks/bench_memory.py --model tiny --device cpu --seq 128 --tokens 512       # dry run anywhere

The model is built without weights and filled at random where it is trained. Bytes on the GPU are the allocator's peak,
on the host the kernel's own figure for the process (VmHWM) and the pinned bytes that the driver was asked for.
`--gpu-gb` also caps the allocator, so that a plan that needs more fails. A list in `--tokens`, `--layers`, `--gpu-gb`
or `--seq` makes runs, each in a process of its own. With the limit in the same run, each row of the engine says how
much of the bound it reaches: of the longest of (micro-batches x limit, CPU Adam, link down, link up, host memory), the
latter four at the rates of the probe.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_step import machine
from memory_modes import RUNS, file_stem

LISTS = {"layers": int, "gpu_gb": float, "tokens": int, "seq": int}


def child(args: argparse.Namespace) -> None:
    for name, kind in LISTS.items():
        setattr(args, name, kind(getattr(args, name)))
    print("RESULT " + json.dumps(RUNS[args.kinds](args)), flush=True)
    os._exit(0)  # giving tens of gigabytes back page by page is nobody's wish


def one(args: argparse.Namespace, kind: str, values: dict[str, str]) -> dict[str, Any]:
    """Run one kind in a process of its own."""
    command = [sys.executable, __file__, "--child", "--kinds", kind]
    for name, value in values.items():
        command += ["--" + name.replace("_", "-"), value]
    for name in (
        "hardware",
        "model",
        "host_gb",
        "micro_batch",
        "steps",
        "warmup",
        "threads",
        "set",
        "device",
        "loss_factor",
        "plans",
    ):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    if args.trace and kind == "engine":
        Path(args.trace).mkdir(parents=True, exist_ok=True)
        stem = file_stem(argparse.Namespace(**{**vars(args), **values}))
        command += ["--trace", str(Path(args.trace) / f"{stem}.json")]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout, env=env)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {args.timeout:g} s"}
    line = next((r for r in done.stdout.splitlines() if r.startswith("RESULT ")), None)
    result: dict[str, Any] = (
        json.loads(line[7:]) if line else {"failed": done.stderr[-2000:] or f"exit {done.returncode}"}
    )
    return result


def with_bound(row: dict[str, Any], limit: dict[str, Any] | None) -> dict[str, Any]:
    """Add the limit of the same run and the bound, by name."""
    if not limit or "limit_s" not in limit or "step_s" not in row:
        return row
    bounds = {"limit": limit["limit_s"] * limit["micro_batches"], **row["loads_s"]}
    name = max(bounds, key=lambda k: bounds[k])
    return {**row, "limit_s": limit["limit_s"], "bound_s": round(bounds[name], 3), "bound_by": name,
            "of_bound": round(bounds[name] / row["step_s"], 4)}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    head = ("kind", "model", "tokens", "GPU GB allowed", "step s (modelled)", "bound s", "of bound", "tokens/s", "MFU",
            "GPU GB (modelled)", "host GB (modelled)", "pinned GB (modelled)")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        m, p = r.get("measured", {}), r.get("predicted", {})
        cells = [r["kind"], r.get("model", r["layers"]), r["tokens"], r["gpu_gb_allowed"]]
        if "failed" in r:
            lines.append(
                "| " + " | ".join(map(str, cells)) + f" | failed: {r['failed'].strip().splitlines()[-1][:90]} |"
            )
            continue
        both = [f"{m.get(k, '')} ({p.get(k, '')})" for k in ("gpu_gb", "host_gb", "pinned_gb")]
        cells += [f"{r.get('step_s', r.get('limit_s'))} ({p.get('step_s', '')})", r.get("bound_s", ""),
                  f"{r['of_bound']:.1%}" if "of_bound" in r else "", r.get("tokens_per_s", ""),
                  f"{r['mfu']:.1%}" if "mfu" in r else "", *both]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="engine", help=f"list of {', '.join(RUNS)}; the limit before the engine")
    parser.add_argument("--hardware", default="h200-pcie5", help="a preset, or a file of superoffload probe")
    parser.add_argument("--model", default="", help="a preset, 3.14b or tiny; omitted: hidden 5120 with --layers")
    parser.add_argument("--layers", default="52")
    parser.add_argument("--gpu-gb", default="0", help="0: all there is")
    parser.add_argument("--host-gb", type=float, default=0)
    parser.add_argument("--tokens", default="4096", help="per step; the plan divides them into micro-batches")
    parser.add_argument("--micro-batch", type=int, default=0, help="0: the plan chooses")
    parser.add_argument("--seq", default="4096")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps of one micro-batch; the first never speculates")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--loss-factor",
        type=float,
        default=1.0,
        help="of every loss, so that random weights' gradients stay below the bound; Adam does not care",
    )
    parser.add_argument("--set", default="", help="plan fields, comma-separated: speculate=off,master=split")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--plans", default="", help="folder: plans are read from there, and put there once made")
    parser.add_argument("--trace", default="", help="folder for measured traces; as a child, the file")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", default="")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
    rows: list[dict[str, Any]] = []
    for values in itertools.product(*(getattr(args, name).split(",") for name in LISTS)):
        limit: dict[str, Any] | None = None
        for kind in args.kinds.split(","):
            named = dict(zip(LISTS, values, strict=True))
            row = one(args, kind, named)
            limit = row if kind == "limit" else limit
            given = {"layers": named["layers"], "tokens": int(named["tokens"]), "gpu_gb_allowed": named["gpu_gb"]}
            rows.append({"kind": kind, **given, **(with_bound(row, limit) if kind == "engine" else row)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.out:
                facts = {"what": "memory", "date": datetime.date.today().isoformat(), "status": "measured",
                         "machine": machine(args.device) if args.kinds != "plan" else {},
                         "arguments": {k: v for k, v in vars(args).items() if k != "out"}, "rows": rows}  # fmt: skip
                Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
