"""Pure functions from view records to plotly figures.

Each picture is first a `Spec`, plain dictionaries as plotly's JSON has them: making them costs a tenth of making a
`go.Figure`, and a live figure needs no more to be updated in place. The number of traces never depends on the data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from superoffload.memory import Ledger
from superoffload.units import GB, format_bytes, format_count
from superoffload.widgets import view_models as vm
from superoffload.widgets.page_figure import PageFigure
from superoffload.widgets.theme import PAPER, STATE_COLOURS, Theme, memory_colour, text_on

Spec = dict[str, Any]
"""``{"data": [traces], "layout": {...}}``."""

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
CLEAR = "rgba(0,0,0,0)"
LEAST_BAR = 0.25
"""No bar of the layer map is lower than this part of the highest: beside a large embedding, layers must still be seen
and clicked."""
MARKS = {
    "none": ("line-ew-open", "all of its activations stay on the GPU"),
    "selective": ("circle-open", "keeps products, computes the rest again"),
    "full": ("circle", "its forward is computed again"),
    "offload_inputs": ("triangle-down", "its input waits in CPU memory, its forward is computed again"),
    "offload_saved": ("triangle-down-open", "its activations wait in CPU memory"),
    "": ("line-ew-open", "no layer: what it keeps stays"),
}
"""Symbol below a block of the layer map, by the policy of its activations, and what it means."""
MARK_ROOM = 0.2
"""Of the highest bar: what the marks take below the bars."""
MEMORY_PIXELS = 400
"""Least width at which the memory bars are drawn: a segment carries its name where it has room for it."""


def _base(theme: Theme, height: int, **layout: Any) -> dict[str, Any]:
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": theme.paper,
        "plot_bgcolor": theme.paper,
        "font": {"family": FONT, "size": 11, "color": theme.text},
        "hoverlabel": {"font": {"family": FONT, "size": 11}, "align": "left"},
        "showlegend": False,
        "dragmode": "zoom",
        **layout,
    }


def _bar(**properties: Any) -> Spec:
    return {"type": "bar", **properties}


def _scatter(**properties: Any) -> Spec:
    return {"type": "scatter", **properties}


def _wrap(text: str, width: int = 60) -> str:
    return "<br>".join(textwrap.wrap(text, width))


def layer_traces(view: vm.LayerMap, theme: Theme) -> list[Spec]:
    """Two stacked bars per block: state updated on the CPU and state retained on the GPU; hatched where it flows.
    Heights are parameters, except of blocks that would be too low to click (`LEAST_BAR`)."""
    index = np.asarray([b.index for b in view.blocks], dtype=np.int16)
    kept = np.asarray([b.retained_params for b in view.blocks], dtype=np.float64)
    rest = np.asarray([b.params for b in view.blocks], dtype=np.float64) - kept
    size = np.maximum(kept + rest, 1.0)
    drawn = np.maximum(1.0, LEAST_BAR * size.max(initial=0.0) / size)
    kept, rest = kept * drawn, rest * drawn
    flow = ["/" if b.flow else "" for b in view.blocks]
    text = [
        f"{b.index}: {b.name}<br>{format_count(b.params)} parameters, "
        + ("weights flow from CPU memory" if b.flow else "weights stay on the GPU")
        + f"<br>optimizer state {b.retained_params / max(1, b.params) * 100:.0f} % on the GPU"
        for b in view.blocks
    ]
    hatch = {"fgcolor": theme.text, "size": 6, "solidity": 0.28, "fillmode": "overlay"}
    traces = []
    for name, values, colour in (
        ("State on CPU", rest, STATE_COLOURS["cpu"]),
        ("State on GPU", kept, STATE_COLOURS["gpu"]),
    ):
        traces.append(
            _bar(
                name=name, x=index, y=values, hovertext=text, hovertemplate="%{hovertext}<extra></extra>",
                marker={"color": colour, "line": {"width": 0}, "pattern": {**hatch, "shape": flow}},
            )
        )  # fmt: skip
    return traces


def mark_trace(view: vm.LayerMap, theme: Theme) -> Spec:
    """One mark below each block: what becomes of its activations."""
    highest = max((b.params for b in view.blocks), default=1)
    return _scatter(
        name="Activations",
        mode="markers",
        x=np.asarray([b.index for b in view.blocks], dtype=np.int16),
        y=np.full(len(view.blocks), -MARK_ROOM * 0.55 * highest, dtype=np.float32),
        marker={
            "symbol": [MARKS[b.activations][0] for b in view.blocks],
            "size": 7 if len(view.blocks) <= 70 else 4,
            "color": theme.text,
            "opacity": [1.0 if b.activations else 0.0 for b in view.blocks],
            "line": {"width": 1, "color": theme.text},
        },
        hovertext=[f"{b.index}: {b.name}<br>{MARKS[b.activations][1]}" for b in view.blocks],
        hovertemplate="%{hovertext}<extra></extra>",
        cliponaxis=False,
    )


def bucket_trace(view: vm.LayerMap, theme: Theme) -> Spec:
    """One narrow bar per bucket in backward-completion order, or for some neighbours with their mean where there are
    many; the retained ones stand at the end."""
    bars, n = view.bucket_bars, len(view.bucket_params)
    params = np.asarray(view.bucket_params, dtype=np.float64)
    sizes = np.asarray([len(b) for b in bars], dtype=np.int32)
    first = np.asarray([b.start for b in bars], dtype=np.int32)
    kept = first >= n - view.retained_buckets
    alone = bool((sizes == 1).all())
    return _bar(
        name="Buckets",
        x=first if alone else (first + (sizes - 1) / 2).astype(np.float32),
        y=(np.add.reduceat(params, first) / sizes if bars else params).astype(np.float32),
        width=0.8 if n <= 150 else 1.0 if alone else sizes,
        customdata=None if alone else np.stack([first, first + sizes - 1], axis=1),
        marker={
            "color": kept.astype(np.int8),
            "colorscale": [[0, STATE_COLOURS["cpu"]], [1, STATE_COLOURS["gpu"]]],
            "cmin": 0,
            "cmax": 1,
            "showscale": False,
            "line": {"width": 0},
        },
        hovertemplate="bucket %{x}<br>%{y:.3s} parameters<extra></extra>"
        if alone
        else "buckets %{customdata[0]} to %{customdata[1]}<br>%{y:.3s} parameters each<extra></extra>",
    )


def memory_trace(rows: Sequence[vm.MemoryRow], theme: Theme) -> tuple[Spec, list[dict[str, Any]], float]:
    """One trace of stacked segments in percent of each place's capacity, its annotations, and the reach of the axis."""
    columns: dict[str, list[Any]] = {k: [] for k in ("x", "base", "y", "text", "hover", "colour", "ink")}
    notes: list[dict[str, Any]] = []
    scales = [100.0 / (r.capacity or max(1, r.total)) for r in rows]
    reach = max([100.0, *(r.total * k for r, k in zip(rows, scales, strict=True))])
    for i, (r, scale) in enumerate(zip(rows, scales, strict=True)):
        for s in r.segments:
            columns["x"].append(s.nbytes * scale)
            columns["base"].append(s.start * scale)
            columns["y"].append(i)
            columns["text"].append(s.name if s.nbytes * scale / reach * MEMORY_PIXELS > 6 * len(s.name) else "")
            columns["hover"].append(f"<b>{r.title}</b>: {s.name}<br>{format_bytes(s.nbytes)}")
            columns["colour"].append(memory_colour(s.name))
            columns["ink"].append(text_on(memory_colour(s.name)))
    trace = _bar(
        name="Memory",
        orientation="h",
        x=np.asarray(columns["x"], dtype=np.float32),
        base=np.asarray(columns["base"], dtype=np.float32),
        y=np.asarray(columns["y"], dtype=np.int8),
        width=0.74,
        text=columns["text"],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        textfont={"size": 10, "color": columns["ink"]},
        hovertext=columns["hover"],
        hovertemplate="%{hovertext}<extra></extra>",
        marker={"color": columns["colour"], "line": {"width": 1, "color": theme.grid}},
    )  # fmt: skip
    for i, r in enumerate(rows):
        of = f" of {r.capacity / GB:,.0f} GB" if r.capacity and r.place != "pinned" else " GB"
        digits = 1 if r.total < 1000 * GB else 0
        text = f"{r.total / GB:,.{digits}f}{of}" if r.total or r.capacity else "part of host"
        notes.append(
            {"x": 1.0, "xref": "paper", "xanchor": "left", "xshift": 6, "y": i, "showarrow": False, "align": "left",
             "text": f"<b>{text} over</b>" if r.over else text,
             "font": {"size": 10, "color": theme.warn if r.over else theme.text}}
        )  # fmt: skip
    return trace, notes, reach


