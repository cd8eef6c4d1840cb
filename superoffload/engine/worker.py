"""The native worker as the engine sees it: its errors in words, and everything it holds addresses of.

The worker's thread reads memory by address. `Lifeline` keeps that memory until the thread has ended, whatever happens
to the engine: garbage collection may clear an engine's attributes in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from superoffload.engine.buckets import Arenas, BucketState
from superoffload.engine.device import Device
from superoffload.engine.recorder import Recorder
from superoffload.errors import EngineError
from superoffload.kernels import native

if TYPE_CHECKING:
    from superoffload.engine.flow import Flow

Verdict = tuple[int, float, float, bool, int]
"""Sequence, gradient norm before clipping, clip coefficient, whether it was skipped, how many were skipped so far."""


class WorkerFace:
    """Calls of the worker that raise EngineError with the worker's own words."""

    def __init__(self, threads: int, arenas: Arenas, device: Device, *, trace: bool):
        self._native = native.Worker(threads, device.cuda_api, list(arenas.host.placement.cores))
        self._native.set_buckets(arenas.describe(device))
        self._native.trace(trace)
        self.take_spans = self._native.take_spans
        self.take_records = self._native.take_records
        self.set_delay_us = self._native.set_delay_us
        self.close = self._native.close

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

    def wait_verdict(self, sequence: int) -> Verdict:
        """Block until step `sequence` is judged."""
        if sequence:
            self._call(self._native.wait_verdict, sequence)
        return self._native.verdict()

    def wait_bucket(self, state: BucketState) -> None:
        """Block until the last update of a bucket is done and its upload enqueued."""
        if state.sequence:
            self._call(self._native.wait_bucket, state.index, state.sequence)

    def bucket_done(self, state: BucketState) -> bool:
        """Whether `wait_bucket` would not block."""
        done = True
        if state.sequence:

            def ask() -> None:
                nonlocal done
                done = self._native.bucket_done(state.index, state.sequence)

            self._call(ask)
        return done

    def wait_idle(self) -> None:
        self._call(self._native.wait_idle)

    def verdict(self) -> Verdict:
        """Of the last judged step."""
        return self._native.verdict()

    @staticmethod
    def _call(wait: Callable[..., Any], *args: Any) -> None:
        try:
            wait(*args)
        except RuntimeError as e:
            raise EngineError(
                f"the optimizer's worker stopped: {e}",
                remedy="Make a new OffloadAdamW and load the last checkpoint; this one is not saved from here on",
            ) from e


class Lifeline:
    """Ends an engine in the right order: hooks off, thread joined, device idle, host memory unpinned.

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

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.recorder is not None:
            self.recorder.close()
        if self.worker is not None:
            self.worker.close()
        try:
            self.device.close()
            if self.flow is not None:
                self.flow.restore()
        finally:
            self.arenas.host.release()
            self.tensors.clear()


__all__ = ["Lifeline", "Verdict", "WorkerFace"]
