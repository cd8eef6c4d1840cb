"""Figures of the workshop's notebooks: lines over a quantity, bars beside each other, a run through a clipping storm.

Each title ends with where the numbers come from: modelled or measured, and for which machine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from superoffload.tracing import Trace
from superoffload.units import format_seconds
from superoffload.widgets.figures import Spec, _bar, _base, _scatter
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.theme import BLUE, GREEN, ORANGE, PAPER, PURPLE, SKY, VERMILION, Theme
from superoffload.workshop import LINK_NAMES, LinkPoint
from superoffload.workshop.storm import StormStep

COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY)
"""By the order of the lines or bars; dashes and symbols differ too."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")


def _axis(theme: Theme, title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 11, "color": theme.text}, "standoff": 6},
        "gridcolor": theme.grid,
        "zeroline": False,
        "tickfont": {"size": 10, "color": theme.muted},
        **more,
    }


def _layout(theme: Theme, title: str, height: int, **more: Any) -> dict[str, Any]:
    return _base(
        theme,
        height,
        title={"text": title, "font": {"size": 12}, "x": 0, "xref": "paper", "y": 1 - 10 / height, "yanchor": "top"},
        margin={"l": 62, "r": 16, "t": 58, "b": 42},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 10}},
        **more,
    )


def line_figure(
    series: Mapping[str, Mapping[float, float]], *, title: str, x: str, y: str, log_x: bool = False,
    mark: tuple[float, str] | None = None, theme: Theme = PAPER, height: int = 320,
) -> go.Figure:  # fmt: skip
    """Draw one line for each entry of `series`, name -> {x: y}.

    Args:
        title: what is shown, and whether it is modelled or measured, for which machine.
        x, y: titles of the axes, with units.
        log_x: draw x in powers of two.
        mark: a place on x and its name, drawn as a vertical line.
    """
    spec = line_spec(series, title=title, x=x, y=y, log_x=log_x, mark=mark, theme=theme, height=height)
    return PageFigure(spec)


