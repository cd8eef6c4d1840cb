"""``superoffload search``: try many plans, show the Pareto set and why the best is the best, measure some of them."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from superoffload import cli_planning as planning
from superoffload import cli_profiles as profiles
from superoffload.cli_running import machine_notes, require_torch
from superoffload.cli_settings import parse_knobs, with_chip_options
from superoffload.errors import DoesNotFit, InputError
from superoffload.plan import Plan, check_one_chip
from superoffload.profiler import Profile
from superoffload.progress import progress_bar
from superoffload.search_result import SearchResult, Trial, gigabytes
from superoffload.units import format_seconds

ROWS = 12
"""Plans of the Pareto set that are shown."""
COLUMNS = ("micro_batch", "accumulation", "activations", "retained_buckets", "flow_blocks", "master", "speculate")
"""Fields in the table; the plan of the best is shown whole below it."""
CHIPS = ("data_parallel", "sequence_parallel")
"""And where there are several chips."""


def search(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload search``: exit code 2 where no plan meets the budgets; what was tried is written all the same."""
    from superoffload import autotune

    knobs = with_chip_options(args, parse_knobs(args.set))
    args.compile_blocks = bool(knobs.get("compile_blocks"))  # a model that is measured here is measured so
    prof = _profile(args)
    if args.micro_batch is not None:
        knobs["micro_batch"] = args.micro_batch
    with _stopped_by_ctrl_c() as stop, _progress(args.trials) as progress:
        found = autotune.search(
            prof,
            objective=args.objective,
            tokens=args.tokens,
            gpu_budget_gb=args.gpu_gb,
            host_budget_gb=args.host_gb,
            tokens_per_s=args.tokens_per_s,
            chips=args.chips,
            trials=args.trials,
            seed=args.seed,
            cancel=stop,
            progress=progress,
            **knobs,
        )
    if args.measure and found.best is not None:
        check_one_chip(found.best.plan)
        found = _measure(found, args.measure)
    planning.write_if_asked(found.save, args.out, "search")
    best = found.winner
    if best is None:
        near = found.nearest
        why = f"none of the {len(found.trials)} plans that were tried meets the budgets; the nearest, #{near.number}"
        raise DoesNotFit(f"{why}, {near.reason}", remedy="Allow more memory or fewer tokens/s, or fix fewer fields")
    for line in _lines(found, best):
        print(line)
    if best.plan.chips > 1:
        print(f"note: superoffload train refuses it: the engine trains on one chip, the plan is for {best.plan.chips}")
    if args.config:
        planning.write_if_asked(_tuned(found, best, args.source).save, args.config, "tuned config")
    return {
        "objective": found.settings.objective,
        "method": found.method,
        "trials": len(found.trials),
        "cancelled": found.cancelled,
        "counts": found.counts,
        "best": _summary(best),
        "reasons": dict(best.plan.reasons),
        "planner": _summary(found.trials[0]),
        "pareto": [_summary(t) for t in found.pareto],
        "measured": [m.model_dump(mode="json") for m in found.measured],
        "hardware": prof.hardware.name,
        "model": prof.model,
        "source": "modelled",
        "out": args.out,
        "config": args.config,
    }


def tokens(text: str) -> int | str:
    """The value of ``--tokens``: a whole number or "free"."""
    if text == "free":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither a whole number of at least 1 nor "free"')


def _profile(args: argparse.Namespace) -> Profile:
    """The profile to search for; where its plans are to be measured, one of this machine."""
    if not args.measure:
        return profiles.profile_for(args)
    require_torch("measuring plans")
    prof = profiles.profile_for(args) if args.profile else profiles.measure(args) if args.model else None
    if prof is None:
        raise InputError("nothing to search for", remedy="Add --model NAME, or --profile FILE")
    if prof.source != "measured" or prof.hardware.source != "probed":
        raise InputError(
            f"--measure with a profile for {prof.hardware.name} that is {prof.source}",
            expected="one that was measured on this machine",
            remedy="Leave --profile out and give --model NAME, or: superoffload profile --measure --out profile.json",
        )
    return prof


def _measure(found: SearchResult, count: int) -> SearchResult:
    from superoffload import measuring

    def say(trial: Trial, step: int, steps: int) -> None:
        print(
            f"\rmeasuring #{trial.number}: step {step} of {steps}", end="\n" if step == steps else "", file=sys.stderr
        )

    assert found.best is not None
    for line in machine_notes(_tuned(found, found.best, None)):
        print(f"note: {line}", file=sys.stderr)
    return measuring.measure_best(found, count, progress=say)


