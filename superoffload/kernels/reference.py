"""The kernels and the worker in numpy, with the compiled module's interface and its exact bits.

Used where no compiler was found. Everything takes addresses, as the compiled module does; the operations and their
order are those of csrc/scalar_ops.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

NORM_CHUNK, NORM_LANES, COMBINE_LANES = 8192, 64, 1024
UNDO_TILE, UNDO_ESCAPES = 16384, 640
_NOT_STEPPED = 0xFFFFFFFF
_ESCAPE = np.dtype([("index", "<u4"), ("p", "<f4"), ("m", "<f4"), ("v", "<f4")])

_F32, _BF16, _F16 = 0, 1, 2
Array = npt.NDArray[Any]


def isas() -> list[str]:
    return ["reference"]


def active_isa() -> str:
    return "reference"


def force_isa(name: str) -> bool:
    return name in ("reference", "auto")


def _at(address: int, n: int, dtype: Any) -> Array:
    """View `n` elements at `address` without copying."""
    if n == 0:
        return np.empty(0, dtype)
    raw = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype=dtype)


def _storage(address: int, n: int, code: int) -> Array:
    return _at(address, n, (np.float32, np.uint16, np.float16)[code])


def _load(address: int, n: int, code: int) -> Array:
    x = _storage(address, n, code)
    if code == _BF16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    if code == _F16:  # numpy keeps a signalling NaN, or not, by the machine; the kernels make it quiet
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float32)
        u = wide.view(np.uint32)
        u[np.isnan(wide)] |= np.uint32(0x400000)
        return wide
    return x.astype(np.float32)


def _store(address: int, x: Array, code: int) -> None:
    target = _storage(address, x.size, code)
    if code == _BF16:
        u = x.view(np.uint32)
        rounded = ((u + np.uint32(0x7FFF) + ((u >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
        target[:] = np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
    elif code == _F16:
        with np.errstate(over="ignore", invalid="ignore"):
            h = x.astype(np.float16).view(np.uint16)
        u = x.view(np.uint32)  # of a NaN: the sign, made quiet, and the upper bits of what it carries
        nan = ((u >> 16) & np.uint32(0x8000)) | np.uint32(0x7E00) | ((u >> 13) & np.uint32(0x3FF))
        target.view(np.uint16)[:] = np.where(np.isnan(x), nan.astype(np.uint16), h)
    else:
        target[:] = x


def _power(x: float, n: int) -> float:
    result = 1.0
    while n > 0:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result


def adam_scalars(arguments: Sequence[Any]) -> tuple[float, ...]:
    """See `superoffload.kernels.adam_scalars`; takes the fields of `StepArguments`."""
    lr, b1, b2, eps, wd, t, scale, decoupled, bias_correction = arguments
    bc1, bc2 = (1.0 - _power(b1, t), 1.0 - _power(b2, t)) if bias_correction else (1.0, 1.0)
    decay, l2 = (1.0 - lr * wd, 0.0) if decoupled else (1.0, wd)
    values = (scale, 1.0 - b1, b2, 1.0 - b2, decay, -(lr / bc1), math.sqrt(bc2), eps, l2)
    return tuple(float(np.float32(x)) for x in values)


def _again(arguments: Sequence[Any], scale: float) -> tuple[Any, ...]:
    """The same step with another scale of the gradient."""
    return (*arguments[:6], scale, *arguments[7:])


def _fma(a: Any, b: Array, c: Array) -> Array:
    """a·b + c in fp32, rounded once. The product is exact in double; the sum is rounded to odd there, so that the
    second rounding, to fp32, cannot go wrong (Boldo and Melquiond, 2008)."""
    product, addend = np.float64(a) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # Knuth's exact error of the sum
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even & np.isfinite(total), odd, total).astype(np.float32)


def _scaled(g: int, g_code: int, p: Array, scalars: tuple[float, ...]) -> Array:
    """The gradient that the moments see."""
    grad, l2 = _load(g, p.size, g_code) * np.float32(scalars[0]), np.float32(scalars[8])
    return _fma(l2, p, grad) if l2 != 0 else grad


def _adam(
    p: int, m: int, v: int, g: int, g_code: int, out: int, out_code: int, n: int, scalars: tuple[float, ...]
) -> None:
    _, omb1, beta2, omb2, decay, neg_step, bc2_sqrt, eps, _ = (np.float32(s) for s in scalars)
    pa, ma, va = (_at(a, n, np.float32) for a in (p, m, v))
    with np.errstate(all="ignore"):
        grad = _scaled(g, g_code, pa, scalars)
        ma[:] = _fma(omb1, grad - ma, ma)
        va[:] = _fma(omb2 * grad, grad, va * beta2)
        denominator = np.sqrt(va) / bc2_sqrt + eps
        pa[:] = pa * decay + (neg_step * ma) / denominator
    if out:
        _store(out, pa, out_code)


Arrays = tuple[int, int, int, int, int, int, int, int]
"""p, m, v, g, the gradient's dtype, out, its dtype, length; the other tuples of addresses as csrc/bindings.cpp has
them."""


def adam_step(arrays: Arrays, arguments: Sequence[Any], threads: int) -> None:
    _adam(*arrays, adam_scalars(arguments))


def _tiles(arrays: Arrays, record: Sequence[int]) -> Iterator[tuple[Arrays, Array, Array, list[Array]]]:
    """Arrays, count, escape list and difference bytes of every tile."""
    p, m, v, g, grad_dtype, out, out_dtype, n = arrays
    *lows, escapes, counts = record
    for i, from_ in enumerate(range(0, n, UNDO_TILE)):
        k = min(UNDO_TILE, n - from_)
        addresses = (a + 4 * from_ for a in (p, m, v))
        gradient, target = g + from_ * (4 if grad_dtype == _F32 else 2), out + from_ * 2 if out else 0
        part = (*addresses, gradient, grad_dtype, target, out_dtype, k)
        entries = _at(escapes + i * UNDO_ESCAPES * _ESCAPE.itemsize, UNDO_ESCAPES, _ESCAPE)
        yield part, _at(counts + 4 * i, 1, np.uint32), entries, [_at(low + from_, k, np.int8) for low in lows]  # type: ignore[misc]


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def _estimate_p(state: list[Array], scalars: tuple[float, ...]) -> Array:
    _, _, _, _, decay, neg_step, bc2_sqrt, eps, _ = (np.float32(s) for s in scalars)
    p1, m1, v1 = state
    return (p1 - (neg_step * m1) / (np.sqrt(v1) / bc2_sqrt + eps)) * (np.float32(1) / decay)


def _estimate_moments(state: list[Array], grad: Array, scalars: tuple[float, ...]) -> tuple[Array, Array]:
    _, omb1, beta2, omb2 = (np.float32(s) for s in scalars[:4])
    _, m1, v1 = state
    one = np.float32(1)
    return (m1 - omb1 * grad) * (one / (one - omb1)), (v1 - (omb2 * grad) * grad) * (one / beta2)


def adam_record(arrays: Arrays, arguments: Sequence[Any], record: Sequence[int], threads: int) -> None:
    scalars = adam_scalars(arguments)
    for part, count, entries, differences in _tiles(arrays, record):
        *addresses, g, grad_dtype, target, out_dtype, k = part
        state = [_at(a, k, np.float32) for a in addresses]
        old = [a.copy() for a in state]
        _adam(*part, scalars)
        with np.errstate(all="ignore"):
            grad = _scaled(g, grad_dtype, old[0], scalars)
            estimates = _estimate_p(state, scalars), *_estimate_moments(state, grad, scalars)
            off = [_bits(a) - _bits(e) for a, e in zip(old, estimates, strict=True)]
        bad = np.flatnonzero(np.any([o + np.uint32(128) > 255 for o in off], axis=0))
        if bad.size > UNDO_ESCAPES:
            count[0] = _NOT_STEPPED
            for a, o in zip(state, old, strict=True):
                a[:] = o
            if target:
                _store(target, old[0], out_dtype)
            continue
        count[0] = bad.size
        entries["index"][: bad.size] = bad
        for name, o, d, low in zip(("p", "m", "v"), old, off, differences, strict=True):
            entries[name][: bad.size] = o[bad]
            low[:] = d.astype(np.int8)


def adam_undo(arrays: Arrays, arguments: Sequence[Any], record: Sequence[int], new_scale: float, threads: int) -> None:
    scalars, again = adam_scalars(arguments), adam_scalars(_again(arguments, new_scale))
    for part, count, entries, differences in _tiles(arrays, record):
        *addresses, g, grad_dtype, target, out_dtype, k = part
        if count[0] != _NOT_STEPPED:
            state = [_at(a, k, np.float32) for a in addresses]
            with np.errstate(all="ignore"):
                p0 = _moved(_estimate_p(state, scalars), differences[0])
                moments = _estimate_moments(state, _scaled(g, grad_dtype, p0, scalars), scalars)
            old = [p0, *(_moved(e, low) for e, low in zip(moments, differences[1:], strict=True))]
            escaped = entries[: int(count[0])]
            for name, a, o in zip(("p", "m", "v"), state, old, strict=True):
                a[:] = o
                a[escaped["index"]] = escaped[name]
            if target:
                _store(target, state[0], out_dtype)
        if new_scale >= 0:
            _adam(*part, again)


def _moved(estimate: Array, difference: Array) -> Array:
    return (_bits(estimate) + difference.astype(np.int32).view(np.uint32)).view(np.float32)


def adam_stream(p: int, m: int, v: int, g: int, n: int, threads: int) -> None:
    gradient = _at(g, n, np.float32)
    for address in (p, m, v):
        _at(address, n, np.float32)[:] += gradient


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
