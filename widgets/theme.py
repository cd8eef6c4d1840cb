"""Colours of the figures: the Okabe-Ito palette, told apart by colour-blind readers, in a light and a dark dress."""

from __future__ import annotations

from dataclasses import dataclass

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#8C8C8C"

KIND_COLOURS: dict[str, str] = {
    "forward": SKY,
    "recompute": "#A8D8F5",
    "backward": BLUE,
    "gpu_adam": PURPLE,
    "norm": GREY,
    "cast": YELLOW,
    "copy_down": ORANGE,
    "copy_up": GREEN,
    "fetch": "#7FD1B9",
    "adam": VERMILION,
    "cpu_cast": YELLOW,
    "verdict": GREY,
    "undo": BLACK,
    "launch": GREY,
    "reduce_scatter": ORANGE,
    "all_gather": GREEN,
    "all_to_all": PURPLE,
}
"""Two kinds share a colour only where they never share a lane."""

SEQUENTIAL = "Cividis"
"""Colour scale from little to much: even in lightness, and the same to colour-blind readers."""

STATE_COLOURS = {"cpu": VERMILION, "gpu": PURPLE}
"""Where a block's master weights and moments live."""

_MEMORY = (
    ("undo", "#5F5F5F"), ("context", GREY), ("system", GREY), ("activation", YELLOW), ("input", YELLOW),
    ("logit", "#F7EE9B"), ("working", "#F7EE9B"), ("retained gradient", "#F2C46D"), ("gradient", ORANGE),
    ("retained", PURPLE), ("master", VERMILION), ("moments", "#E58B4A"), ("upload", GREEN), ("flow", "#7FD1B9"),
    ("weight", BLUE),
)  # fmt: skip
"""First word found in an item's name decides; the same thing has the same colour in every picture."""


def memory_colour(item: str) -> str:
    """Colour of an item of the ledger."""
    return next((colour for word, colour in _MEMORY if word in item.lower()), SKY)


@dataclass(frozen=True, slots=True)
class Theme:
    name: str
    text: str
    muted: str
    grid: str
    lane: str
    """Faint band behind a lane."""
    stall: str
    warn: str
    paper: str = "rgba(0,0,0,0)"
    """Transparent by default, so that a panel takes the notebook's own background."""


LIGHT = Theme("light", "#1F2328", "#59636E", "#E3E6EA", "rgba(100,116,139,0.07)", "#6B7280", "#B3261E")
DARK = Theme("dark", "#E6EAF0", "#A7B0BC", "#3A414B", "rgba(160,174,192,0.09)", "#B6BEC9", "#FF8A80")
PAPER = Theme("paper", LIGHT.text, LIGHT.muted, LIGHT.grid, LIGHT.lane, LIGHT.stall, LIGHT.warn, "#FFFFFF")
"""Light on a white sheet: for figures that stand alone or are exported."""

THEMES = {t.name: t for t in (LIGHT, DARK, PAPER)}


def rgb(colour: str) -> str:
    """A colour as a browser says it, without its opacity: ``rgb(31, 35, 40)``."""
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = [int(x) for x in colour[colour.index("(") + 1 :].split(",")[:3]]
    return f"rgb({', '.join(map(str, parts))})"


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour` (relative luminance of WCAG 2)."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return BLACK if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#FFFFFF"
