"""The split master of bf16 weights: 4 bytes per parameter for the fp32 master and the GPU's 16-bit copy, not 6.

The master is held as the bf16 weight and a 16-bit remainder, its lower half. Rounding to nearest even leaves two
masters possible where it was a tie, so one more bit is needed to tell them apart. It stands in the sign of the second
moment, which is never negative: nothing is allocated and nothing can overflow. While a master is split, **the sign of
`v` is not that of a number**: read the arrays through `join`. csrc/split_ops.h has the proof, docs/kernels.md the
reasons.

Every function goes element by element, so that any part of the arrays can be stepped, split or joined by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from superoffload.errors import InputError
from superoffload.kernels import (
    DTYPE_CODES,
    _describe,
    _notice_fallback,
    _refuse_overlap,
    native,
    resolve_threads,
)
from superoffload.kernels.arguments import StepOptions, step_arguments
from superoffload.kernels.undo import UndoRecord, check_redo_scale

__all__ = ["adam_record_split", "adam_step_split", "adam_undo_redo_split", "adam_undo_split", "join", "split"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint16": 2, "int16": 2}
_F32, _BF16, _BITS = ("float32",), ("bfloat16",), ("uint16", "int16")


def split(master: Any, weight16: Any, remainder16: Any, v: Any, *, threads: int | None = None) -> None:
    """Go from the plain layout to the split one.

    Args:
        master: fp32, length n; only read, and no longer needed afterwards. A NaN comes back as another NaN.
        weight16: bf16, length n; receives the master rounded to nearest even.
        remainder16: uint16 or int16, length n; receives its lower half.
        v: fp32 second moment, length n, without negative elements; its signs receive the bit that `join` needs.

    Raises:
        InputError: wrong dtype, shape, stride, device or length, a read-only or overlapping array, or an element of `v`
            with its sign set, as when it is already split. Nothing is changed.
    """
    addresses, _, n = _check(
        ("master", master, _F32, False),
        ("weight16", weight16, _BF16, True),
        ("remainder16", remainder16, _BITS, True),
        ("v", v, _F32, True),
    )
    workers = resolve_threads(threads)
    p, weight, remainder, second = addresses
    if native.any_sign(second, n):
        raise InputError(
            "v has elements with their sign set",
            expected="a second moment as Adam leaves it, +0 or more",
            remedy="Join it first if it is split already",
        )
    native.split(p, weight, remainder, second, n, workers)


def join(weight16: Any, remainder16: Any, v: Any, master: Any, exp_avg_sq: Any, *, threads: int | None = None) -> None:
    """Go from the split layout to the plain one, for a checkpoint for instance; the split arrays stay as they are.

    Args:
        weight16, remainder16, v: as `split` and the steps leave them, length n.
        master: fp32, length n; receives the exact bits of the master.
        exp_avg_sq: fp32, length n; receives `v` without the bits in its signs. May be `v` itself, which ends the split.

    Raises:
        InputError: as `split`. Nothing is changed.
    """
    arrays = [
        ("weight16", weight16, _BF16, False),
        ("remainder16", remainder16, _BITS, False),
        ("v", v, _F32, False),
        ("master", master, _F32, True),
    ]
    if exp_avg_sq is v:
        arrays[2] = ("v", v, _F32, True)
        addresses, _, n = _check(*arrays)
        addresses.append(addresses[2])  # v
    else:
        addresses, _, n = _check(*arrays, ("exp_avg_sq", exp_avg_sq, _F32, True))
    weight, remainder, second, p, plain_v = addresses
    native.join(weight, remainder, second, p, plain_v, n, resolve_threads(threads))


def adam_step_split(
    weight16: Any, remainder16: Any, m: Any, v: Any, g: Any, *, threads: int | None = None,
    **options: Unpack[StepOptions],
) -> None:  # fmt: skip
    """`adam_step` on a split master, with the same bits, in one pass over memory.

    Args:
        weight16, remainder16: bf16 and uint16 or int16, length n; updated. `weight16` is what the GPU gets.
        m: fp32 first moment, length n; updated.
        v: fp32 second moment that carries the split's bits, length n; updated.
        g, threads, options: as in `adam_step`.

    Raises:
        InputError: as `adam_step`. Nothing is changed.
    """
    arguments, arrays = step_arguments(options), _check_step(weight16, remainder16, m, v, g)
    native.adam_step_split(arrays, arguments, resolve_threads(threads))


def adam_record_split(
    weight16: Any, remainder16: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, threads: int | None = None,
    **options: Unpack[StepOptions],
) -> None:  # fmt: skip
    """`adam_step_split` that can be undone; see `superoffload.kernels.undo.adam_record`."""
    arguments, arrays = step_arguments(options), _check_step(weight16, remainder16, m, v, g)
    record._check_length(arrays.length)
    workers = resolve_threads(threads)
    record._step = arguments
    native.adam_record_split(arrays, arguments, record._addresses(), workers)


def adam_undo_split(
    weight16: Any, remainder16: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, threads: int | None = None
) -> None:
    """Restore all four arrays to their exact bits before the recorded step; `g` must be that step's gradient."""
    _take_back(weight16, remainder16, m, v, g, record, -1.0, threads)


def adam_undo_redo_split(
    weight16: Any, remainder16: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, grad_scale: float,
    threads: int | None = None,
) -> None:  # fmt: skip
    """Undo the recorded step and take it again with another `grad_scale`, in one pass over memory."""
    check_redo_scale(grad_scale)
    _take_back(weight16, remainder16, m, v, g, record, grad_scale, threads)


def _take_back(
    weight16: Any, remainder16: Any, m: Any, v: Any, g: Any, record: UndoRecord, new_scale: float, threads: int | None
) -> None:
    taken = record._recorded("adam_record_split")
    arrays = _check_step(weight16, remainder16, m, v, g)
    record._check_length(arrays.length)
    native.adam_undo_split(arrays, taken, record._addresses(), new_scale, resolve_threads(threads))
    record._step = None


class SplitArrays(NamedTuple):
    """Addresses, the gradient's dtype code and the length, as the native functions take them."""

    weight: int
    remainder: int
    m: int
    v: int
    g: int
    grad_dtype: int
    length: int


def _check_step(weight16: Any, remainder16: Any, m: Any, v: Any, g: Any) -> SplitArrays:
    addresses, dtypes, n = _check(
        ("weight16", weight16, _BF16, True),
        ("remainder16", remainder16, _BITS, True),
        ("m", m, _F32, True),
        ("v", v, _F32, True),
        ("g", g, tuple(DTYPE_CODES), False),
    )
    weight, remainder, first, second, gradient = addresses
    return SplitArrays(weight, remainder, first, second, gradient, DTYPE_CODES[dtypes[4]], n)


def _check(*arrays: tuple[str, Any, tuple[str, ...], bool]) -> tuple[list[int], list[str], int]:
    """Addresses, dtypes and the common length of (name, array, dtypes, writable), or InputError."""
    _notice_fallback()
    described = {name: _describe(array, name, dtypes, writable=writable) for name, array, dtypes, writable in arrays}
    lengths = {name: n for name, (_, _, n) in described.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(f"lengths differ: {lengths}", expected="equal lengths")
    _refuse_overlap({name: (address, n * _BYTES[dtype]) for name, (address, dtype, n) in described.items()})
    return (
        [address for address, _, _ in described.values()],
        [dtype for _, dtype, _ in described.values()],
        next(iter(lengths.values())),
    )