def state_figure(
    layers: vm.LayerMap, rows: Sequence[vm.MemoryRow], *, theme: Theme = PAPER, height: int = 260
) -> go.Figure:
    """Layer map, bucket strip and memory bars; see `state_spec`."""
    return PageFigure(state_spec(layers, rows, theme=theme, height=height))


def state_spec(
    layers: vm.LayerMap,
    rows: Sequence[vm.MemoryRow],
    *,
    theme: Theme = PAPER,
    height: int = 260,
    clickable: bool = True,
) -> Spec:
    """Layer map, bucket strip and memory bars in one figure of five traces, since live figures are costly.

    Args:
        clickable: whether the captions say what a click does.
    """
    memory, notes, reach = memory_trace(rows, theme)
    blocks, buckets = layer_traces(layers, theme), bucket_trace(layers, theme)
    buckets.update(xaxis="x2", yaxis="y2")
    memory.update(xaxis="x3", yaxis="y3")
    for note in notes:
        note["yref"] = "y3"
    plain = {"showgrid": False, "zeroline": False, "fixedrange": True, "showticklabels": False, "ticks": ""}
    n, nb = len(layers.blocks), len(layers.bucket_params)
    highest = max((b.params for b in layers.blocks), default=1)
    title = {"size": 10, "color": theme.muted}
    kept = f"<b>{nb} buckets</b> in backward order, {layers.retained_buckets} retained"
    cpu, gpu = (f'<span style="color:{STATE_COLOURS[x]}">■</span>' for x in ("cpu", "gpu"))
    captions = [
        {
            "text": f"<b>{n} blocks</b>, state on {cpu} CPU or {gpu} GPU; "
            + ("click: flow (hatched); marks: recompute (●)" if clickable else "hatched: flow; ●: recomputed"),
            "y": 1.0,
        },
        {"text": kept + ("; click one to retain it and all later" if clickable else ""), "y": 0.60},
        {"text": "<b>Memory</b> in percent of capacity", "y": 0.37},
    ]
    notes += [
        {**c, "x": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
         "font": title} for c in captions
    ]  # fmt: skip
    layout = _base(
        theme,
        height,
        barmode="stack",
        bargap=0.16,
        margin={"l": 52, "r": 92, "t": 15, "b": 18},
        annotations=notes,
        shapes=[_capacity_line("x3", "y3", theme)],
        xaxis={**plain, "domain": [0, 1], "anchor": "y", "range": [-0.6, n - 0.4]},
        yaxis={**plain, "domain": [0.70, 1.0], "anchor": "x", "range": [-MARK_ROOM * highest, 1.0 * highest]},
        xaxis2={**plain, "domain": [0, 1], "anchor": "y2", "range": [-0.6, nb - 0.4]},
        yaxis2={**plain, "domain": [0.48, 0.60], "anchor": "x2"},
        xaxis3=_percent_axis(reach, theme, domain=[0, 1], anchor="y3"),
        yaxis3=_place_axis(rows, domain=[0.0, 0.37], anchor="x3"),
    )  # fmt: skip
    return {"data": [*blocks, buckets, memory, mark_trace(layers, theme)], "layout": layout}


