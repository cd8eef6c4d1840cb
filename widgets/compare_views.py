"""Plans side by side as records: a table of what differs, headline numbers with their difference to the first."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation, simulate
from superoffload.sweeps import AXES, Sweep
from superoffload.tracing import Trace
from superoffload.units import GB, format_seconds
from superoffload.widgets import view_models as vm
from superoffload.widgets.block_text import format_blocks

LEAST_PLANS, MOST_PLANS = 2, 6
"""More than six timelines in one lane are too thin to read."""

FIELD_TITLES: dict[str, str] = {
    "bucket_mb": "Bucket size, MiB",
    "retained_buckets": "Retained buckets",
    "flow_blocks": "Flow blocks",
    "prefetch_blocks": "Blocks fetched ahead",
    "cast_down": "Cast down",
    "cast_up": "Cast up",
    "master": "Master weights",
    "speculate": "Speculation",
    "undo": "Undo by",
    "undo_buckets": "Buckets with undo memory",
    "adam_threads": "Adam threads",
    "activations": "Activations",
    "activations_by_block": "Activations of other blocks",
    "loss_chunks": "Loss chunks",
    "compile_blocks": "Compiled layers",
    "micro_batch": "Micro-batch, sequences",
    "seq_len": "Sequence, tokens",
    "accumulation": "Micro-batches per step",
    "accumulate_on": "Gradients wait on",
    "data_parallel": "Chips, data parallel",
    "sequence_parallel": "Chips, Ulysses",
}
"""Every field of a plan in the order in which the table lists it."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    delta: str = ""
    """Difference to the first plan, where there is one."""
    verdict: vm.Verdict = ""
    help: str = ""
    """Why there is no number."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Column:
    letter: str
    name: str
    origin: str
    """``"modelled, gh200"``."""
    lacks: str
    """What memory the plan lacks; empty where it fits."""


@dataclass(frozen=True, slots=True)
class Comparison:
    columns: tuple[Column, ...]
    headline: tuple[Row, ...]
    fields: tuple[Row, ...]
    """Fields of the plan in which at least two differ."""


def named(plans: Any) -> dict[str, Plan | Trace]:
    """Plans by name; those of a list are called by their number.

    Raises:
        InputError: fewer than two, more than six, or something that is neither a plan nor a trace (nor a list or
            mapping of them).
    """
    if isinstance(plans, Plan | Trace):
        found: dict[str, Any] = {"plan 1": plans}
    elif isinstance(plans, Mapping):
        found = {str(name): plan for name, plan in plans.items()}
    else:
        try:
            found = {f"plan {i}": plan for i, plan in enumerate(plans, 1)}
        except TypeError:
            raise InputError(
                f"plans is a {type(plans).__name__}", expected="a list of plans, or plans by name"
            ) from None
    for name, plan in found.items():
        if not isinstance(plan, Plan | Trace):
            raise InputError(f'"{name}" is a {type(plan).__name__}', expected="a Plan, or a Trace of one")
    if not LEAST_PLANS <= len(found) <= MOST_PLANS:
        raise InputError(
            f"{len(found)} plan{'s' if len(found) != 1 else ''} to compare",
            expected=f"{LEAST_PLANS} to {MOST_PLANS} plans",
            remedy='For example Compare({"planner": so.make_plan(profile), "mine": plan}, profile)',
        )
    return found


def traces_of(plans: Mapping[str, Plan | Trace], profile: Profile) -> dict[str, Trace]:
    """Simulate the plans; traces stay as they are.

    Raises:
        InputError: a plan that does not belong to the profile; the message names it.
    """
    traces = {}
    for name, plan in plans.items():
        try:
            traces[name] = plan if isinstance(plan, Trace) else simulate(profile, plan)
        except InputError as e:
            raise InputError(f'plan "{name}": {e.what}', expected=e.expected, remedy=e.remedy) from e
    return traces


def comparison(traces: Mapping[str, Trace]) -> Comparison:
    """The table: the first plan is what the others are compared with."""
    columns = tuple(
        Column(letter, name, vm.origin(t), t.memory.shortage())
        for letter, (name, t) in zip(string.ascii_uppercase, traces.items(), strict=False)
    )
    many = list(traces.values())
    return Comparison(columns, _headline(columns, many), _fields(many))


def _headline(columns: Sequence[Column], traces: Sequence[Trace]) -> tuple[Row, ...]:
    all_numbers = [vm.numbers(t) for t in traces]
    first = all_numbers[0] if not columns[0].lacks else None
    rows = []
    for field, title in (
        ("step_s", "Step time"), ("tokens_per_s", "Tokens/s"), ("mfu", "MFU"), ("gpu_busy", "GPU busy"),
        ("exposed_s", "Exposed optimizer"),
    ):  # fmt: skip
        cells = []
        for column, trace, numbers in zip(columns, traces, all_numbers, strict=True):
            if column.lacks:
                cells.append(Cell("does not fit", help=column.lacks))
                continue
            now = getattr(numbers, field)
            before = getattr(first, field) if first is not None and trace is not traces[0] else None
            if field == "mfu" and not (now and before):
                before = None
            cells.append(Cell(_shown_number(field, now, trace), *vm.difference(field, now, before)))
        rows.append(Row(title, tuple(cells)))
    if len({t.tokens_per_step for t in traces}) > 1:
        rows.append(Row("Tokens per step", tuple(Cell(f"{t.tokens_per_step:,}") for t in traces)))
    for place, title in (("gpu", "GPU memory"), ("host", "Host memory")):
        rows.append(Row(title, tuple(_memory(t, traces[0], place) for t in traces)))
    return tuple(rows)


def _shown_number(field: str, value: float, trace: Trace) -> str:
    if field in ("step_s", "exposed_s"):
        return format_seconds(value)
    if field == "tokens_per_s":
        return f"{value:,.0f}"
    return f"{value * 100:.1f} %" if field == "gpu_busy" or trace.peak_bf16_tflops else "n/a"


def _memory(trace: Trace, first: Trace, place: Any) -> Cell:
    total, over = trace.memory.total(place), trace.memory.overflow().get(place, 0)
    capacity = trace.memory.gpu_capacity_bytes if place == "gpu" else trace.memory.host_capacity_bytes
    needs = f"{total / GB:,.1f}" + (f" of {capacity / GB:,.0f} GB" if capacity else " GB")
    if over:
        return Cell(needs, f"{over / GB:,.1f} GB over", "worse", trace.memory.shortage())
    more = (total - first.memory.total(place)) / GB
    if trace is first or abs(more) < 0.05:
        return Cell(needs, "" if trace is first else "±0", "" if trace is first else "same")
    return Cell(needs, f"{more:+,.1f}".replace("-", "−"), "worse" if more > 0 else "better")


def _fields(traces: Sequence[Trace]) -> tuple[Row, ...]:
    rows = []
    for field, title in FIELD_TITLES.items():
        values = [shown(t.plan, field) for t in traces]
        if len(set(values)) > 1:
            rows.append(Row(title, tuple(Cell(v) for v in values)))
    return tuple(rows)


def shown(plan: Plan, field: str) -> str:
    """A field's value for people."""
    value = getattr(plan, field)
    if field == "flow_blocks":
        return f"{len(value)}: {block_ranges(value)}" if value else "none"
    if field == "activations_by_block":
        return ", ".join(f"{b} {policy}" for b, policy in sorted(value.items())) or "none"
    if field == "undo_buckets" and value is None:
        return "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,g}" if isinstance(value, int | float) else str(value)


