"""How several Superchips are joined, by preset: "gh200-quad-x8" is eight chips on two boards with four GH200 each.

Every number has an entry in `Hardware.sources` that begins with one of the words of `hardware_presets`. Nobody
reports a curve over sizes for collectives between GH200: all have the shape of one reported all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from superoffload.errors import InputError
from superoffload.hardware import Curve, Hardware, Interconnect, Wire

CHIPS = (2, 4, 8, 16)
"""How many chips a preset may have."""
NVLINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 14e-6
"""Per step of a ring with NCCL's Simple protocol."""
_SHAPE = ((2.1, 0.41), (4.2, 0.55), (8.4, 0.73), (16.8, 0.80), (33.6, 0.83), (512.0, 1.0))
"""Bytes that a chip sends, in MB, and share of the plateau: an all-reduce between two nodes with one H100 and four
adapters each (NVIDIA/nccl-tests issue 232), whose plateau is 50 GB/s."""

_CURVE = "over sizes as one all-reduce between two nodes (reported: NVIDIA/nccl-tests issue 232)"
_LATENCY = "reported: hwLat of NCCL's own tuning model (ring, Simple protocol)"
_H100 = (
    "reported for H100 behind NVSwitch: all-gather 350, reduce-scatter 360 GB/s of 450 published (NVIDIA/nccl issue "
    "1281)"
)


@dataclass(frozen=True, slots=True)
class _Family:
    """How chips of one kind are joined; bandwidths in GB/s that one chip sends."""

    board_chips: int
    board: tuple[float, float] | None
    """Plateau of the ring and of the all-to-all."""
    network: tuple[float, float]
    sources: dict[str, str]
    mesh: bool = False


def _curve(plateau: float) -> Curve:
    return Curve(size_mb=tuple(s for s, _ in _SHAPE), gb_per_s=tuple(round(plateau * f, 2) for _, f in _SHAPE))


_SLINGSHOT = (
    "reported: 24.2 GB/s for each GH200, NCCL's send and receive over Slingshot-11 between boards of four (NVIDIA/nccl "
    "issue 1272)"
)
_UNKNOWN_NETWORK = "assumed: one 200 Gb/s adapter for each chip, as reported for boards of four (24.2 GB/s)"

FAMILIES: dict[str, _Family] = {
    "gh200": _Family(
        board_chips=1,
        board=None,
        network=(94.5, 30.9),
        sources={
            "interconnect.network.ring": "reported: all-gather 94.5 GB/s between two single GH200 with four 200 Gb/s "
            f"ports each, 2 GB, GPUDirect on (NVIDIA/nccl issue 1579); {_CURVE}; more than two chips assumed alike",
            "interconnect.network.all_to_all": "reported: all-to-all 30.9 GB/s there; more than two chips assumed "
            f"alike; {_CURVE}",
        },
    ),
    "gh200-144gb": _Family(
        board_chips=2,
        board=(350.0, 350.0),
        network=(24.2, 24.2),
        sources={
            "interconnect.board.ring": f"assumed: a GH200 NVL2 joins two chips by 18 NVLinks; {_H100}; {_CURVE}",
            "interconnect.board.all_to_all": f"assumed: as the ring; {_CURVE}",
            "interconnect.network.ring": f"{_UNKNOWN_NETWORK}; {_CURVE}",
            "interconnect.network.all_to_all": f"{_UNKNOWN_NETWORK}; {_CURVE}",
        },
    ),
    "gh200-quad": _Family(
        board_chips=4,
        board=(350.0, 350.0),
        network=(24.2, 24.2),
        mesh=True,
        sources={
            "interconnect.board.ring": "assumed: six NVLinks between each two of the four (published: NCSA on its "
            f"DeltaAI), 18 for each chip; {_H100}; {_CURVE}",
            "interconnect.board.all_to_all": f"assumed: as the ring; {_CURVE}",
            "interconnect.network.ring": f"{_SLINGSHOT}; {_CURVE}",
            "interconnect.network.all_to_all": f"{_SLINGSHOT}; {_CURVE}",
        },
    ),
    "gh200-datasheet": _Family(
        board_chips=2,
        board=(450.0, 450.0),
        network=(25.0, 25.0),
        sources={
            "interconnect.board.ring": f"published: NVLink of a GH200 NVL2, 900 GB/s both ways together; {_CURVE}",
            "interconnect.board.all_to_all": f"published: as the ring; {_CURVE}",
            "interconnect.network.ring": f"published: one Slingshot-11 adapter of 200 Gb/s; {_CURVE}; assumed: one for "
            "each chip",
            "interconnect.network.all_to_all": "published: one Slingshot-11 adapter of 200 Gb/s; assumed: one for each "
            "chip",
        },
    ),
}
"""Preset of one chip -> how several of them are joined."""


def split_name(name: str) -> tuple[str, int] | None:
    """("gh200-quad", 8) of "gh200-quad-x8"; None for anything that is no such preset."""
    base, times, count = name.rpartition("-x")
    known = times and base in FAMILIES and count in {str(n) for n in CHIPS}
    return (base, int(count)) if known else None


def arrange(hardware: Hardware, chips: int) -> Hardware:
    """`chips` of a preset's chip with what joins them, named "NAME-xCHIPS".

    Raises:
        InputError: nothing is known of how such chips are joined, or of so many.
    """
    if hardware.name not in FAMILIES or hardware.source != "preset":
        raise InputError(
            f'nothing is known of how several "{hardware.name}" are joined',
            expected="one of the presets " + ", ".join(FAMILIES),
            remedy="Take one of these, or a hardware record with an interconnect of your own",
        )
    if chips not in CHIPS:
        raise InputError(f"chips = {chips}", expected=f"1, {', '.join(map(str, CHIPS))}")
    family = FAMILIES[hardware.name]
    per_board = min(family.board_chips, chips)
    board, network = None, None
    sources = dict(hardware.sources)
    if per_board > 1 and family.board:
        # Two chips of a board with four have their own links only: the board is as wide as its whole mesh.
        part = (per_board - 1) / (family.board_chips - 1) if family.mesh else 1.0
        board = Wire(
            ring=_curve(family.board[0] * part),
            all_to_all=_curve(family.board[1] * part),
            latency_s=NVLINK_LATENCY_S,
            mesh=family.mesh,
        )
        sources["interconnect.board.latency_s"] = _LATENCY
    if chips > per_board:
        network = Wire(
            ring=_curve(family.network[0]), all_to_all=_curve(family.network[1]), latency_s=NETWORK_LATENCY_S
        )
        sources["interconnect.network.latency_s"] = _LATENCY
    wires = {"board": board, "network": network}
    sources |= {field: why for field, why in family.sources.items() if wires[field.split(".")[1]] is not None}
    return hardware.replace(
        name=f"{hardware.name}-x{chips}",
        interconnect=Interconnect(chips=chips, board_chips=per_board, board=board, network=network),
        sources=sources,
    )
