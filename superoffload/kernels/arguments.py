"""The arguments of an Adam step, as every function that takes one has them: plain, recorded, split."""

from __future__ import annotations

from typing import NamedTuple, Required, TypedDict

from superoffload.errors import InputError


class StepArguments(NamedTuple):
    """What a step needs besides its arrays; the native functions take it as it is."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 0
    """1 for the first step."""
    grad_scale: float = 1.0
    """The gradient is multiplied by it, in fp32."""
    decoupled_weight_decay: bool = True
    """torch.optim.AdamW's decay; False is torch.optim.Adam's, which adds ``weight_decay * p`` to the scaled gradient
    before the moments see it."""
    bias_correction: bool = True
    """Divide the moments by ``1 - beta ** step``."""


class StepOptions(TypedDict, total=False):
    """The fields of `StepArguments` as keywords."""

    lr: Required[float]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Required[int]
    grad_scale: float
    decoupled_weight_decay: bool
    bias_correction: bool


def step_arguments(options: StepOptions) -> StepArguments:
    """Check what a step is given.

    Raises:
        InputError: the step is not 1 or more.
        TypeError: a keyword that a step does not have, or no `lr`.
    """
    arguments = StepArguments(**options)
    if arguments.step < 1:
        raise InputError(f"step = {arguments.step}", expected="at least 1 (the first step is 1)")
    return arguments
