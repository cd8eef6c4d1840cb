"""Speculation: Adam runs over a bucket as soon as its gradient is on the host, before the norm of the step is known.

The worker keeps an undo record of what it does, and the verdict settles it: bit for bit the training that waits. This
file tells the worker of every bucket that has come down whole, and knows until when the weights that a block would read
are those of a step that is not yet one. Which steps speculate is `superoffload.gate`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.buckets import BucketState, ManagedParam
from superoffload.engine.device import Device, copy
from superoffload.engine.worker import WorkerFace


class Speculation:
    """The step that has begun and is not submitted, as far as the worker has been told of it."""

    def __init__(self, arenas: Arenas, device: Device, worker: WorkerFace, readers: Sequence[set[int]],
                 device_partials: torch.Tensor, host_partials: torch.Tensor):  # fmt: skip
        self._arenas, self._device, self._worker, self._readers = arenas, device, worker, readers
        self.open = False
        self.arrived: list[BucketState] = []
        """Buckets whose weights may be those of the step that has begun."""
        self._blocks: set[int] = set()
        self._value = 0
        tickets = arenas.host.zeros(len(arenas.buckets), torch.int64, pinned=True)
        self.tensors = [tickets]
        if device.is_cuda:
            self._device_value = torch.zeros(1, dtype=torch.int64, device=device.device)
        # Views are made once: one less call of torch in a gradient's hook is one less chance to lose Python's lock.
        self._tickets = [(one, one.data_ptr()) for one in tickets.split(1)]
        ranges = [self._partial_range(b) for b in arenas.buckets]
        self._partials = [(host_partials[span], device_partials[span]) for span in ranges]

    def _partial_range(self, state: BucketState) -> slice:
        """From the bucket's first partial sum to its last. What other buckets have in between is copied along: where
        they have arrived those are the values that the host has already."""
        runs = self._arenas.partial_runs(state.layout.segments)
        return slice(min(first for first, _ in runs), max(first + count for first, count in runs))

    def begin(self, step: Any) -> None:
        """Open a step: buckets that arrive from now on are updated at once."""
        self._worker.begin(step)
        self.open = True
        self._value += 1  # never twice the same, also when a step is forgotten
        if self._device.is_cuda:
            with self._device.down.use():  # after the last step's tickets, before this one's
                self._device_value.fill_(self._value)

    def arrive(self, state: BucketState) -> None:
        """A whole bucket's gradient is on its way down: its partial sums follow it, then the ticket.

        Whoever sees the ticket may read both, and may overwrite the bucket's weights: the download waited for all that
        backward had enqueued, and backward is done with weights whose gradient is complete.
        """
        self.arrived.append(state)
        self._blocks |= self._readers[state.index]
        if not self._device.is_cuda:
            self._worker.arrive(state.index, 0, 0)
            return
        on_host, on_device = self._partials[state.index]
        ticket, address = self._tickets[state.index]
        with self._device.down.use():
            copy(on_host, on_device)
            copy(ticket, self._device_value)
        self._worker.arrive(state.index, address, self._value)

    def touches(self, block: int) -> bool:
        """Whether `block` might read weights of the step that is not yet one."""
        return block in self._blocks

    def has(self, p: ManagedParam) -> bool:
        """Whether `p` might hold weights of the step that is not yet one."""
        mine = {index for index, _ in p.places}
        return any(state.index in mine for state in self.arrived)

    def submitted(self) -> None:
        """`step()` has handed the step over: the verdict settles it."""
        self.open = False
        self.arrived.clear()
        self._blocks.clear()

    def cancel(self) -> list[BucketState]:
        """Take back what an open step has speculated and wait for that; returns the buckets whose weights were sent
        again."""
        self._worker.cancel()
        arrived = list(self.arrived)
        self.submitted()
        return arrived


__all__ = ["Speculation"]
