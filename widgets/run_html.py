"""The words and numbers of a run: its state in one line, cards, and the ledger of what speculation took back."""

from __future__ import annotations

import math
import time

from superoffload.units import format_bytes, format_seconds
from superoffload.widgets.parts import cards_html, escape
from superoffload.widgets.run_views import RECENT_STEPS, RunView
from superoffload.widgets.view_models import HeadlineItem

NOT_RECORDED = "not in its log"
SILENT_S = 60.0


def head_html(view: RunView) -> str:
    """Folder, state, verdicts, and what is wrong, in one line."""
    parts = [f"<b>{escape(view.folder)}</b>", escape(view.state)]
    goal = view.status.get("steps")
    if view.steps:
        parts.append(f"step {view.steps[-1]:,}" + (f" of {goal:,}" if isinstance(goal, int) else ""))
    if view.verdict_counts:
        parts.append(", ".join(f"{n:,} {escape(v)}" for v, n in view.verdict_counts))
    if view.has_gpu is not None:
        parts.append(escape(view.status["gpu_name"]) if view.has_gpu else "no GPU: the CPU computes the model")
    if view.unreadable_lines:
        parts.append(f'<span class="so-worse">{view.unreadable_lines} unreadable lines</span>')
    error = view.status.get("error")
    if view.state == "failed" and error:
        parts.append(f'<span class="so-worse">{escape(error)}</span>')
    updated = view.status.get("updated")
    if isinstance(updated, int | float) and view.state == "running" and time.time() - updated > SILENT_S:
        parts.append(f'<span class="so-worse">silent for {time.time() - updated:.0f} s</span>')
    return " · ".join(parts)


def cards(view: RunView) -> tuple[HeadlineItem, ...]:
    """The numbers of the last steps."""
    recent, how = view.recent, measured_by(view)
    no_gpu, cores, threads = view.has_gpu is False, view.status.get("cores"), view.status.get("adam_threads")
    gpu_source = str(view.status.get("gpu_busy_source", ""))

    def card(name: str, value: float, text: str, label: str) -> HeadlineItem:
        if math.isfinite(value):
            return HeadlineItem(name, text, label, help=how[name])
        why = "no GPU" if no_gpu and name.startswith("GPU") else NOT_RECORDED
        if name == "GPU busy" and not no_gpu and gpu_source:
            why = "not measured" if gpu_source.startswith("not") else "no sample yet"
        return HeadlineItem(name, "–", why, help=how[name])

    first = f"first {view.first_loss:.4f}" if math.isfinite(view.first_loss) else ""
    return (
        card("Loss", recent.loss, f"{recent.loss:.4f}", first),
        card("Tokens/s", recent.tokens_per_s, f"{recent.tokens_per_s:,.0f}", "measured"),
        card("GPU busy", recent.gpu_busy, f"{recent.gpu_busy:.0%}", "measured"),
        card("CPU Adam busy", recent.adam_busy, f"{recent.adam_busy:.0%}", _counted(threads, "thread")),
        card("CPU busy", recent.cpu_busy, f"{recent.cpu_busy:.0%}", _counted(cores, "core")),
        card("GPU memory", recent.gpu_peak_bytes, _amount(recent.gpu_peak_bytes), f"peak, of {_of(view, 'gpu')}"),
        card("Host memory", recent.host_bytes, _amount(recent.host_bytes), f"of {_of(view, 'host')}"),
    )


def measured_by(view: RunView) -> dict[str, str]:
    """How each number of `cards` is measured."""
    mean = f"mean of the last {RECENT_STEPS} rows"
    status = view.status
    gpu = status.get("gpu_busy_source", NOT_RECORDED)
    own = "; without a GPU, forward and backward are part of it" if view.has_gpu is False else ""
    return {
        "Loss": f"The training loss, {mean}.",
        "Tokens/s": f"By the host's clock, {mean}; saving and pauses are left out.",
        "GPU busy": f"Share of time in which a kernel ran on the GPU, {mean}: {gpu}.",
        "CPU Adam busy": f"Share of a step in which the optimizer's thread worked, by its own clock, {mean}.",
        "CPU busy": f"CPU time of the run's process over that of all cores it may use, {mean}{own}.",
        "GPU memory": "Most that torch's allocator had given out in the last step.",
        "Host memory": f"Of the last row, pinned memory included: {status.get('host_bytes_source', NOT_RECORDED)}.",
    }  # fmt: skip


def how_html(view: RunView) -> str:
    """`measured_by`, folded away."""
    rows = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in measured_by(view).items())
    smooth = "In the picture, the busy shares and one line of the loss are means over neighbouring steps."
    return (
        '<div class="so-foot"><details><summary>Everything here is measured; how?</summary>'
        f"<ul>{rows}</ul>{smooth}</details></div>"
    )


def _counted(count: object, what: str) -> str:
    return f"of {count} {what}{'' if count == 1 else 's'}" if isinstance(count, int) else "measured"


def _amount(value: float) -> str:
    """Three digits: a card is narrow."""
    number, _, unit = format_bytes(value).partition(" ")
    return f"{float(number):.3g} {unit}" if math.isfinite(value) else "–"


def _of(view: RunView, place: str) -> str:
    capacity = view.capacity(place)
    return f"{capacity / 1e9:,.0f} GB" if capacity else "unknown"


def numbers_html(view: RunView) -> str:
    """The cards as HTML."""
    return cards_html(cards(view))


def rollbacks_html(view: RunView) -> str:
    """The ledger as a table that a screen reader can walk through."""
    ledger = view.rollbacks
    if not ledger.steps:
        ran = f"in {ledger.speculated_steps:,} rows Adam ran before the verdict" if ledger.speculated_steps else (
            "no step speculated"
        )  # fmt: skip
        return f'<div class="so-note"><b>Rollbacks</b>: none; {ran}.</div>'
    rows = "".join(
        f'<tr><th scope="row">{s.step:,}</th><td>{escape(s.verdict)}</td><td>{_figure(s.grad_norm)}</td>'
        f"<td>{'–' if s.verdict == 'skip' else _figure(s.clip_coefficient)}</td>"
        f"<td>{s.undone} of {s.speculated}</td><td>{_seconds(s.undo_s)}</td><td>{_seconds(s.waited_s)}</td></tr>"
        for s in ledger.last
    )
    total = (
        f'<tr><th scope="row">all {ledger.steps:,}</th><td></td><td></td><td></td><td>{ledger.buckets:,}</td>'
        f"<td>{_seconds(ledger.undo_s)}</td><td>{_seconds(ledger.waited_s)}</td></tr>"
    )
    names = (
        "step",
        "verdict",
        "gradient norm",
        "clip coefficient",
        "buckets undone",
        "undo and redo",
        "exposed, at most",
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    shown = "" if ledger.steps == len(ledger.last) else f", the last {len(ledger.last)} shown"
    return (
        '<div class="so-scroll so-rollbacks" tabindex="0" role="region" aria-label="Rollback ledger">'
        f'<table class="so-table"><caption><b>Rollbacks</b>: {ledger.steps:,} steps whose speculation was undone{shown}'
        ". Measured: undo and redo by the optimizer's thread, exposed by the wait of the next forward</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{total}{rows}</tbody></table></div>"
    )


def _figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _seconds(value: float) -> str:
    return format_seconds(value) if math.isfinite(value) else "–"


__all__ = ["cards", "head_html", "how_html", "measured_by", "numbers_html", "rollbacks_html"]