def block_ranges(blocks: Sequence[int]) -> str:
    """Block numbers as ranges, cut where they are many."""
    text = format_blocks(tuple(blocks))
    return text if len(text) <= 24 else text[:22].rsplit(",", 1)[0] + " …"


def changes(before: Plan, after: Plan) -> tuple[tuple[str, str, str], ...]:
    """(title, before, after) of the fields that differ, `auto` speculation taken as what is simulated."""
    a, b = resolve_speculation(before), resolve_speculation(after)
    told = [(title, shown(a, f), shown(b, f)) for f, title in FIELD_TITLES.items() if getattr(a, f) != getattr(b, f)]
    return tuple((title, x, y) for title, x, y in told if x != y)


@dataclass(frozen=True, slots=True)
class SweepView:
    """A sweep as columns for a heat map; rows of equal y."""

    title: str
    x_title: str
    y_title: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    tokens_per_s: tuple[tuple[float | None, ...], ...]
    reasons: tuple[tuple[str, ...], ...]
    own: tuple[int, int]
    """Column and row of the plan itself."""
    best: tuple[int, int] | None
    origin: str
    notes: tuple[str, ...]

    @property
    def unfit(self) -> int:
        """How many points have no number."""
        return sum(v is None for row in self.tokens_per_s for v in row)


def sweep_view(sweep: Sweep, plan_name: str) -> SweepView:
    """Lay out a whole sweep."""
    points = {(p.x, p.y): p for p in sweep.points}
    rows = [[points[x, y] for x in sweep.xs] for y in sweep.ys]
    best = sweep.best
    return SweepView(
        title=f"Tokens/s ({origin_of(sweep)}), everything else as in {plan_name}",
        x_title=AXES[sweep.x].title,
        y_title=AXES[sweep.y].title,
        x_labels=tuple(map(AXES[sweep.x].show, sweep.xs)),
        y_labels=tuple(map(AXES[sweep.y].show, sweep.ys)),
        tokens_per_s=tuple(tuple(p.tokens_per_s for p in row) for row in rows),
        reasons=tuple(tuple(p.reason for p in row) for row in rows),
        own=(sweep.xs.index(sweep.own[0]), sweep.ys.index(sweep.own[1])),
        best=(sweep.xs.index(best.x), sweep.ys.index(best.y)) if best is not None else None,
        origin=origin_of(sweep),
        notes=sweep.notes,
    )


def origin_of(sweep: Sweep) -> str:
    """As `view_models.origin` of a trace."""
    return f"modelled, {sweep.hardware}"


def sweep_line(view: SweepView) -> str:
    """What the heat map shows, in words."""

    def at(place: tuple[int, int]) -> str:
        column, row = place
        return f"{view.x_title} = {view.x_labels[column]} and {view.y_title} = {view.y_labels[row]}"

    own = view.tokens_per_s[view.own[1]][view.own[0]]
    parts = []
    if view.best is None:
        parts.append("No point fits the memory.")
    else:
        value = view.tokens_per_s[view.best[1]][view.best[0]] or 0.0
        gain = f", {vm.difference('tokens_per_s', value, own)[0]} against the plan itself" if own else ""
        parts.append(f"★ best: {value:,.0f} tokens/s at {at(view.best)}{gain}.")
    parts.append(f"Framed: the plan itself, {own:,.0f} tokens/s." if own else "Framed: the plan itself.")
    if view.unfit:
        parts.append(f"✕: {view.unfit} points without a number; hover, or the table below, says why.")
    parts += map(vm.sentence, view.notes)
    return " ".join(parts)
