"""Pictures of a training run: loss and speed, and beside them how busy the processors are and what memory they hold."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import plotly.graph_objects as go

from superoffload.widgets.figures import Spec, _base, _scatter
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.run_reader import read_run
from superoffload.widgets.run_views import RunView
from superoffload.widgets.theme import GREY, KIND_COLOURS, ORANGE, PAPER, PURPLE, SKY, VERMILION, Theme

Run = str | os.PathLike[str] | RunView


def plot_loss(run: Run, *, theme: Theme = PAPER) -> go.Figure:
    """Draw the loss and tokens per second of a run folder.

    Raises:
        InputError: the folder is not a run folder.
    """
    return PageFigure(loss_spec(_view(run), theme=theme))


def plot_run(run: Run, *, theme: Theme = PAPER) -> go.Figure:
    """Draw loss, tokens per second, busy processors and memory of a run folder, as the RunPanel does.

    Raises:
        InputError: the folder is not a run folder.
    """
    return PageFigure(run_spec(_view(run), theme=theme))


def _view(run: Run) -> RunView:
    return run if isinstance(run, RunView) else read_run(run)


def loss_spec(view: RunView, *, theme: Theme = PAPER, height: int = 280) -> Spec:
    """Loss (upper half) and tokens per second (lower half) against the step; clipped and skipped steps are marked."""
    layout = _base(
        theme,
        height,
        margin={"l": 62, "r": 14, "t": 26, "b": 36},
        showlegend=True,
        legend=_legend(0.0),
        **_learning_axes(theme, [0.0, 1.0]),
    )
    return {"data": learning_traces(view), "layout": layout}


def run_spec(view: RunView, *, theme: Theme = PAPER, height: int = 300) -> Spec:
    """Left as `loss_spec`; right the busy share of GPU, CPU Adam and all CPU cores, and the memory against what there
    is of it."""
    right = [0.56, 1.0]
    axis, title = _axis(theme), _title(theme)
    percent = {**axis, "ticksuffix": " %", "range": [0, 104], "dtick": 50, "anchor": "x2"}
    layout = _base(
        theme,
        height,
        margin={"l": 58, "r": 10, "t": 26, "b": 36},
        showlegend=True,
        legend=_legend(0.0),
        legend2=_legend(right[0]),
        legend3=_legend(right[0], 0.42),
        **_learning_axes(theme, [0.0, 0.46]),
        xaxis2={
            **axis,
            "title": {"text": "step", **title},
            "domain": right,
            "anchor": "y4",
            "matches": "x",
            "tickformat": ",d",
        },
        yaxis3={**percent, "domain": [0.58, 1.0], "title": {"text": "busy", **title}},
        yaxis4={**percent, "domain": [0.0, 0.42], "title": {"text": "memory", **title}},
        shapes=[
            {"type": "line", "xref": "x2 domain", "yref": "y4", "x0": 0, "x1": 1, "y0": 100, "y1": 100,
             "line": {"width": 1, "dash": "dot", "color": theme.warn}}
        ],
    )  # fmt: skip
    return {"data": [*learning_traces(view), *machine_traces(view)], "layout": layout}


def learning_traces(view: RunView) -> list[Spec]:
    """Loss, clipped steps, skipped steps, smoothed loss, tokens/s."""
    steps = _steps(view)
    marks = [
        _scatter(name=name, x=np.asarray(of.steps, dtype=np.int32), y=_floats(of.loss), mode="markers",
                 showlegend=bool(of.steps), marker={"symbol": symbol, "size": 5, "color": KIND_COLOURS["adam"]},
                 hovertemplate=f"step %{{x}}: {name.lower()}<extra></extra>")
        for name, of, symbol in (("Clipped", view.clipped, "diamond-open"), ("Skipped", view.skipped, "x"))
    ]  # fmt: skip
    return [
        _scatter(name="Loss", x=steps, y=_floats(view.loss), mode="lines", line={"color": GREY, "width": 1.2},
                 hovertemplate="step %{x}<br>loss %{y:.4f}<extra></extra>"),
        *marks,
        _scatter(name="Loss, smoothed", x=steps, y=_floats(view.smooth_loss), mode="lines",
                 line={"color": KIND_COLOURS["backward"], "width": 2.2},
                 hovertemplate="step %{x}<br>smoothed %{y:.4f}<extra></extra>"),
        _scatter(name="Tokens/s", x=steps, y=_floats(view.tokens_per_s), mode="lines", yaxis="y2",
                 showlegend=False, line={"color": KIND_COLOURS["copy_up"], "width": 1.6},
                 hovertemplate="step %{x}<br>%{y:,.0f} tokens/s<extra></extra>"),
    ]  # fmt: skip


def machine_traces(view: RunView) -> list[Spec]:
    """GPU, CPU Adam and CPU busy in percent, smoothed; GPU and host memory in percent of what there is."""
    steps = _steps(view)
    lines: list[Spec] = []
    for name, values, colour, dash in (
        ("GPU", view.gpu_busy, SKY, "solid"),
        ("CPU Adam", view.adam_busy, VERMILION, "solid"),
        ("CPU, all cores", view.cpu_busy, ORANGE, "dot"),
    ):
        lines.append(
            _scatter(name=name, x=steps, y=100 * _floats(values), mode="lines", xaxis="x2", yaxis="y3",
                     legend="legend2", showlegend=_known(values), line={"color": colour, "width": 1.8, "dash": dash},
                     hovertemplate=f"step %{{x}}<br>{name} busy %{{y:.0f}} %<extra></extra>")
        )  # fmt: skip
    for place, name, values, colour in (
        ("gpu", "GPU memory", view.gpu_bytes, PURPLE),
        ("host", "Host memory", view.host_bytes, "#7A8793"),
    ):
        of = view.capacity(place)
        share = 100 * np.asarray(values) / of if of else np.full(len(values), np.nan)
        lines.append(
            _scatter(name=name, x=steps, y=share.astype(np.float32), mode="lines", xaxis="x2", yaxis="y4",
                     legend="legend3", showlegend=_known(share), line={"color": colour, "width": 1.8},
                     hovertemplate=f"step %{{x}}<br>{name} %{{y:.1f}} % of {of / 1e9:,.0f} GB<extra></extra>")
        )  # fmt: skip
    return lines


def _learning_axes(theme: Theme, domain: list[float]) -> dict[str, Any]:
    axis, title = _axis(theme), _title(theme)
    return {
        "xaxis": {**axis, "title": {"text": "step", **title}, "domain": domain, "anchor": "y2", "tickformat": ",d"},
        "yaxis": {**axis, "domain": [0.40, 1.0], "title": {"text": "loss", **title}},
        "yaxis2": {**axis, "domain": [0.0, 0.30], "title": {"text": "tokens/s", **title}, "rangemode": "tozero",
                   "nticks": 4},
    }  # fmt: skip


def _axis(theme: Theme) -> dict[str, Any]:
    return {"gridcolor": theme.grid, "zeroline": False, "tickfont": {"size": 10, "color": theme.muted}}


def _title(theme: Theme) -> dict[str, Any]:
    return {"font": {"size": 11, "color": theme.text}, "standoff": 6}


def _legend(x: float, y: float = 1.0) -> dict[str, Any]:
    return {"orientation": "h", "x": x, "y": y, "yanchor": "bottom", "font": {"size": 10}, "bgcolor": "rgba(0,0,0,0)"}


def _steps(view: RunView) -> Any:
    return np.asarray(view.steps, dtype=np.int32)


def _floats(values: Any) -> Any:
    return np.asarray(values, dtype=np.float32)


def _known(values: Any) -> bool:
    return bool(np.isfinite(np.asarray(values)).any())


__all__ = ["learning_traces", "loss_spec", "machine_traces", "plot_loss", "plot_run", "run_spec"]
