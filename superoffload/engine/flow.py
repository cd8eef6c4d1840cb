"""Weight flow: blocks whose 16-bit weights live in pinned host memory and are fetched into a slot before each use.

The home of such a weight is what CPU Adam writes, so a step is followed by no upload. There are `prefetch_blocks` + 1
slots of the largest block's size, and the k-th flow block has slot k modulo their number, always: what autograd saved
in forward (a transposed view of a weight, say) points into the slot, and is right again once the block has been fetched
again before its backward. Outside its block's forward and backward the parameter itself points at its home, which the
GPU reads across the link: whoever reads or writes a weight then, does so slowly and rightly.

Order of threads and streams:

1. A fetch reads homes that CPU Adam has written: the host waits for these buckets first (a fetch ahead only asks).
2. It overwrites a slot whose last block may still be in use, so the fetch stream waits for the compute stream as it is
   at that moment. Fetches are only asked for between two blocks, when all uses of the one before are enqueued.
3. The compute stream waits for the fetch before the block's kernels are enqueued.
4. Nothing writes a home while a fetch that counts reads it: CPU Adam updates a bucket when its gradient is complete,
   and so after the backward that waited for the fetch. A fetch that nobody waited for is forgotten at the step.
5. Other compute streams come in turn: each first waits for all that was enqueued on the one before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.blocks import Block
from superoffload.engine.buckets import DTYPES, BucketState, ManagedParam
from superoffload.engine.device import Device
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.speculation import Speculation
from superoffload.engine.weights import Weights
from superoffload.engine.worker import WorkerFace
from superoffload.errors import EngineError, InputError
from superoffload.units import format_bytes

SLOT_ALIGN_BYTES = 256


class _Slot:
    """Device memory of one block at a time."""

    def __init__(self, nbytes: int, device: Device):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
        self.occupant: _FlowBlock | None = None
        self.ready = device.new_event()
        """Recorded when the occupant's weights have arrived."""


