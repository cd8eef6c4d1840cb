"""The same machine with another link between GPU and CPU: from PCIe to C2C."""

from __future__ import annotations

from superoffload.errors import InputError
from superoffload.hardware import Curve, Hardware, Link, resolve

LINKS_GB_PER_S = (16.0, 32.0, 64.0, 128.0, 200.0, 300.0, 450.0)
"""Stops of the link knob, each way."""
LINK_NAMES: dict[float, str] = {16.0: "PCIe 3 x16", 32.0: "PCIe 4 x16", 64.0: "PCIe 5 x16", 450.0: "NVLink-C2C"}
"""Nominal rates each way: PCIe 4 and 5 and C2C as the SuperOffload paper prints them, PCIe 3 half of PCIe 4."""


def link_at(hardware: str | Hardware, gb_per_s: float) -> Hardware:
    """The same machine with a link of `gb_per_s` each way.

    Curves keep their shape over the transfer size and are scaled to the new plateau; both ways together give twice as
    much. Everything else stays, memory bandwidth included.

    Raises:
        InputError: a bandwidth that is not above 0.
    """
    if not 0 < gb_per_s < float("inf"):
        raise InputError(f"a link of {gb_per_s:g} GB/s", expected="a number above 0")
    hw = resolve(hardware)

    def scaled(curve: Curve) -> Curve:
        return curve.replace(gb_per_s=tuple(x * gb_per_s / curve.peak for x in curve.gb_per_s))

    link = Link(down=scaled(hw.link.down), up=scaled(hw.link.up), both_gb_per_s=2 * gb_per_s)
    why = f"assumed: {gb_per_s:g} GB/s each way, set by hand"
    sources = {**hw.sources, "link.down": why, "link.up": why, "link.both_gb_per_s": why}
    return hw.replace(name=f"{hw.name} with {gb_per_s:g} GB/s each way", link=link, sources=sources)
