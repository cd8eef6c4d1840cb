"""Predictions: many plans of a few shapes, each run, beside what the model says after one probe and one profile.

    python benchmarks/bench_predictions.py --shapes 1b,3b,8b --out predictions.json        # on a GPU
    python benchmarks/bench_predictions.py --shapes small,wide --device cpu --steps 5      # where there is none

Each shape runs in a process of its own: it is profiled once for each size of a micro-batch, and then every plan of the
grid is simulated and run by the same function that the Tuner's Measure panel calls (two steps of warm-up, median of the
others). The planner's own plan is one of the rows, so that the best of the grid can be told from it. Nothing is fitted;
with --calibrate each shape's profile is also corrected by its first row, and the other rows are predicted again.
Results are written after each row. With --profiles the profiles are kept too, so that a later model, or another probe,
can be held against these measurements:

    python benchmarks/bench_predictions.py --replay predictions.json --profiles FOLDER [--hardware probe.json]

and with --traces each measured step is kept as a trace, all in one archive.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_step import machine
from memory_modes import build

from superoffload.calibration import calibrate
from superoffload.errors import SuperOffloadError
from superoffload.graph import buckets_of
from superoffload.hardware import Hardware, probe
from superoffload.host_load import KEY
from superoffload.measuring import measure_steps
from superoffload.memory import CUDA_CONTEXT_BYTES, ledger
from superoffload.model import ModelSpec
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.profiling import profile as profile_model
from superoffload.simulator import simulate
from superoffload.tracing import LANES


def _llama(name: str, hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, vocab: int) -> ModelSpec:
    return ModelSpec(name=name, hidden=hidden, layers=layers, mlp=mlp, heads=heads, kv_heads=kv_heads,
                     head_dim=hidden // heads, vocab=vocab)  # fmt: skip


SHAPES = {
    "1b": _llama("llama-1b", 2048, 18, 5632, 16, 16, 32000),
    "3b": _llama("llama-3.14b", 3072, 26, 8192, 24, 24, 32000),
    "8b": _llama("llama-8b", 4096, 32, 14336, 32, 8, 128256),
    "small": _llama("small", 384, 6, 1024, 6, 6, 4096),
    "wide": _llama("wide", 768, 3, 2048, 12, 12, 2048),
}
GRIDS: dict[str, list[dict[str, Any]]] = {
    "cuda": [
        {"activations": "full", "retained": 0.0, "speculate": "off"},
        {"activations": "full", "retained": 0.0, "speculate": "on"},
        {"activations": "full", "retained": 0.5, "speculate": "on"},
        {"activations": "none", "retained": 0.5, "speculate": "on"},
        {"activations": "none", "retained": 0.5, "speculate": "off"},
        {"activations": "selective", "retained": 0.5, "speculate": "on"},
        {"activations": "offload_inputs", "retained": 0.25, "speculate": "on"},
        {"activations": "full", "retained": 0.25, "speculate": "on", "flow": 8},
        {"activations": "full", "retained": 0.25, "speculate": "on", "accumulation": 4, "accumulate_on": "cpu"},
        {},
    ],
    "cpu": [
        {"activations": "none", "retained": 0.0, "speculate": "off"},
        {"activations": "none", "retained": 0.0, "speculate": "on"},
        {"activations": "full", "retained": 0.5, "speculate": "off"},
        {"activations": "full", "retained": 0.0, "speculate": "on"},
        {"activations": "none", "retained": 0.0, "speculate": "on", "accumulation": 3},
        {},
    ],
}
"""Plan fields of each row; `retained` is a share of the buckets, {} is the planner's own plan."""
SIZES = {
    "cuda": {"1b": ((8, 2048),), "3b": ((4, 2048),), "8b": ((2, 2048),)},
    "cpu": {"small": ((2, 128),), "wide": ((2, 128),)},
}
"""Shape -> (micro-batch, sequence) of its profiles."""
BUCKET_MB = {"cuda": 64.0, "cpu": 2.0}
NOTED = ("bucket_mb", "retained_buckets", "activations", "speculate", "master", "cast_down", "cast_up", "accumulation",
         "adam_threads")  # fmt: skip


