"""The two-processor timeline as plotly's JSON: pure functions from view records.

The number of traces never depends on the data, so that a live figure can be updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from superoffload.tracing import LANE_TITLES, LANES, Trace
from superoffload.units import format_seconds
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.figures import CLEAR, Spec, _bar, _base, _wrap
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.theme import KIND_COLOURS, PAPER, Theme

LANE_HEIGHT = 0.72


def timeline_figure(
    views: Sequence[tv.TimelineView], *, theme: Theme = PAPER, height: int = 300, legend: bool = True
) -> go.Figure:
    """Draw one or more traces on their lanes; see `timeline_spec`."""
    return PageFigure(timeline_spec(views, theme=theme, height=height, legend=legend))


def timeline_spec(
    views: Sequence[tv.TimelineView], *, theme: Theme = PAPER, height: int = 300, legend: bool = True
) -> Spec:
    """Draw one or more traces on the five lanes of a chip, and on that between chips where there are several; several
    traces share each lane, the first on top, on one time axis.

    One bar trace per kind of span and one for the waits, all in seconds.
    """
    n = max(1, len(views))
    lanes = LANES[: max((v.lanes for v in views), default=len(LANES) - 1)]
    part = LANE_HEIGHT / n

    def rows(lane: Sequence[int], view: int) -> Any:
        return np.asarray(lane, dtype=np.float32) + np.float32((view - (n - 1) / 2) * part)

    data: list[Spec] = []
    stalls = [(i, s) for i, v in enumerate(views) for s in v.stalls]
    data.append(
        _bar(
            name="Waits",
            orientation="h",
            base=np.asarray([s.start_s for _, s in stalls], dtype=np.float32),
            x=np.asarray([s.duration_s for _, s in stalls], dtype=np.float32),
            y=np.asarray([rows([s.lane], i)[0] for i, s in stalls], dtype=np.float32),
            width=part * 0.94,
            text=[s.waits_for for _, s in stalls],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="both",
            textfont={"color": theme.text, "size": 10},
            hovertext=[_wrap(s.cause) for _, s in stalls],
            hovertemplate="<b>Wait</b> of %{x:.3s}s<br>%{hovertext}<extra></extra>",
            marker={
                "color": CLEAR,
                "line": {"width": 0},
                "pattern": {"shape": "/", "fgcolor": theme.stall, "bgcolor": CLEAR, "size": 5, "solidity": 0.16},
            },
            legendrank=2000,
            showlegend=True,
        )
    )  # fmt: skip
    for kind, title in tv.KIND_TITLES.items():
        groups = [(i, g) for i, v in enumerate(views) for g in v.groups if g.kind == kind]
        data.append(
            _bar(
                name=title,
                orientation="h",
                base=np.asarray([t for _, g in groups for t in g.start_s], dtype=np.float32),
                x=np.asarray([t for _, g in groups for t in g.duration_s], dtype=np.float32),
                y=np.concatenate([rows(g.lane, i) for i, g in groups]) if groups else np.zeros(0, np.float32),
                width=part * 0.94,
                hovertext=[label for _, g in groups for label in g.label],
                customdata=np.asarray([b for _, g in groups for b in g.nbytes], dtype=np.float32),
                hovertemplate=f"<b>{title}</b> %{{hovertext}}<br>%{{x:.3s}}s from %{{base:.4s}}s"
                + ("<br>%{customdata:.3s}B" if any(any(g.nbytes) for _, g in groups) else "")
                + "<extra></extra>",
                marker={"color": _kind_colour(kind, theme), "line": {"width": 0}},
                showlegend=bool(groups),
            )
        )
    length = max((v.window_s for v in views), default=1.0) or 1.0
    shapes: list[dict[str, Any]] = [
        {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": i - 0.44, "y1": i + 0.44, "layer": "below",
         "line": {"width": 0}, "fillcolor": theme.lane}
        for i in range(len(lanes))
    ]  # fmt: skip
    starts = views[0].step_starts_s if views else ()
    shapes += [
        {"type": "line", "x0": t, "x1": t, "yref": "paper", "y0": 0, "y1": 1,
         "line": {"width": 1, "dash": "dot", "color": theme.muted}}
        for t in starts
    ]  # fmt: skip
    notes = [
        {"x": t, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False,
         "text": f"step {k + 1}", "font": {"size": 10, "color": theme.muted}}
        for k, t in enumerate(starts)
        if n == 1 and t < 0.93 * length
    ]  # fmt: skip
    if n > 1 and legend:
        notes.append(
            {"x": 1, "y": 1, "xref": "paper", "yref": "paper", "yanchor": "bottom", "xanchor": "right",
             "showarrow": False, "font": {"size": 10, "color": theme.muted},
             "text": "in each lane from the top: " + "; ".join(v.label for v in views)}
        )  # fmt: skip
    layout = _base(
        theme,
        height,
        barmode="overlay",
        bargap=0,
        margin={"l": 88, "r": 8, "t": 16, "b": 66 if legend else 20},
        shapes=shapes,
        annotations=notes,
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis={"range": [0, length * 1.002], "tickformat": ".3~s", "ticksuffix": "s", "gridcolor": theme.grid,
               "zeroline": False, "tickfont": {"color": theme.muted, "size": 10}},
        yaxis={"range": [len(lanes) - 0.5, -0.5], "tickvals": list(range(len(lanes))), "showgrid": False,
               "ticktext": [LANE_TITLES[x] for x in lanes], "zeroline": False, "fixedrange": True, "ticks": "outside",
               "ticklen": 5, "tickcolor": CLEAR},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom",
                "font": {"size": 10, "color": theme.text}, "itemsizing": "constant", "tracegroupgap": 0,
                "bgcolor": CLEAR},
    )  # fmt: skip
    return {"data": data, "layout": layout}


def _kind_colour(kind: str, theme: Theme) -> str:
    return theme.text if kind == "undo" else KIND_COLOURS[kind]


def plot_timeline(
    traces: Trace | Sequence[Trace], *, steps: int = 1, height: int | None = None, theme: Theme = PAPER
) -> go.Figure:
    """Draw the two-processor timeline of one trace, or of several on one time axis.

    Args:
        traces: simulated or measured, in any mix.
        steps: of a simulated trace so many steps in a row, in steady state; a measured one shows what it holds.
        height: pixels; chosen from the number of traces when omitted.
    """
    many = [traces] if isinstance(traces, Trace) else list(traces)
    views = [tv.steady_steps(t, steps, max_bars=tv.MAX_BARS // max(1, len(many))) for t in many]
    height = height or 200 + 90 * max(1, len(many))
    fig = timeline_figure(views, theme=theme, height=height)
    fig.update_layout(
        title={"text": "<br>".join(f"{t.model}: {format_seconds(t.step_s)} per step ({vm.origin(t)})" for t in many),
               "font": {"size": 12}, "x": 0, "xref": "paper", "y": 1 - 12 / height, "yanchor": "top"},
        margin={"t": 30 + 16 * max(1, len(many))},
    )  # fmt: skip
    return fig
