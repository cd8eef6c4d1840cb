"""CLI commands of the planning half: probe, profile, plan, simulate, calibrate, export. None of them needs torch, but
those that measure: `probe`, and `profile` of a real model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload import cli_profiles as profiles
from superoffload import hardware as hw
from superoffload.cli_running import require_torch
from superoffload.cli_settings import parse_knobs, with_chips
from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import write_atomic
from superoffload.tracing import Trace
from superoffload.units import format_bytes, format_count, format_seconds

STALLS_SHOWN = 5
VALUE_WIDTH = 6
"""Characters of the value column in the table of a plan."""


def probe(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload probe``: measure this machine."""
    require_torch("measuring this machine")
    found = hw.probe(refresh=args.refresh)
    print(f"{found.name} (measured): {found.gpu.name}, {found.cpu.name} with {found.cpu.cores} cores")
    print(f"  link down {found.link.down.peak:.1f} GB/s, up {found.link.up.peak:.1f} GB/s, "
          f"both at once {found.link.both_gb_per_s:.1f} GB/s")  # fmt: skip
    print(f"  matrix product {found.gpu.matmul_bf16_tflops:.3g} TFLOP/s, "
          f"CPU Adam {max(found.cpu.adam_gb_per_s):.1f} GB/s")  # fmt: skip
    write_if_asked(found.save, args.out, "hardware")
    return {"hardware": found.model_dump(mode="json"), "out": args.out}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload profile``: a preset is estimated, a real model is measured on this machine."""
    if profiles.is_preset(args.model) and not args.measure:
        result = profiles.estimate(args)
    else:
        result = profiles.measure(args)
    total_s = sum(b.forward_s + b.backward_s for b in result.blocks)
    print(f"{result.model}: {format_count(result.params)} parameters in {len(result.blocks)} blocks ({result.source})")
    print(f"  forward and backward of {result.micro_batch} x {result.seq_len} tokens: {format_seconds(total_s)} "
          f"on {result.hardware.name}")  # fmt: skip
    write_if_asked(result.save, args.out, "profile")
    return {
        "profile": result.model_dump(mode="json"),
        "parameters": result.params,
        "forward_backward_s": total_s,
        "source": result.source,
        "out": args.out,
    }


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload plan``: let the cost model choose, and say why."""
    from superoffload import memory, planner

    prof = profiles.profile_for(args)
    knobs = with_chips(args, prof, parse_knobs(args.set))
    chosen = planner.make_plan(prof, **knobs)
    ledger = memory.ledger(prof, chosen)
    print("\n".join(plan_lines(chosen)))
    on_gpu = f"GPU {format_bytes(ledger.total('gpu'))} of {format_bytes(ledger.gpu_capacity_bytes)}, "
    print(f"memory{' of each chip' if chosen.chips > 1 else ''}: {on_gpu if ledger.gpu_capacity_bytes else ''}"
          f"host {format_bytes(ledger.total('host'))} of {format_bytes(ledger.host_capacity_bytes)}")  # fmt: skip
    write_if_asked(chosen.save, args.out, "plan")
    if args.config:
        write_if_asked(_tuned(prof, chosen, args.source).save, args.config, "tuned config")
        if chosen.chips > 1:
            print(f"note: superoffload train refuses it: the engine trains on one chip, the plan is for {chosen.chips}")
    return {
        "plan": chosen.model_dump(mode="json", exclude={"reasons"}),
        "reasons": dict(chosen.reasons),
        "memory": ledger.summary(),
        "hardware": prof.hardware.name,
        "model": prof.model,
        "source": prof.source,
        "out": args.out,
        "config": args.config,
    }


