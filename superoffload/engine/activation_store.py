"""Saved tensors in host memory: copied down while forward goes on, and back up ahead of their use in backward.

`ActivationStore.pack` and `unpack` are hooks for `torch.autograd.graph.saved_tensors_hooks`. Whole storages are copied,
so that views saved from one storage (query, key and value of a fused product) cross the link once and come back with
their strides, and so with the same kernels and bits.

Stream order, in one place. `compute` is the stream on which a block's forward ran, and autograd runs its backward;
`out` and `back` are the store's own.

1. pack: `out` waits for what `compute` has enqueued (the tensor exists) and for the last read of the host buffer,
   which may still be going up. The source stays referenced: freed at once, its memory would be written by the next
   kernel while the copy reads it. `record_stream` would do as well, but then the allocator decides when memory is free
   again by polling events, and the peak differs from step to step.
2. A block's entry: sources of the block before the last one are let go after `compute` has been told to wait for
   their copies. Memory is thus free in `compute`'s own order, and forward never runs further ahead of the link than
   two blocks.
3. The first unpack in a block's backward begins to fetch the block before it. The memory comes from `compute`'s pool
   and may be in use by what `compute` has enqueued so far, so `back` waits for that; and for the copy down.
4. unpack: `compute` waits for the fetch. Let go later, the memory is reused on `compute`, behind that wait. What is
   let go without having been used (a graph that is dropped) is parked until `compute` has waited.
   What another forward saved on another stream is not fetched ahead: its memory would belong to this one.
5. The host buffer is free for another storage when the last saved tensor of this one is gone; rule 1 keeps its next
   copy behind the last read.

On a CPU there are no streams: every copy is done when its call returns.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn

from superoffload.activation_costs import IN_FLIGHT_BLOCKS
from superoffload.engine.buffer_pool import BufferPool, HostBuffer
from superoffload.engine.device import Device
from superoffload.engine.host_memory import HostMemory
from superoffload.engine.recorder import Recorder

TABLE_SHARE = 8
"""A tensor smaller than this part of its storage is a view of somebody's table, which lives on anyway."""


class _Group:
    """What one run of a block's forward saved."""

    __slots__ = ("__weakref__", "block", "number", "previous", "stored", "stream")

    def __init__(self, block: int, number: int, stream: Any, previous: _Group | None):
        self.block, self.number, self.stream = block, number, stream
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        self.stored: list[weakref.ref[_Stored]] = []


class _Stored:
    """A storage with a copy on the host."""

    __slots__ = (
        "__weakref__", "buffer", "device", "fetched", "group", "nbytes", "origin", "parked", "pool", "seen", "source",
        "spoiled", "uses", "version",
    )  # fmt: skip

    def __init__(self, group: _Group, source: torch.Tensor, buffer: HostBuffer, pool: BufferPool, parked: list[Any]):
        storage = source.untyped_storage()
        self.group, self.pool, self.parked = group, pool, parked
        self.nbytes, self.device = storage.nbytes(), source.device
        self.buffer = buffer
        self.origin = weakref.ref(storage)
        self.source: torch.Tensor | None = source
        """The saved tensor itself, for as long as it is on the device."""
        self.version = source._version
        self.spoiled = False
        """Written in place while its copy may not have been over."""
        self.fetched: torch.UntypedStorage | None = None
        """On the device again, held until the last saved view has been asked for."""
        self.seen: weakref.ref[torch.UntypedStorage] | None = None
        """The same, for as long as anybody holds it."""
        self.uses = 0
        """Saved views that backward has not asked for yet."""

    def __del__(self) -> None:
        # In any thread, at any time: no stream may be asked to wait here (rule 4). The parked memory is let go at the
        # store's next call.
        for held, event in ((self.source, self.buffer.copied), (self.fetched, self.buffer.read)):
            if held is not None:
                self.parked.append((held, event, self.group.stream))
        self.pool.give(self.buffer)


class _View:
    """What autograd holds in a saved tensor's place."""

    __slots__ = ("dtype", "offset", "shape", "stored", "stride")

    def __init__(self, stored: _Stored, x: torch.Tensor):
        self.stored, self.dtype, self.shape = stored, x.dtype, x.shape
        self.stride, self.offset = x.stride(), x.storage_offset()


