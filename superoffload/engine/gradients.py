"""From autograd to the bucket's held gradient: hooks copy each gradient into its bucket's ring slot and drop it; a full
bucket gets its norm partials and goes down the link while backward continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from superoffload.engine.buckets import Arenas, BucketState, ManagedParam
from superoffload.engine.device import Device
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.worker import WorkerFace
from superoffload.layout import Segment

RING_SLOTS = 4
"""One bucket fills while others are on their way; more would only hold memory, since one copy runs at a time."""

SECOND_BACKWARD = (
    "a second backward ran before step(): its gradients were added to the ones already on the CPU, which is right but "
    "slow. Put every backward but the last inside `with opt.no_sync():` (or pass gradient_accumulation_steps)"
)


class _Slot:
    """One landing buffer on the device."""

    def __init__(self, nbytes: int, device: Device):
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.sent = device.new_event()
        self.used = False

    def view(self, state: BucketState) -> torch.Tensor:
        dtype = state.grad.dtype
        return self.buffer[: state.layout.numel * dtype.itemsize].view(dtype)


class GradientCollector:
    """Takes gradients of managed parameters until a step consumes them."""

    def __init__(self, arenas: Arenas, device: Device, recorder: Recorder, worker: WorkerFace):
        self._arenas, self._device, self._recorder, self._worker = arenas, device, recorder, worker
        self._stream: Any = None
        self.partials = torch.zeros(arenas.partial_count, dtype=torch.float64, device=device.device)
        nbytes = max((b.layout.numel * b.grad.dtype.itemsize for b in arenas.cpu_buckets), default=0)
        self._free = [_Slot(nbytes, device) for _ in range(RING_SLOTS if nbytes else 0)]
        self._open: dict[int, _Slot] = {}
        self._pending: dict[int, list[Segment]] = {}
        self.collected: set[int] = set()
        """Parameters whose gradient has been taken since the last step."""
        self._live: set[int] = set()
        """Parameters whose partial sums are not zero."""
        self._touched: set[int] = set()
        """Buckets that have been sent since the last step, whole or in part."""
        self._warned = False

    def take(self, p: ManagedParam) -> list[BucketState]:
        """Take `p`'s gradient and drop it. A second one since the last step is added to the first.

        Returns the buckets that this gradient has filled and sent on their way, whole and for the first time.
        """
        grad = p.param.grad
        if grad is None:
            return []
        # Slots, partial sums and held gradients are ordered on one stream at a time: a gradient that comes on another
        # one first waits for all that was done on the last.
        self._stream = self._device.continue_from(self._stream)
        if grad.is_sparse:
            grad = grad.to_dense()
        if p.index in self.collected:
            grad = self._add_to_held(p, grad)
        self.collected.add(p.index)
        self._live.add(p.index)
        flat = grad.detach().reshape(-1)
        p.param.grad = None
        filled: list[BucketState] = []
        for index, segment in p.places:
            state = self._arenas.buckets[index]
            target = self._landing(state)
            target[segment.start : segment.start + segment.numel].copy_(
                flat[segment.offset : segment.offset + segment.numel]
            )
            pending = self._pending.setdefault(index, [])
            pending.append(segment)
            if len(pending) == len(state.layout.segments):
                with profiled(f"send bucket {index}"):
                    self._flush(state)
                if index not in self._touched:
                    filled.append(state)
                self._touched.add(index)
        return filled

    def finish(self) -> None:
        """Send what has not been sent, and zero the partial sums of parameters without a gradient in this step."""
        self._stream = self._device.continue_from(self._stream)
        for index in list(self._pending):
            self._flush(self._arenas.buckets[index])
        for i in self._live - self.collected:
            p = self._arenas.params[i]
            self.partials[p.first_partial : p.first_partial + p.chunks].zero_()
        self._live &= self.collected
        self._touched.clear()

    def discard(self) -> None:
        """Forget every gradient taken since the last step (`zero_grad` without `step`)."""
        for slot in self._open.values():
            self._free.append(slot)
        self._open.clear()
        self._pending.clear()
        self._touched.clear()
        self.collected.clear()

    def _landing(self, state: BucketState) -> torch.Tensor:
        if state.retained:
            return state.grad
        slot = self._open.get(state.index)
        if slot is None:
            if not self._free:  # gradients came in an unexpected order: send the bucket that has waited longest
                longest = next(iter(self._open))
                self._touched.add(longest)
                self._flush(self._arenas.buckets[longest])
            slot = self._free.pop(0)
            if slot.used:
                self._device.compute_waits(slot.sent)  # its last bucket must have left before it is overwritten
            self._open[state.index] = slot
        return slot.view(state)

    def _flush(self, state: BucketState) -> None:
        if not state.retained:
            self._worker.wait_bucket(state)  # may be interrupted by Ctrl-C: nothing has changed until here
        segments = self._pending.pop(state.index, [])
        if not segments:  # all of them were taken back to be added to
            self._free.append(self._open.pop(state.index))
            return
        whole = len(segments) == len(state.layout.segments)
        landed = self._landing(state)
        table = state.table if whole else self._device.chunk_table(self._arenas.chunks(segments))
        start = self._recorder.mark(self._device)
        self._device.norm_partials(landed, table, self.partials)
        self._recorder.add("gpu", "norm", start, self._recorder.mark(self._device), bucket=state.index)
        if state.retained:
            return
        slot = self._open.pop(state.index)
        self._device.down_waits_for_compute()
        with self._device.down_stream():
            start = self._recorder.mark(self._device, down=True)
            if whole:
                state.grad.copy_(landed, non_blocking=True)
            else:
                for s in segments:
                    span = slice(s.start, s.start + s.numel)
                    state.grad[span].copy_(landed[span], non_blocking=True)
            end = self._recorder.mark(self._device, down=True)
        self._device.record_down(slot.sent)
        slot.used = True
        self._free.append(slot)
        nbytes = sum(s.numel for s in segments) * state.grad.element_size()
        self._recorder.add("link_down", "copy_down", start, end, bucket=state.index, nbytes=nbytes)

    def _add_to_held(self, p: ManagedParam, grad: torch.Tensor) -> torch.Tensor:
        """The sum of the held gradient and a new one, in the parameter's dtype as torch accumulates."""
        if not self._warned:
            self._warned = True
            warnings.warn(SECOND_BACKWARD, UserWarning, stacklevel=2)
        held = self._take_back(p)
        return held.view(grad.shape).to(grad.dtype) + grad

    def _take_back(self, p: ManagedParam) -> torch.Tensor:
        """A copy on the device, flat, of a gradient already taken; what has not been sent yet will not be."""
        pieces: list[torch.Tensor] = []
        for index, s in p.places:
            state = self._arenas.buckets[index]
            pending = self._pending.get(index, [])
            span = slice(s.start, s.start + s.numel)
            if state.retained:
                pieces.append(state.grad[span].clone())
            elif s in pending:
                pieces.append(self._landing(state)[span].clone())
            else:
                self._synchronize_down()
                pieces.append(state.grad[span].to(self._device.device))
            if s in pending:
                pending.remove(s)
        return torch.cat(pieces) if pieces else torch.empty(0, device=self._device.device)

    def give_back(self) -> None:
        """Return every gradient taken since the last step to `p.grad`."""
        for i in sorted(self.collected):
            p = self._arenas.params[i]
            held = self._take_back(p).view(p.param.shape).to(p.param.dtype)
            p.param.grad = held if p.param.grad is None else p.param.grad + held
        self.discard()

    def _synchronize_down(self) -> None:
        for slot in [*self._free, *self._open.values()]:
            if slot.used:
                self._device.host_waits(slot.sent)

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring and the partial sums on the device."""
        slots = sum(s.buffer.numel() for s in [*self._free, *self._open.values()])
        return slots + self.partials.numel() * 8


def collect_hook(take: Callable[[ManagedParam], None], p: ManagedParam) -> Any:
    """Register `take` to run when autograd has accumulated `p`'s gradient."""
    return p.param.register_post_accumulate_grad_hook(lambda _: take(p))
