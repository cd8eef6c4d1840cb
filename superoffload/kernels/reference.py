"""The kernels and the worker in numpy, with the compiled module's interface and its exact bits.

Used where no compiler was found. Everything takes addresses, as the compiled module does; steps and their undo record
are in reference_step.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from superoffload.kernels.reference_step import (
    _BF16,
    _F32,
    UNDO_ESCAPES,
    UNDO_TILE,
    Array,
    _adam,
    _at,
    _load,
    _storage,
    _store,
    adam_record,
    adam_scalars,
    adam_step,
    adam_stream,
    adam_undo,
)

__all__ = [
    "COMBINE_LANES",
    "NORM_CHUNK",
    "NORM_LANES",
    "UNDO_ESCAPES",
    "UNDO_TILE",
    "BucketDesc",
    "CudaApi",
    "StepDesc",
    "Worker",
    "active_isa",
    "adam_record",
    "adam_record_split",
    "adam_scalars",
    "adam_step",
    "adam_step_split",
    "adam_stream",
    "adam_undo",
    "adam_undo_split",
    "any_sign",
    "cast",
    "combine_partials",
    "force_isa",
    "isas",
    "join",
    "norm_partials",
    "split",
    "split_failures",
]

NORM_CHUNK, NORM_LANES, COMBINE_LANES = 8192, 64, 1024


def isas() -> list[str]:
    return ["reference"]


def active_isa() -> str:
    return "reference"


def force_isa(name: str) -> bool:
    return name in ("reference", "auto")


def _join(weight: int, remainder: int, v: int, n: int) -> tuple[Array, Array]:
    """Master and plain second moment; see csrc/split_ops.h."""
    w, lower = _at(weight, n, np.uint16), _at(remainder, n, np.uint16)
    flagged = _at(v, n, np.uint32)
    upper = w - ((w ^ (flagged >> 31).astype(np.uint16)) & np.uint16(1))
    master = (upper.astype(np.uint32) << 16) | lower
    return master.view(np.float32), (flagged & np.uint32(0x7FFFFFFF)).view(np.float32)


def _split(master: Array, plain_v: Array, weight: int, remainder: int, v: int) -> None:
    u, n = master.view(np.uint32), master.size
    _store(weight, master, _BF16)
    _at(remainder, n, np.uint16)[:] = u.astype(np.uint16)
    _at(v, n, np.uint32)[:] = (plain_v.view(np.uint32) & np.uint32(0x7FFFFFFF)) | ((u << 15) & np.uint32(0x80000000))


def split(p: int, weight: int, remainder: int, v: int, n: int, threads: int) -> None:
    _split(_at(p, n, np.float32), _at(v, n, np.float32).copy(), weight, remainder, v)


def join(weight: int, remainder: int, v: int, p: int, plain_v: int, n: int, threads: int) -> None:
    master, plain = _join(weight, remainder, v, n)
    _at(p, n, np.float32).view(np.uint32)[:] = master.view(np.uint32)
    _at(plain_v, n, np.float32).view(np.uint32)[:] = plain.view(np.uint32)


def any_sign(x: int, n: int) -> bool:
    return bool((_at(x, n, np.uint32) >> 31).any())


def split_failures(first: int, count: int, threads: int) -> int:
    failures = 0
    for upper in range(first, first + count):
        master = ((upper << 16) + np.arange(1 << 16, dtype=np.uint32)).view(np.float32)
        u = master.view(np.uint32)
        plain_v = (u ^ (u << 13)) & np.uint32(0x7FFFFFFF)
        v, (weight, remainder) = plain_v.copy(), np.empty((2, u.size), np.uint16)
        addresses = int(weight.ctypes.data), int(remainder.ctypes.data), int(v.ctypes.data)
        _split(master, plain_v.view(np.float32), *addresses)
        back, back_v = _join(*addresses, u.size)
        low, nan = u & np.uint32(0xFFFF), np.isnan(master)
        nearest = np.where(nan, 0x7FC0, upper + ((low > 0x8000) | ((low == 0x8000) & (upper & 1 == 1))))
        same = np.where(nan, np.isnan(back), back.view(np.uint32) == u)
        failures += int((~same | (weight != nearest) | (back_v.view(np.uint32) != plain_v)).sum())
    return failures


def _through_plain(plain: Callable[..., None], arrays: Sequence[int], *rest: Any) -> None:
    """Call `plain` (adam_step, adam_record or adam_undo) on the joined arrays and split them again."""
    weight, remainder, m, v, g, grad_dtype, n = arrays
    master, plain_v = _join(weight, remainder, v, n)
    addresses = int(master.ctypes.data), m, int(plain_v.ctypes.data)
    plain((*addresses, g, grad_dtype, weight, _BF16, n), *rest)
    _split(master, plain_v, weight, remainder, v)


def adam_step_split(*arguments: Any) -> None:
    _through_plain(adam_step, *arguments)


def adam_record_split(*arguments: Any) -> None:
    _through_plain(adam_record, *arguments)


def adam_undo_split(*arguments: Any) -> None:
    _through_plain(adam_undo, *arguments)


def cast(src: int, src_dtype: int, dst: int, dst_dtype: int, n: int, threads: int) -> None:
    if src_dtype == dst_dtype:
        _storage(dst, n, dst_dtype).view(np.uint8)[:] = _storage(src, n, src_dtype).view(np.uint8)
    else:
        _store(dst, _load(src, n, src_dtype), dst_dtype)


def norm_partials(x: int, dtype: int, n: int, partials: int, threads: int) -> None:
    values = _load(x, n, dtype).astype(np.float64)
    chunks = -(-n // NORM_CHUNK)
    padded = np.zeros(chunks * NORM_CHUNK)
    padded[:n] = values  # a square of zero leaves a lane's bits as they are
    rows = padded.reshape(chunks, NORM_CHUNK // NORM_LANES, NORM_LANES)
    lanes = np.zeros((chunks, NORM_LANES))
    with np.errstate(all="ignore"):
        for r in range(rows.shape[1]):
            lanes += rows[:, r] * rows[:, r]
        _at(partials, chunks, np.float64)[:] = _halve(lanes)


def _halve(lanes: Array) -> Array:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def combine_partials(partials: int, n: int) -> float:
    values = _at(partials, n, np.float64)
    lanes = np.zeros(COMBINE_LANES)
    with np.errstate(all="ignore"):
        for base in range(0, n, COMBINE_LANES):
            part = values[base : base + COMBINE_LANES]
            lanes[: part.size] += part
        return float(_halve(lanes))


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

    def __init__(self, threads: int, cuda: CudaApi):
        self.threads = threads
        self._cuda, self._buckets = cuda, list[BucketDesc]()
        self._verdict: tuple[int, float, float, bool, int] = (0, 0.0, 1.0, False, 0)
        self._closed = False

    def set_buckets(self, buckets: list[BucketDesc]) -> None:
        self._buckets = list(buckets)

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
        if skipped:
            return
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
            scalars = adam_scalars((lr, b1, b2, eps, wd, int(steps[param]), scale, True, True))
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

    def wait_idle(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the optimizer's worker is closed")

    def verdict(self) -> tuple[int, float, float, bool, int]:
        return self._verdict

    def trace(self, on: bool) -> None:
        """Spans of the fall-back are not recorded."""

    def take_spans(self) -> list[tuple[int, int, int, int, int]]:
        return []

    def set_delay_us(self, us: int) -> None:
        """Nothing runs beside the caller, so there is nothing to delay."""

    def close(self) -> None:
        self._closed = True
