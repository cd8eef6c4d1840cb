"""From autograd to the bucket's held gradient: hooks copy each gradient into its bucket's ring slot and drop it; a full
bucket gets its norm partials and goes down the link while backward continues.

A hook runs once for each parameter and step, so it asks torch for as little as it can. Every operation costs launching
time, and each one, a view too, gives Python's lock away: beside a thread that runs Python it is a wait to get it back.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.buckets import BucketState, ManagedParam
from superoffload.engine.device import Device, copy
from superoffload.engine.gradient_ring import GradientRing, Landing, Slot
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.worker import WorkerFace
from superoffload.layout import Segment

SECOND_BACKWARD = (
    "a second backward ran before step(): its gradients were added to the ones already on the CPU, which is right but "
    "slow, and nothing was speculated. Put every backward but the last inside `with opt.no_sync():` (or pass "
    "gradient_accumulation_steps)"
)


class GradientCollector:
    """Takes gradients of managed parameters until a step consumes them.

    Gradients of several backwards add up where the bucket's gradient is kept: a retained bucket's on the device, any
    other's on the host. There the sum is made on the device, in the parameter's dtype as torch accumulates: the held
    bucket comes up the link into a slot of the ring, ahead of the gradient, which is added to it where it would have
    been copied; the sum goes down. Adding on a stream of its own would save the compute stream a third read, but let
    that small kernel queue behind whole matrix multiplications.
    """

    def __init__(self, arenas: Arenas, device: Device, recorder: Recorder, worker: WorkerFace):
        self._arenas, self._device, self._recorder, self._worker = arenas, device, recorder, worker
        self._stream: Any = None
        self.partials = torch.zeros(arenas.partial_count, dtype=torch.float64, device=device.device)
        self._kept = {b.index: Landing(b.grad) for b in arenas.buckets if b.retained}
        self._pending: dict[int, list[Segment]] = {}
        self._ring = GradientRing(arenas, device, recorder, self._pending)
        self.collected: set[int] = set()
        """Parameters whose gradient has been taken since the last step."""
        self._final: set[int] = set()
        """Of these, the ones that the last backward before the step has given."""
        self._live: set[int] = set()
        """Parameters whose partial sums are not zero."""
        self._unsummed: dict[int, list[Segment]] = {}
        """Segments that were sent by a backward which was not the last, so that their partial sums are missing."""
        self._sent: set[int] = set()
        """Buckets that the last backward has sent, whole or in part."""
        self._warned = False

    def is_final(self, p: ManagedParam) -> bool:
        """Whether the last backward has given `p`'s gradient already."""
        return p.index in self._final

    @property
    def final_begun(self) -> bool:
        return bool(self._final)

    def take(self, p: ManagedParam, *, last: bool = True) -> list[BucketState]:
        """Take `p`'s gradient and drop it. A second one since the last step is added to the first.

        Args:
            last: whether this backward is the last before the step, as far as anyone knows.

        Returns:
            The buckets that the last backward has filled with this gradient, whole and for the first time. None of
            their parameters is expected to get another gradient.
        """
        if p.param.grad is None:
            return []
        for index, _ in p.places:  # here Ctrl-C leaves the gradient where it is
            self._worker.wait_bucket(self._arenas.buckets[index])
        with uninterrupted():  # half of it taken would be lost, or added a second time
            return self._take(p, p.param.grad, last)

    def _take(self, p: ManagedParam, grad: torch.Tensor, last: bool) -> list[BucketState]:
        # Slots, partial sums and held gradients are ordered on one stream at a time: a gradient that comes on another
        # one first waits for all that was done on the last.
        self._stream = self._device.continue_from(self._stream)
        if grad.is_sparse:
            grad = grad.to_dense()
        again = p.index in self.collected
        if p.index in self._final and not self._warned:
            self._warned = True
            warnings.warn(SECOND_BACKWARD, UserWarning, stacklevel=3)
        self._live.add(p.index)
        if last:
            self._final.add(p.index)
        if grad.requires_grad:
            grad = grad.detach()
        pieces = [grad]
        if len(p.places) != 1:  # in several buckets; an empty parameter is in none
            flat = grad.reshape(-1)
            pieces = [flat[s.offset : s.offset + s.numel] for _, s in p.places]
        filled: list[BucketState] = []
        for (index, segment), piece in zip(p.places, pieces, strict=True):
            state = self._arenas.buckets[index]
            self._land(state, p, segment, piece, again)
            if len(self._pending[index]) == len(state.layout.segments):
                with profiled(f"send bucket {index}"):
                    self._flush(state, last=last)
                if last:
                    # What an earlier micro-batch left here may fill a bucket too early: more is to be added to it.
                    final = all(s.tensor in self._final for s in state.layout.segments)
                    if final and index not in self._sent:
                        filled.append(state)
                    self._sent.add(index)
                if not state.retained:
                    self._ring.fetch_ahead(self._sent if last else set())
        self.collected.add(p.index)
        p.param.grad = None
        return filled

    def finish(self) -> None:
        """Send what has not been sent, and zero the partial sums of parameters without a gradient in this step."""
        with uninterrupted():
            self._finish()

    def _finish(self) -> None:
        self._stream = self._device.continue_from(self._stream)
        for index in list(self._pending):
            self._flush(self._arenas.buckets[index], last=True)
        for index, segments in self._unsummed.items():  # had no gradient in the last backward
            self._sum_again(self._arenas.buckets[index], segments)
        for i in self._live - self.collected:
            p = self._arenas.params[i]
            self.partials[p.first_partial : p.first_partial + p.chunks].zero_()
        self._live &= self.collected
        self._unsummed.clear()
        self._sent.clear()
        self._ring.close_slots()

    def consumed(self) -> None:
        """A step has been submitted: the next gradient is another step's."""
        self.collected.clear()
        self._final.clear()
        self._ring.consumed()

    def discard(self) -> None:
        """Forget every gradient taken since the last step (`zero_grad` without `step`)."""
        with uninterrupted():  # a slot that is given up half would serve two buckets at once
            self._ring.close_slots()
            self._pending.clear()
            self._unsummed.clear()
            self._sent.clear()
            self.consumed()

    def _land(self, state: BucketState, p: ManagedParam, segment: Segment, piece: torch.Tensor, again: bool) -> None:
        """Put one segment of `p`'s gradient where its bucket is gathered."""
        pending = self._pending.get(state.index, [])
        here = segment in pending
        if state.retained:
            landing = self._kept[state.index]
        else:
            slot = self._slot(state)
            if not pending:
                self._ring.begin(state)
            if again and not here:
                self._ring.complete(state, slot)
            landing = slot.landing(state)
        if again:
            _add(landing.part(p, segment), piece, state.weights.dtype)
        else:
            copy(landing.part(p, segment), piece)
        if not here:
            self._pending.setdefault(state.index, pending).append(segment)

    def _slot(self, state: BucketState) -> Slot:
        while (slot := self._ring.slot(state)) is None:  # gradients come in an unexpected order
            self._sent.add(self._ring.longest)
            self._flush(self._arenas.buckets[self._ring.longest], last=True)
        return slot

    def _flush(self, state: BucketState, *, last: bool) -> None:
        """Send a bucket's pending segments on their way, with their partial sums if these are the final gradients.

        The worker is done with what the bucket held before: nothing is pending whose `take` has not waited for that.
        """
        segments = self._pending.pop(state.index, [])
        whole = len(segments) == len(state.layout.segments)
        if last:
            left = [s for s in self._unsummed.pop(state.index, []) if s not in segments]
            if left:
                self._unsummed[state.index] = left
        else:
            self._unsummed[state.index] = list({*self._unsummed.get(state.index, []), *segments})
        if state.retained:
            if last:
                self._sum(state, state.grad, segments, whole)
            return
        if last:
            self._sum(state, self._slot(state).landing(state).flat, segments, whole)
        self._ring.send(state, segments)

    def _sum(self, state: BucketState, gradient: torch.Tensor, segments: list[Segment], whole: bool) -> None:
        """Partial sums of squares of some segments, on the current stream."""
        table = state.table if whole else self._device.chunk_table(self._arenas.chunks(segments))
        start = self._recorder.mark(self._device)
        self._device.norm_partials(gradient, table, self.partials)
        self._recorder.add("gpu", "norm", start, self._recorder.mark(self._device), bucket=state.index)

    def _sum_again(self, state: BucketState, segments: list[Segment]) -> None:
        """Partial sums of gradients that have been sent without."""
        if state.retained:
            self._sum(state, state.grad, segments, whole=False)
            return
        slot = self._slot(state)
        self._ring.complete(state, slot)
        self._sum(state, slot.landing(state).flat, segments, whole=False)
        self._ring.read(state, slot)

    def _take_back(self, p: ManagedParam) -> torch.Tensor:
        """A copy on the device, flat, of a gradient already taken; what has not been sent yet will not be."""
        for index, _ in p.places:
            if index in self._pending:
                self._flush(self._arenas.buckets[index], last=False)
        self._ring.wait_until_sent()
        pieces: list[torch.Tensor] = []
        for index, s in p.places:
            held = self._arenas.buckets[index].grad[s.start : s.start + s.numel]
            pieces.append(held.to(self._device.device, copy=True))
        return torch.cat(pieces) if pieces else torch.empty(0, device=self._device.device)

    def give_back(self) -> None:
        """Return every gradient taken since the last step to `p.grad`."""
        with uninterrupted():
            for i in sorted(self.collected):
                p = self._arenas.params[i]
                held = self._take_back(p).view(p.param.shape).to(p.param.dtype)
                p.param.grad = held if p.param.grad is None else p.param.grad + held
            self.discard()

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring and the partial sums on the device."""
        return self._ring.device_bytes + self.partials.numel() * 8


def _add(target: torch.Tensor, addend: torch.Tensor, dtype: torch.dtype) -> None:
    """target + addend rounded to the parameter's dtype, whatever the dtype in which gradients are held."""
    if target.dtype == dtype == addend.dtype:
        target.add_(addend)
    else:
        target.copy_(target.to(dtype).add_(addend.to(dtype)))
