"""Steps that can be taken back bit for bit: what speculation needs.

A record holds three bytes per parameter and a bounded list of the elements that one byte cannot repair; docs/kernels.md
says how. A tile of 16,384 elements with too many of those is not stepped at all, and waits for the true coefficient.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from superoffload.errors import InputError
from superoffload.kernels import check_arrays, native, resolve_threads
from superoffload.kernels.arguments import StepArguments, StepOptions, step_arguments

_LINE_BYTES = 64


class UndoRecord:
    """Memory for the record of one step over arrays of `n` elements, and the arguments of that step."""

    def __init__(self, n: int):
        tiles = -(-n // native.UNDO_TILE)
        self.n = n
        self._low = [_aligned_bytes(n) for _ in range(3)]
        self._escapes = _aligned_bytes(tiles * native.UNDO_ESCAPES * native.UNDO_ESCAPE_BYTES)
        self._counts = np.zeros(tiles, dtype=np.uint32)
        self._step: StepArguments | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the record, all of them allocated from the start."""
        return sum(x.nbytes for x in self._low) + self._escapes.nbytes + self._counts.nbytes

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

    def _recorded(self, by: str) -> StepArguments:
        """The arguments of the step to take back; `by` names the function that records one."""
        if self._step is None:
            raise InputError("the record holds no step", remedy=f"Record one with {by}; a record undoes once")
        return self._step

    def _addresses(self) -> tuple[int, int, int, int, int]:
        low = [int(row.ctypes.data) for row in self._low]
        return low[0], low[1], low[2], int(self._escapes.ctypes.data), int(self._counts.ctypes.data)


def _aligned_bytes(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros from the start of a cache line: kernels write whole ones past the caches. numpy promises 16 bytes."""
    room = np.zeros(n + _LINE_BYTES, dtype=np.uint8)
    start = -int(room.ctypes.data) % _LINE_BYTES
    return room[start : start + n]


def adam_record(
    p: Any, m: Any, v: Any, g: Any, record: UndoRecord, *, out16: Any = None, threads: int | None = None,
    **options: Unpack[StepOptions],
) -> None:  # fmt: skip
    """`adam_step` that can be undone: same bits, and `record` holds what `adam_undo` needs. Where a tile waits, `out16`
    holds the weights of the old p.

    Raises:
        InputError: as `adam_step`, or a record of another length. Nothing is changed.
    """
    arguments, arrays = step_arguments(options), check_arrays(p, m, v, g, out16)
    record._check_length(arrays.length)
    workers = resolve_threads(threads)  # nothing may be refused once the record claims a step
    record._step = arguments
    native.adam_record(arrays, arguments, record._addresses(), workers)


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
    arrays = check_arrays(p, m, v, g, out16)
    record._check_length(arrays.length)
    native.adam_undo(arrays, taken, record._addresses(), new_scale, resolve_threads(threads))
    record._step = None
