"""What stands in for the compiled module where no compiler was found: the kernels of reference.py, and a worker that
has no thread.
"""

from __future__ import annotations

import ctypes
import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from superoffload.kernels.arguments import StepArguments
from superoffload.kernels.reference import *  # noqa: F403
from superoffload.kernels.reference import adam_scalars, cast, combine_partials
from superoffload.kernels.reference_step import _ESCAPE, _F32, Array, _adam, _at

UNDO_ESCAPE_BYTES = _ESCAPE.itemsize


@dataclass
class CudaApi:
    ctx_set_current: int = 0
    memcpy_htod_async: int = 0
    event_record: int = 0
    get_error_string: int = 0
    context: int = 0
    upload_stream: int = 0
    stream_query: int = 0
    download_stream: int = 0
    launch_kernel: int = 0
    cast_bf16: int = 0
    cast_f16: int = 0


def bind_cores(cores: list[int]) -> int:
    """No threads, nothing to bind."""
    return 0


def bind_memory(address: int, size: int, node: int) -> int:
    """Memory is not placed without the compiled module."""
    return errno.ENOSYS


def first_touch(address: int, size: int, threads: int, cores: list[int]) -> int:
    """Zero fresh pages; the fall-back has no threads to place."""
    ctypes.memset(address, 0, size)
    return 0


@dataclass
class BucketDesc:
    master: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    grad: int = 0
    grad_dtype: int = _F32
    grad_cast: int = 0
    out: int = 0
    out_dtype: int = _F32
    out_separate: bool = False
    upload_from: int = 0
    upload_to: int = 0
    upload_bytes: int = 0
    stage: int = 0
    stage_numel: int = 0
    events: dict[int, tuple[int, int]] = field(default_factory=dict)
    segments: list[tuple[int, int, int]] = field(default_factory=list)

    def set_events(self, parity: int, start: int, done: int) -> None:
        self.events[parity & 1] = (start, done)

    def set_undo(self, p: int, m: int, v: int, escapes: int, counts: int) -> None:
        """Not needed: see `Worker.begin`."""

    def set_snapshot(self, p: int, m: int, v: int) -> None:
        """Not needed: see `Worker.begin`."""

    def add_partials(self, first: int, count: int) -> None:
        """Not needed: see `Worker.begin`."""

    def add_segment(self, param: int, start: int, numel: int) -> None:
        self.segments.append((param, start, numel))


@dataclass
class StepDesc:
    sequence: int = 0
    ticket: int = 0
    ticket_value: int = 0
    partials: int = 0
    partial_count: int = 0
    max_norm: float = -1.0
    unscale: float = 1.0
    active: int = 0
    steps: int = 0
    groups: int = 0
    param_count: int = 0
    order: list[int] = field(default_factory=list)
    hyper: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def add_group(self, lr: float, b1: float, b2: float, eps: float, wd: float) -> None:
        self.hyper.append((lr, b1, b2, eps, wd))


