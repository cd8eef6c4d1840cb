"""Units used across the project.

Sizes shown to people are decimal (GB = 1e9 bytes), as vendors print memory and bandwidth; `bucket_mb`
is binary (MiB), as the paper's "64 MB" bucket is 2**26 bytes. Times are seconds unless a name says so.
"""

from __future__ import annotations

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
MIB, GIB = 2**20, 2**30
TERA = 1e12

FP32_BYTES = 4
ADAM_STATE_BYTES = 12
"""Bytes per parameter of fp32 master weight, first and second moment."""
REMAINDER_BYTES = 2
"""Bytes per parameter that a split master adds to the 16-bit weight."""
ADAM_STREAM_BYTES = 28
"""Bytes per parameter that a plain fp32 AdamW step moves: reads p, m, v, g and writes p, m, v."""
UNDO_BYTES = 3
"""Bytes per parameter of the undo record that a speculative step writes, escape lists apart."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def format_bytes(n: float) -> str:
    """Format a byte count with a decimal unit: ``format_bytes(2.5e9) == '2.50 GB'``."""
    for unit, size in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def format_seconds(t: float) -> str:
    """Format a duration with three significant digits: ``format_seconds(0.0412) == '41.2 ms'``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(t) >= size:
            return f"{t / size:.3g} {unit}"
    return "0 s" if t == 0 else f"{t / 1e-9:.3g} ns"


def format_count(n: float) -> str:
    """Format a parameter count as people say it: ``format_count(3_140_000_000) == '3.14B'``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def format_off(modelled: float, measured: float) -> str:
    """How far a prediction is off: ``"−1.7 %"``."""
    return f"{(modelled / measured - 1) * 100:+.1f} %".replace("-", "−")
