"""The same machine with some of its figures changed by hand: what if the link were faster, the memory larger?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superoffload.errors import InputError, unknown_name
from superoffload.hardware import Cpu, Curve, Gpu, Hardware

EDITED = " edited"
"""What the name of such a machine ends in."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a machine that a person may change."""

    title: str
    unit: str
    help: str
    read: Callable[[Hardware], float]
    write: Callable[[Hardware, float], Hardware]
    source: str
    """Key in `Hardware.sources`."""
    whole: bool = False


def _gpu(hw: Hardware, **changes: float) -> Hardware:
    return hw.replace(gpu=Gpu(**{**dict(hw.gpu), **changes}))


def _cpu(hw: Hardware, **changes: object) -> Hardware:
    return hw.replace(cpu=Cpu(**{**dict(hw.cpu), **changes}))


def _curve(curve: Curve, peak: float) -> Curve:
    """The curve with its shape over the transfer size kept and its plateau at `peak`."""
    return curve.replace(gb_per_s=tuple(x * peak / curve.peak for x in curve.gb_per_s))


def _link(hw: Hardware, **changes: object) -> Hardware:
    # What was measured of casts holds for the link and the memory that it was measured on.
    return hw.replace(link=hw.link.replace(**changes), casts=None)


def _matmul(hw: Hardware, tflops: float) -> Hardware:
    factor = tflops / hw.gpu.matmul_bf16_tflops
    return _gpu(hw, matmul_bf16_tflops=tflops, peak_bf16_tflops=hw.gpu.peak_bf16_tflops * factor)


def _adam(hw: Hardware, gb_per_s: float) -> Hardware:
    now = max(hw.cpu.adam_gb_per_s)
    return _cpu(hw, adam_gb_per_s=tuple(x * gb_per_s / now for x in hw.cpu.adam_gb_per_s)).replace(casts=None)


FIGURES: dict[str, Figure] = {
    "gpu_memory_gb": Figure("GPU memory", "GB", "What weights, activations and retained state may take of the GPU.",
        lambda h: h.gpu.memory_gb, lambda h, x: _gpu(h, memory_gb=x), "gpu.memory_gb"),
    "matmul_tflops": Figure("Matrix products", "TFLOP/s", "What large bf16 matrix products reach; the peak, which MFU "
        "is a share of, moves with it.", lambda h: h.gpu.matmul_bf16_tflops, _matmul, "gpu.matmul_bf16_tflops"),
    "hbm_gb_per_s": Figure("HBM", "GB/s", "Bandwidth of the GPU's memory.",
        lambda h: h.gpu.hbm_gb_per_s, lambda h, x: _gpu(h, hbm_gb_per_s=x), "gpu.hbm_gb_per_s"),
    "link_down_gb_per_s": Figure("Link down", "GB/s", "GPU to CPU, large transfers: the way of gradients.",
        lambda h: h.link.down.peak, lambda h, x: _link(h, down=_curve(h.link.down, x)), "link.down"),
    "link_up_gb_per_s": Figure("Link up", "GB/s", "CPU to GPU, large transfers: the way of weights.",
        lambda h: h.link.up.peak, lambda h, x: _link(h, up=_curve(h.link.up, x)), "link.up"),
    "link_both_gb_per_s": Figure("Link, both ways", "GB/s", "Sum of both directions when both are at work.",
        lambda h: h.link.both_gb_per_s, lambda h, x: _link(h, both_gb_per_s=x), "link.both_gb_per_s"),
    "cpu_cores": Figure("CPU cores", "", "Cores that Adam's threads may take.",
        lambda h: h.cpu.cores, lambda h, x: _cpu(h, cores=round(x)), "cpu.cores", whole=True),
    "cpu_memory_gb": Figure("CPU memory", "GB", "What master weights, moments and held gradients may take.",
        lambda h: h.cpu.memory_gb, lambda h, x: _cpu(h, memory_gb=x), "cpu.memory_gb"),
    "dram_gb_per_s": Figure("CPU memory rate", "GB/s", "What CPU Adam and both directions of the link share.",
        lambda h: h.cpu.dram_gb_per_s, lambda h, x: _cpu(h, dram_gb_per_s=x).replace(casts=None),
        "cpu.dram_gb_per_s"),
    "adam_gb_per_s": Figure("CPU Adam", "GB/s", "Bandwidth of an fp32 AdamW step at its best number of threads, 28 "
        "bytes a parameter.", lambda h: max(h.cpu.adam_gb_per_s), _adam, "cpu.adam_gb_per_s"),
}  # fmt: skip
"""By name, in the order in which they are shown."""


def edited(hardware: Hardware, **figures: float) -> Hardware:
    """The machine with these figures changed by hand; everything else stays.

    Args:
        figures: by the names of `FIGURES`; a figure that the machine has already is no change.

    Returns:
        The machine; where something differs, its name ends in " edited" and `sources` says what was set by hand.

    Raises:
        InputError: an unknown figure, or a value that is not above 0.
    """
    out, sources = hardware, dict(hardware.sources)
    for name, value in figures.items():
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
        figure = FIGURES[name]
        if not 0 < value < float("inf") or (figure.whole and value < 1):
            raise InputError(f"{figure.title} = {value:g} {figure.unit}".rstrip(), expected="a number above 0")
        before = figure.read(hardware)
        if value != before:
            out = figure.write(out, value)
            sources[figure.source] = (
                f"assumed: {value:g} {figure.unit}".rstrip() + f", set by hand in place of {before:g}"
            )
    if out == hardware:
        return hardware
    return out.replace(name=hardware.name.removesuffix(EDITED) + EDITED, sources=sources)
