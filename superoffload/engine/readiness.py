"""When a block's weights may be read: which updates its forward waits for, and which `step()` waits for itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from superoffload.engine.arenas import Arenas
from superoffload.engine.blocks import Block
from superoffload.engine.buckets import ManagedParam
from superoffload.engine.device import Device
from superoffload.engine.flow import Flow
from superoffload.engine.recorder import profiled
from superoffload.engine.retained import RetainedUpdate
from superoffload.engine.weights import Weights
from superoffload.engine.worker import WorkerFace
from superoffload.errors import EngineError


class Readiness:
    """Makes streams wait for the weights of the last step, block by block and once for each step.

    Args:
        reads: block -> the parameters that its forward reads. read_buckets: block -> their buckets.
        readers: bucket -> the blocks that read it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        reads: Sequence[Sequence[ManagedParam]],
        read_buckets: Sequence[Sequence[int]],
        readers: Sequence[set[int]],
        arenas: Arenas,
        device: Device,
        worker: WorkerFace,
        weights: Weights,
        flow: Flow,
        retained: RetainedUpdate,
    ):
        self._blocks, self._reads, self._read_buckets, self._readers = blocks, reads, read_buckets, readers
        self._arenas, self._device, self._worker = arenas, device, worker
        self._weights, self._flow, self._retained = weights, flow, retained
        self.sequence = 0
        """The step whose weights are waited for."""
        self.waited_s = 0.0
        """Host seconds of waiting since somebody set this to 0."""
        self._ready: list[dict[int, int]] = [{} for _ in blocks]
        """Block -> stream -> the step whose weights that stream may read."""
        self._seen = [0] * len(arenas.params)
        """Parameter -> the step whose weights a forward has waited for."""
        self.lazy = [False] * len(blocks)
        """Blocks that have been seen to be entered before their gradients came."""
        self._entered: set[int] = set()
        self._with_gradient: set[int] = set()
        self._unentered: set[int] = set()
        self._unsettled = False

    def enter(self, block: int) -> None:
        """Before a forward of `block`."""
        self._entered.add(block)
        self.wait(block)

    def wait(self, block: int) -> None:
        """Make the current stream wait for the weights that `block` reads."""
        stream = self._device.stream_id()
        if self._ready[block].get(stream, 0) == self.sequence:
            return
        for index in self._read_buckets[block]:
            state = self._arenas.buckets[index]
            if state.retained:
                self._device.compute_waits(self._retained.homed if state.flow else self._retained.done)
                continue
            begin = time.perf_counter()
            with profiled(f"wait for bucket {index}"):
                self._worker.wait_bucket(state)
            self.waited_s += time.perf_counter() - begin
            for event in state.done:  # both: the last step may have been skipped, and then the one before counts
                self._device.compute_waits(event)
        # Once a step: a graph of another stream, or of another block with the same weight, stays as good as this one.
        new = [p for p in self._reads[block] if self._seen[p.index] != self.sequence]
        self.reject([p for p in new if self._weights.is_edited(p)])
        self._weights.bump(new)
        for p in new:
            self._seen[p.index] = self.sequence
        self._ready[block][stream] = self.sequence

    def wait_again(self, bucket: int) -> None:
        """The current stream waits for a bucket whose weights were sent once more; other streams have to as well."""
        for event in self._arenas.buckets[bucket].done:
            self._device.compute_waits(event)
        for block in self._readers[bucket]:
            self._ready[block].clear()

    def reject(self, edited: Sequence[ManagedParam]) -> None:
        """Take back edits that raced with the worker."""
        if edited:
            self._device.synchronize_compute()  # an edit that is still queued would land afterwards
            self._weights.reject(edited)
            for p in edited:
                self._flow.drop(p.block)

    def gradient(self, p: ManagedParam) -> None:
        """`p` got a gradient.

        Raises:
            EngineError: its weights were used without its block's forward, for the first time.
        """
        if p.block not in self._entered:
            # A fused loss on `head.weight`, say: nothing waited for the weights. Until a block has been seen to be
            # entered, `step()` itself waits for it.
            if self.lazy[p.block] and self.sequence not in self._ready[p.block].values():
                raise EngineError(
                    f"{p.name} got a gradient although the forward of {self._blocks[p.block].name} did not run",
                    expected="every weight to be used through its module, as in the steps before",
                    remedy="Call opt.synchronize() before the first forward that uses weights directly",
                )
            self._unentered.add(p.block)
        self._with_gradient.add(p.block)

    def submitted(self, sequence: int) -> None:
        """New weights are on their way."""
        self.sequence, self._unsettled = sequence, True

    def settle(self) -> None:
        """Wait for the blocks that were not seen to be entered before their gradients; the others' forward waits. An
        interrupted call is taken up again by the next."""
        if not self._unsettled:
            return
        for block in self._with_gradient:
            self.lazy[block] = block not in self._unentered
        self._with_gradient.clear()
        self._unentered.clear()
        for block, lazy in enumerate(self.lazy):
            if not lazy:
                self.wait(block)
        self._entered.clear()
        self._unsettled = False


__all__ = ["Readiness"]
