"""The CPU kernels: AdamW on flat fp32 arrays, casts and the partial sums of the gradient norm.

Arrays are one-dimensional, contiguous, on the CPU: torch tensors or numpy arrays (numpy has no bf16). Anything else is
refused, never copied: an in-place step on a silent copy would update nothing. All instruction sets, thread counts and
the numpy fall-back give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from superoffload.errors import InputError, unknown_name
from superoffload.kernels.arguments import StepOptions, step_arguments

if TYPE_CHECKING:
    from superoffload import _kernels as native
else:
    try:
        from superoffload import _kernels as native
    except ImportError:  # a pure install: no compiler was found
        from superoffload.kernels import fallback as native

_COMPILED = native.__name__.endswith("._kernels")

__all__ = [
    "DTYPE_CODES",
    "accumulate",
    "adam_scalars",
    "adam_step",
    "bind_cores",
    "capabilities",
    "cast",
    "combine_partials",
    "force_isa",
    "native",
    "norm_partials",
    "sum_of_squares",
]

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Codes shared with csrc/kernels.h."""

_noticed = False


def capabilities() -> dict[str, Any]:
    """What the kernels can use here: ``compiled``, ``isas`` (best first), ``active``, ``cores``."""
    return {
        "compiled": _COMPILED,
        "isas": list(native.isas()),
        "active": native.active_isa(),
        "cores": available_cores(),
    }


def available_cores() -> int:
    """Cores this process may run on (affinity, not the machine's total)."""
    return len(available_core_list())


def bind_cores(cores: Sequence[int] | None) -> None:
    """From now on run the kernels' own threads on these cores and no others; None leaves them to the system. The
    calling thread works too and stays where it is. Meant to be called once: each change starts new threads. An engine's
    threads are its own and placed by it.

    Raises:
        InputError: the process may not use any of these cores.
    """
    chosen = [] if cores is None else sorted(set(cores))
    if cores is not None and not chosen:
        raise InputError("no cores", expected="at least one, or None")
    if code := native.bind_cores(chosen):
        raise InputError(f"cores {chosen}: {os.strerror(code)}", expected=f"some of {available_core_list()}")


