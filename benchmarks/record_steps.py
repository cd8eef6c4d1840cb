"""Record the measured steps that ship with the package: one step each, with its profile, plan and machine.

    python benchmarks/record_steps.py --out FOLDER                          # all, on a machine with a GPU
    python benchmarks/record_steps.py --cases committed,clipped --device cpu --tiny --out FOLDER    # dry run anywhere

Each shape runs in a process of its own: profiled once, then each of its cases is planned, warmed up and stepped a few
times with clipping on, and the last step is kept as a `MeasuredStep`. The learning rate is 0, so that every step has
the same gradients, and a factor on the loss sets their norm: half of the bound, or 1 % over it where a step shall be
clipped. A larger norm would be seen to be over it early in backward, and Adam would wait for what is left.
`ship_traces.py` makes the package's data of the files.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_predictions import SHAPES
from bench_step import machine
from memory_modes import build

import superoffload
from superoffload.engine import OffloadAdamW
from superoffload.graph import buckets_of
from superoffload.hardware import Hardware, probe
from superoffload.measured_step import MeasuredStep
from superoffload.memory import ledger
from superoffload.model import ModelSpec
from superoffload.model import spec as model_spec
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.profiling import profile as profile_model
from superoffload.search_asked import within
from superoffload.simulator import simulate

WARMUP, BOUND = 4, 1.0
UNDER, OVER = 0.5, 1.01
"""Norms of steps that commit and of those that are clipped, in parts of the bound."""


@dataclass(frozen=True)
class Case:
    """One recorded step."""

    shape: str
    title: str
    shows: str
    fields: dict[str, Any]
    """Fixed fields of the plan; `retained` is a share of the buckets. The planner chooses the others."""
    micro_batch: int = 4
    seq_len: int = 2048
    gpu_gb: float | None = None
    host_gb: float | None = None
    """What the plan may use of the GPU and of the host; None is all that there is."""
    clipped: bool = False
    busy: bool = False
    steps: int = 8


HALF = {"bucket_mb": 64.0, "retained": 0.5, "activations": "full"}
CASES = {
    "waited": Case(
        "3b",
        "3.14B Llama shape, 8,192 tokens a step, half of the buckets retained: waits for the norm",
        "CPU Adam begins when the norm is known, and the next forward waits for its weights block by block.",
        {**HALF, "speculate": "off"},
    ),
    "committed": Case(
        "3b",
        "3.14B Llama shape, 8,192 tokens a step, half of the buckets retained: speculates and commits",
        "CPU Adam runs under the backward that makes its gradients; what is left of it ends under the next "
        "forward.",
        {**HALF, "speculate": "on"},
    ),
    "clipped": Case(
        "3b",
        "3.14B Llama shape, 8,192 tokens a step, half of the buckets retained: speculates and is clipped",
        "The norm is over the bound, which is known after Adam has run: its buckets are undone and redone with "
        "the clipped gradient and sent up again, and the next forward waits for them.",
        {**HALF, "speculate": "on"}, clipped=True,
    ),
    "busy": Case(
        "3b-4-layers",
        "Four layers of the 3.14B shape, 8,192 tokens a step, beside a thread that runs a Python loop",
        "CPU Adam and the copies lose nothing. Forward and backward take long because the host, which gets "
        "Python's lock late, launches their kernels late.",
        {**HALF, "speculate": "on"}, busy=True, steps=4,
    ),
    "flow": Case(
        "7b",
        "Llama-7B shape, 8,192 tokens a step within 24 GB of GPU memory: weights of half of the layers flow",
        "The weights of every other layer are fetched before forward and again before backward. CPU Adam takes "
        "longer than the GPU, and the next forward waits for what it has not done yet.",
        {"speculate": "on", "accumulation": 1, "activations": "full", "flow": 16}, gpu_gb=24.0, host_gb=120.0, steps=4,
    ),
}  # fmt: skip
SPECS: dict[str, ModelSpec] = {
    **SHAPES,
    "7b": model_spec("llama-7b"),
    "3b-4-layers": SHAPES["3b"].replace(name="llama-3.14b-4-layers", layers=4),
}


@contextlib.contextmanager
def python_loop(on: bool) -> Iterator[None]:
    """A thread that never lets go of Python's lock by itself."""
    end = threading.Event()

    def spin() -> None:
        n = 0
        while not end.is_set():
            n += 1

    if on:
        threading.Thread(target=spin, daemon=True).start()
        time.sleep(0.1)  # until it has had the lock once
    try:
        yield
    finally:
        end.set()


