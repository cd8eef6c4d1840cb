"""Records what a running engine does, as the same TraceEvents that the simulator makes.

Off, it costs one attribute test per call. On, marks are CUDA events (or host times where the CPU is the device) that
are turned into seconds only when a trace is asked for.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from superoffload.engine.blocks import Block
from superoffload.engine.device import Device, Stream
from superoffload.engine.hooks import tensors_in
from superoffload.engine.stalls import name_stalls
from superoffload.tracing import Kind, Lane, Stall, TraceEvent
from superoffload.units import format_seconds

_WORKER_KINDS: dict[int, tuple[Lane, Kind]] = {
    0: ("validator", "verdict"),
    1: ("cpu_adam", "adam"),
    2: ("cpu_adam", "cpu_cast"),
    3: ("cpu_adam", "cpu_cast"),
    4: ("link_up", "copy_up"),
    5: ("gpu", "cast"),
    6: ("cpu_adam", "undo"),
}
SHORTEST_COLLECTION_S = 2e-3
KEEP_STEPS = 8
"""Steps that are kept; older marks are dropped, so that recording does not grow."""


class _Span(NamedTuple):
    """Two marks of the engine, not yet turned into seconds."""

    step: int
    lane: Lane
    kind: Kind
    start: Any
    end: Any
    block: int = -1
    bucket: int = -1
    nbytes: int = 0
    name: str = ""
    launched_s: float = float("-inf")
    """Host time by which all of its work had been launched. Known of spans that the GPU may not have filled: it did
    where it came to their begin no earlier."""


class Recorder:
    """Collects marks of the last steps; `events` converts them."""

    def __init__(self, device: Device, *, on: bool):
        self.on = on
        self._device = device
        self._step = 0
        self._spans: list[_Span] = []
        self._bounds: list[Any] = []
        self._handles: list[Any] = []
        self._worker_spans: list[tuple[int, int, int, int, int]] = []
        self._backward: tuple[int, Any] | None = None
        self._forward_end: Any = None
        self._entered: dict[int, Any] = {}
        self._recomputed: dict[int, tuple[Any, Any]] = {}
        self._collections: deque[tuple[float, float]] = deque(maxlen=64)
        """Begin and end of long garbage collections, on the clock of `time.perf_counter`."""
        self._collecting = 0.0
        if on:
            gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collecting = now
        elif now - self._collecting > SHORTEST_COLLECTION_S:
            self._collections.append((self._collecting, now))

    def mark(self, device: Device, *, on: Stream = "compute") -> Any:
        return device.now(on=on) if self.on else None

    def add(
        self, lane: Lane, kind: Kind, start: Any, end: Any, *, block: int = -1, bucket: int = -1, nbytes: int = 0
    ) -> None:
        if self.on:
            self._spans.append(_Span(self._step, lane, kind, start, end, block, bucket, nbytes))

    def keep(self, worker_spans: Iterable[tuple[int, int, int, int, int]], sequence: int) -> None:
        """Add (kind, bucket, sequence, begin, end) in nanoseconds from the native worker, `sequence` being the last
        step."""
        self._worker_spans += worker_spans
        self._worker_spans = [s for s in self._worker_spans if s[2] > sequence - KEEP_STEPS]

    def watch(self, blocks: Sequence[Block]) -> None:
        """Hook the blocks: forward and recompute by module hooks, backward by the gradient of each block's output
        (nothing is added to the autograd graph)."""
        if not self.on:
            return
        for index, block in enumerate(blocks):
            if not block.modules:
                continue
            first, last = block.modules[0], block.modules[-1]
            self._handles.append(first.register_forward_pre_hook(self._enter(index)))
            self._handles.append(last.register_forward_hook(self._leave(index)))

    def recompute(self, block: int, *, begins: bool) -> None:
        """A block's forward is repeated inside backward without its hooks (`engine/activations.py`)."""
        if not self.on:
            return
        now = self.mark(self._device)
        if begins:
            self._entered[block] = now
        elif (start := self._entered.pop(block, None)) is not None:
            self._recomputed[block] = (start, now)
            self.add("gpu", "recompute", start, now, block=block)

    def _enter(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._entered[index] = self.mark(self._device)
            if torch._C._current_graph_task_id() == -1:
                self._backward = None  # left over by one that an exception ended

        return hook

    def _leave(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            start, end = self._entered.pop(index, None), self.mark(self._device)
            if start is None:
                return
            if torch._C._current_graph_task_id() != -1:  # a checkpointed forward inside backward
                self._recomputed[index] = (start, end)
                self.add("gpu", "recompute", start, end, block=index)
                return
            self.add("gpu", "forward", start, end, block=index)
            self._forward_end = end
            tensor = next(tensors_in(output), None)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._begin_backward(index))

        return hook

    def _begin_backward(self, index: int) -> None:
        now = self.mark(self._device)
        if self._backward is None:
            self._turn(now)
            # The last block's backward ends with the pass: no other block's begins, and the next forward is another's.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._end_backward(now)
        self._backward = (index, now)

    def _turn(self, now: Any) -> None:
        """Between the last block's forward and its backward lie the loss and whatever else the model does there."""
        start, self._forward_end = self._forward_end, None
        if start is not None:
            launched_s = time.perf_counter() if self._device.is_cuda else float("-inf")
            self._spans.append(_Span(self._step, "gpu", "forward", start, now, name="loss", launched_s=launched_s))

    def _end_backward(self, now: Any) -> None:
        if self._backward is None:
            return
        index, start = self._backward
        recomputed = self._recomputed.pop(index, None)
        self.add("gpu", "backward", recomputed[1] if recomputed else start, now, block=index)
        self._backward = None

    def _end_pass(self) -> None:
        self._end_backward(self.mark(self._device))

    def end_step(self) -> None:
        """Called by `step()` once backward is enqueued and before the update is."""
        if not self.on:
            return
        self._step += 1
        self._bounds.append(self.mark(self._device))
        if len(self._bounds) > KEEP_STEPS + 1:
            self._bounds.pop(0)
        oldest = self._step - KEEP_STEPS
        if self._spans and self._spans[0].step < oldest:
            self._spans = [s for s in self._spans if s.step >= oldest]

    def start_over(self) -> None:
        """Forget how long the steps so far took: the next one begins where the last has ended."""
        del self._bounds[:-1]

    def steps_s(self) -> list[float]:
        """Seconds between the ends of recorded steps."""
        times = [self._device.seconds(b) for b in self._bounds]
        return [b - a for a, b in itertools.pairwise(times)]

    def events(
        self, uploads: Iterable[tuple[int, Any, Any, int]]
    ) -> tuple[tuple[TraceEvent, ...], tuple[Stall, ...], float, float]:
        """The last complete step: (events, stalls, step seconds, window seconds).

        The window runs from the end of one backward to the end of the next: the update of the step before, the forward
        that it overlaps, and the last step's own forward and backward.

        Args:
            uploads: (bucket, start mark, end mark, bytes) of CUDA uploads; what lies outside the window is dropped.
        """
        if len(self._bounds) < 2:
            return (), (), 0.0, 0.0
        seconds = self._device.seconds
        begin, end = seconds(self._bounds[-2]), seconds(self._bounds[-1])
        found: list[TraceEvent] = []

        def keep(
            lane: Lane, kind: Kind, start: float, stop: float, block: int, bucket: int, nbytes: int, name: str = ""
        ) -> None:
            start, stop = max(start, begin), min(stop, end)
            if stop > start:
                what = f"bucket {bucket}" if bucket >= 0 else f"block {block}" if block >= 0 else ""
                name = name or f"{kind.replace('_', ' ')} {what}".strip()
                found.append(
                    TraceEvent(lane, kind, name, start - begin, stop - start, nbytes, block, bucket, self._step)
                )

        for s in self._spans:
            if s.step >= self._step - 2 and (start := seconds(s.start)) >= s.launched_s:
                keep(s.lane, s.kind, start, seconds(s.end), s.block, s.bucket, s.nbytes, s.name)
        for code, bucket, _, t0, t1 in self._worker_spans:
            lane, kind = _WORKER_KINDS[code]
            keep(lane, kind, t0 / 1e9, t1 / 1e9, -1, bucket, 0)
        for bucket, a, b, nbytes in uploads:
            keep("link_up", "copy_up", seconds(a), seconds(b), -1, bucket, nbytes)
        found.sort(key=lambda e: (e.start_s, e.lane))
        events = tuple(found)
        window = end - begin
        steps = self.steps_s()
        stalls = [*name_stalls(events, window)]
        for start, stop in self._collections:  # inside a span or between two: the GPU's lane does not show it
            if start < end and stop > begin:
                cause = f"Python's garbage collector stopped the host for {format_seconds(stop - start)}"
                start = max(start, begin)
                stalls.append(Stall("gpu", start - begin, min(stop, end) - start, "garbage collection", cause))
        return events, tuple(sorted(stalls, key=lambda s: s.start_s)), statistics.median(steps), window

    def close(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range in torch.profiler, where one runs; else nothing, at the cost of one call."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"superoffload: {name}")
    return nullcontext()