def _capacity_line(x: str, y: str, theme: Theme) -> dict[str, Any]:
    return {"type": "line", "xref": x, "yref": f"{y} domain", "x0": 100, "x1": 100, "y0": 0, "y1": 1,
            "line": {"width": 2, "color": theme.warn}}  # fmt: skip


def _percent_axis(reach: float, theme: Theme, **more: Any) -> dict[str, Any]:
    step = 25 if reach <= 150 else 50 if reach <= 400 else 100 * max(1, round(reach / 600))
    return {"range": [0, max(101.0, reach * 1.02)], "ticksuffix": " %", "dtick": step, "gridcolor": theme.grid,
            "zeroline": False, "fixedrange": True, "tickfont": {"size": 10, "color": theme.muted}, **more}  # fmt: skip


def _place_axis(rows: Sequence[vm.MemoryRow], **more: Any) -> dict[str, Any]:
    return {"range": [len(rows) - 0.5, -0.5], "tickvals": list(range(len(rows))), "ticktext": [r.title for r in rows],
            "showgrid": False, "zeroline": False, "fixedrange": True, **more}  # fmt: skip


def memory_figure(rows: Sequence[vm.MemoryRow], *, theme: Theme = PAPER, height: int = 190) -> go.Figure:
    """Memory bars alone, in percent of capacity."""
    trace, notes, reach = memory_trace(rows, theme)
    layout = _base(
        theme,
        height,
        barmode="stack",
        margin={"l": 60, "r": 124, "t": 12, "b": 28},
        annotations=notes,
        shapes=[_capacity_line("x", "y", theme)],
        xaxis=_percent_axis(reach, theme),
        yaxis=_place_axis(rows),
    )
    return PageFigure(data=[trace], layout=layout)


def plot_memory(ledger: Ledger, *, theme: Theme = PAPER) -> go.Figure:
    """Draw what a plan needs on the GPU, on the host and pinned, against what the hardware has."""
    return memory_figure(vm.memory_rows(ledger), theme=theme)
