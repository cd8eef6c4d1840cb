"""What the worker is told of a step: its description, the parameters that take part, and the ticket by which the worker
knows that all of its gradients and partial sums are in host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.arguments import StepSettings
from superoffload.engine.buckets import ManagedParam
from superoffload.engine.device import Device
from superoffload.kernels import native


class Prepared(NamedTuple):
    """A step that may be handed to the worker."""

    step: Any
    active: list[int]
    """Per parameter, 1 where it had a gradient in this step."""
    counts: list[int]
    """Per parameter, the step count that it has when this step is committed."""


class Submission:
    """Describes steps in memory that the worker reads until they are settled.

    Args:
        device_partials: partial sums of the gradient norm, where they are computed.
    """

    def __init__(self, params: Sequence[ManagedParam], arenas: Arenas, device: Device, device_partials: torch.Tensor):
        self._arenas, self._device, self._device_partials = arenas, device, device_partials
        # Named devices: the worker reads these on the host, whatever torch's default device is.
        self.steps = torch.zeros(len(params), dtype=torch.int64, device="cpu")
        """Adam's step count of each parameter, incremented by the worker when a step is committed."""
        self._groups = torch.tensor([p.group for p in params], dtype=torch.int32, device="cpu")
        self._active = [torch.zeros(len(params), dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._ticket = arenas.host.zeros(1, torch.int64, pinned=True)
        self._ticket_value = 0
        self.host_partials = device_partials
        if device.is_cuda:
            self.host_partials = arenas.host.zeros(arenas.partial_count, torch.float64, pinned=True)
            self._device_ticket = torch.zeros(1, dtype=torch.int64, device=device.device)
        self.tensors = [self.steps, self._groups, *self._active, self._ticket, self.host_partials]
        """What the worker reads."""
        self._order = [b.index for b in reversed(arenas.buckets) if not b.retained]

    @property
    def updates(self) -> bool:
        """Whether there is any bucket for the worker."""
        return bool(self._order)

    def describe(self, sequence: int, arguments: StepSettings) -> Any:
        """A step as the worker wants it, but for what is only known once it is submitted."""
        d = native.StepDesc()
        d.sequence = sequence
        d.partials, d.partial_count = self.host_partials.data_ptr(), self.host_partials.numel()
        d.max_norm = -1.0 if arguments.max_norm is None else float(arguments.max_norm)
        d.unscale = arguments.unscale
        d.steps, d.groups = self.steps.data_ptr(), self._groups.data_ptr()
        d.param_count = len(self.steps)
        for h in arguments.hyper:
            d.add_group(*h)
        return d

    def prepare(self, sequence: int, arguments: StepSettings, collected: Collection[int]) -> Prepared:
        """Send the partial sums down, and behind them the ticket of a step over the parameters `collected`."""
        # The worker reads this until the step's last bucket. The step before the last is done with the other one: its
        # successor has been judged.
        active = self._active[sequence & 1].zero_()
        active[list(collected)] = 1
        # Taken before the worker may count this step. The verdict of the step before is known, so these are the
        # counts that a commit will give; on a skip nothing is written and nobody looks at them.
        counts: list[int] = (self.steps + active).tolist()
        self._ticket_value += 1  # never twice the same, also when a step fails before it is submitted
        if self._device.is_cuda:
            self._device.down.waits_for_compute()
            with self._device.down.use():
                self.host_partials.copy_(self._device_partials, non_blocking=True)
                self._device_ticket.fill_(self._ticket_value)
                self._ticket.copy_(self._device_ticket, non_blocking=True)
            self._device.up.waits_for_compute()  # uploads overwrite weights that this step's backward still reads
        step = self.describe(sequence, arguments)
        step.ticket = self._ticket.data_ptr() if self._device.is_cuda else 0
        step.ticket_value, step.active, step.order = self._ticket_value, active.data_ptr(), self._order
        return Prepared(step, active.tolist(), counts)


__all__ = ["Prepared", "Submission"]