def record(name: str, case: Case, model: torch.nn.Module, ids: torch.Tensor, profile: Profile,
           device: str) -> tuple[MeasuredStep, dict[str, Any]]:  # fmt: skip
    fields = dict(case.fields)
    if (share := fields.pop("retained", None)) is not None:
        fields["retained_buckets"] = round(share * len(buckets_of(profile, fields["bucket_mb"])))
    plan = make_plan(within(profile, case.gpu_gb, case.host_gb), **fields)
    opt = OffloadAdamW(model, lr=0.0, weight_decay=0.0, max_grad_norm=BOUND, plan=plan, record_trace=True)
    ids = ids.to(next(model.parameters()).device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    gc.freeze()  # as `superoffload train` does

    def step(factor: float) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        (loss * factor).backward()
        opt.step()
        opt.zero_grad()

    try:
        step(1.0)
        opt.synchronize()
        norm = opt.ledger[-1].grad_norm
        under, over = (share * BOUND / norm for share in (UNDER, OVER))
        for _ in range(WARMUP):
            step(under)
        with python_loop(case.busy):
            step(under)
            opt.engine.recorder.start_over()
            for i in range(case.steps):
                step(over if case.clipped and i == case.steps - 2 else under)
            opt.synchronize()
            seconds = opt.engine.recorder.steps_s()
        trace = opt.trace(
            tokens_per_step=profile.tokens,
            model_flops_per_step=profile.model_flops,
            peak_bf16_tflops=profile.hardware.gpu.peak_bf16_tflops,
            hardware=profile.hardware.name,
        )
        verdict = opt.ledger[-2].verdict
        ledger_row = [r.as_dict() for r in opt.ledger[-3:]]
    finally:
        opt.close()
    if case.clipped:  # the median would be that of the others
        trace = trace.replace(step_s=trace.window_s)
    found = MeasuredStep(
        name=name, title=case.title, shows=case.shows, date=datetime.date.today().isoformat(),
        machine={**machine(device), "superoffload": superoffload.__version__}, verdict=verdict, steps_s=tuple(seconds),
        profile=profile, trace=trace.replace(model=profile.model, plan=plan),
    )  # fmt: skip
    row: dict[str, Any] = {
        "name": name, "step_s": trace.step_s, "steps_s": [round(s, 4) for s in seconds],
        "predicted_s": round(simulate(profile, plan).step_s, 4), "verdict": verdict, "events": len(trace.events),
        "ledger": ledger_row, "modelled_gpu_gb": round(ledger(profile, plan).total("gpu") / 1e9, 2),
        "plan": plan.model_dump(mode="json", exclude={"reasons"}),
    }  # fmt: skip
    if device == "cuda":
        row["gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found, row


def run_shape(args: argparse.Namespace, shape: str) -> None:
    hw = Hardware.load(args.hardware) if args.hardware else probe()
    cases = {n: CASES[n] for n in args.cases.split(",") if CASES[n].shape == shape}
    first = next(iter(cases.values()))
    spec = SHAPES["small"].replace(name="small") if args.tiny else SPECS[shape]
    batch, seq = (2, 64) if args.tiny else (first.micro_batch, first.seq_len)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = build(spec, seq, empty=False)
    if args.device == "cpu":
        model.float()
    ids = torch.randint(0, spec.vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
    profile = profile_model(model, ids, hardware=hw, name=spec.name)
    for name, case in cases.items():
        if args.tiny:
            case = Case(
                **{**case.__dict__, "gpu_gb": None, "host_gb": None, "fields": {**case.fields, "bucket_mb": 1.0}}
            )
        found, row = record(name, case, model, ids, profile, args.device)
        path = Path(args.out) / f"measured_step_{name}_{args.machine}_{found.date}.json"
        path.write_text(found.to_json(indent=None) + "\n")
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument("--hardware", default="", help="a file of superoffload probe; omitted: this machine is probed")
    parser.add_argument("--machine", default="h200", help="its name in the files'")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--shape", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.shape:
        run_shape(args, args.shape)
        sys.stdout.flush()
        os._exit(0)  # giving tens of gigabytes back page by page is nobody's wish
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    failed = []
    for shape in dict.fromkeys(CASES[n].shape for n in args.cases.split(",")):
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shape", shape], check=False, env=env)
        failed += [shape] if done.returncode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