def available_core_list() -> list[int]:
    """The cores this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def force_isa(name: str) -> Iterator[None]:
    """Use one instruction set ("scalar", "avx2", …) inside the block. The environment variable SUPEROFFLOAD_ISA does
    the same for a process.

    Raises:
        InputError: this CPU or build does not have it.
    """
    before = native.active_isa()
    if not native.force_isa(name):
        raise unknown_name("instruction set", name, native.isas(), "superoffload doctor lists what this CPU can run")
    try:
        yield
    finally:
        native.force_isa(before)


def _notice_fallback() -> None:
    global _noticed
    if not _COMPILED and not _noticed:
        _noticed = True
        warnings.warn(
            "superoffload was installed without a C++ compiler: Adam runs in numpy, exact but many times slower. "
            "Install a compiler (Debian: g++) and reinstall superoffload",
            RuntimeWarning,
            stacklevel=3,
        )


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(x: Any, name: str, dtypes: tuple[str, ...], *, writable: bool) -> tuple[int, str, int]:
    """Address, dtype name and length of an array, or InputError with the remedy."""
    dtype = _dtype_name(getattr(x, "dtype", None) or type(x).__name__)
    if dtype not in dtypes:
        raise InputError(
            f"{name} has dtype {dtype}",
            expected=" or ".join(dtypes),
            remedy=f"Convert it first; {name} is not copied",
        )
    if len(x.shape) != 1:
        raise InputError(f"{name} has shape {tuple(x.shape)}", expected="one dimension", remedy="Pass a flat view")
    if hasattr(x, "data_ptr"):
        if not x.is_cpu:
            raise InputError(f"{name} is on {x.device}", expected="the CPU", remedy="Copy it to the CPU first")
        contiguous, address, length = x.is_contiguous(), x.data_ptr(), x.numel()
        if writable and x.requires_grad:
            raise InputError(f"{name} requires grad", expected="plain data", remedy=f"Pass {name}.detach()")
    else:
        contiguous, address, length = x.flags.c_contiguous, x.ctypes.data, x.size
        if writable and not x.flags.writeable:
            raise InputError(f"{name} is read-only", expected="a writable array", remedy=f"Pass {name}.copy()")
    if not contiguous:
        raise InputError(f"{name} is strided", expected="a contiguous array", remedy=f"Pass a contiguous {name}")
    return int(address), dtype, int(length)


def resolve_threads(threads: int | None) -> int:
    if threads is None:
        return available_cores()
    if threads < 1:
        raise InputError(f"threads = {threads}", expected="at least 1")
    return threads


def _refuse_overlap(spans: dict[str, tuple[int, int]]) -> None:
    ordered = sorted((start, start + size, name) for name, (start, size) in spans.items() if size)
    for (_, end, a), (start, _, b) in itertools.pairwise(ordered):
        if start < end:
            raise InputError(f"{a} and {b} overlap in memory", expected="separate arrays")


def adam_step(
    p: Any, m: Any, v: Any, g: Any, *, out16: Any = None, threads: int | None = None, **options: Unpack[StepOptions]
) -> None:
    """One Adam step in place, in one pass over memory; the formula and its order are torch.optim.AdamW's, or with
    ``decoupled_weight_decay=False`` torch.optim.Adam's.

    Args:
        p, m, v: fp32 master weights and moments, length n; updated.
        g: gradient, length n, fp32, bf16 or fp16; multiplied by `grad_scale` in fp32.
        out16: bf16 or fp16, length n; receives the new weights, rounded to nearest even.
        threads: None uses every core the process may run on.
        options: `lr` and `step` (1 for the first), and what else `superoffload.kernels.arguments.StepArguments` has
            with its defaults: `beta1`, `beta2`, `eps`, `weight_decay`, `grad_scale`, `decoupled_weight_decay`,
            `bias_correction`.

    Raises:
        InputError: wrong dtype, shape, stride, device or length, a read-only or overlapping array, or a step below 1.
            Nothing is changed.
    """
    arguments, arrays = step_arguments(options), check_arrays(p, m, v, g, out16)
    native.adam_step(arrays, arguments, resolve_threads(threads))


class PlainArrays(NamedTuple):
    """Addresses, dtype codes and length of the arrays of a step, as the native functions take them; `out` is 0 where
    there is none."""

    p: int
    m: int
    v: int
    g: int
    grad_dtype: int
    out: int
    out_dtype: int
    length: int


def check_arrays(p: Any, m: Any, v: Any, g: Any, out16: Any) -> PlainArrays:
    """Check everything that a step is given, before anything is changed; see `adam_step` for what is raised."""
    _notice_fallback()
    spans: dict[str, tuple[int, int]] = {}
    lengths: dict[str, int] = {}
    described: dict[str, tuple[int, str]] = {}
    arrays: list[tuple[str, Any, tuple[str, ...], bool]] = [
        ("p", p, ("float32",), True),
        ("m", m, ("float32",), True),
        ("v", v, ("float32",), True),
        ("g", g, tuple(DTYPE_CODES), False),
    ]
    if out16 is not None:
        arrays.append(("out16", out16, ("bfloat16", "float16"), True))
    for name, array, dtypes, writable in arrays:
        address, dtype, n = _describe(array, name, dtypes, writable=writable)
        described[name], lengths[name] = (address, dtype), n
        spans[name] = (address, n * (4 if dtype == "float32" else 2))
    if len(set(lengths.values())) != 1:
        raise InputError(f"lengths differ: {lengths}", expected="equal lengths")
    _refuse_overlap(spans)
    out, out_dtype = described.get("out16", (0, "float32"))
    grad, grad_dtype = described["g"]
    addresses = described["p"][0], described["m"][0], described["v"][0]
    return PlainArrays(*addresses, grad, DTYPE_CODES[grad_dtype], out, DTYPE_CODES[out_dtype], lengths["p"])


def adam_scalars(**options: Unpack[StepOptions]) -> tuple[float, ...]:
    """The fp32 constants of a step: grad_scale, 1-beta1, beta2, 1-beta2, 1-lr·wd, -lr/bc1, sqrt(bc2), eps, and the
    weight decay that is added to the gradient.

    The GPU kernel takes these, so that both processors multiply by the same numbers.
    """
    return tuple(native.adam_scalars(step_arguments(options)))


def accumulate(total: Any, x: Any, *, threads: int | None = None) -> None:
    """Add `x` (fp32, bf16 or fp16) to `total` (fp32) in place, each element rounded once.

    Raises:
        InputError: another dtype, shape or device, lengths that differ, a read-only `total`, arrays that overlap.
            Nothing is changed.
    """
    _notice_fallback()
    a, _, n = _describe(total, "total", ("float32",), writable=True)
    b, dtype, n_x = _describe(x, "x", tuple(DTYPE_CODES), writable=False)
    if n != n_x:
        raise InputError(f"lengths differ: total {n}, x {n_x}", expected="equal lengths")
    _refuse_overlap({"total": (a, n * 4), "x": (b, n * (4 if dtype == "float32" else 2))})
    native.accumulate(a, b, DTYPE_CODES[dtype], n, resolve_threads(threads))


def cast(src: Any, dst: Any, *, threads: int | None = None) -> None:
    """Convert `src` into `dst` (fp32, bf16, fp16 in any pair), rounding to nearest even, denormals kept."""
    _notice_fallback()
    a, a_dtype, n = _describe(src, "src", tuple(DTYPE_CODES), writable=False)
    b, b_dtype, n_dst = _describe(dst, "dst", tuple(DTYPE_CODES), writable=True)
    if n != n_dst:
        raise InputError(f"lengths differ: src {n}, dst {n_dst}", expected="equal lengths")
    size = {"float32": 4, "bfloat16": 2, "float16": 2}
    _refuse_overlap({"src": (a, n * size[a_dtype]), "dst": (b, n * size[b_dtype])})
    native.cast(a, DTYPE_CODES[a_dtype], b, DTYPE_CODES[b_dtype], n, resolve_threads(threads))


def norm_partials(x: Any, out: Any, *, threads: int | None = None) -> None:
    """Write one float64 sum of squares per NORM_CHUNK elements of `x` into `out`."""
    _notice_fallback()
    address, dtype, n = _describe(x, "x", tuple(DTYPE_CODES), writable=False)
    target, _, chunks = _describe(out, "out", ("float64",), writable=True)
    if chunks != -(-n // native.NORM_CHUNK):
        raise InputError(f"out has {chunks} elements", expected=f"{-(-n // native.NORM_CHUNK)} (one per chunk)")
    native.norm_partials(address, DTYPE_CODES[dtype], n, target, resolve_threads(threads))


def combine_partials(partials: Any) -> float:
    """Add float64 partials in their fixed order: the same bits for any device and thread count."""
    address, _, n = _describe(partials, "partials", ("float64",), writable=False)
    return float(native.combine_partials(address, n))


def sum_of_squares(x: Any, *, threads: int | None = None) -> float:
    """Sum of squares of `x` in float64; not finite exactly when an element of `x` is not."""
    import numpy as np

    partials = np.zeros(-(-len(x) // native.NORM_CHUNK), dtype=np.float64)
    norm_partials(x, partials, threads=threads)
    return combine_partials(partials)
