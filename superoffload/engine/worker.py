"""The native worker as the engine sees it: its errors in words, and everything it holds addresses of.

The worker's thread reads memory by address. `Lifeline` keeps that memory until the thread has ended, whatever happens
to the engine: garbage collection may clear an engine's attributes in any order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.buckets import BucketState
from superoffload.engine.device import Device
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import Recorder
from superoffload.engine.stats import NativeRecord
from superoffload.errors import EngineError
from superoffload.kernels import native

if TYPE_CHECKING:
    from superoffload.engine.flow import Flow

T = TypeVar("T")
Verdict = tuple[int, float, float, bool, int]
"""Sequence, gradient norm before clipping, clip coefficient, whether it was skipped, how many were skipped so far."""


class WorkerFace:
    """Calls of the worker that raise EngineError with the worker's own words, and in a forked child, where its thread
    does not live and its lock may be held for ever."""

    def __init__(self, threads: int, arenas: Arenas, device: Device, *, trace: bool):
        self._process = os.getpid()
        self._native = native.Worker(threads, device.cuda_api, list(arenas.host.placement.cores))
        self._native.set_buckets(arenas.describe(device))
        self._native.trace(trace)
        self.close = self._native.close
        self.submitted = 0
        """The last step that was."""

    def begin(self, step: Any) -> None:
        """Open a step for speculation."""
        self._call(self._native.begin, step)

    def arrive(self, bucket: int, ticket: int, value: int) -> None:
        """A bucket's gradient is in host memory once the int64 at address `ticket` equals `value`; now where it is
        0."""
        self._call(self._native.arrive, bucket, ticket, value)

    def cancel(self) -> None:
        """Take back what was speculated, and block until that is done."""
        self._call(self._native.cancel)

    def submit(self, step: Any) -> None:
        self._call(self._native.submit, step)
        self.submitted = step.sequence

    def wait_verdict(self, sequence: int) -> Verdict:
        """Block until step `sequence` is judged."""
        if sequence:
            self._call(self._native.wait_verdict, sequence)
        return self.verdict()

    def wait_bucket(self, state: BucketState) -> None:
        """Block until the last update of a bucket is done and its upload enqueued."""
        if state.sequence:
            self._call(self._native.wait_bucket, state.index, state.sequence)

    def bucket_done(self, state: BucketState) -> bool:
        """Whether `wait_bucket` would not block."""
        return not state.sequence or self._call(self._native.bucket_done, state.index, state.sequence)

    def wait_idle(self) -> None:
        self._call(self._native.wait_idle)

    def verdict(self) -> Verdict:
        """Of the last judged step."""
        return self._call(self._native.verdict)

    def take_records(self) -> list[NativeRecord]:
        """Of the steps that have finished since the last call."""
        return self._call(self._native.take_records)

    def take_spans(self) -> list[tuple[int, int, int, int, int]]:
        """What was traced since the last call: kind, bucket, sequence, begin and end in nanoseconds."""
        return self._call(self._native.take_spans)

    def set_delay_us(self, us: int) -> None:
        """For tests: sleep so long before each bucket."""
        self._call(self._native.set_delay_us, us)

    def _call(self, call: Callable[..., T], *args: Any) -> T:
        if os.getpid() != self._process:
            raise EngineError(
                "the optimizer was used in a process that was forked while it was open: its worker runs in the process "
                "that made it",
                expected="training in one process",
                remedy="Make the OffloadAdamW in the process that trains, after the fork; a child that only reads the "
                "model needs opt.synchronize() before the fork",
            )
        try:
            return call(*args)
        except RuntimeError as e:
            raise EngineError(
                f"the optimizer's worker stopped: {e}",
                remedy="Make a new OffloadAdamW and load the last checkpoint; this one is not saved from here on",
            ) from e


class Lifeline:
    """Ends an engine in the right order: hooks off, the submitted step finished, thread joined, device idle, host
    memory unpinned.

    Registered with `weakref.finalize`, so it runs when the engine is closed, dropped or left at exit, exactly once.
    """

    def __init__(self, device: Device, arenas: Arenas):
        self.device, self.arenas = device, arenas
        self.handles: list[Any] = []
        self.worker: WorkerFace | None = None
        self.recorder: Recorder | None = None
        self.flow: Flow | None = None
        self.tensors: list[torch.Tensor] = []
        """What the worker reads besides the arenas."""
        self._process = os.getpid()

    def end(self) -> None:
        """All of it, whatever fails and whenever Ctrl-C comes: what is left out now is never done."""
        if os.getpid() != self._process:  # a forked child has the objects, but neither their thread nor their device
            if self.worker is not None:
                self.worker.close()
            return
        with uninterrupted(), ExitStack() as last_first:
            last_first.callback(self.tensors.clear)
            last_first.callback(self.arenas.host.release)
            if self.flow is not None:
                last_first.callback(self.flow.restore)
            last_first.callback(self.device.close)
            if self.worker is not None:
                last_first.callback(self.worker.close)
                # With its verdict known the worker finishes a step; without one it takes it back, although retained
                # buckets may have taken it on the device.
                last_first.callback(_judge_last_step, self.worker)
            if self.recorder is not None:
                last_first.callback(self.recorder.close)
            last_first.callback(self.handles.clear)
            for handle in reversed(self.handles):
                last_first.callback(handle.remove)


def _judge_last_step(worker: WorkerFace) -> None:
    with suppress(EngineError):  # it has failed, and says so where it is asked
        worker.wait_verdict(worker.submitted)


__all__ = ["Lifeline", "Verdict", "WorkerFace"]