def line_spec(
    series: Mapping[str, Mapping[float, float]], *, title: str, x: str, y: str, log_x: bool = False,
    mark: tuple[float, str] | None = None, theme: Theme = PAPER, height: int = 320,
) -> Spec:  # fmt: skip
    """See `line_figure`."""
    data = [
        _scatter(
            name=name, x=np.asarray(list(points), dtype=np.float64), y=np.asarray(list(points.values())),
            mode="lines+markers", line={"color": COLOURS[i % 6], "width": 2.2, "dash": DASHES[i % 6]},
            marker={"size": 7, "symbol": SYMBOLS[i % 6]},
            hovertemplate=f"<b>{name}</b><br>%{{x:,.6~g}}: %{{y:.4~g}}<extra></extra>",
        )
        for i, (name, points) in enumerate(series.items())
    ]  # fmt: skip
    values = sorted({v for points in series.values() for v in points})
    axis = _axis(theme, x)
    if log_x:
        shown = values if len(values) <= 10 else values[:: -(-len(values) // 10)]
        axis |= {"type": "log", "tickvals": shown, "ticktext": [f"{v:,.6g}" for v in shown]}
    layout = _layout(theme, title, height, xaxis=axis, yaxis=_axis(theme, y, rangemode="tozero"))
    if mark is not None:
        at, text = mark
        layout["shapes"] = [
            {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1,
             "line": {"width": 1.5, "dash": "dot", "color": theme.muted}}
        ]  # fmt: skip
        layout["annotations"] = [
            {"x": np.log10(at) if log_x else at, "y": 0.03, "yref": "paper", "yanchor": "bottom", "xanchor": "left",
             "xshift": 4, "showarrow": False, "text": text, "font": {"size": 10, "color": theme.muted}}
        ]  # fmt: skip
    return {"data": data, "layout": layout}


def bar_figure(
    groups: Mapping[str, Mapping[str, float]], *, title: str, y: str, theme: Theme = PAPER, height: int = 320
) -> go.Figure:
    """Draw bars beside each other: group -> {name: value}. A single group is drawn as lying bars in one colour, so that
    long names have room.

    Args:
        title: what is shown, and whether it is modelled or measured, for which machine.
        y: title of the axis of values, with the unit.
    """
    if len(groups) == 1:
        return _lying_bars(next(iter(groups.values())), title, y, theme, height)
    names = list(dict.fromkeys(n for values in groups.values() for n in values))
    data = [
        _bar(
            name=name, x=list(groups),
            y=[values.get(name) for values in groups.values()],
            marker={"color": COLOURS[i % 6], "line": {"width": 0}}, texttemplate="%{y:.3~g}", textposition="outside",
            cliponaxis=False, textfont={"size": 10, "color": theme.text},
            hovertemplate=f"<b>{name}</b><br>%{{x}}: %{{y:.4~g}}<extra></extra>",
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    layout = _layout(
        theme, title, height, barmode="group", bargap=0.28, xaxis=_axis(theme, "", showgrid=False),
        yaxis=_axis(theme, y, rangemode="tozero"),
    )  # fmt: skip
    return PageFigure(data=data, layout=layout)


def _lying_bars(values: Mapping[str, float], title: str, unit: str, theme: Theme, height: int) -> go.Figure:
    names = ["<br>".join(textwrap.wrap(name, 34)) for name in values]
    bar = _bar(
        orientation="h", x=list(values.values()), y=names, marker={"color": COLOURS[0], "line": {"width": 0}},
        texttemplate="%{x:.3~g}", textposition="outside", cliponaxis=False,
        textfont={"size": 10, "color": theme.text}, hovertemplate="%{y}: %{x:.4~g}<extra></extra>",
    )  # fmt: skip
    layout = _layout(
        theme, title, height, bargap=0.28, xaxis=_axis(theme, unit, rangemode="tozero"),
        yaxis=_axis(theme, "", showgrid=False, autorange="reversed", ticksuffix=" "),
    )  # fmt: skip
    layout |= {"showlegend": False, "margin": {"l": 225, "r": 40, "t": 34, "b": 42}}
    layout["title"] |= {"x": 0.01, "xref": "container"}
    return PageFigure(data=[bar], layout=layout)


def storm_figure(
    runs: Mapping[str, Sequence[StormStep]], *, title: str, theme: Theme = PAPER, height: int = 320
) -> go.Figure:
    """Draw seconds per step of the same run under several modes; see `storm_spec`."""
    return PageFigure(storm_spec(runs, title=title, theme=theme, height=height))


def storm_spec(runs: Mapping[str, Sequence[StormStep]], *, title: str, theme: Theme = PAPER, height: int = 320) -> Spec:
    """Seconds per step against the step, one line for each mode, and a mark below for every clipped step."""
    data = [
        _scatter(
            name=f"{name}: {format_seconds(sum(s.step_s for s in run))} in all",
            x=np.arange(1, len(run) + 1, dtype=np.int32), y=np.asarray([s.step_s for s in run], dtype=np.float32),
            mode="lines", line={"color": COLOURS[i % 6], "width": 2, "dash": DASHES[i % 6], "shape": "hv"},
            hovertemplate=f"<b>{name}</b>, step %{{x}}<br>%{{y:.4~g}} s<extra></extra>",
        )
        for i, (name, run) in enumerate(runs.items())
    ]  # fmt: skip
    first = next(iter(runs.values()))
    clipped = [i for i, s in enumerate(first, 1) if s.verdict == "clip"]
    data.append(
        _scatter(
            name="clipped", x=clipped, y=[0.0] * len(clipped), mode="markers",
            marker={"symbol": "line-ns-open", "size": 9, "color": theme.text},
            hovertemplate="step %{x}: clipped<extra></extra>",
        )
    )  # fmt: skip
    layout = _layout(
        theme, title, height, xaxis=_axis(theme, "step"), yaxis=_axis(theme, "s per step", rangemode="tozero")
    )
    return {"data": data, "layout": layout}


def link_spec(points: Sequence[LinkPoint], at: int, *, theme: Theme = PAPER, height: int = 300) -> Spec:
    """Seconds per step over the link's rate, with the knob at point `at`: the PCIe-era plan and the best one."""
    model, machine = points[0].best.model, points[0].best.hardware.partition(" with ")[0]
    rates = [p.gb_per_s for p in points]
    series: dict[str, list[Trace]] = {
        "PCIe-era plan": [p.era for p in points],
        "best plan for this link": [p.best for p in points],
    }
    data = [
        _scatter(
            name=name, x=rates, y=[t.step_s for t in traces], mode="lines+markers",
            line={"color": COLOURS[i], "width": 2.2, "dash": DASHES[i]},
            marker={"symbol": SYMBOLS[i], "opacity": 1, "size": [14 if k == at else 7 for k in range(len(points))]},
            customdata=[t.gpu_busy * 100 for t in traces],
            hovertemplate=f"<b>{name}</b><br>%{{x:g}} GB/s each way: %{{y:.3f}} s, "
            "the GPU computes %{customdata:.0f} %<extra></extra>",
        )
        for i, (name, traces) in enumerate(series.items())
    ]  # fmt: skip
    names = [f"{r:g}" + (f"<br>{LINK_NAMES[r]}" if r in LINK_NAMES else "") for r in rates]
    layout = _layout(
        theme,
        f"{model} on the {machine} with another link (modelled)",
        height,
        xaxis=_axis(theme, "link, GB/s each way", type="log", tickvals=rates, ticktext=names),
        yaxis=_axis(theme, "s per step", rangemode="tozero"),
        shapes=[
            {"type": "line", "x0": rates[at], "x1": rates[at], "yref": "paper", "y0": 0, "y1": 1,
             "line": {"width": 1.5, "dash": "dot", "color": theme.muted}}
        ],
    )  # fmt: skip
    layout["margin"] = {**layout["margin"], "b": 58}
    return {"data": data, "layout": layout}