class _FlowBlock:
    """One block with its runs of weights: a run is what it has of one bucket."""

    def __init__(self, index: int, params: Sequence[ManagedParam], arenas: Arenas):
        self.index, self.params = index, list(params)
        self.buckets: list[BucketState] = []
        self.in_use = False
        """Whether its parameters point into the slot."""
        self.announced = False
        """Whether a backward has announced it since its last forward."""
        self.nbytes = 0
        self._runs: dict[int, tuple[int, int, int]] = {}
        """Bucket -> (first element, end, byte in the slot)."""
        mine = {bucket for p in params for bucket, _ in p.places}
        for k in sorted(mine, key=lambda k: (arenas.buckets[k].layout.dtype, k)):
            spans = [s for p in params for bucket, s in p.places if bucket == k]
            first, end = min(s.start for s in spans), max(s.start + s.numel for s in spans)
            self._runs[k] = (first, end, self.nbytes)
            self.buckets.append(arenas.buckets[k])
            # A parameter that goes on in the next bucket of its dtype fills this one to a multiple of the alignment, so
            # that it stays in one piece here too.
            size = (end - first) * DTYPES[arenas.buckets[k].layout.dtype].itemsize
            self.nbytes += -(-size // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    def settle(self, slot: _Slot) -> None:
        """Take `slot`, for good."""
        self.slot = slot
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(part of the slot, part of the home)."""
        for state in self.buckets:
            first, end, byte = self._runs[state.index]
            home = state.weights[first:end]
            size = home.numel() * home.element_size()
            self.copies.append((slot.memory[byte : byte + size].view(home.dtype), home))
        self.views: list[torch.Tensor] = []
        """Of each parameter, in the slot."""
        for p in self.params:
            bucket, segment = p.places[0]
            first, _, byte = self._runs[bucket]
            byte += (segment.start - first) * p.param.element_size()
            size = p.numel * p.param.element_size()
            self.views.append(slot.memory[byte : byte + size].view(p.param.dtype).view(p.param.shape))


class Flow:
    """Keeps the flow blocks of an engine moving. Without any, every call returns at once."""

    def __init__(
        self,
        blocks: Sequence[Block],
        arenas: Arenas,
        device: Device,
        recorder: Recorder,
        worker: WorkerFace,
        weights: Weights,
        speculation: Speculation,
        homed: Any,
    ):
        self._device, self._recorder, self._worker = device, recorder, worker
        self._weights, self._speculation, self._names = weights, speculation, [b.name for b in blocks]
        self._homed = homed
        """Recorded when the new weights of retained buckets are home."""
        self._order = [
            _FlowBlock(i, [p for p in arenas.params if p.block == i], arenas) for i in sorted(arenas.plan.flow_blocks)
        ]
        self._by_index = {f.index: f for f in self._order}
        largest = max((f.nbytes for f in self._order), default=0)
        self._slots = [_Slot(largest, device) for _ in range(min(arenas.plan.prefetch_blocks + 1, len(self._order)))]
        for k, f in enumerate(self._order):
            f.settle(self._slots[k % len(self._slots)])
        self._stream: Any = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(s.memory.numel() for s in self._slots)

    def use(self, block: int, *, backward: bool) -> None:
        """Make the current stream safe to read `block`'s weights, and fetch what will be used next.

        Args:
            backward: whether the blocks before it come next, or those after it.
        """
        if not self._order:
            return
        self._stream = self._device.continue_from(self._stream)
        f = self._by_index.get(block)
        for slot in self._slots:
            if slot.occupant is not None and slot.occupant is not f:
                self._leave(slot.occupant)
        if f is not None:
            self._enter(f)
            f.announced = backward
        before = [g for g in self._order if g.index < block]
        coming = before[::-1] if backward else [g for g in self._order if g.index > block]
        for g in coming[: len(self._slots)]:
            if f is not None and g.slot is f.slot:
                break
            if g.slot.occupant is g:
                continue
            if self._speculation.touches(g.index) or not all(s.retained or self._worker.bucket_done(s)
                                                             for s in g.buckets):  # fmt: skip
                break  # nothing overtakes: who comes later would take the link from who comes first
            self._fetch(g)

    def _enter(self, f: _FlowBlock) -> None:
        # What lies in the slot is not what somebody has written into the home since.
        fresh = f.slot.occupant is f and (f.in_use or not any(self._weights.is_edited(p) for p in f.params))
        if not fresh:
            for state in f.buckets:
                if not state.retained:
                    self._worker.wait_bucket(state)
            self._fetch(f)
        self._device.compute_waits(f.slot.ready)
        if not f.in_use:
            with uninterrupted():
                f.in_use = True
                for p, view in zip(f.params, f.views, strict=True):
                    p.point_to(view)

    def left(self, block: int) -> None:
        """`block`'s forward has been enqueued: whoever uses its weights from now on, beside their module, is not to
        keep views of the slot."""
        f = self._by_index.get(block)
        if f is not None:
            self._leave(f)

    def _leave(self, f: _FlowBlock) -> None:
        """Point its parameters home. The slot keeps the weights for the next use."""
        if not f.in_use:
            return
        with uninterrupted():
            for p in f.params:
                # Written where it lay: master and home must not forget it. What the worker has overwritten meanwhile
                # stays edited, and is rejected with words.
                if self._weights.is_edited(p) and not self._speculation.has(p):
                    self._weights.adopt(p)
                p.point_to(p.home_on_device)
            f.in_use = False

    def _fetch(self, f: _FlowBlock) -> None:
        self._evict(f.slot)
        for p in f.params:  # written at home
            if self._weights.is_edited(p) and not self._speculation.has(p):
                self._weights.adopt(p)
        device = self._device
        device.fetch.waits_for_compute()
        if any(state.retained for state in f.buckets):
            device.fetch.waits(self._homed)
        with device.fetch.use(), profiled(f"fetch block {f.index}"):
            start = self._recorder.mark(device, on="fetch")
            for target, home in f.copies:
                target.copy_(home, non_blocking=True)
            end = self._recorder.mark(device, on="fetch")
        device.fetch.record(f.slot.ready)
        f.slot.occupant = f
        self._recorder.add("link_up", "fetch", start, end, block=f.index, nbytes=f.nbytes)

    def _evict(self, slot: _Slot) -> None:
        if slot.occupant is not None:
            self._leave(slot.occupant)
            slot.occupant = None

    def drop(self, block: int) -> None:
        """What lies in the slot of `block` is not what its weights are any more."""
        f = self._by_index.get(block)
        if f is not None and f.slot.occupant is f:
            self._evict(f.slot)

    def forget(self) -> None:
        """Leave the slots: weights are about to change, or somebody wants to see them all."""
        for slot in self._slots:
            self._evict(slot)

    def check(self, p: ManagedParam) -> None:
        """Raise if `p`'s gradient was made while its weights were not there. Asked within backward.

        Raises:
            EngineError: nothing announced the backward of its block.
        """
        f = self._by_index.get(p.block)
        if f is None or f.announced:
            return
        raise EngineError(
            f"{p.name} got a gradient while its weights were not on the GPU: nothing announced the backward of "
            f"{self._names[p.block]}, so what was computed with it is wrong",
            expected="a flow block that returns its outputs as tensors, lists, tuples, dicts or dataclasses of them",
            remedy=f"Take block {p.block} out of flow_blocks; call zero_grad() to go on",
        )

    def restore(self) -> None:
        """Give every parameter ordinary memory again, on the device where there is room; the others stay at home, which
        takes no memory besides. The worker has ended and the device is idle."""
        self.forget()
        # A graph that saved views of a slot must not be walked any more.
        torch.autograd.graph.increment_version([p.param for f in self._order for p in f.params])
        left = 0
        for f in self._order:
            for p in f.params:
                try:
                    p.point_to(p.home.to(self._device.device, copy=True))
                except torch.cuda.OutOfMemoryError:
                    left += p.numel * p.param.element_size()
                    p.point_to(p.home)
                p.home = p.home_on_device = torch.empty(0)
        if left:
            warnings.warn(
                f"{format_bytes(left)} of weights did not fit the GPU's memory and stay on the host: they flowed while "
                "the optimizer was open. Move the model to the CPU before using it as a whole",
                UserWarning,
                stacklevel=2,
            )


def check_flow_blocks(blocks: Sequence[Block], flow_blocks: Sequence[int]) -> None:
    """Refuse blocks that cannot flow.

    Raises:
        InputError: no such block, one without weights of its own, one that shares weights with another, or one whose
            forward contains other blocks.
    """
    for i in flow_blocks:
        if not 0 <= i < len(blocks):
            raise InputError(f"flow_blocks names block {i}", expected=f"0 to {len(blocks) - 1}")
        block = blocks[i]
        inside = {id(m) for b in blocks for m in b.modules}
        nested = any(id(m) in inside and m is not own for own in block.modules for m in own.modules())
        mine = {id(p) for _, p in block.parameters}
        tied = bool(block.shared) or any(id(p) in mine for b in blocks for p in b.shared)
        why = (
            "has no trainable weights of its own" if not mine
            else "shares weights with another block" if tied
            else "contains other blocks, so that its weights are in use all the time" if nested
            else ""
        )  # fmt: skip
        if why:
            raise InputError(
                f"flow_blocks names block {i} ({block.name}), which {why}", expected="blocks such as the layers",
                remedy=f"Take block {i} out of flow_blocks",
            )  # fmt: skip


__all__ = ["Flow", "check_flow_blocks"]