class _Here:
    """A tensor that stays where it is. Autograd does not check versions through hooks, so this does."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: torch.Tensor):
        self.tensor, self.version = x.detach(), x._version  # detached: an output that held its own node would leak

    def get(self) -> torch.Tensor:
        _check(self.tensor, self.version)
        return self.tensor


class _Weight:
    """A parameter or buffer, or a view of one: found anew in backward, as its storage may be another one by then."""

    __slots__ = ("offset", "owner", "shape", "stride", "version")

    def __init__(self, owner: torch.Tensor, x: torch.Tensor):
        self.owner, self.version, self.shape, self.stride = owner, x._version, x.shape, x.stride()
        self.offset = x.storage_offset() - owner.storage_offset()

    def get(self) -> torch.Tensor:
        _check(self.owner, self.version)
        owner = self.owner.detach()
        return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.offset)


def _check(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )


class ActivationStore:
    """Moves what blocks save to the host and back.

    Args:
        arenas: addresses of storages that hold weights; nothing in them is ever moved.
        min_bytes: storages below this stay on the device.
    """

    def __init__(self, device: Device, host: HostMemory, recorder: Recorder, *, arenas: frozenset[int], min_bytes: int):
        self._cuda, self._device, self._recorder = device.is_cuda, device.device, recorder
        self._arenas, self._min = arenas, min_bytes
        self._now = device.now
        self.pool = BufferPool(host, cuda=self._cuda)
        self._group: _Group | None = None
        self._in_backward: weakref.ref[_Group] | None = None
        self._window: deque[weakref.ref[_Stored]] = deque()
        self._by_storage: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()
        self._weights: list[torch.Tensor] = []
        """Of the block whose forward runs, by address."""
        self._starts: list[int] = []
        self._parked: list[tuple[Any, Any, Any]] = []
        if self._cuda:
            with torch.cuda.device(self._device):
                self._out, self._back = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
                self._fork = torch.cuda.Event()

    def enter(self, block: int, module: nn.Module) -> None:
        """A block's forward begins: what is saved from here on is its own."""
        self._let_go()
        number = self._group.number + 1 if self._group is not None else 0
        self._group = _Group(block, number, self._stream(), self._group)
        while self._window:
            stored = self._window[0]()
            if stored is not None and stored.group.number > number - IN_FLIGHT_BLOCKS:
                break
            self._window.popleft()
            if stored is not None and stored.source is not None:
                _wait(stored.group.stream, stored.buffer.copied)
                # A write after this line is behind the copy; one before it may not have been.
                stored.spoiled = stored.source._version != stored.version
                stored.source = None
        # Where the block's weights lie now: those of a block that is fetched for each use move.
        own = sorted((t.data_ptr(), i, t) for i, t in enumerate((*module.parameters(), *module.buffers())) if t.numel())
        self._weights, self._starts = [t for *_, t in own], [start for start, *_ in own]

    def pack(self, x: torch.Tensor) -> _View | _Here | _Weight:
        """Take a tensor that autograd saves."""
        owner = self._owner(x) if _plain(x) else None
        if owner is not None:
            return _Weight(owner, x)
        if not self._moves(x):
            return _Here(x)
        storage = x.untyped_storage()
        stored = self._by_storage.get(storage.data_ptr())
        if stored is None or stored.origin() is not storage or stored.version != x._version:
            if x.numel() * x.element_size() * TABLE_SHARE < storage.nbytes():
                return _Here(x)
            stored = self._copy_down(x.detach())
            self._by_storage[storage.data_ptr()] = stored
        stored.uses += 1
        return _View(stored, x)

    def unpack(self, packed: _View | _Here | _Weight) -> torch.Tensor:
        """Give back what `pack` took.

        Raises:
            RuntimeError: as autograd does, where it was written in place meanwhile.
        """
        if not isinstance(packed, _View):
            return packed.get()
        self._let_go()
        stored = packed.stored
        if stored.source is not None:
            _check(stored.source, stored.version)
        if stored.spoiled:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{packed.dtype} {list(packed.shape)}] was written while it was copied to the host"
            )
        group = stored.group
        if self._in_backward is None or self._in_backward() is not group:
            self._in_backward = weakref.ref(group)
            self._fetch_ahead(group.previous())
        stored.uses -= 1
        storage = self._on_device(stored)
        if stored.uses <= 0:
            stored.fetched = None  # this view holds it now
        with torch.no_grad():
            view = torch.empty(0, dtype=packed.dtype, device=stored.device)
            return view.set_(storage, packed.offset, packed.shape, packed.stride)

    def _owner(self, x: torch.Tensor) -> torch.Tensor | None:
        """The weight of the block that `x` is, or is a view of."""
        at = bisect.bisect_right(self._starts, x.data_ptr()) - 1
        if at < 0:
            return None
        t = self._weights[at]
        inside = x.data_ptr() < t.data_ptr() + t.numel() * t.element_size() and x.device == t.device
        return t if inside and x.dtype == t.dtype else None

    # -- copies --------------------------------------------------------------------------------------------------------

    def _moves(self, x: torch.Tensor) -> bool:
        return (
            _plain(x)
            and x.device == self._device
            and x.untyped_storage().nbytes() >= self._min
            and x.untyped_storage().data_ptr() not in self._arenas
            and not x.is_conj()
            and not x.is_neg()
        )

    def _copy_down(self, source: torch.Tensor) -> _Stored:
        assert self._group is not None
        buffer = self.pool.take(source.untyped_storage().nbytes())
        stored = _Stored(self._group, source, buffer, self.pool, self._parked)
        self._group.stored.append(weakref.ref(stored))
        target, data = stored.buffer.data[: stored.nbytes], _bytes(source.untyped_storage(), self._device)
        if not self._cuda:
            start = self._mark(None)
            target.copy_(data)
            self._recorded("link_down", stored, start, self._mark(None))
            stored.source = None
            return stored
        self._fork.record(self._stream())
        self._out.wait_event(self._fork)
        self._out.wait_event(stored.buffer.read)
        with torch.cuda.stream(self._out):
            start = self._mark(self._out)
            target.copy_(data, non_blocking=True)
            stored.buffer.copied.record(self._out)
            self._recorded("link_down", stored, start, self._mark(self._out))
        self._window.append(weakref.ref(stored))
        return stored

    def _fetch_ahead(self, group: _Group | None) -> None:
        for ref in group.stored if group is not None and group.stream == self._stream() else ():
            stored = ref()
            if stored is not None and stored.source is None and stored.uses > 0:
                self._fetch(stored)  # on this stream, which is the group's

    def _on_device(self, stored: _Stored) -> torch.UntypedStorage:
        """The storage, ready for what the current stream does next."""
        if stored.source is not None:  # still in flight: it never left
            return stored.source.untyped_storage()
        storage = stored.fetched
        if storage is None and stored.seen is not None:
            storage = stored.seen()
        if storage is None:
            storage = self._fetch(stored)
        _wait(self._stream(), stored.buffer.read)
        return storage

    def _fetch(self, stored: _Stored) -> torch.UntypedStorage:
        if stored.fetched is not None:
            return stored.fetched
        data = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.device)
        source = stored.buffer.data[: stored.nbytes]
        if not self._cuda:
            start = self._mark(None)
            data.copy_(source)
            self._recorded("link_up", stored, start, self._mark(None))
        else:
            self._fork.record(self._stream())
            self._back.wait_event(self._fork)
            self._back.wait_event(stored.buffer.copied)
            with torch.cuda.stream(self._back):
                start = self._mark(self._back)
                data.copy_(source, non_blocking=True)
                stored.buffer.read.record(self._back)
                self._recorded("link_up", stored, start, self._mark(self._back))
        stored.fetched = data.untyped_storage()
        stored.seen = weakref.ref(stored.fetched)
        return stored.fetched

    def _mark(self, stream: torch.cuda.Stream | None) -> Any:
        if not self._recorder.on:
            return None
        if stream is None:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _recorded(self, lane: Any, stored: _Stored, start: Any, end: Any) -> None:
        kind: Any = "copy_down" if lane == "link_down" else "fetch"
        self._recorder.add(lane, kind, start, end, block=stored.group.block, nbytes=stored.nbytes)

    def _stream(self) -> Any:
        """The current stream; None where there are none."""
        return torch.cuda.current_stream(self._device) if self._cuda else None

    def _let_go(self) -> None:
        """Free parked memory behind the copies that still use it."""
        while self._parked:
            held, event, stream = self._parked.pop()
            _wait(stream, event)
            del held


def _wait(stream: Any, event: Any) -> None:
    if stream is not None:
        stream.wait_event(event)


def _plain(x: torch.Tensor) -> bool:
    """Whether a tensor is its storage's bytes, seen through strides."""
    return type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided and x.numel() > 0


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


__all__ = ["ActivationStore"]
