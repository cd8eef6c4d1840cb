"""The ring of landing buffers on the device: gradients are gathered in them on their way down, and held ones come back
up into them to be added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.buckets import BucketState, ManagedParam
from superoffload.engine.device import Device, copy
from superoffload.engine.recorder import Recorder
from superoffload.layout import Segment, ring_slots


class Landing:
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


class Slot:
    """One landing buffer on the device, for one bucket after another."""

    def __init__(self, nbytes: int, device: Device):
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.sent = device.new_event()
        """Recorded behind the last copy out of it."""
        self.fetched = device.new_event()
        """Recorded behind the last copy of held gradients into it."""
        self.used = False
        """Whether `sent` means anything."""
        self.busy: Any = None
        """The event after which it may be written, unless the compute stream has waited for it."""
        self.has_held = False
        """Whether the held gradients of its bucket lie in it."""
        self._landings: dict[int, Landing] = {}

    def landing(self, state: BucketState) -> Landing:
        found = self._landings.get(state.index)
        if found is None:
            dtype = state.grad.dtype
            found = Landing(self.buffer[: state.layout.numel * dtype.itemsize].view(dtype))
            self._landings[state.index] = found
        return found


class GradientRing:
    """Slots for the buckets whose gradients the host keeps, and what of them has been sent since the last step.

    Args:
        pending: by bucket, the segments that lie in its slot and have not been sent; the caller keeps it up to date.
    """

    def __init__(
        self,
        arenas: Arenas,
        device: Device,
        recorder: Recorder,
        pending: Mapping[int, list[Segment]],
    ):
        self._arenas, self._device, self._recorder, self._pending = arenas, device, recorder, pending
        nbytes = max((b.layout.numel * b.grad.dtype.itemsize for b in arenas.cpu_buckets), default=0)
        slots = ring_slots([b.layout for b in arenas.cpu_buckets], at_once=arenas.plan.compile_blocks)
        self._free = [Slot(nbytes, device) for _ in range(slots if nbytes else 0)]
        self._open: dict[int, Slot] = {}
        self._next: dict[int, int] = {}
        """The bucket that was begun after each bucket the last time: the order in which held gradients are fetched."""
        self._begun = -1
        """The bucket that was begun last."""
        self._on_host: dict[int, set[Segment]] = {}
        """Segments that have been sent since the last step."""
        self._went_by: dict[int, Slot] = {}
        """The slot by which each bucket went down last."""

    def slot(self, state: BucketState) -> Slot | None:
        """The slot of a bucket, for the compute stream to write. None where no slot is free and none can be freed but
        by sending the bucket of `longest`."""
        slot = self._open.get(state.index)
        if slot is None:
            if not self._free and not self._evict():
                return None
            slot = self._open[state.index] = self._free.pop(0)
        if slot.busy is not None:  # its last bucket must have left, or its held gradients come
            self._device.compute_waits(slot.busy)
            slot.busy = None
        return slot

    @property
    def longest(self) -> int:
        """The bucket that has been in its slot for the longest time."""
        return next(iter(self._open))

    def begin(self, state: BucketState) -> None:
        """The first gradient of a bucket lands in its slot."""
        self._next[self._begun], self._begun = state.index, state.index

    def _evict(self) -> bool:
        """Free a slot when gradients come in an unexpected order: of those fetched ahead, the one needed last."""
        for index in reversed(self._open):
            if not self._pending.get(index):
                self._release(self._open.pop(index))
                return True
        return False

    def _release(self, slot: Slot) -> None:
        slot.has_held = False
        self._free.append(slot)

    def close_slots(self) -> None:
        """Nothing that lies in a slot is wanted any more."""
        for slot in self._open.values():
            self._release(slot)
        self._open.clear()

    def consumed(self) -> None:
        """Nothing is held for the next step."""
        self._on_host.clear()

    def send(self, state: BucketState, segments: list[Segment]) -> None:
        """Copy segments of a bucket down, on the download stream, and give up its slot."""
        slot, whole = self._open.pop(state.index), len(segments) == len(state.layout.segments)
        landed, down = slot.landing(state).flat, self._device.down
        down.waits_for_compute()
        with down.use():
            start = self._recorder.mark(self._device, on="down")
            for held, part in zip(_parts(state.grad, segments, whole), _parts(landed, segments, whole), strict=True):
                copy(held, part)
            end = self._recorder.mark(self._device, on="down")
        down.record(slot.sent)
        slot.used, slot.busy = True, slot.sent
        self._went_by[state.index] = slot
        self._on_host.setdefault(state.index, set()).update(segments)
        self._release(slot)
        nbytes = sum(s.numel for s in segments) * state.grad.element_size()
        self._recorder.add("link_down", "copy_down", start, end, bucket=state.index, nbytes=nbytes)

    def fetch_ahead(self, done: set[int]) -> None:
        """Fetch held gradients of the buckets that came next the last time, as far as slots are free, up to one that is
        `done`. The next micro-batch begins where this one ends.

        A slot that was fetched and is not written, because its gradient did not come, stays right until the next step.
        """
        index = self._begun
        for _ in range(len(self._next)):
            index = self._next.get(index, -1)
            if not self._free or index < 0 or index in done:
                return
            if index in self._open:
                continue
            state = self._arenas.buckets[index]
            if not self._held(state):
                return
            slot = self._open[index] = self._free.pop(0)
            self._fetch(state, slot)
            slot.busy = slot.fetched

    def complete(self, state: BucketState, slot: Slot) -> None:
        """Bring held gradients into an open slot, unless they are there."""
        if not slot.has_held:
            self._fetch(state, slot)
            self._device.compute_waits(slot.fetched)

    def read(self, state: BucketState, slot: Slot) -> None:
        """The compute stream has read what it asked for of an open slot that is not to be sent."""
        self._device.record(slot.sent)
        slot.used, slot.busy = True, slot.sent

    def _held(self, state: BucketState) -> list[Segment]:
        """Segments of a bucket whose gradients of earlier backwards are on the host, and nowhere else."""
        sent, pending = self._on_host.get(state.index, ()), self._pending.get(state.index, ())
        return [s for s in state.layout.segments if s in sent and s not in pending]

    def _fetch(self, state: BucketState, slot: Slot) -> None:
        """Bring a bucket's held gradients up into its slot, beside what waits there to be sent."""
        slot.has_held = True
        segments, stream = self._held(state), self._device.held
        whole = len(segments) == len(state.layout.segments)
        if slot.busy is not None:
            stream.waits(slot.busy)
        else:
            stream.waits_for_compute()
        if (went_by := self._went_by.get(state.index)) is not None:  # the copy that brought them down
            stream.waits(went_by.sent)
        with stream.use():
            start = self._recorder.mark(self._device, on="held")
            landing = slot.landing(state).flat
            for up, part in zip(_parts(landing, segments, whole), _parts(state.grad, segments, whole), strict=True):
                copy(up, part)
            end = self._recorder.mark(self._device, on="held")
        stream.record(slot.fetched)
        nbytes = sum(s.numel for s in segments) * state.grad.element_size()
        self._recorder.add("link_up", "fetch", start, end, bucket=state.index, nbytes=nbytes)

    def wait_until_sent(self) -> None:
        """On the host, for all copies down."""
        for slot in [*self._free, *self._open.values()]:
            if slot.used:
                self._device.host_waits(slot.sent)

    @property
    def device_bytes(self) -> int:
        return sum(s.buffer.numel() for s in [*self._free, *self._open.values()])


def _parts(flat: torch.Tensor, segments: list[Segment], whole: bool) -> list[torch.Tensor]:
    """Some segments of a bucket's tensor; all of them as one piece."""
    return [flat] if whole else [flat[s.start : s.start + s.numel] for s in segments]