def _tuned(found: SearchResult, trial: Trial, source: str | None) -> Any:
    from superoffload import simulator
    from superoffload.config import TunedConfig

    config = TunedConfig.create(
        found.profile, trial.plan, model_source=source, trace=simulator.simulate(found.profile, trial.plan)
    )
    measured = next((m for m in found.measured if m.number == trial.number and m.headline), None)
    return config.replace(measurement=measured.headline) if measured else config


def _lines(found: SearchResult, best: Trial) -> list[str]:
    """The Pareto set as a table, what became of the others, and the best plan with its reasons."""
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    how = "the whole space" if found.method == "exhaustive" else f"seed {found.settings.seed}"
    what = f"{found.profile.model} on {found.profile.hardware.name} (modelled): {len(found.trials)} plans tried"
    lines = [f"{what}, {how}{', stopped early' if found.cancelled else ''}: {counts}"]
    lines += ["", "no other plan beats these in tokens/s, GPU and host memory at once:"]
    columns = (*(CHIPS if best.plan.chips > 1 else ()), *COLUMNS)
    rows = [["", "tokens/s", "MFU", "GPU GB", "host GB", *columns]]
    rows += [_row(t, best, columns) for t in _spread(found.pareto, best)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(found.pareto) > ROWS:
        lines.append(f"({len(found.pareto) - ROWS} more between them, in the file of --out)")
    rejected: dict[str, Trial] = {}
    for t in found.trials[1:]:
        if t.verdict in ("dominated", "too slow", "does not fit", "impossible"):
            rejected.setdefault(t.verdict, t)
    lines += ["", *(f"rejected, for example #{t.number}: {t.reason}" for t in rejected.values())]
    own = found.trials[0]
    if own.ran and best.number != own.number:
        lines.append(f"the planner's own plan, #0: {own.tokens_per_s:,.0f} tokens/s, {gigabytes(own.gpu_bytes)} GB on "
                     f"the GPU, {gigabytes(own.host_bytes)} GB on the host")  # fmt: skip
    for m in found.measured:
        said = f"{format_seconds(m.measured_s)} measured ({m.predicted_s / m.measured_s - 1:+.1%})" if (
            m.measured_s) else f"failed: {m.failure}"  # fmt: skip
        lines.append(f"#{m.number}: {format_seconds(m.predicted_s)} per step predicted, {said}")
    chosen = "chosen by measured time" if found.measured else best.reason
    return [*lines, "", f"#{best.number}, {chosen}", *planning.plan_lines(best.plan)]


def _spread(kept: tuple[Trial, ...], best: Trial) -> list[Trial]:
    """At most ROWS of the Pareto set, from end to end, the best among them."""
    if len(kept) <= ROWS:
        return list(kept)
    chosen = {round(i * (len(kept) - 1) / (ROWS - 1)) for i in range(ROWS)}
    return [t for i, t in enumerate(kept) if i in chosen or t.number == best.number]


def _row(trial: Trial, best: Trial, columns: tuple[str, ...]) -> list[str]:
    plan = trial.plan
    values = [_cell(plan, name) for name in columns]
    return [f"{'* ' if trial.number == best.number else ''}#{trial.number}", f"{trial.tokens_per_s:,.0f}",
            f"{trial.mfu:.1%}" if trial.mfu else "n/a", gigabytes(trial.gpu_bytes), gigabytes(trial.host_bytes),
            *map(str, values)]  # fmt: skip


def _cell(plan: Plan, name: str) -> Any:
    value = getattr(plan, name)
    if name == "activations" and plan.activations_by_block:
        others = list(plan.activations_by_block.values())
        return f"{value}, {len(others)} {others[0]}"
    return len(value) if isinstance(value, tuple) else value


def _summary(trial: Trial) -> dict[str, Any]:
    body = trial.model_dump(mode="json", exclude={"plan"})
    plan: Plan = trial.plan
    return {**body, "plan": plan.model_dump(mode="json", exclude={"reasons"})}


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    bar = progress_bar(total, unit="plan")

    def show(done: int, _: int, best: Trial | None) -> None:
        if bar is not None:
            bar.update(done - bar.n)
            if best is not None:
                bar.set_postfix_str(f"best {best.tokens_per_s:,.0f} tokens/s (modelled)", refresh=False)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def _stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """Ctrl-C ends the search, which then shows what it has; a second one ends the command."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
