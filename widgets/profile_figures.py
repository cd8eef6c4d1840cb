"""What torch's profiler saw, drawn here: it needs no network, which TensorBoard's own charts do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from superoffload.profiler_events import ROLES, OperatorTotal, ProfilerSummary, read_profile
from superoffload.units import format_seconds
from superoffload.widgets.figures import Spec, _bar, _base
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.theme import BLUE, GREEN, GREY, ORANGE, PAPER, PURPLE, SKY, VERMILION, Theme

ROLE_TITLES = {"kernel": "GPU kernels", "memcpy": "GPU copies", "memset": "GPU fills", "runtime": "CUDA calls",
               "cpu": "CPU operators", "other": "Other host work, or idle"}  # fmt: skip
ROLE_COLOURS = {"kernel": BLUE, "memcpy": GREEN, "memset": "#7FD1B9", "runtime": PURPLE, "cpu": VERMILION,
                "other": "#B8BEC6"}  # fmt: skip
SHOWN = 12
"""Operators and kernels that are drawn."""
SHOWN_STEPS = 40
NAME_CHARACTERS = 34
ROW, GAP, TOP, BOTTOM = 20, 66, 58, 66
"""Pixels: of a bar, between operators and kernels, above and below the axes."""
RIGHT = [0.56, 1.0]
"""Of the width: operators and kernels, their names to the left of it."""


def plot_profile(source: ProfilerSummary | str | os.PathLike[str], *, theme: Theme = PAPER) -> go.Figure:
    """Draw a profile of torch's profiler: steps by what filled them, the dearest operators, and the dearest kernels
    where a GPU was profiled.

    Args:
        source: what `superoffload.read_profile` gave, a file that torch's profiler wrote, or a folder of such files
            (the newest counts).

    Raises:
        InputError: no such file, or one that holds no profile.
    """
    summary = source if isinstance(source, ProfilerSummary) else read_profile(source)
    return PageFigure(profile_spec(summary, theme=theme))


def profile_spec(summary: ProfilerSummary, *, theme: Theme = PAPER) -> Spec:
    """Steps as stacked bars on the left, operators on the right, kernels below."""
    operators, kernels = [o.name for o in _dearest(summary)], [k.name for k in summary.kernels[:SHOWN]]
    upper = 24 + ROW * max(len(operators), 8)
    inner = upper + (GAP + ROW * len(kernels) if kernels else 0)
    height = inner + TOP + BOTTOM
    low, high = (1 - upper / inner, 1 - (upper + GAP) / inner) if kernels else (0.0, 0.01)
    axis = {"gridcolor": theme.grid, "zeroline": False, "tickfont": {"size": 10, "color": theme.muted}}
    seconds = {**axis, "tickformat": ".2~s", "ticksuffix": "s", "rangemode": "tozero", "nticks": 6}
    names = {**axis, "showgrid": False, "tickfont": {"size": 10, "color": theme.text}}
    use = "; ".join(f"GPU {g.device} {g.name} busy {g.utilisation:.0%}" for g in summary.gpus) or "no GPU was profiled"
    head = f"{summary.worker}: {format_seconds(summary.step_s)} per step ({summary.source}); {use}"
    note = {"showarrow": False, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "font": {"size": 11, "color": theme.text}}  # fmt: skip
    captions = [
        {**note, "text": "<b>Steps</b>, by what filled them", "x": 0, "y": 1},
        {**note, "text": "<b>Operators</b>, on the host in themselves and on the GPU", "x": RIGHT[0], "y": 1},
    ]
    if kernels:
        captions.append({**note, "text": "<b>Kernels</b>, all their runs", "x": RIGHT[0], "y": high})
    layout = _base(
        theme,
        height,
        barmode="stack",
        bargap=0.25,
        margin={"l": 58, "r": 18, "t": TOP, "b": BOTTOM},
        title={"text": head, "font": {"size": 12}, "x": 0, "xref": "paper", "y": 1 - 8 / height, "yanchor": "top"},
        annotations=captions,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 10},
                "traceorder": "normal"},
        xaxis={**axis, "domain": [0, 0.3], "anchor": "y", "type": "category", "nticks": 8},
        yaxis={**seconds, "domain": [low, 1], "anchor": "x"},
        xaxis2={**seconds, "domain": RIGHT, "anchor": "y2"},
        yaxis2={**names, **_ticks(operators), "domain": [low, 1], "anchor": "x2"},
        xaxis3={**seconds, "domain": RIGHT, "anchor": "y3", "visible": bool(kernels)},
        yaxis3={**names, **_ticks(kernels), "domain": [0, high], "anchor": "x3", "visible": bool(kernels)},
    )  # fmt: skip
    return {"data": [*_step_traces(summary), *_operator_traces(summary), _kernel_trace(summary)], "layout": layout}


def _step_traces(summary: ProfilerSummary) -> list[Spec]:
    steps = summary.steps[-SHOWN_STEPS:]
    return [
        _bar(
            name=ROLE_TITLES[role],
            x=[str(s.step) for s in steps],
            y=[getattr(s, f"{role}_s") for s in steps],
            marker={"color": ROLE_COLOURS[role], "line": {"width": 0}},
            showlegend=any(getattr(s, f"{role}_s") > 0 for s in steps),
            hovertemplate=f"step %{{x}}<br>{ROLE_TITLES[role]} %{{y:.3s}}s<extra></extra>",
        )
        for role in ROLES
    ]


def _operator_traces(summary: ProfilerSummary) -> list[Spec]:
    ops, traces = _dearest(summary), []
    for name, field, colour in (("In the operator itself", "self_s", ORANGE), ("On the GPU", "kernel_s", SKY)):
        values = [getattr(o, field) for o in ops]
        traces.append(
            _bar(
                name=name, orientation="h", x=values, y=list(range(len(ops))), xaxis="x2", yaxis="y2",
                customdata=[o.calls for o in ops], marker={"color": colour, "line": {"width": 0}},
                hovertext=[o.name for o in ops], showlegend=any(values),
                hovertemplate=f"<b>%{{hovertext}}</b>, %{{customdata}} calls<br>{name}: %{{x:.3s}}s<extra></extra>",
            )
        )  # fmt: skip
    return traces


def _kernel_trace(summary: ProfilerSummary) -> Spec:
    kernels = summary.kernels[:SHOWN]
    return _bar(
        name="Kernels", orientation="h", x=[k.total_s for k in kernels], xaxis="x3", yaxis="y3",
        y=list(range(len(kernels))), customdata=[k.calls for k in kernels],
        hovertext=[k.name[:300] for k in kernels], showlegend=False,
        marker={"color": GREY, "line": {"width": 0}},
        hovertemplate="<b>%{hovertext}</b>, %{customdata} runs<br>%{x:.3s}s<extra></extra>",
    )  # fmt: skip


def _dearest(summary: ProfilerSummary) -> list[OperatorTotal]:
    return sorted(summary.operators, key=lambda o: -(o.self_s + o.kernel_s))[:SHOWN]


def _ticks(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names by number, the first on top: short names may be the same."""
    n = len(names)
    return {"tickvals": list(range(n)), "ticktext": [_short(x) for x in names], "range": [max(n, 1) - 0.5, -0.5]}


def _short(name: str) -> str:
    """What fits beside a bar."""
    text = name.removeprefix("void ").removeprefix("autograd::engine::evaluate_function: ")
    text = text.replace("at::native::", "")
    return text if len(text) <= NAME_CHARACTERS else text[: NAME_CHARACTERS - 1] + "…"


__all__ = ["plot_profile", "profile_spec"]
