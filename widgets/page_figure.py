"""Figures that stand alone in a notebook: drawn on white, and shown in the dress of a dark page.

The figure itself never changes: what is saved, exported or shown where nothing is known of the page stays readable on
white. A style sheet that is put out before it gives each colour of the light dress its fellow of the dark one, where
JupyterLab says that its theme is dark. So a change of the theme needs no kernel.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from IPython.core.getipython import get_ipython
from IPython.display import display

from superoffload.widgets.theme import DARK, LIGHT, rgb

MARK = "so-page"
"""Class of the mark in the output before a figure: styles reach this one figure and no other of the page."""
DARK_PAGE = '[data-jp-theme-light="false"]'
"""Set on the body by JupyterLab and Notebook 7, and in the pages that nbconvert writes."""

_INKS = tuple((getattr(LIGHT, f), getattr(DARK, f)) for f in ("text", "muted", "grid", "stall", "warn", "lane"))


def dark_rules(*figures: str) -> str:
    """Rules that show a figure of the light dress in the dark one.

    Args:
        figures: selectors of the figures.
    """
    scope = f":is({', '.join(figures)})"

    def rule(selectors: tuple[str, ...], declaration: str) -> str:
        return f"{', '.join(f'{scope} {s}' for s in selectors)} {{ {declaration} !important; }}"

    rules = []
    for light, dark in _INKS:
        # plotly writes a colour into the style of a shape or text, and into the attributes of a pattern. Labels under
        # the pointer have the colour of what they tell of, and an ink that was chosen for it.
        for paint in ("fill", "stroke"):
            drawn = (f'[style*="{paint}: {rgb(light)}"]:not(.hoverlayer *)', f'pattern [{paint}="{rgb(light)}"]')
            rules.append(rule(drawn, f"{paint}: {rgb(dark)}"))
    return "\n".join(rules)


def page_style() -> str:
    """The style sheet of a figure that stands alone, in its mark."""
    after = f".jp-OutputArea-child:has(.{MARK}) + .jp-OutputArea-child"
    figure = f"{DARK_PAGE} {after} .js-plotly-plot"
    sheet = "\n".join(
        (
            f".jp-OutputArea-child:has(.{MARK}) {{ display: none; }}",
            f"{figure} .main-svg {{ background: transparent !important; }}",
            f"{figure} rect.bg {{ fill: transparent !important; }}",
            f"{figure} .modebar-group {{ background-color: transparent !important; }}",
            f"{figure} .modebar-btn .icon path {{ fill: {DARK.muted} !important; }}",
            dark_rules(figure),
        )
    )
    return f'<style class="{MARK}">{sheet}</style>'


class PageFigure(go.Figure):  # type: ignore[misc]
    """A plotly figure that follows a dark page where a notebook shows it, and is else as any other."""

    def _ipython_display_(self) -> None:
        _put_out_style()
        super()._ipython_display_()

    def show(self, *args: Any, **kwargs: Any) -> Any:
        """Show it as plotly does."""
        _put_out_style()
        return super().show(*args, **kwargs)


def _put_out_style() -> None:
    if getattr(get_ipython(), "kernel", None) is not None:  # a terminal would print what no page reads
        display({"text/html": page_style(), "text/plain": ""}, raw=True)


__all__ = ["DARK_PAGE", "PageFigure", "dark_rules", "page_style"]
