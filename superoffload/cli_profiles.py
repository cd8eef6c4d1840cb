"""Which profile a command is about: estimated from a preset, measured on this machine, or read from a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from superoffload import hardware as hw
from superoffload import model as shapes
from superoffload.cli_running import require_torch
from superoffload.errors import InputError, unknown_name
from superoffload.hardware import Hardware
from superoffload.profiler import Profile

DEFAULT_MICRO_BATCH = 1
DEFAULT_SEQ_LEN = 2048
SMALL = "smollm2-135m-instruct"
"""The pretrained model that a package carries; `model_source.SMALL`, which cannot be asked without torch."""


def profile_for(args: argparse.Namespace) -> Profile:
    """The profile that a plan is asked for: ``--profile FILE``, or an estimate of ``--model``.

    Raises:
        InputError: neither is given, or options that contradict each other or the machine.
    """
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
        if not is_preset(args.model):
            _check_source(args.model)
            raise InputError(
                f'"{args.model}" is no preset, so it has to be measured first',
                remedy=f"superoffload profile --model {args.model} --out profile.json, then --profile profile.json",
            )
        prof = estimate(args)
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


def estimate(args: argparse.Namespace) -> Profile:
    """An estimate of the preset ``--model`` on ``--hardware``.

    Raises:
        InputError: no machine is named, or an unknown one.
    """
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


def measure(args: argparse.Namespace) -> Profile:
    """The model of ``--model``, measured on this machine.

    Raises:
        InputError: an unknown model, or a machine that is not this one.
        MissingDependency: torch is not installed.
    """
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


def resolve_hardware(text: str) -> Hardware:
    """A preset's name, or the path of a file that `superoffload probe` wrote. Raises InputError."""
    if hw.is_preset(text):
        return hw.preset(text)
    if os.path.sep in text or text.endswith(".json") or Path(text).exists():
        return Hardware.load(text)
    raise unknown_name(
        "hardware", text, hw.preset_names(), "Name a preset, or a file written by superoffload probe --out hw.json"
    )


def is_preset(name: str) -> bool:
    """Whether a model of this name can be estimated without being measured."""
    return name in shapes.spec_names()


def _check_source(name: str) -> None:
    """Refuse a misspelled preset before torch is loaded: ids have a slash, folders exist."""
    if is_preset(name) or name == SMALL or "/" in name or Path(name).exists():
        return
    raise unknown_name(
        "model", name, (*shapes.spec_names(), SMALL), "Name one of these, a folder, or a Hugging Face id (owner/name)"
    )


def _joined(machine: Hardware, chips: int | None) -> Hardware:
    """`machine` with as many chips as asked for, where its record does not say itself how many there are."""
    if chips is None or machine.interconnect is not None:
        return machine
    return hw.joined(machine, chips)
