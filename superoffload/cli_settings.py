"""Fields of the plan that a command line fixes: ``--set KEY=VALUE``, and the options for several chips."""

from __future__ import annotations

import argparse
from typing import Any, get_args, get_origin

from superoffload.errors import InputError, did_you_mean
from superoffload.plan import Plan
from superoffload.profiler import Profile

COUNTS = ("buckets", "flow", "tokens")
"""`--set` keys that stand for a field of the plan: how many buckets, how many flow blocks."""
SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Values of a `--set` key that is on or off."""


def parse_knobs(settings: list[str]) -> dict[str, Any]:
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


def with_chip_options(args: argparse.Namespace, knobs: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields with those that the options for several chips give. Raises InputError for one given twice."""
    found = dict(knobs)
    for field in ("data_parallel", "sequence_parallel"):
        if (value := getattr(args, field)) is not None:
            if field in knobs:
                raise InputError(f"--set {field} and --{field.replace('_', '-')} are both given")
            found[field] = value
    return found


def with_chips(args: argparse.Namespace, prof: Profile, knobs: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields as the options for several chips give them: `--chips` fixes their product.

    Raises:
        InputError: a field is given twice, more chips than the machine has, or fields that do not make up so many.
    """
    knobs = with_chip_options(args, knobs)
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