class Worker:
    """The compiled worker's interface, without a thread: a step runs inside `submit`."""

    def __init__(self, threads: int, cuda: CudaApi, cores: list[int] | None = None):
        self.threads = threads
        self._cuda, self._buckets = cuda, list[BucketDesc]()
        self._verdict: tuple[int, float, float, bool, int] = (0, 0.0, 1.0, False, 0)
        self._records = list[tuple[int, float, float, bool, int, int, int, int, int, int]]()
        self._closed = False

    def set_buckets(self, buckets: list[BucketDesc]) -> None:
        self._buckets = list(buckets)

    def begin(self, step: StepDesc) -> None:
        """The fall-back has no thread that could run ahead: every step waits for its norm, with the same bits."""

    def arrive(self, bucket: int, ticket: int, value: int) -> None:
        """See `begin`."""

    def cancel(self) -> None:
        self._check()

    def submit(self, step: StepDesc) -> None:
        if self._closed:
            raise RuntimeError("the optimizer's worker is closed")
        if step.ticket:
            self._driver("cuCtxSynchronize")  # everything is in host memory once the device is idle
        total = combine_partials(step.partials, step.partial_count)
        norm, skipped, coefficient = math.sqrt(total) * step.unscale, not math.isfinite(total), 1.0
        if not skipped and step.max_norm >= 0.0:
            ratio = step.max_norm / (norm + 1e-6)
            coefficient = float(np.float32(ratio)) if ratio < 1.0 else 1.0
        self._verdict = (step.sequence, norm, coefficient, skipped, self._verdict[4] + skipped)
        begin = time.perf_counter_ns()
        if not skipped:
            self._step(step, coefficient)
        self._records.append((step.sequence, norm, coefficient, skipped, 0, 0, 0, 0, 0, time.perf_counter_ns() - begin))

    def _step(self, step: StepDesc, coefficient: float) -> None:
        active = _at(step.active, step.param_count, np.uint8)
        _at(step.steps, step.param_count, np.int64)[:] += active
        scale = float(np.float32(step.unscale) * np.float32(coefficient))
        for index in step.order:
            self._update(self._buckets[index], step, active, scale)

    def _update(self, b: BucketDesc, step: StepDesc, active: Array, scale: float) -> None:
        steps = _at(step.steps, step.param_count, np.int64)
        groups = _at(step.groups, step.param_count, np.int32)
        for param, start, numel in b.segments:
            if not active[param]:
                continue
            lr, b1, b2, eps, wd = step.hyper[groups[param]]
            scalars = adam_scalars(StepArguments(lr, b1, b2, eps, wd, int(steps[param]), scale))
            grad = b.grad + start * (4 if b.grad_dtype == _F32 else 2)
            out = b.out + start * 2 if b.out else 0
            arrays = (b.master + start * 4, b.exp_avg + start * 4, b.exp_avg_sq + start * 4)
            _adam(*arrays, grad, b.grad_dtype, out, b.out_dtype, numel, scalars)
        if not b.upload_to:
            return
        if not self._cuda.memcpy_htod_async:
            ctypes.memmove(b.stage or b.upload_to, b.upload_from, b.upload_bytes)
            if b.stage:
                cast(b.stage, _F32, b.upload_to, b.out_dtype, b.stage_numel, 1)
            return
        if b.stage:
            raise RuntimeError('cast_up = "gpu" needs the compiled kernels; use cast_up = "fused"')
        prototype: Callable[..., Any] = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        copy = prototype(self._cuda.memcpy_htod_async)
        record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._cuda.event_record)
        start, done = b.events[step.sequence & 1]
        if start:
            record(start, self._cuda.upload_stream)
        if code := copy(b.upload_to, b.upload_from, b.upload_bytes, self._cuda.upload_stream):
            raise RuntimeError(f"cuMemcpyHtoDAsync failed with CUDA driver error {code}")
        record(done, self._cuda.upload_stream)

    @staticmethod
    def _driver(name: str) -> None:
        if code := getattr(ctypes.CDLL("libcuda.so.1"), name)():
            raise RuntimeError(f"{name} failed with CUDA driver error {code}")

    def wait_verdict(self, sequence: int) -> None:
        self._check()

    def wait_bucket(self, bucket: int, sequence: int) -> None:
        self._check()

    def bucket_done(self, bucket: int, sequence: int) -> bool:
        self._check()
        return True

    def wait_idle(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the optimizer's worker is closed")

    def verdict(self) -> tuple[int, float, float, bool, int]:
        return self._verdict

    def trace(self, on: bool) -> None:
        """Spans of the fall-back are not recorded."""

    def take_records(self) -> list[tuple[int, float, float, bool, int, int, int, int, int, int]]:
        taken, self._records = self._records, []
        return taken

    def take_spans(self) -> list[tuple[int, int, int, int, int]]:
        return []

    def set_delay_us(self, us: int) -> None:
        """Nothing runs beside the caller, so there is nothing to delay."""

    def close(self) -> None:
        self._closed = True
