"""Pictures of plans side by side: their timelines on one axis, and a sweep as a heat map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from superoffload.tracing import LANES, Trace
from superoffload.widgets import timeline_views as tv
from superoffload.widgets.compare_views import SweepView
from superoffload.widgets.figures import Spec, _base, _wrap
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.theme import PAPER, SEQUENTIAL, Theme, text_on
from superoffload.widgets.timeline_figures import LANE_HEIGHT, timeline_spec

ROW_PIXELS = 13
"""Height of one plan's row within a lane."""
NONE_HEIGHT = 60


def drawn(traces: Mapping[str, Trace]) -> list[tuple[int, Trace]]:
    """Traces that have a timeline, with their place among all: what does not fit takes no time."""
    return [(i, t) for i, t in enumerate(traces.values()) if t.memory.fits]


def compare_figure(traces: Mapping[str, Trace], *, theme: Theme = PAPER) -> go.Figure:
    """Timelines of several plans, see `compare_spec`."""
    return PageFigure(compare_spec(traces, theme=theme))


def compare_spec(traces: Mapping[str, Trace], *, theme: Theme = PAPER) -> Spec:
    """Draw the timelines on one time axis, the plans' rows within each lane in their order, with their letters.

    A row begins where the GPU begins a step, and a mark in the GPU's lane shows where its next step begins.
    """
    shown = drawn(traces)
    views = [
        tv.timeline(t, steps=1 if t.source == "measured" else None, max_bars=tv.MAX_BARS // len(shown))
        for _, t in shown
    ]
    n = max(1, len(shown))
    height = 34 + len(LANES) * max(24, n * ROW_PIXELS + 6)
    spec = timeline_spec(views, theme=theme, height=height, legend=False)
    part = LANE_HEIGHT / n
    notes = [
        {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 4, "y": lane + (row - (n - 1) / 2) * part,
         "showarrow": False, "text": chr(ord("A") + place), "font": {"size": 10, "color": theme.muted}}
        for lane in range(len(LANES))
        for row, (place, _) in enumerate(shown)
    ]  # fmt: skip
    lanes = [s for s in spec["layout"]["shapes"] if s["type"] == "rect"]
    ends = [
        {"type": "line", "x0": t.step_s, "x1": t.step_s, "y0": (row - n / 2) * part, "y1": (row + 1 - n / 2) * part,
         "line": {"width": 2, "color": theme.text}}
        for row, (_, t) in enumerate(shown)
    ]  # fmt: skip
    spec["layout"].update(annotations=notes, shapes=[*lanes, *ends])
    spec["layout"]["margin"] = {"l": 88, "r": 22, "t": 8, "b": 20}
    if not shown:
        spec["layout"]["height"] = NONE_HEIGHT
        spec["layout"]["annotations"] = [
            {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False,
             "text": "No plan fits the memory, so there is no timeline", "font": {"size": 12, "color": theme.warn}}
        ]  # fmt: skip
    return spec


def sweep_figure(view: SweepView, *, theme: Theme = PAPER, height: int = 330) -> go.Figure:
    """Heat map of a sweep, see `sweep_spec`."""
    return PageFigure(sweep_spec(view, theme=theme, height=height))


def sweep_spec(
    view: SweepView, chosen: tuple[int, int] | None = None, *, theme: Theme = PAPER, height: int = 330
) -> Spec:
    """Tokens/s as colour and number; a point without a number is a cross, and says why when pointed at. The plan's own
    cell is framed, the chosen one (column, row) with a dashed line."""
    rows, columns = range(len(view.y_labels)), range(len(view.x_labels))

    def told(row: int, column: int) -> str:
        place = f"{view.x_title}: <b>{view.x_labels[column]}</b><br>{view.y_title}: <b>{view.y_labels[row]}</b><br>"
        value = view.tokens_per_s[row][column]
        if value is None:
            return place + _wrap(view.reasons[row][column])
        return place + f"<b>{value:,.0f} tokens/s</b> ({view.origin})"

    def number(row: int, column: int) -> str:
        value = view.tokens_per_s[row][column]
        return "✕" if value is None else ("★ " if (column, row) == view.best else "") + _short(value)

    shown = [v for row in view.tokens_per_s for v in row if v is not None]
    low, high = min(shown, default=0.0), max(shown, default=1.0)

    def ink(value: float | None) -> str:
        if value is None:
            return theme.text
        (colour,) = sample_colorscale(SEQUENTIAL, [(value - low) / (high - low) if high > low else 0.5])
        return text_on("#" + "".join(f"{int(float(part)):02x}" for part in re.findall(r"[\d.]+", colour)))

    hover = [[told(r, c) for c in columns] for r in rows]
    missing = [[1.0 if v is None else None for v in row] for row in view.tokens_per_s]
    same: dict[str, Any] = {
        "type": "heatmap", "x": list(columns), "y": list(rows), "hovertext": hover, "xgap": 1, "ygap": 1,
        "hovertemplate": "%{hovertext}<extra></extra>", "hoverongaps": False,
    }  # fmt: skip
    data = [
        {
            **same, "name": "Tokens/s", "z": [list(row) for row in view.tokens_per_s], "colorscale": SEQUENTIAL,
            "zmin": low, "zmax": high, "showscale": True,
            "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 10, "color": theme.muted},
                         "tickformat": "~s", "title": {"text": "tokens/s", "font": {"size": 10, "color": theme.muted}}},
        },
        {
            **same, "name": "Does not fit", "z": missing, "zmin": 0, "zmax": 1, "showscale": False,
            "colorscale": [[0, theme.grid], [1, theme.grid]],
        },
        {
            "type": "scatter", "name": "Numbers", "mode": "text", "hoverinfo": "skip", "showlegend": False,
            "x": [c for r in rows for c in columns], "y": [r for r in rows for _ in columns],
            "text": [number(r, c) for r in rows for c in columns],
            "textfont": {"size": 10, "color": [ink(view.tokens_per_s[r][c]) for r in rows for c in columns]},
        },
    ]  # fmt: skip
    frames = [_frame(view.own, "solid")] + ([_frame(chosen, "dot")] if chosen is not None else [])
    title = {"size": 11, "color": theme.text}
    axis = {"showgrid": False, "zeroline": False, "fixedrange": True, "tickfont": {"size": 10, "color": theme.muted}}
    layout = _base(
        theme,
        height,
        margin={"l": 62, "r": 8, "t": 26, "b": 44},
        title={"text": view.title, "font": {"size": 11.5}, "x": 0, "xref": "paper", "y": 1 - 6 / height,
               "yanchor": "top"},
        shapes=[line for frame in frames for line in frame],
        xaxis={**axis, "tickvals": list(columns), "ticktext": [_broken(x) for x in view.x_labels],
               "title": {"text": view.x_title, "font": title, "standoff": 6}, "range": [-0.5, len(columns) - 0.5]},
        yaxis={**axis, "tickvals": list(rows), "ticktext": list(view.y_labels),
               "title": {"text": view.y_title, "font": title, "standoff": 6}, "range": [-0.5, len(rows) - 0.5]},
    )  # fmt: skip
    return {"data": data, "layout": layout}


def _frame(cell: tuple[int, int], dash: str) -> list[Spec]:
    column, row = cell
    return [
        {"type": "rect", "x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5,
         "line": {"width": width, "color": colour, "dash": style}}
        for width, colour, style in ((5, "#FFFFFF", "solid"), (2.5, "#000000", dash))  # seen on any colour
    ]  # fmt: skip


def _broken(label: str) -> str:
    """A label's name below its number."""
    return label.replace(" ", "<br>", 1)


def _short(value: float) -> str:
    return f"{value / 1000:.4g}k" if value >= 1000 else f"{value:.3g}"


def empty_view(text: str) -> SweepView:
    """What stands there until a sweep has been made."""
    return SweepView(text, "", "", ("",), ("",), ((None,),), (("not simulated yet",),), (0, 0), None, "", ())
