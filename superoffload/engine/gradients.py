"""From autograd to the bucket's held gradient: hooks copy each gradient into its bucket's ring slot and drop it; a full
bucket gets its norm partials and goes down the link while backward continues.

A hook runs once for each parameter and step, so it asks torch for as little as it can. Every operation costs launching
time, and each one, a view too, gives Python's lock away: beside a thread that runs Python it is a wait to get it back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from superoffload.engine.buckets import Arenas, BucketState, ManagedParam
from superoffload.engine.device import Device, copy
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.worker import WorkerFace
from superoffload.layout import Segment, ring_slots

SECOND_BACKWARD = (
    "a second backward ran before step(): its gradients were added to the ones already on the CPU, which is right but "
    "slow, and nothing was speculated. Put every backward but the last inside `with opt.no_sync():` (or pass "
    "gradient_accumulation_steps)"
)


class _Landing:
    """Where a bucket's gradient is gathered on the device, with its parts as views that are made once."""

    def __init__(self, flat: torch.Tensor):
        self.flat = flat
        self._parts: dict[Segment, torch.Tensor] = {}

    def part(self, p: ManagedParam, segment: Segment) -> torch.Tensor:
        """Of one segment: in the shape of the parameter that it is the whole of, else flat."""
        view = self._parts.get(segment)
        if view is None:
            view = self.flat[segment.start : segment.start + segment.numel]
            if len(p.places) == 1:
                view = view.view(p.param.shape)
            self._parts[segment] = view
        return view


class _Slot:
    """One landing buffer on the device, for one bucket after another."""

    def __init__(self, nbytes: int, device: Device):
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.sent = device.new_event()
        self.used = False
        self._landings: dict[int, _Landing] = {}

    def landing(self, state: BucketState) -> _Landing:
        found = self._landings.get(state.index)
        if found is None:
            dtype = state.grad.dtype
            found = _Landing(self.buffer[: state.layout.numel * dtype.itemsize].view(dtype))
            self._landings[state.index] = found
        return found


