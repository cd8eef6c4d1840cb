"""The kernels in numpy, with the compiled module's interface and its exact bits.

Used where no compiler was found (see fallback.py), and by tests. Everything takes addresses, as the compiled module
does; steps and their undo record are in reference_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from superoffload.kernels.reference_step import (
    _BF16,
    UNDO_ESCAPES,
    UNDO_TILE,
    Array,
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
    "accumulate",
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


def accumulate(total: int, x: int, dtype: int, n: int, threads: int) -> None:
    values = _at(total, n, np.float32)
    with np.errstate(all="ignore"):
        values += _load(x, n, dtype)


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
