"""What a search found, as records for a picture and a list: bounded in number, each point with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from superoffload.search_result import Objective, SearchResult, Trial, difference
from superoffload.units import GB

MAX_POINTS = 300
"""Most points drawn and listed; the best and the Pareto set always are, of the others an even selection."""

Kind = Literal["best", "planner", "pareto", "rejected", "does not fit"]
KINDS: tuple[Kind, ...] = ("best", "planner", "pareto", "rejected", "does not fit")
KIND_NAMES: dict[Kind, str] = {
    "best": "best",
    "planner": "the planner's own",
    "pareto": "kept: no other beats it",
    "rejected": "beaten or too slow",
    "does not fit": "does not fit",
}
MARKS: dict[Kind, str] = {"best": "★", "planner": "■", "pareto": "◆", "rejected": "○", "does not fit": "✕"}
SAID = {
    "pareto": "kept",
    "dominated": "beaten",
    "too slow": "too slow",
    "does not fit": "without room",
    "impossible": "impossible",
}
"""Verdict of several plans -> the word for it."""
OBJECTIVE_TITLES: dict[Objective, str] = {
    "throughput": "most tokens/s",
    "gpu_memory": "least GPU memory",
    "host_memory": "least host memory",
}


@dataclass(frozen=True, slots=True)
class FoundPoint:
    """One plan that was tried."""

    number: int
    kind: Kind
    gb: float
    """Memory at the place that the picture shows."""
    tokens_per_s: float | None
    """Modelled; None where the plan does not fit or is impossible."""
    reason: str
    label: str
    """One line for the list."""


@dataclass(frozen=True, slots=True)
class FoundView:
    """The picture of a search: tokens/s over the memory that the objective is about."""

    place: str
    """``"GPU"`` or ``"host"``."""
    origin: str
    """``"modelled, gh200"``."""
    points: tuple[FoundPoint, ...]
    """In the order of the list: by kind, the fastest first."""
    tried: int
    budget_gb: float
    goal_tokens_per_s: float | None

    def of(self, kind: Kind) -> tuple[FoundPoint, ...]:
        return tuple(p for p in self.points if p.kind == kind)


def kind_of(trial: Trial) -> Kind:
    """What the picture calls a trial."""
    if trial.verdict == "best":
        return "best"
    if not trial.ran:
        return "does not fit"
    if trial.number == 0:
        return "planner"
    return "pareto" if trial.verdict == "pareto" else "rejected"


def found_view(result: SearchResult) -> FoundView:
    """Choose what is shown of a search."""
    hw, asked = result.profile.hardware, result.settings
    host = asked.objective == "host_memory" or hw.shared_memory
    budget = (asked.host_budget_gb or hw.cpu.memory_gb) if host else (asked.gpu_budget_gb or hw.gpu.memory_gb)
    kept = [t for t in result.trials if kind_of(t) in ("best", "planner", "pareto")]
    others = [t for t in result.trials if kind_of(t) in ("rejected", "does not fit")]
    chosen = kept[:MAX_POINTS] + _evenly(others, MAX_POINTS - min(len(kept), MAX_POINTS))
    points = [_point(t, host) for t in chosen]
    points.sort(key=lambda p: (KINDS.index(p.kind), -(p.tokens_per_s or 0.0), p.gb, p.number))
    return FoundView(
        "host" if host else "GPU", f"modelled, {hw.name}", tuple(points), len(result.trials), budget, asked.tokens_per_s
    )


def _point(trial: Trial, host: bool) -> FoundPoint:
    kind = kind_of(trial)
    gb = (trial.host_bytes if host else trial.gpu_bytes) / GB
    rate = trial.tokens_per_s if trial.ran else None
    numbers = f"{rate:,.0f} tokens/s, {gb:.1f} GB" if rate is not None else trial.verdict
    return FoundPoint(trial.number, kind, gb, rate, trial.reason, f"{MARKS[kind]} #{trial.number}: {numbers}")


def _evenly(trials: Sequence[Trial], most: int) -> list[Trial]:
    if len(trials) <= most:
        return list(trials)
    return [trials[round(i * (len(trials) - 1) / max(1, most - 1))] for i in range(most)]


def outcome_line(result: SearchResult) -> str:
    """What came out, in a sentence or two."""
    tried = f"{len(result.trials):,} plans tried" + (", stopped early" if result.cancelled else "")
    counts = ", ".join(f"{n} {SAID[verdict]}" for verdict, n in result.counts.items() if verdict in SAID) or "the best"
    best = result.best
    if best is None:
        nearest = result.nearest
        return f"{tried} ({counts}). None meets what is asked; the nearest is #{nearest.number}: {nearest.reason}."
    own = result.trials[0]
    against = ""
    if best.number == 0:
        against = " It is the planner's own plan."
    elif own.ran:
        against = f" Against the planner's own plan: {difference(best, own)}."
    return f"{tried} ({counts}). #{best.number} is {best.reason}.{against}"


def so_far_line(done: int, total: int, best: Trial | None) -> str:
    """Where a running search stands."""
    if best is None:
        return f"plan {done:,} of {total:,}; none fits so far"
    return (
        f"plan {done:,} of {total:,}; best so far #{best.number}: {best.tokens_per_s:,.0f} tokens/s, "
        f"GPU {best.gpu_bytes / GB:.1f} GB, host {best.host_bytes / GB:.1f} GB (modelled)"
    )
