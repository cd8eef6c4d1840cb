"""The golden file: what every kernel must give, on every processor, as hashes.

``python tests/kernels/make_golden.py`` writes golden.json from the numpy reference; ``--check`` only compares. A change
of the file means that training under an old checkpoint would go on with other bits: it wants a reason in the change
log. Inputs come from an integer generator, so that csrc/test_golden.cpp makes the same ones without Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from superoffload.kernels import reference

GOLDEN = Path(__file__).with_name("golden.json")

NAMES = ("f32", "bf16", "f16")
SIZES = (1, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 1000, 4099)
NORM_SIZES = (1, 3, 7, 63, 64, 65, 97, 127, 129, 1000, 8191, 8192)
MANY_TILES = 40_007  # more than two tiles of the thread pool
PARTIALS = 5000
HYPER = (3e-4, 0.9, 0.999, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight decay
GRAD_SCALE = 0.375
STEPS = 3
UNDO_SIZES = (1, 3, 7, 15, 17, 31, 33, 63, 65, 97, 129, 600, 4099)  # within the escape list, over one block, too many
SPLIT_SIZES = (1, 7, 17, 33, 65, 129, 600, 4099)
VARIANT_SIZES = (17, 97, 600)
PLAIN, L2, L2_UNCORRECTED = (True, True), (False, True), (False, False)  # decoupled weight decay, bias correction
REDO_SCALE = 0.03125

MASTER, EXP_AVG, EXP_AVG_SQ, GRADIENT, CAST, NEXT_GRADIENT, NORM, PARTIAL = 1, 2, 3, 4, 5, 6, 16, 32
SUMS = 8
"""Sums are taken of this many inputs (streams NORM, NORM + 1, …): another order of addition shows in few of them."""
# Biased exponents of ordinary and of wide values: low, count, wide low, wide count.
RANGES = {
    MASTER: (119, 8, 1, 146),
    EXP_AVG: (107, 16, 1, 136),
    EXP_AVG_SQ: (87, 32, 1, 146),
    GRADIENT: (115, 14, 1, 156),
    NEXT_GRADIENT: (115, 14, 1, 156),
    NORM: (115, 14, 100, 33),
    PARTIAL: (115, 14, 100, 33),
}

Array = Any


def draw(stream: int, n: int) -> Array:
    """The first n numbers of a stream, uint64: SplitMix64's output function over a counter."""
    with np.errstate(over="ignore"):
        z = np.uint64((stream << 32) + n) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _bits(u: Array, shift: int, mask: int) -> Array:
    return ((u >> np.uint64(shift)) & np.uint64(mask)).astype(np.uint32)


def finite_f32(u: Array, limits: tuple[int, int, int, int]) -> Array:
    """Bits of finite fp32: zeros, denormals, a quarter over a wide range, the rest over the ordinary one."""
    low, count, wide_low, wide_count = limits
    kind, sign, mantissa = _bits(u, 56, 127), _bits(u, 63, 1) << 31, _bits(u, 0, 0x7FFFFF)
    spread = _bits(u, 24, 0xFFFFFFFF)
    return np.select(
        [kind < 8, kind < 16, kind < 48],
        [sign, sign | mantissa, sign | (wide_low + spread % wide_count) << 23 | mantissa],
        sign | (low + spread % count) << 23 | mantissa,
    ).astype(np.uint32)


def finite_f16(u: Array) -> Array:
    """Bits of finite fp16, zeros and denormals more often than chance has it."""
    kind, sign, mantissa = _bits(u, 56, 127), _bits(u, 63, 1) << 15, _bits(u, 0, 0x3FF)
    normal = sign | (1 + _bits(u, 24, 0xFFFFFFFF) % 30) << 10 | mantissa
    return np.select([kind < 8, kind < 16], [sign, sign | mantissa], normal).astype(np.uint16)


def finite(stream: int, n: int, dtype: int, number: int = 0) -> Array:
    u = draw(stream + number, n)
    if dtype == 2:
        return finite_f16(u)
    x = finite_f32(u, RANGES[stream])
    return x if dtype == 0 else (x >> 16).astype(np.uint16)


