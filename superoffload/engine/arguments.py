"""What an optimizer is given: hyperparameters and plans checked, defaults chosen, hints of other libraries read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from superoffload.engine.placement import Placement, place
from superoffload.errors import InputError, NotSupported, did_you_mean
from superoffload.kernels import available_cores, capabilities
from superoffload.plan import Plan, check_compile, check_master
from superoffload.topology import callers_cores


class Hyper(NamedTuple):
    """Hyperparameters of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class StepSettings(NamedTuple):
    """What a step is taken with, besides the gradients."""

    hyper: list[Hyper]
    """By parameter group."""
    max_norm: float | None
    unscale: float = 1.0
    """1 / loss scale."""


def step_settings(groups: Iterable[dict[str, Any]], max_norm: float | None, unscale: float) -> StepSettings:
    """What a step is taken with whose parameter groups are these."""
    hyper = [
        Hyper(float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"]))
        for g in groups
    ]
    return StepSettings(hyper, max_norm, unscale)


def default_adam_threads(placement: Placement | None = None) -> int:
    """All cores but one, or but two where there are many: PyTorch's launching thread and autograd's need theirs.

    Args:
        placement: on a machine of several NUMA nodes, where Adam goes; its cores are those left to it.
    """
    if placement is not None and placement.cores:
        return len(placement.cores)
    cores = available_cores()
    return max(1, cores - callers_cores(cores))


def check_hyper(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None, accumulation: int
) -> None:
    """Refuse hyperparameters that are not numbers, or not in their range.

    Raises:
        InputError: with the argument's name, its value and what was expected.
    """
    rules: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
        ("lr", lr, lambda x: x >= 0, "0 or more"),
        ("betas", betas, lambda x: len(x) == 2 and all(0 <= b < 1 for b in x), "two numbers in [0, 1)"),
        ("eps", eps, lambda x: x >= 0, "0 or more"),
        ("weight_decay", weight_decay, lambda x: x >= 0, "0 or more"),
        ("max_grad_norm", max_norm, lambda x: x is None or x > 0, "more than 0, or None for no clipping"),
        ("gradient_accumulation_steps", accumulation, lambda x: x >= 1, "at least 1"),
    )
    for name, value, valid, expected in rules:
        try:
            right = bool(valid(value))
        except TypeError:
            right = False
        if not right:
            raise InputError(f"{name} = {value!r}", expected=expected)


def resolve_plan(plan: Plan | None, fields: dict[str, Any], device: torch.device | None = None) -> Plan:
    """The plan with the caller's fields in it.

    Args:
        device: of the weights; without a plan it decides how many Adam threads there are cores for.

    Raises:
        InputError: a field that a plan does not have, or fields that exclude each other.
        NotSupported: a split master without compiled kernels.
    """
    for name in fields:
        if name not in Plan.knobs():
            raise InputError(f'unknown argument "{name}"{did_you_mean(name, Plan.knobs())}',
                             expected="AdamW's arguments or a plan field: " + ", ".join(Plan.knobs()))  # fmt: skip
    if plan is None:
        plan = Plan(adam_threads=default_adam_threads(place(device) if device is not None else None))
    plan = plan.replace(**fields) if fields else plan
    check_master(plan)
    check_compile(plan)
    if plan.master == "split" and not capabilities()["compiled"]:
        raise NotSupported(
            'master = "split" needs the compiled kernels', expected='master = "plain"',
            remedy="Install with a C++ compiler",
        )  # fmt: skip
    return plan


def accelerate_syncs() -> bool:
    """What Accelerate says of this backward, where it is in use: the last group of an epoch may be short, so that a
    counter of ours would be wrong."""
    module = sys.modules.get("accelerate.state")
    shared = getattr(getattr(module, "GradientState", None), "_shared_state", None)
    return bool(shared.get("sync_gradients", True)) if shared else True
