"""The picture of a search: tokens/s over memory, what fits above, what does not in a strip below."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from superoffload.widgets.figures import Spec, _base, _scatter, _wrap
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.search_views import KIND_NAMES, KINDS, FoundView, Kind
from superoffload.widgets.theme import BLUE, GREEN, GREY, ORANGE, PAPER, VERMILION, Theme

SYMBOLS: dict[Kind, str] = {
    "best": "star",
    "planner": "square",
    "pareto": "diamond",
    "rejected": "circle-open",
    "does not fit": "x-thin-open",
}
COLOURS: dict[Kind, str] = {
    "best": VERMILION,
    "planner": ORANGE,
    "pareto": BLUE,
    "rejected": GREY,
    "does not fit": GREEN,
}
SIZES: dict[Kind, int] = {"best": 15, "planner": 11, "pareto": 9, "rejected": 6, "does not fit": 7}
ORDER: tuple[Kind, ...] = KINDS[::-1]
"""What matters is drawn last, and so on top."""
SELECTED = len(ORDER)
"""Number of the trace that rings what is selected."""


def search_figure(
    view: FoundView, selected: int | None = None, *, theme: Theme = PAPER, height: int = 300
) -> go.Figure:
    """Draw a search, see `search_spec`."""
    return PageFigure(search_spec(view, selected, theme=theme, height=height))


def search_spec(
    view: FoundView | None, selected: int | None = None, *, theme: Theme = PAPER, height: int = 300
) -> Spec:
    """One trace for each kind of plan in `ORDER`, and a ring around the selected one (by its number)."""
    data: list[Spec] = []
    for kind in ORDER:
        points = view.of(kind) if view is not None else ()
        fits = kind != "does not fit"
        colour = theme.muted if kind == "does not fit" else COLOURS[kind]
        data.append(
            _scatter(
                name=KIND_NAMES[kind], mode="markers", x=[p.gb for p in points],
                y=[p.tokens_per_s if fits else 0.0 for p in points], yaxis="y" if fits else "y2",
                hovertext=[_wrap(f"#{p.number}: {p.reason}", 52) for p in points],
                hovertemplate=("%{y:,.0f} tokens/s, %{x:.1f} GB" if fits else "needs %{x:.1f} GB")
                + f" ({view.origin if view else 'modelled'})<br>%{{hovertext}}<extra></extra>",
                marker={"symbol": SYMBOLS[kind], "size": SIZES[kind], "color": colour,
                        "line": {"width": 1.5 if "open" in SYMBOLS[kind] else 0.5,
                                 "color": colour if "open" in SYMBOLS[kind] else theme.text}},
            )
        )  # fmt: skip
    chosen = next((p for p in view.points if p.number == selected), None) if view is not None else None
    fits = chosen is None or chosen.kind != "does not fit"
    data.append(
        _scatter(
            name="selected", mode="markers", x=[chosen.gb] if chosen else [], yaxis="y" if fits else "y2",
            y=[chosen.tokens_per_s if fits else 0.0] if chosen else [], hoverinfo="skip", showlegend=False,
            marker={"symbol": "circle-open", "size": 19, "color": theme.text, "line": {"width": 2}},
        )
    )  # fmt: skip
    title = {"size": 11, "color": theme.text}
    axis: dict[str, Any] = {"gridcolor": theme.grid, "zeroline": False, "tickfont": {"size": 10, "color": theme.muted}}
    place = view.place if view is not None else "GPU"
    lines, notes = [], []
    if view is not None:
        for where, value, text in (("x", view.budget_gb, "budget"), ("y", view.goal_tokens_per_s, "goal")):
            if value is not None:
                ends = {"x0": value, "x1": value, "y0": 0, "y1": 1, "yref": "paper"}
                if where == "y":
                    ends = {"y0": value, "y1": value, "x0": 0, "x1": 1, "xref": "paper"}
                lines.append({"type": "line", "line": {"width": 1.5, "dash": "dot", "color": theme.warn}, **ends})
                notes.append(_note(where, value, text, theme))
    if view is not None and view.of("does not fit"):
        notes.append(
            {"x": 0, "xref": "paper", "xanchor": "left", "y": 0.13, "yref": "paper", "yanchor": "bottom", "xshift": 2,
             "showarrow": False, "text": "does not fit: no number", "font": {"size": 10, "color": theme.muted}}
        )  # fmt: skip
    layout = _base(
        theme,
        height,
        margin={"l": 58, "r": 10, "t": 42, "b": 40},
        showlegend=True,
        hovermode="closest",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "font": {"size": 10},
                "traceorder": "reversed", "itemsizing": "trace"},
        shapes=lines,
        annotations=notes,
        xaxis={**axis, "title": {"text": f"{place} memory, GB (modelled)", "font": title, "standoff": 4},
               "anchor": "y2"},
        yaxis={**axis, "title": {"text": "tokens/s (modelled)", "font": title, "standoff": 4}, "domain": [0.22, 1]},
        yaxis2={**axis, "domain": [0, 0.12], "range": [-1, 1], "showticklabels": False, "showgrid": False,
                "fixedrange": True},
    )  # fmt: skip
    return {"data": data, "layout": layout}


def _note(where: str, value: float, text: str, theme: Theme) -> dict[str, Any]:
    font = {"size": 10, "color": theme.warn}
    if where == "x":
        return {"x": value, "y": 0.22, "yref": "paper", "yanchor": "bottom", "xanchor": "right", "xshift": -3,
                "showarrow": False, "text": text, "font": font}  # fmt: skip
    return {"y": value, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom", "showarrow": False,
            "text": text, "font": font}  # fmt: skip