def cast_source(n: int, dtype: int) -> Array:
    """Everything a dtype holds, NaN and infinities too, and more of the places where rounding may go wrong."""
    u = draw(CAST, n)
    kind = _bits(u, 56, 127)
    if dtype != 0:
        raw, exponent = _bits(u, 0, 0xFFFF), np.uint32((0x7F80, 0x7C00)[dtype - 1])
        return np.select([kind < 8, kind < 16], [raw | exponent, raw & ~exponent], raw).astype(np.uint16)
    raw, spread = _bits(u, 0, 0xFFFFFFFF), _bits(u, 32, 0xFFFFFF)
    sign, mantissa = raw & 0x80000000, raw & 0x7FFFFF
    return np.select(
        [kind < 2, kind < 4, kind < 8, kind < 12, kind < 20, kind < 36, kind < 52, kind < 68, kind < 76, kind < 84],
        [
            sign | 0x7F800000,  # infinity
            sign | 0x7F800000 | (mantissa & 0x1FFF) | 1,  # NaN in the lost bits only
            sign | 0x7F800000 | mantissa,  # NaN
            sign,  # zero
            sign | mantissa,  # denormal of fp32 and bf16
            sign | (101 + spread % 44) << 23 | (mantissa & 0x7FE000) | 0x1000,  # half-way between two fp16
            (raw & 0xFFFF0000) | 0x8000,  # half-way between two bf16
            sign | (101 + spread % 13) << 23 | mantissa,  # denormal of fp16
            sign | 142 << 23 | 0x7FC000 | (mantissa & 0x3FFF),  # where fp16 overflows
            sign | 0x7F7F0000 | (mantissa & 0xFFFF),  # where bf16 overflows
        ],
        raw,
    ).astype(np.uint32)


def _address(x: Array) -> int:
    return int(x.ctypes.data)


def _empty(n: int, dtype: int) -> Array:
    return np.zeros(n, np.uint32 if dtype == 0 else np.uint16)


def run_adam(
    native: Any, grad: int, out: int, n: int, threads: int = 1, *, choices: tuple[bool, bool] = PLAIN
) -> bytes:
    """Bytes of p, m, v and the 16-bit weights after some steps. `native` is the compiled module or the reference."""
    p, m, v = (finite(stream, n, 0) for stream in (MASTER, EXP_AVG, EXP_AVG_SQ))
    v &= np.uint32(0x7FFFFFFF)
    g, w = finite(GRADIENT, n, grad), _empty(0 if out == 0 else n, out)
    for t in range(1, STEPS + 1):
        arrays = (*map(_address, (p, m, v, g)), grad, _address(w) if out else 0, out, n)
        native.adam_step(arrays, (*HYPER, t, GRAD_SCALE, *choices), threads)
    return b"".join(x.tobytes() for x in (p, m, v, w))


class _Record:
    """Memory of an undo record of one tile."""

    def __init__(self, n: int):
        self.bytes = [np.zeros(n, np.int8) for _ in range(3)]
        self.escapes, self.count = np.zeros((reference.UNDO_ESCAPES, 4), np.uint32), np.zeros(1, np.uint32)

    def addresses(self) -> tuple[int, ...]:
        return (*map(_address, self.bytes), _address(self.escapes), _address(self.count))

    def taken(self) -> list[bytes]:
        count = int(self.count[0])
        if count == 0xFFFFFFFF:  # what a tile that waits has in its record means nothing
            return [self.count.tobytes()]
        return [self.count.tobytes(), *(x.tobytes() for x in self.bytes), self.escapes[:count].tobytes()]


def run_undo(
    native: Any, grad: int, out: int, n: int, threads: int = 1, *, choices: tuple[bool, bool] = PLAIN
) -> bytes:
    """Two steps from zero moments, then a third that is recorded, taken back, recorded and redone."""
    p, m, v = finite(MASTER, n, 0), _empty(n, 0), _empty(n, 0)
    before, now, w = finite(GRADIENT, n, grad), finite(NEXT_GRADIENT, n, grad), _empty(0 if out == 0 else n, out)
    rest = (grad, _address(w) if out else 0, out, n)
    for t in (1, 2):
        native.adam_step((*map(_address, (p, m, v, before)), *rest), (*HYPER, t, GRAD_SCALE, *choices), threads)
    arrays, step, record = (*map(_address, (p, m, v, now)), *rest), (*HYPER, 3, GRAD_SCALE, *choices), _Record(n)
    return _record_undo_redo(native, "", arrays, step, record, (p, m, v, w), threads)


def run_split(native: Any, grad: int, n: int, threads: int = 1, *, choices: tuple[bool, bool] = PLAIN) -> bytes:
    """The same on a split master, and the split itself."""
    p, m, v = finite(MASTER, n, 0), _empty(n, 0), _empty(n, 0)
    before, now = finite(GRADIENT, n, grad), finite(NEXT_GRADIENT, n, grad)
    weight, remainder = _empty(n, 1), _empty(n, 1)
    native.split(*map(_address, (p, weight, remainder, v)), n, threads)
    state = (weight, remainder, m, v)
    result = b"".join(x.tobytes() for x in state)
    for t in (1, 2):
        step = (*HYPER, t, GRAD_SCALE, *choices)
        native.adam_step_split((*map(_address, (*state, before)), grad, n), step, threads)
    result += b"".join(x.tobytes() for x in state)
    arrays, step = (*map(_address, (*state, now)), grad, n), (*HYPER, 3, GRAD_SCALE, *choices)
    return result + _record_undo_redo(native, "_split", arrays, step, _Record(n), state, threads)


