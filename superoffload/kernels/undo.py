"""Steps that can be taken back bit for bit: what speculation needs.

A record holds three bytes per parameter and a bounded list of the elements that one byte cannot repair; docs/kernels.md
says how. A tile of 16,384 elements with too many of those is not stepped at all, and waits for the true coefficient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from superoffload.errors import InputError
from superoffload.kernels import DTYPE_CODES, Described, check_arrays, native, resolve_threads

_ESCAPE_BYTES = 16

Step = tuple[float, float, float, float, float, int, float]
"""lr, beta1, beta2, eps, weight_decay, step, grad_scale."""


class UndoRecord:
    """Memory for the record of one step over arrays of `n` elements, and the arguments of that step."""

    def __init__(self, n: int):
        tiles = -(-n // native.UNDO_TILE)
        self.n = n
        self._low = np.zeros((3, n), dtype=np.uint8)
        self._escapes = np.zeros(tiles * native.UNDO_ESCAPES * _ESCAPE_BYTES, dtype=np.uint8)
        self._counts = np.zeros(tiles, dtype=np.uint32)
        self._step: Step | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the record, all of them allocated from the start."""
        return self._low.nbytes + self._escapes.nbytes + self._counts.nbytes

    @property
    def waiting(self) -> int:
        """Tiles that the last step left alone."""
        return int((self._counts == 0xFFFFFFFF).sum())

    @property
    def escaped(self) -> int:
        """Elements in the escape list after the last step."""
        return int(self._counts[self._counts != 0xFFFFFFFF].sum())

    def _check_length(self, n: int) -> None:
        if self.n != n:
            raise InputError(f"the record is for {self.n} elements", expected=f"{n}")

    def _recorded(self, by: str) -> Step:
        """The arguments of the step to take back; `by` names the function that records one."""
        if self._step is None:
            raise InputError("the record holds no step", remedy=f"Record one with {by}; a record undoes once")
        return self._step

    def _addresses(self) -> tuple[int, int, int, int, int]:
        low = [int(row.ctypes.data) for row in self._low]
        return low[0], low[1], low[2], int(self._escapes.ctypes.data), int(self._counts.ctypes.data)


def adam_record(
    p: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, lr: float, beta1: float = 0.9, beta2: float = 0.999,
    eps: float = 1e-8, weight_decay: float = 0.0, step: int, grad_scale: float = 1.0, out16: Any = None,
    threads: int | None = None,
) -> None:  # fmt: skip
    """`adam_step` that can be undone: same bits, and `record` holds what `adam_undo` needs.

    Raises:
        InputError: as `adam_step`, or a record of another length. Nothing is changed.
    """
    arrays = check_arrays(p, m, v, g, out16, step=step)
    record._check_length(arrays.length)
    workers = resolve_threads(threads)  # nothing may be refused once the record claims a step
    record._step = (lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    native.adam_record(*_flat(arrays), *record._step, *record._addresses(), workers)


def adam_undo(
    p: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, out16: Any = None, threads: int | None = None
) -> None:
    """Restore p, m, v (and out16) to their exact bits before the recorded step; `g` must be that step's gradient."""
    _take_back(p, m, v, g, record, -1.0, out16, threads)


def adam_undo_redo(
    p: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, grad_scale: float, out16: Any = None,
    threads: int | None = None,
) -> None:  # fmt: skip
    """Undo the recorded step and take it again with another `grad_scale`, in one pass: what clipping needs. Tiles that
    had waited take only the second."""
    check_redo_scale(grad_scale)
    _take_back(p, m, v, g, record, grad_scale, out16, threads)


def check_redo_scale(grad_scale: float) -> None:
    """A negative scale means "undo only" to the native functions."""
    if grad_scale < 0:
        raise InputError(f"grad_scale = {grad_scale}", expected="0 or more")


def _take_back(
    p: Any, m: Any, v: Any, g: Any, record: UndoRecord, new_scale: float, out16: Any, threads: int | None
) -> None:
    taken = record._recorded("adam_record")
    arrays = check_arrays(p, m, v, g, out16, step=taken[5])
    record._check_length(arrays.length)
    native.adam_undo(*_flat(arrays), *taken, *record._addresses(), new_scale, resolve_threads(threads))
    record._step = None


def _flat(arrays: Described) -> tuple[int, int, int, int, int, int, int, int]:
    return (
        arrays.p, arrays.m, arrays.v, arrays.g, DTYPE_CODES[arrays.grad_dtype], arrays.out,
        DTYPE_CODES[arrays.out_dtype], arrays.length,
    )  # fmt: skip
