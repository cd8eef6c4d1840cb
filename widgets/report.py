"""One self-contained page about a plan: numbers, timeline, memory, every knob with its reason, how to train with it.

It opens without a network, without Python and without a notebook: for whoever was not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from plotly.offline import get_plotlyjs

import superoffload
from superoffload.config import TunedConfig
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.tracing import Trace
from superoffload.units import format_bytes, format_off, format_seconds
from superoffload.widgets import figures, timeline_figures
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.compare_views import FIELD_TITLES
from superoffload.widgets.compare_views import shown as field_text
from superoffload.widgets.measured_view import overlay
from superoffload.widgets.parts import escape, legend_html

STYLE = """
body { font: 14px/1.45 system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; color: #1F2328;
  background: #fff; max-width: 1080px; margin: 24px auto; padding: 0 20px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 26px 0 6px; }
.so-muted { color: #59636E; margin: 2px 0 12px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid #D8DCE2; }
th { font-weight: 600; } pre { background: #F4F6F8; padding: 8px 10px; border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 12.5px; }
.so-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 0 0 6px 88px; }
.so-legend span::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 5px;
  border-radius: 2px; background: var(--c); }
.so-legend .so-wait::before { background: repeating-linear-gradient(135deg, #59636E 0 1px, transparent 1px 4px); }
@media print { body { margin: 0; } details { display: none; } }
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a Tuner shows, as records."""

    config: TunedConfig
    profile: Profile
    trace: Trace
    measured: Trace | None = None
    baseline: vm.Numbers | None = None

    @property
    def views(self) -> list[tv.TimelineView]:
        """The timeline, with measured steps under the predicted one where there are any."""
        return [tv.timeline(self.trace)] if self.measured is None else overlay(self.trace, self.measured)

    @property
    def title(self) -> str:
        return f"{self.trace.model}: {format_seconds(self.trace.step_s)} per step ({vm.origin(self.trace)})"


def timeline_picture(shown: Shown, height: int = 330) -> figures.Spec:
    """The timeline on a white sheet, titled."""
    return _titled(timeline_figures.timeline_spec(shown.views, height=height), shown.title, left=110)


def state_picture(shown: Shown, height: int = 330) -> figures.Spec:
    """Layer map, bucket strip and memory on a white sheet, titled."""
    return _titled(_state_spec(shown, height), shown.title, left=70)


def _state_spec(shown: Shown, height: int) -> figures.Spec:
    layers = vm.layer_map(shown.profile, shown.trace.plan)
    return figures.state_spec(layers, vm.memory_rows(shown.trace.memory), height=height, clickable=False)


def _titled(spec: figures.Spec, title: str, left: int) -> figures.Spec:
    """With its title, and so much room at the left that other fonts than a browser's usual ones fit too."""
    layout = spec["layout"]
    layout["title"] = {"text": title, "font": {"size": 13}, "x": 0, "xref": "paper", "y": 1 - 12 / layout["height"],
                       "yanchor": "top"}  # fmt: skip
    layout["margin"] = {**layout["margin"], "t": 52, "l": left}
    return spec


def report_html(shown: Shown, *, command: str = "", snippet: str = "", now: datetime | None = None) -> str:
    """The page.

    Args:
        command: the command line that trains with this plan.
        snippet: the Python lines that do.
        now: the date that the page carries.
    """
    trace, plan = shown.trace, shown.trace.plan
    when = f"{now or datetime.now():%Y-%m-%d %H:%M}"
    about = (
        f"{vm.size_line(shown.profile)}, {plan.tokens_per_step:,} tokens a step. Numbers are {vm.origin(trace)}; block "
        f"times are {shown.profile.source}. SuperOffload {superoffload.__version__}, {when}."
    )
    parts = [
        f"<h1>{escape(trace.model)} on {escape(trace.hardware)}</h1>",
        f'<p class="so-muted">{escape(about)}</p>',
        _numbers(shown),
        "<h2>One step on both processors</h2>",
        _figure("timeline", timeline_figures.timeline_spec(shown.views, height=330, legend=False)),
        legend_html(
            (k for k in tv.KIND_TITLES if any(g.kind == k for v in shown.views for g in v.groups)),
            bool(trace.stalls),
            "In each lane: predicted above, measured below" if shown.measured is not None else "",
        ),
        _list(tv.stall_lines(trace) or ("No lane waits.",)),
        "<h2>Where state lives, and what memory it takes</h2>",
        _figure("state", _state_spec(shown, 300)),
        _table(
            ("place", "item", "bytes"),
            [(i.place, i.name, format_bytes(i.bytes)) for i in trace.memory.items if i.bytes],
        ),
        "<h2>The plan</h2>",
        _table(("knob", "value", "why"), _knobs(plan)),
    ]
    if command or snippet:
        parts.append(f"<h2>Train with it</h2><pre>{escape(command)}</pre><pre>{escape(snippet)}</pre>")
    sources = shown.profile.hardware.sources
    if sources:
        listed = _table(("figure", "source"), sorted(sources.items()))
        parts.append(f"<details><summary>Where the machine's figures come from</summary>{listed}</details>")
    config = escape(shown.config.to_json())
    parts.append(f"<details><summary>The tuned config</summary><pre>{config}</pre></details>")
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(shown.title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>'
        f"<body>{body}</body></html>\n"
    )


def _numbers(shown: Shown) -> str:
    """The head's numbers as a table, beside the baseline and the measured step where there are any."""
    head = ["", vm.origin(shown.trace)]
    if shown.baseline is not None:
        head.append(f"beside the baseline ({shown.baseline.label})")
    rows = []
    for item in vm.headline(shown.trace, shown.baseline):
        rows.append((item.name, item.value, *([item.delta] if shown.baseline is not None else [])))
    table = _table(head, rows)
    if shown.measured is None:
        return table
    off = format_off(shown.trace.step_s, shown.measured.step_s)
    told = f"Measured on {shown.measured.hardware}: {format_seconds(shown.measured.step_s)} per step"
    return f"{table}<p>{escape(told)}; the prediction is {escape(off)} off.</p>"


def _knobs(plan: Plan) -> list[tuple[str, str, str]]:
    return [(FIELD_TITLES.get(k, k), field_text(plan, k), plan.reasons.get(k, "set by hand")) for k in Plan.knobs()]


def _figure(name: str, spec: figures.Spec) -> str:
    import plotly.graph_objects as go

    text: str = go.Figure(spec).to_html(
        full_html=False, include_plotlyjs=False, div_id=name,
        config={"displaylogo": False, "responsive": True, "toImageButtonOptions": {"format": "svg", "filename": name}},
    )  # fmt: skip
    return text


def _table(head: list[str] | tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(c)}</td>" for c in rest)}</tr>'
        for first, *rest in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _list(lines: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{escape(x)}</li>' for x in lines)}</ul>"