def _record_undo_redo(
    native: Any, layout: str, arrays: Any, step: Any, record: _Record, state: tuple[Array, ...], threads: int
) -> bytes:
    take_step, take_back = getattr(native, f"adam_record{layout}"), getattr(native, f"adam_undo{layout}")
    take_step(arrays, step, record.addresses(), threads)
    result = [*(x.tobytes() for x in state), *record.taken()]
    take_back(arrays, step, record.addresses(), -1.0, threads)
    result += [x.tobytes() for x in state]
    take_step(arrays, step, record.addresses(), threads)
    take_back(arrays, step, record.addresses(), REDO_SCALE, threads)
    return b"".join([*result, *(x.tobytes() for x in state)])


def run_cast(native: Any, source: int, target: int, n: int, threads: int = 1) -> bytes:
    x, y = cast_source(n, source), _empty(n, target)
    native.cast(_address(x), source, _address(y), target, n, threads)
    return bytes(y.tobytes())


def run_accumulate(native: Any, dtype: int, n: int, threads: int = 1) -> bytes:
    total, x = finite(NORM, n, 0), finite(NORM, n, dtype, 1)
    native.accumulate(_address(total), _address(x), dtype, n, threads)
    return bytes(total.tobytes())


def run_sum_sq(native: Any, dtype: int, n: int, threads: int = 1) -> bytes:
    sums = np.zeros(SUMS)
    for k in range(SUMS):
        x = finite(NORM, n, dtype, k)
        native.norm_partials(_address(x), dtype, n, _address(sums[k:]), threads)
    return bytes(sums.tobytes())


def run_combine(native: Any, threads: int = 1) -> bytes:
    totals = np.zeros(SUMS)
    for k in range(SUMS):
        bits = finite(PARTIAL, PARTIALS, 0, k) & np.uint32(0x7FFFFFFF)
        partials = bits.view(np.float32).astype(np.float64)
        totals[k] = native.combine_partials(_address(partials), PARTIALS)
    return bytes(totals.tobytes())


def cases() -> Iterator[tuple[str, Callable[..., bytes]]]:
    """Name of a case and what runs it, given the module and a number of threads."""

    def case(run: Callable[..., bytes], *arguments: int, **choices: Any) -> Callable[..., bytes]:
        return lambda native, threads=1: run(native, *arguments, threads, **choices)

    for a in range(3):
        for b in range(3):
            for n in SIZES:
                yield f"adam/{NAMES[a]}/{NAMES[b]}/{n}", case(run_adam, a, b, n)
                yield f"cast/{NAMES[a]}/{NAMES[b]}/{n}", case(run_cast, a, b, n)
            for n in UNDO_SIZES:
                yield f"undo/{NAMES[a]}/{NAMES[b]}/{n}", case(run_undo, a, b, n)
            for n in VARIANT_SIZES:
                name = f"{NAMES[a]}/{NAMES[b]}/{n}"
                yield f"adam_l2/{name}", case(run_adam, a, b, n, choices=L2)
                yield f"adam_l2_uncorrected/{name}", case(run_adam, a, b, n, choices=L2_UNCORRECTED)
                yield f"undo_l2/{name}", case(run_undo, a, b, n, choices=L2)
        for n in SPLIT_SIZES:
            yield f"split/{NAMES[a]}/{n}", case(run_split, a, n)
        for n in VARIANT_SIZES:
            yield f"split_l2/{NAMES[a]}/{n}", case(run_split, a, n, choices=L2)
        for n in SIZES:
            yield f"accumulate/{NAMES[a]}/{n}", case(run_accumulate, a, n)
        for n in NORM_SIZES:
            yield f"sum_sq/{NAMES[a]}/{n}", case(run_sum_sq, a, n)
    yield f"adam/bf16/bf16/{MANY_TILES}", case(run_adam, 1, 1, MANY_TILES)
    yield f"combine/{PARTIALS}", case(run_combine)


def hashes(native: Any, threads: int = 1) -> dict[str, str]:
    """Case -> sha256 of what the module gives, as bytes in memory (little-endian)."""
    return {name: hashlib.sha256(run(native, threads)).hexdigest() for name, run in cases()}


def load() -> dict[str, str]:
    """Case -> sha256 as checked in."""
    hashes_by_case: dict[str, str] = json.loads(GOLDEN.read_text())["sha256"]
    return hashes_by_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    arguments = parser.parse_args()
    made = hashes(reference)
    if not arguments.check:
        about = "sha256 by kernel/dtype/dtype/size of the results of make_golden.py; every processor must reproduce it"
        GOLDEN.write_text(json.dumps({"about": about, "sha256": dict(sorted(made.items()))}, indent=1) + "\n")
        print(f"{len(made)} hashes written to {GOLDEN}")
        return 0
    old = load()
    different = sorted(name for name in made.keys() | old.keys() if made.get(name) != old.get(name))
    print("\n".join(different) or f"{len(made)} hashes agree")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