class GradientCollector:
    """Takes gradients of managed parameters until a step consumes them.

    Gradients of several backwards add up where the bucket's gradient is kept: a retained bucket's on the device, any
    other's on the host. There the sum is made on the device, in the parameter's dtype as torch accumulates: the held
    bucket comes up the link, the new gradient is added and the sum goes down again, all on the download stream, beside
    whatever is computed.
    """

    def __init__(self, arenas: Arenas, device: Device, recorder: Recorder, worker: WorkerFace):
        self._arenas, self._device, self._recorder, self._worker = arenas, device, recorder, worker
        self._stream: Any = None
        self.partials = torch.zeros(arenas.partial_count, dtype=torch.float64, device=device.device)
        self._slot_bytes = max((b.layout.numel * b.grad.dtype.itemsize for b in arenas.cpu_buckets), default=0)
        slots = ring_slots([b.layout for b in arenas.cpu_buckets], at_once=arenas.plan.compile_blocks)
        self._free = [_Slot(self._slot_bytes, device) for _ in range(slots if self._slot_bytes else 0)]
        self._open: dict[int, _Slot] = {}
        self._kept = {b.index: _Landing(b.grad) for b in arenas.buckets if b.retained}
        self._pending: dict[int, list[Segment]] = {}
        self._adds: dict[int, list[Segment]] = {}
        """Pending segments that have a held gradient to be added to."""
        self._fetched: torch.Tensor | None = None
        """Where a held bucket comes up to; only the download stream uses it."""
        if arenas.plan.accumulate_on == "cpu" and self._slot_bytes:
            self._fetched = torch.zeros(self._slot_bytes, dtype=torch.uint8, device=device.device)
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
        self.sums_on_download = False
        """Whether partial sums of this step are made on the download stream."""
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
        grad = p.param.grad
        if grad is None:
            return []
        # Slots, partial sums and held gradients are ordered on one stream at a time: a gradient that comes on another
        # one first waits for all that was done on the last.
        self._stream = self._device.continue_from(self._stream)
        if grad.is_sparse:
            grad = grad.to_dense()
        again = p.index in self.collected
        if p.index in self._final and not self._warned:
            self._warned = True
            warnings.warn(SECOND_BACKWARD, UserWarning, stacklevel=2)
        self.collected.add(p.index)
        self._live.add(p.index)
        if last:
            self._final.add(p.index)
        if grad.requires_grad:
            grad = grad.detach()
        pieces = [grad]
        if len(p.places) != 1:  # in several buckets; an empty parameter is in none
            flat = grad.reshape(-1)
            pieces = [flat[s.offset : s.offset + s.numel] for _, s in p.places]
        p.param.grad = None
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
        return filled

    def finish(self) -> None:
        """Send what has not been sent, and zero the partial sums of parameters without a gradient in this step."""
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

    def consumed(self) -> None:
        """A step has been submitted: the next gradient is another step's."""
        self.collected.clear()
        self._final.clear()
        self.sums_on_download = False

    def discard(self) -> None:
        """Forget every gradient taken since the last step (`zero_grad` without `step`)."""
        for slot in self._open.values():
            self._free.append(slot)
        for by_bucket in (self._open, self._pending, self._adds, self._unsummed):
            by_bucket.clear()
        self._sent.clear()
        self.consumed()

    def _land(self, state: BucketState, p: ManagedParam, segment: Segment, piece: torch.Tensor, again: bool) -> None:
        """Put one segment of `p`'s gradient where its bucket is gathered."""
        landing = self._kept[state.index] if state.retained else self._landing(state)
        target = landing.part(p, segment)
        pending = self._pending.setdefault(state.index, [])
        here = segment in pending
        if again and (here or state.retained):
            _add(target, piece, state.weights.dtype)
        else:
            copy(target, piece)
            if again:
                self._adds.setdefault(state.index, []).append(segment)
        if not here:
            pending.append(segment)

    def _landing(self, state: BucketState) -> _Landing:
        slot = self._open.get(state.index)
        if slot is None:
            if not self._free:  # gradients came in an unexpected order: send the bucket that has waited longest
                longest = next(iter(self._open))
                self._sent.add(longest)
                self._flush(self._arenas.buckets[longest], last=True)
            slot = self._free.pop(0)
            if slot.used:
                self._device.compute_waits(slot.sent)  # its last bucket must have left before it is overwritten
            self._open[state.index] = slot
        return slot.landing(state)

    def _flush(self, state: BucketState, *, last: bool) -> None:
        """Send a bucket's pending segments on their way, with their partial sums if these are the final gradients."""
        if not state.retained:
            self._worker.wait_bucket(state)  # may be interrupted by Ctrl-C: nothing has changed until here
        segments, adds = self._pending.pop(state.index, []), self._adds.pop(state.index, [])
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
        landed, slot = self._landing(state).flat, self._open.pop(state.index)
        if last and not adds:
            self._sum(state, landed, segments, whole)
        self._device.down_waits_for_compute()
        with self._device.down_stream():
            if adds:
                self._add_held(state, landed, adds)
                if last:
                    self._sum(state, landed, segments, whole)
                    self.sums_on_download = True
            start = self._recorder.mark(self._device, on="down")
            for held, part in zip(_parts(state.grad, segments, whole), _parts(landed, segments, whole), strict=True):
                copy(held, part)
            end = self._recorder.mark(self._device, on="down")
        self._device.record_down(slot.sent)
        slot.used = True
        self._free.append(slot)
        nbytes = sum(s.numel for s in segments) * state.grad.element_size()
        self._recorder.add("link_down", "copy_down", start, end, bucket=state.index, nbytes=nbytes)

    def _sum(self, state: BucketState, gradient: torch.Tensor, segments: list[Segment], whole: bool) -> None:
        """Partial sums of squares of some segments, on the current stream."""
        table = state.table if whole else self._device.chunk_table(self._arenas.chunks(segments))
        start = self._recorder.mark(self._device)
        self._device.norm_partials(gradient, table, self.partials)
        self._recorder.add("gpu", "norm", start, self._recorder.mark(self._device), bucket=state.index)

    def _fetch(self, state: BucketState, segments: list[Segment]) -> torch.Tensor:
        """Bring held gradients up, on the download stream: behind the copies that brought them down."""
        if self._fetched is None:
            self._fetched = torch.zeros(self._slot_bytes, dtype=torch.uint8, device=self._device.device)
        held = self._fetched[: state.layout.numel * state.grad.element_size()].view(state.grad.dtype)
        start = self._recorder.mark(self._device, on="down")
        whole = len(segments) == len(state.layout.segments)
        for up, part in zip(_parts(held, segments, whole), _parts(state.grad, segments, whole), strict=True):
            copy(up, part)
        nbytes = sum(s.numel for s in segments) * state.grad.element_size()
        end = self._recorder.mark(self._device, on="down")
        self._recorder.add("link_up", "fetch", start, end, bucket=state.index, nbytes=nbytes)
        return held

    def _add_held(self, state: BucketState, landed: torch.Tensor, segments: list[Segment]) -> None:
        held, whole = self._fetch(state, segments), len(segments) == len(state.layout.segments)
        for target, addend in zip(_parts(landed, segments, whole), _parts(held, segments, whole), strict=True):
            _add(target, addend, state.weights.dtype)

    def _sum_again(self, state: BucketState, segments: list[Segment]) -> None:
        if state.retained:
            self._sum(state, state.grad, segments, whole=False)
            return
        self._device.down_waits_for_compute()
        with self._device.down_stream():
            self._sum(state, self._fetch(state, segments), segments, whole=False)
        self.sums_on_download = True

    def _take_back(self, p: ManagedParam) -> torch.Tensor:
        """A copy on the device, flat, of a gradient already taken; what has not been sent yet will not be."""
        for index, _ in p.places:
            if index in self._pending:
                self._flush(self._arenas.buckets[index], last=False)
        for slot in [*self._free, *self._open.values()]:
            if slot.used:
                self._device.host_waits(slot.sent)
        pieces: list[torch.Tensor] = []
        for index, s in p.places:
            held = self._arenas.buckets[index].grad[s.start : s.start + s.numel]
            pieces.append(held.to(self._device.device, copy=True))
        return torch.cat(pieces) if pieces else torch.empty(0, device=self._device.device)

    def give_back(self) -> None:
        """Return every gradient taken since the last step to `p.grad`."""
        for i in sorted(self.collected):
            p = self._arenas.params[i]
            held = self._take_back(p).view(p.param.shape).to(p.param.dtype)
            p.param.grad = held if p.param.grad is None else p.param.grad + held
        self.discard()

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring and the partial sums on the device."""
        slots = sum(s.buffer.numel() for s in [*self._free, *self._open.values()])
        return slots + self.partials.numel() * 8 + (0 if self._fetched is None else self._fetched.numel())


def _parts(flat: torch.Tensor, segments: list[Segment], whole: bool) -> list[torch.Tensor]:
    """Some segments of a bucket's tensor; all of them as one piece."""
    return [flat] if whole else [flat[s.start : s.start + s.numel] for s in segments]


def _add(target: torch.Tensor, addend: torch.Tensor, dtype: torch.dtype) -> None:
    """target + addend rounded to the parameter's dtype, whatever the dtype in which gradients are held."""
    if target.dtype == dtype == addend.dtype:
        target.add_(addend)
    else:
        target.copy_(target.to(dtype).add_(addend.to(dtype)))


def collect_hook(take: Callable[[ManagedParam], None], p: ManagedParam) -> Any:
    """Register `take` to run when autograd has accumulated `p`'s gradient."""
    return p.param.register_post_accumulate_grad_hook(lambda _: take(p))
