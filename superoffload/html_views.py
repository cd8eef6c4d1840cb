"""How records show themselves in a notebook: plain HTML tables, no widget library."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from superoffload.units import format_bytes, format_count, format_off, format_seconds

if TYPE_CHECKING:
    from superoffload.measured_step import MeasuredStep
    from superoffload.plan import Plan
    from superoffload.profiler import BlockProfile, Profile
    from superoffload.profiler_events import ProfilerSummary
    from superoffload.tracing import Trace

SHOWN_STALLS = 5
SHOWN_OPERATORS = 10


def profile_html(profile: Profile) -> str:
    """One row per block, equal layers together with their medians."""
    rows = []
    for _, group in groupby(enumerate(profile.blocks), key=lambda item: (item[1].kind, item[1].tensor_numels)):
        blocks = [b for _, b in group]
        rows.append(
            [
                _title(blocks),
                format_count(sum(b.params for b in blocks)),
                format_seconds(median(b.forward_s for b in blocks)),
                format_seconds(median(b.backward_s for b in blocks)),
                format_bytes(median(b.activation_bytes for b in blocks)),
                format_bytes(median(b.working_bytes for b in blocks)),
            ]
        )
    forward, backward = (sum(getattr(b, key) for b in profile.blocks) for key in ("forward_s", "backward_s"))
    kept = sum(b.activation_bytes for b in profile.blocks)
    rows.append(["all", format_count(profile.params), format_seconds(forward), format_seconds(backward),
                 format_bytes(kept), ""])  # fmt: skip
    head = (
        f"{profile.model}, {profile.micro_batch} × {profile.seq_len} tokens in {_dtypes(profile.blocks)} "
        f"on {profile.hardware.name} ({profile.source})"
    )
    columns = ("block", "parameters", "forward", "backward", "kept for backward", "transient")
    return _table(head, columns, rows)


def plan_html(plan: Plan) -> str:
    """One row per knob, with the reason of a choice."""
    rows = [[name, _value(getattr(plan, name)), plan.reasons.get(name, "")] for name in plan.knobs()]
    return _table("Plan", ("knob", "value", "why"), rows)


def trace_html(trace: Trace) -> str:
    """The headline numbers, and the longest waits of the GPU."""
    rows = [
        ["step", format_seconds(trace.step_s)],
        ["tokens/s", f"{trace.tokens_per_s:,.0f}"],
        ["model TFLOP/s", f"{trace.model_tflops:.3g}" + (f" ({trace.mfu:.0%} MFU)" if trace.mfu else "")],
        ["GPU busy", f"{trace.gpu_busy:.0%}"],
        ["memory", f"GPU {format_bytes(trace.memory.total('gpu'))}, host {format_bytes(trace.memory.total('host'))}"],
    ]
    longest = sorted((s for s in trace.stalls if s.lane == "gpu"), key=lambda s: -s.duration_s)[:SHOWN_STALLS]
    rows += [[f"GPU waits {format_seconds(s.duration_s)}", s.cause] for s in longest]
    return _table(f"{trace.model} on {trace.hardware} ({trace.source})", ("", ""), rows)


def profiler_html(summary: ProfilerSummary) -> str:
    """The mean step by what filled it, the dearest operators, and the dearest kernels where there are any."""
    use = "; ".join(f"GPU {g.device} {g.name} busy {g.utilisation:.0%}" for g in summary.gpus) or "no GPU"
    head = f"{summary.worker}: {len(summary.steps)} steps of {format_seconds(summary.step_s)} ({summary.source}), {use}"
    shares = summary.shares()
    parts = [_table(head, list(shares), [[f"{share:.0%}" for share in shares.values()]])]
    columns = ("operator", "calls", "itself", "with what it calls", *(("on the GPU",) if summary.gpus else ()))
    rows = [
        [o.name, str(o.calls), *(format_seconds(t) for t in (o.self_s, o.total_s, o.kernel_s))][: len(columns)]
        for o in summary.operators[:SHOWN_OPERATORS]
    ]
    parts.append(_table("Operators", columns, rows))
    if summary.kernels:
        runs = [[k.name, str(k.calls), format_seconds(k.total_s)] for k in summary.kernels[:SHOWN_OPERATORS]]
        parts.append(_table("Kernels", ("kernel", "runs", "together"), runs))
    return "".join(parts)


def measured_step_html(step: MeasuredStep) -> str:
    """What was run where, and each lane beside the prediction."""
    from superoffload.tracing import LANE_TITLES

    measured_s, modelled_s = step.trace.step_s, step.predicted().step_s
    rows = [["step", format_seconds(measured_s), format_seconds(modelled_s), format_off(modelled_s, measured_s)]]
    rows += [
        [LANE_TITLES[x.lane] + " busy", format_seconds(x.measured_s), format_seconds(x.modelled_s),
         format_off(x.modelled_s, x.measured_s) if x.measured_s else ""]
        for x in step.lanes()
        if x.measured_s or x.modelled_s
    ]  # fmt: skip
    where = ", ".join(f"{k} {v}" for k, v in step.machine.items())
    table = _table(step.title, ("", "measured", "modelled", "model off"), rows)
    return f"{table}<p>{html.escape(step.shows)}</p><p>Measured on {step.date}: {html.escape(where)}.</p>"


def _title(blocks: Sequence[BlockProfile]) -> str:
    first = blocks[0].name
    return first if len(blocks) == 1 else f"{first} … {blocks[-1].name.rsplit('.', 1)[-1]} (each of {len(blocks)})"


def _dtypes(blocks: Iterable[BlockProfile]) -> str:
    return ", ".join(dict.fromkeys(b.dtype for b in blocks))


def _value(value: object) -> str:
    if isinstance(value, dict):
        value = tuple(f"{k}: {v}" for k, v in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align:left">{html.escape(c)}</{tag}>' for c in cells) + "</tr>"

    top = line(columns, "th") if any(columns) else ""
    return f"<b>{html.escape(head)}</b><table>{top}{''.join(line(r, 'td') for r in rows)}</table>"
