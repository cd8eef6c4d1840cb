"""CLI commands of the planning half: probe, profile, plan, simulate, calibrate, export. None of them needs torch, but
those that measure: `probe`, and `profile` of a real model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, get_args, get_origin

from superoffload import hardware as hw
from superoffload import model as shapes
from superoffload.cli_running import require_torch
from superoffload.errors import InputError, did_you_mean, unknown_name
from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import write_atomic
from superoffload.tracing import Trace
from superoffload.units import format_bytes, format_count, format_seconds

DEFAULT_MICRO_BATCH = 1
DEFAULT_SEQ_LEN = 2048
STALLS_SHOWN = 5
VALUE_WIDTH = 6
"""Characters of the value column in the table of a plan."""
COUNTS = ("buckets", "flow", "tokens")
"""`--set` keys that stand for a field of the plan: how many buckets, how many flow blocks."""
SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Values of a `--set` key that is on or off."""
SMALL = "smollm2-135m-instruct"
"""The pretrained model that a package carries; `model_source.SMALL`, which cannot be asked without torch."""


def probe(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload probe``: measure this machine."""
    require_torch("measuring this machine")
    found = hw.probe(refresh=args.refresh)
    print(f"{found.name} (measured): {found.gpu.name}, {found.cpu.name} with {found.cpu.cores} cores")
    print(f"  link down {found.link.down.peak:.1f} GB/s, up {found.link.up.peak:.1f} GB/s, "
          f"both at once {found.link.both_gb_per_s:.1f} GB/s")  # fmt: skip
    print(f"  matrix product {found.gpu.matmul_bf16_tflops:.3g} TFLOP/s, "
          f"CPU Adam {max(found.cpu.adam_gb_per_s):.1f} GB/s")  # fmt: skip
    _save(found.save, args.out, "hardware")
    return {"hardware": found.model_dump(mode="json"), "out": args.out}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload profile``: a preset is estimated, a real model is measured on this machine."""
    if _is_preset(args.model) and not args.measure:
        result = _estimate(args)
    else:
        result = _measure(args)
    total_s = sum(b.forward_s + b.backward_s for b in result.blocks)
    print(f"{result.model}: {format_count(result.params)} parameters in {len(result.blocks)} blocks ({result.source})")
    print(f"  forward and backward of {result.micro_batch} x {result.seq_len} tokens: {format_seconds(total_s)} "
          f"on {result.hardware.name}")  # fmt: skip
    _save(result.save, args.out, "profile")
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

    prof = _profile_for(args)
    knobs = _chips(args, prof, _knobs(args.set))
    chosen = planner.make_plan(prof, **knobs)
    ledger = memory.ledger(prof, chosen)
    print("\n".join(plan_lines(chosen)))
    on_gpu = f"GPU {format_bytes(ledger.total('gpu'))} of {format_bytes(ledger.gpu_capacity_bytes)}, "
    print(f"memory{' of each chip' if chosen.chips > 1 else ''}: {on_gpu if ledger.gpu_capacity_bytes else ''}"
          f"host {format_bytes(ledger.total('host'))} of {format_bytes(ledger.host_capacity_bytes)}")  # fmt: skip
    _save(chosen.save, args.out, "plan")
    if args.config:
        _save(_tuned(prof, chosen, args.source).save, args.config, "tuned config")
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

    prof = _profile_for(args)
    trace = simulator.simulate(prof, planner.make_plan(prof, **_chips(args, prof, _knobs(args.set))))
    per_chip = " of each chip" if trace.plan.chips > 1 else ""
    print(f"{trace.model} on {trace.hardware} ({trace.source}): {format_seconds(trace.step_s)} per step, "
          f"{trace.tokens_per_s:,.0f} tokens/s, {trace.model_tflops / trace.plan.chips:.3g} model-TFLOP/s{per_chip}, "
          f"MFU {f'{trace.mfu:.1%}' if trace.peak_bf16_tflops else 'n/a'}, GPU busy {trace.gpu_busy:.0%}")  # fmt: skip
    for stall in sorted(trace.stalls, key=lambda s: -s.duration_s)[:STALLS_SHOWN]:
        print(f"  {stall.cause}")
    memory = trace.memory
    print(f"  memory{per_chip}: GPU {format_bytes(memory.total('gpu'))}, host {format_bytes(memory.total('host'))} "
          f"(pinned {format_bytes(memory.total('pinned'))})")  # fmt: skip
    _save(trace.save, args.out, "trace")
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
    _save(found.profile.save, args.out, "profile")
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
    if not (_is_preset(cfg.model.source) and hw.is_preset(cfg.hardware.name)):
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


def _is_preset(name: str) -> bool:
    return name in shapes.spec_names()


def resolve_hardware(text: str) -> Hardware:
    """A preset's name, or the path of a file that `superoffload probe` wrote. Raises InputError."""
    if hw.is_preset(text):
        return hw.preset(text)
    if os.path.sep in text or text.endswith(".json") or Path(text).exists():
        return Hardware.load(text)
    raise unknown_name(
        "hardware", text, hw.preset_names(), "Name a preset, or a file written by superoffload probe --out hw.json"
    )


def _estimate(args: argparse.Namespace) -> Profile:
    from superoffload import estimating

    if not args.hardware:
        raise InputError(
            "an estimate needs --hardware",
            expected=f"one of {', '.join(hw.preset_names())}, or a file of superoffload probe",
            remedy="To measure on this machine instead: superoffload profile --measure",
        )
    return estimating.estimate(
        args.model,
        micro_batch=args.micro_batch or DEFAULT_MICRO_BATCH,
        seq_len=args.seq_len or DEFAULT_SEQ_LEN,
        hardware=_joined(resolve_hardware(args.hardware), getattr(args, "chips", None)),
        dtype=args.dtype or "bfloat16",
    )


def _joined(machine: Hardware, chips: int | None) -> Hardware:
    """`machine` with as many chips as asked for, where its record does not say itself how many there are."""
    if chips is None or machine.interconnect is not None:
        return machine
    return hw.joined(machine, chips)


def _chip_knobs(args: argparse.Namespace, knobs: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields with those that the options for several chips give."""
    found = dict(knobs)
    for field in ("data_parallel", "sequence_parallel"):
        if (value := getattr(args, field)) is not None:
            if field in knobs:
                raise InputError(f"--set {field} and --{field.replace('_', '-')} are both given")
            found[field] = value
    return found


def _chips(args: argparse.Namespace, prof: Profile, knobs: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields as the options for several chips give them: `--chips` fixes their product."""
    knobs = _chip_knobs(args, knobs)
    if args.chips is None:
        return knobs
    there = prof.hardware.interconnect.chips if prof.hardware.interconnect else 1
    if args.chips > there:
        raise InputError(
            f"--chips {args.chips}, and {prof.hardware.name} has {there}",
            expected=f"at most {there}",
            remedy="Several chips are planned from an estimate: --model NAME --hardware gh200-quad --chips 8",
        )
    group = knobs.get("sequence_parallel", prof.sequence_parallel)
    groups = knobs.get("data_parallel", args.chips // group)
    if groups * group != args.chips:
        raise InputError(
            f"--chips {args.chips} with sequence_parallel = {group}"
            + (f" and data_parallel = {groups}" if "data_parallel" in knobs else ""),
            expected="chips = data_parallel x sequence_parallel",
        )
    return {**knobs, "data_parallel": groups}


def _measure(args: argparse.Namespace) -> Profile:
    _check_source(args.model)
    machine = None
    if args.hardware:
        machine = resolve_hardware(args.hardware)
        if machine.source != "probed":
            raise InputError(
                f'a measured profile cannot be made for the preset "{machine.name}"',
                expected="this machine",
                remedy="Leave --hardware out, or give a file of superoffload probe; a model preset can be estimated",
            )
    require_torch("measuring a model")
    from superoffload import profiling

    measured = profiling.profile_source(
        args.model,
        micro_batch=args.micro_batch or DEFAULT_MICRO_BATCH,
        seq_len=args.seq_len or DEFAULT_SEQ_LEN,
        hardware=machine,
        dtype=args.dtype,
        gguf_file=args.gguf_file,
        compile_blocks=args.compile_blocks,
    )
    # The config made from this profile finds the weights again, from any folder.
    source = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    return measured.replace(context={**measured.context, "model_source": source, "gguf_file": args.gguf_file or ""})


def _check_source(name: str) -> None:
    """Refuse a misspelled preset before torch is loaded: ids have a slash, folders exist."""
    if _is_preset(name) or name == SMALL or "/" in name or Path(name).exists():
        return
    raise unknown_name(
        "model", name, (*shapes.spec_names(), SMALL), "Name one of these, a folder, or a Hugging Face id (owner/name)"
    )


def _profile_for(args: argparse.Namespace) -> Profile:
    if args.profile:
        for given, option in ((args.model, "--model"), (args.micro_batch, "--micro-batch"), (args.seq_len, "--seq-len"),
                              (args.dtype, "--dtype")):  # fmt: skip
            if given is not None:
                raise InputError(f"{option} contradicts --profile, which fixes it", remedy="Leave one of them out")
        prof = Profile.load(args.profile)
        if args.hardware:
            machine = resolve_hardware(args.hardware)
            if machine != prof.hardware:
                raise InputError(
                    f'the profile was made on "{prof.hardware.name}", its times do not hold for "{machine.name}"',
                    remedy="Leave --hardware out, or estimate the model there with --model",
                )
    elif args.model:
        if not _is_preset(args.model):
            _check_source(args.model)
            raise InputError(
                f'"{args.model}" is no preset, so it has to be measured first',
                remedy=f"superoffload profile --model {args.model} --out profile.json, then --profile profile.json",
            )
        prof = _estimate(args)
    else:
        raise InputError("nothing to plan for", remedy="Add --model NAME --hardware NAME, or --profile FILE")
    if args.gpu_budget_gb is not None:
        machine = prof.hardware
        if args.gpu_budget_gb > machine.gpu.memory_gb:
            raise InputError(
                f"--gpu-budget-gb {args.gpu_budget_gb:g} is more than {machine.gpu.name} has",
                expected=f"at most {machine.gpu.memory_gb:.4g}",
            )
        gpu = machine.gpu.replace(memory_gb=args.gpu_budget_gb)
        prof = prof.replace(hardware=machine.replace(gpu=gpu))
    return prof


def _knobs(settings: list[str]) -> dict[str, Any]:
    """Parse ``--set key=value`` by the type of the plan's field. Raises InputError for an unknown key or bad value."""
    # The batch is part of the profile: it has its own options, and the plan takes it from there.
    names = [*(n for n in Plan.knobs() if n not in ("micro_batch", "seq_len")), *COUNTS]
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not text:
            raise InputError(f'--set "{setting}"', expected="KEY=VALUE, for example --set bucket_mb=32")
        if key in ("micro_batch", "seq_len"):
            raise InputError(f"--set {key}", remedy=f"Use --{key.replace('_', '-')} {text}: the profile depends on it")
        if key not in names:
            raise InputError(
                f'unknown plan field "{key}"{did_you_mean(key, names)}', expected=f"one of {', '.join(names)}"
            )
        if key in found:
            raise InputError(f"--set {key} is given twice")
        found[key] = _value(key, text)
    # Ranges and words, before anything is computed; the counts depend on the profile, the planner checks them.
    Plan.from_dict({k: v for k, v in found.items() if k not in COUNTS}, where="--set")
    return found


def _value(key: str, text: str) -> Any:
    if key in COUNTS:
        return _whole(key, text)
    annotation = Plan.model_fields[key].annotation
    if get_origin(annotation) is tuple:
        return tuple(_whole(key, part) for part in text.split(",")) if text != "none" else ()
    if get_origin(annotation) is dict:
        pairs = [part.partition(":") for part in text.split(",")] if text != "none" else []
        return {_whole(key, number): word for number, _, word in pairs}
    if annotation is bool:
        if text.lower() not in SWITCH:
            raise InputError(f'--set {key}="{text}"', expected="true or false")
        return SWITCH[text.lower()]
    if annotation is int or int in get_args(annotation):
        return _whole(key, text)
    if annotation is float:
        try:
            return float(text)
        except ValueError:
            raise InputError(f'--set {key}="{text}"', expected="a number") from None
    words = get_args(annotation)
    if words and text not in words:
        raise InputError(f'--set {key}="{text}"{did_you_mean(text, words)}', expected=f"one of {', '.join(words)}")
    return text


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f'--set {key}="{text}"', expected="a whole number") from None


def _tuned(prof: Profile, chosen: Plan, source: str | None) -> Any:
    from superoffload import simulator
    from superoffload.config import TunedConfig

    return TunedConfig.create(prof, chosen, model_source=source, trace=simulator.simulate(prof, chosen))


def _save(save: Any, path: str | None, what: str) -> None:
    if path:
        print(f"wrote {what}: {save(path)}")