def run_shape(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    cuda = args.device == "cuda"
    hw = Hardware.load(args.hardware) if args.hardware else probe()
    torch.manual_seed(0)
    with torch.device(args.device):
        model = build(SHAPES[shape], 2048, empty=False)
    if not cuda:
        model.float()
    for micro_batch, seq_len in SIZES[args.device][shape]:
        ids = torch.randint(0, SHAPES[shape].vocab, (micro_batch, seq_len))
        begin = time.perf_counter()
        profile = profile_model(model, ids, hardware=hw, name=shape, compile_blocks=args.compile)
        print(f"{shape}: profiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        if args.profiles:
            profile.save(Path(args.profiles) / f"profile_{shape}_{micro_batch}x{seq_len}.json")
        corrected: Profile | None = None
        rows = GRIDS[args.device]
        for number in map(int, args.only.split(",")) if args.only else range(len(rows)):
            fields = rows[number]
            row, trace = _row(args, model, ids, profile, corrected, fields)
            if trace is not None and args.traces:
                with zipfile.ZipFile(args.traces, "a", compression=zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr(f"{shape}_{number}.json", trace.to_json())
            yield {"shape": shape, "micro_batch_tokens": micro_batch * seq_len, **row}
            if trace is not None and args.calibrate and corrected is None:
                corrected = calibrate(profile, trace).profile


def replay(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Recorded rows, predicted again by the present model; `--hardware` takes the processor and memory of a probe."""
    rows: list[dict[str, Any]] = []
    for row in json.loads(Path(args.replay).read_text())["rows"]:
        if "off" in row:
            shape, tokens = row["shape"], row["micro_batch_tokens"]
            micro_batch, seq_len = next(s for s in SIZES["cuda"][shape] if s[0] * s[1] == tokens)
            profile = Profile.load(Path(args.profiles) / f"profile_{shape}_{micro_batch}x{seq_len}.json")
            plan = make_plan(
                profile, **_knobs(profile, row["fields"], "cuda", adam_threads=row["plan"]["adam_threads"])
            )
            if args.hardware:
                cpu = Hardware.load(args.hardware).cpu
                profile = profile.replace(hardware=profile.hardware.replace(cpu=cpu))
            predicted = simulate(profile, plan)
            busy = {lane: [row["busy_s"][lane][0], round(predicted.busy_s(lane, predicted.step_s), 5)]
                    for lane in row["busy_s"]}  # fmt: skip
            row |= {"predicted_s": round(predicted.step_s, 5), "busy_s": busy,
                    "off": round(predicted.step_s / row["measured_s"] - 1, 4)}  # fmt: skip
            row.pop("calibrated_off", None)
        rows.append(row)
    return rows


def _knobs(profile: Profile, fields: dict[str, Any], device: str, **more: Any) -> dict[str, Any]:
    """Plan fields of a row of the grid."""
    knobs = {**fields, **more}
    if (share := knobs.pop("retained", None)) is not None:
        knobs["bucket_mb"] = BUCKET_MB[device]
        knobs["retained_buckets"] = round(share * len(buckets_of(profile, knobs["bucket_mb"])))
    return knobs


def _row(
    args: argparse.Namespace,
    model: torch.nn.Module,
    ids: torch.Tensor,
    profile: Profile,
    corrected: Profile | None,
    fields: dict[str, Any],
) -> tuple[dict[str, Any], Any]:
    row: dict[str, Any] = {"fields": fields}
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row["gpu_gb_before"] = round(torch.cuda.memory_allocated() / 1e9, 3)  # the model, if nothing is left behind
    try:
        plan = make_plan(profile, **_knobs(profile, fields, args.device))
        predicted, account = simulate(profile, plan), ledger(profile, plan)
        begin = time.perf_counter()
        trace = measure_steps(
            model, ids, profile, plan, steps=args.steps, progress=functools.partial(_set_up, args, row)
        )
    except (SuperOffloadError, torch.OutOfMemoryError) as error:
        return {**row, "failed": str(error)}, None
    row |= {
        "plan": {k: getattr(plan, k) for k in NOTED} | {"flow": len(plan.flow_blocks)},
        "predicted_s": round(predicted.step_s, 5), "measured_s": round(trace.step_s, 5),
        "off": round(predicted.step_s / trace.step_s - 1, 4), "took_s": round(time.perf_counter() - begin, 1),
    }  # fmt: skip
    row["busy_s"] = {lane: [round(t.busy_s(lane, t.step_s), 5) for t in (trace, predicted)] for lane in LANES[:4]}
    row["beside"] = trace.context.get(KEY, "")
    row["stalls"] = [s.cause for s in sorted(trace.stalls, key=lambda s: -s.duration_s)[:3]]
    if corrected is not None:
        row["calibrated_off"] = round(simulate(corrected, plan).step_s / trace.step_s - 1, 4)
    if args.device == "cuda":
        measured = torch.cuda.max_memory_allocated() / 1e9
        said = (account.total("gpu") - CUDA_CONTEXT_BYTES) / 1e9
        row |= {"predicted_gpu_gb": round(said, 3), "measured_gpu_gb": round(measured, 3),
                "gpu_off": round(said / measured - 1, 4)}  # fmt: skip
    return row, trace


def _set_up(args: argparse.Namespace, row: dict[str, Any], steps: int) -> None:
    """After the first step: what the ledger speaks of is what steps need. Weights lie on the GPU twice while the
    optimizer is made, where there is room; where there is none, they wait on the host."""
    if steps == 1 and args.device == "cuda":
        row["set_up_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        torch.cuda.reset_peak_memory_stats()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and worst cases, and the planner's own plan against the best of its shape."""
    done = [r for r in rows if "off" in r]
    found: dict[str, Any] = {"plans": len(done), "failed": len(rows) - len(done)}
    for key in ("off", "calibrated_off", "gpu_off"):
        values = [abs(r[key]) for r in done if key in r]
        if values:
            found[key] = {"median": round(statistics.median(values), 4), "worst": round(max(values), 4)}
    found["planner against the best"] = {}
    for own in (r for r in done if not r["fields"]):
        # Plans that take as many micro-batches a step: of others the update is another share.
        like = [r["measured_s"] for r in done
                if r["shape"] == own["shape"] and r["plan"]["accumulation"] == own["plan"]["accumulation"]]  # fmt: skip
        found["planner against the best"][own["shape"]] = round(own["measured_s"] / min(like) - 1, 4)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    head = ("shape", "tokens a micro-batch", "plan", "measured s", "predicted s", "off", "calibrated", "GPU GB",
            "modelled", "off")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        name = ", ".join(f"{k}={v}" for k, v in r["fields"].items()) or "the planner's own"
        if "off" not in r:
            lines.append(f"| {r['shape']} | {r['micro_batch_tokens']} | {name} | failed: {r['failed'][:120]} |")
            continue
        cells = [r["shape"], r["micro_batch_tokens"], name, r["measured_s"], r["predicted_s"], f"{r['off']:+.1%}",
                 f"{r['calibrated_off']:+.1%}" if "calibrated_off" in r else "", r.get("measured_gpu_gb", ""),
                 r.get("predicted_gpu_gb", ""), f"{r['gpu_off']:+.1%}" if "gpu_off" in r else ""]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _child(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    """The rows of a shape, as a process of its own finds them."""
    command = [sys.executable, __file__, "--child", "--shapes", shape, "--device", args.device,
               "--hardware", args.hardware, "--steps", str(args.steps), "--profiles", args.profiles,
               "--traces", args.traces]  # fmt: skip
    command += ["--calibrate"] * args.calibrate + ["--compile"] * args.compile + ["--only", args.only]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
    if process.returncode:
        yield {"shape": shape, "micro_batch_tokens": 0, "fields": {}, "failed": f"exit {process.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,3b,8b", help=f"list of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hardware", default="", help="a file of superoffload probe; omitted: this machine is probed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--calibrate", action="store_true", help="also predict from a profile that row 1 has corrected")
    parser.add_argument("--only", default="", help="numbers of rows of the grid, in the order in which to run them")
    parser.add_argument("--compile", action="store_true", help="the profiles measure compiled layers too")
    parser.add_argument("--profiles", default="", help="folder for the profiles")
    parser.add_argument("--traces", default="", help="a .zip for the measured steps")
    parser.add_argument("--replay", default="", help="a file of results to predict again; nothing is run")
    parser.add_argument("--out", default="")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for row in run_shape(args, args.shapes):
            print("ROW " + json.dumps(row), flush=True)
        os._exit(0)  # giving tens of gigabytes back page by page is nobody's wish
    rows: list[dict[str, Any]] = replay(args) if args.replay else []
    for shape in [] if args.replay else args.shapes.split(","):
        for row in _child(args, shape):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            facts = {"what": "predictions", "date": datetime.date.today().isoformat(),
                     "status": "measured and modelled", "machine": machine(args.device),
                     "arguments": {k: v for k, v in vars(args).items() if k != "out"}, "summary": summary(rows),
                     "rows": rows}  # fmt: skip
            if args.out:
                Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")
    print(table(rows))
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
