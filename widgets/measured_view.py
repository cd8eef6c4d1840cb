"""A measured step beside what the model predicts for its plan: one figure, and the lanes as a table."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

from superoffload.measured_step import LaneBusy, MeasuredStep
from superoffload.tracing import LANE_TITLES, Trace
from superoffload.units import format_off, format_seconds
from superoffload.widgets import timeline_views as tv
from superoffload.widgets.parts import escape
from superoffload.widgets.theme import PAPER, Theme
from superoffload.widgets.timeline_figures import timeline_figure

HEIGHT = 400


def overlay(predicted: Trace, measured: Trace, *, max_bars: int = tv.MAX_BARS) -> list[tv.TimelineView]:
    """One step of each trace, with what it overlaps of the step before, so that they can be compared by eye."""
    return [tv.timeline(t, window=tv.one_step(t), max_bars=max_bars // 2) for t in (predicted, measured)]


def plot_measured(step: MeasuredStep, *, theme: Theme = PAPER, height: int = HEIGHT) -> go.Figure:
    """Draw a measured step under the prediction for its plan, in each lane the prediction above.

    Args:
        step: `superoffload.load_measured(...)`, or one of your own.
        height: pixels.
    """
    predicted, measured = step.predicted(), step.trace
    fig = timeline_figure(overlay(predicted, measured), theme=theme, height=height)
    told = (
        f"{step.title}<br>{format_seconds(measured.step_s)} per step measured on {measured.hardware}, {step.date}; "
        f"{format_seconds(predicted.step_s)} modelled ({format_off(predicted.step_s, measured.step_s)})"
    )
    fig.update_layout(
        title={"text": told, "font": {"size": 12}, "x": 0, "xref": "paper", "y": 1 - 12 / height, "yanchor": "top"},
        margin={"t": 66},
    )
    return fig


def lanes_html(lanes: Iterable[LaneBusy]) -> str:
    """What each lane works in a step, as a table with the model's error."""
    rows = "".join(
        f'<tr><th scope="row">{escape(LANE_TITLES[x.lane])}</th><td>{format_seconds(x.measured_s)}</td>'
        f"<td>{format_seconds(x.modelled_s)}</td>"
        f"<td>{format_off(x.modelled_s, x.measured_s) if x.measured_s else ''}</td></tr>"
        for x in lanes
        if x.measured_s or x.modelled_s
    )
    return (
        '<div class="so-scroll"><table class="so-table"><caption>At work in a step</caption><tr><th scope="col"></th>'
        '<th scope="col">measured</th><th scope="col">modelled</th><th scope="col">model off</th></tr>'
        f"{rows}</table></div>"
    )
