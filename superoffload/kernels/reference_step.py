"""The steps of `superoffload.kernels.reference`: memory by address, one Adam step, and its undo record.

The operations and their order are those of csrc/step_ops.h and csrc/undo_ops.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

UNDO_TILE, UNDO_ESCAPES = 16384, 640
_NOT_STEPPED = 0xFFFFFFFF
_ESCAPE = np.dtype([("index", "<u4"), ("p", "<f4"), ("m", "<f4"), ("v", "<f4")])

_F32, _BF16, _F16 = 0, 1, 2
Array = npt.NDArray[Any]


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