def plan_lines(plan: Plan) -> list[str]:
    """A plan as a table for people: field, value, why. A reason that begins with the value does not repeat it."""
    rows = []
    wide = max(map(len, Plan.knobs()))
    for name in Plan.knobs():
        value = getattr(plan, name)
        value = tuple(f"{k}:{v}" for k, v in value.items()) if isinstance(value, dict) else value
        value = ("off", "on")[value] if isinstance(value, bool) else "all" if value is None else value
        shown = (",".join(map(str, value)) or "none") if isinstance(value, tuple) else f"{value:g}" if isinstance(
            value, float) else str(value)  # fmt: skip
        reason = plan.reasons.get(name, "given").removeprefix(f"{shown}: ")
        if len(shown) > VALUE_WIDTH:
            rows += [f"{name:{wide}} {shown}", f"{'':{wide}} {'':{VALUE_WIDTH}} {reason}"]
        else:
            rows.append(f"{name:{wide}} {shown:{VALUE_WIDTH}} {reason}")
    return rows


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload simulate``: the step under a plan, with its stalls and its memory."""
    from superoffload import planner, simulator

    prof = profiles.profile_for(args)
    trace = simulator.simulate(prof, planner.make_plan(prof, **with_chips(args, prof, parse_knobs(args.set))))
    per_chip = " of each chip" if trace.plan.chips > 1 else ""
    print(f"{trace.model} on {trace.hardware} ({trace.source}): {format_seconds(trace.step_s)} per step, "
          f"{trace.tokens_per_s:,.0f} tokens/s, {trace.model_tflops / trace.plan.chips:.3g} model-TFLOP/s{per_chip}, "
          f"MFU {f'{trace.mfu:.1%}' if trace.peak_bf16_tflops else 'n/a'}, GPU busy {trace.gpu_busy:.0%}")  # fmt: skip
    for stall in sorted(trace.stalls, key=lambda s: -s.duration_s)[:STALLS_SHOWN]:
        print(f"  {stall.cause}")
    memory = trace.memory
    print(f"  memory{per_chip}: GPU {format_bytes(memory.total('gpu'))}, host {format_bytes(memory.total('host'))} "
          f"(pinned {format_bytes(memory.total('pinned'))})")  # fmt: skip
    write_if_asked(trace.save, args.out, "trace")
    return {**trace.summary(), "out": args.out}


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload calibrate``: correct a profile by a measured step."""
    from superoffload import calibration

    found = calibration.calibrate(Profile.load(args.profile), Trace.load(args.trace))
    print(f"{found.model} on {found.hardware}")
    print("\n".join(f"  {line}" for line in found.lines()))
    history: list[str] = []
    if args.history:
        found.remember(args.history)
        history = calibration.drift(args.history, found)
        print("\n".join(f"  {line}" for line in history))
    write_if_asked(found.profile.save, args.out, "profile")
    return {**found.summary(), "history": history, "out": args.out}


def export(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload export``: another tool's format."""
    from superoffload import export as writers
    from superoffload.config import TunedConfig

    notes: list[str] = []
    if args.format == "deepspeed":
        if not args.config:
            raise InputError("--format deepspeed needs a tuned config", remedy="Add --config tuned.json")
        body, notes = writers.deepspeed(TunedConfig.load(args.config))
        text = json.dumps(body, indent=2) + "\n"
    else:
        trace = _trace_for(args)
        body = writers.chrome_trace(trace) if args.format == "chrome-trace" else {"format": "html"}
        text = json.dumps(body) + "\n" if args.format == "chrome-trace" else writers.html(trace)
    if args.out:
        write_atomic(args.out, text)
        print(f"wrote {args.out}")
    elif not args.json:
        print(text, end="")
    for note in notes:
        print(f"note: {note}")
    return {"format": args.format, "out": args.out, "notes": notes, "body": None if args.out else body}


def _trace_for(args: argparse.Namespace) -> Trace:
    if args.trace:
        return Trace.load(args.trace)
    if not args.config:
        raise InputError(f"--format {args.format} needs a trace", remedy="Add --trace FILE or --config FILE")
    from superoffload import estimating, simulator
    from superoffload.config import TunedConfig

    cfg = TunedConfig.load(args.config)
    if not (profiles.is_preset(cfg.model.source) and hw.is_preset(cfg.hardware.name)):
        raise InputError(
            f'{args.config} is for the measured model "{cfg.model.name}" on "{cfg.hardware.name}", '
            "which cannot be simulated without its profile",
            remedy="Simulate it with superoffload simulate --profile profile.json --out trace.json, then export that",
        )
    prof = estimating.estimate(
        cfg.model.source,
        micro_batch=cfg.plan.micro_batch,
        seq_len=cfg.plan.seq_len,
        hardware=cfg.hardware.name,
        dtype=cfg.training.dtype,
    )
    return simulator.simulate(prof, cfg.plan)


def _tuned(prof: Profile, chosen: Plan, source: str | None) -> Any:
    from superoffload import simulator
    from superoffload.config import TunedConfig

    return TunedConfig.create(prof, chosen, model_source=source, trace=simulator.simulate(prof, chosen))


def write_if_asked(save: Callable[[str], Path], path: str | None, what: str) -> None:
    """Write a record where a path was given, and say so.

    Args:
        save: the record's own method.
        what: the record, for people.
    """
    if path:
        print(f"wrote {what}: {save(path)}")
