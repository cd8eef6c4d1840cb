"""What a search found, as records for a picture and a list: bounded in number, each point with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from superoffload.profiler import Profile
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
    asked = result.settings
    frame = Frame.of(
        result.profile, asked.objective, asked.gpu_budget_gb, asked.host_budget_gb, asked.tokens_per_s
    )  # fmt: skip
    kept = [t for t in result.trials if kind_of(t) in ("best", "planner", "pareto")]
    others = [t for t in result.trials if kind_of(t) in ("rejected", "does not fit")]
    chosen = kept[:MAX_POINTS] + _evenly(others, MAX_POINTS - min(len(kept), MAX_POINTS))
    return frame.view([(t, kind_of(t), t.reason) for t in chosen], len(result.trials))


@dataclass(frozen=True, slots=True)
class Frame:
    """What the picture of a search is about, whatever has been found by then."""

    host: bool
    """Whether it is drawn over the host's memory."""
    origin: str
    budget_gb: float
    goal_tokens_per_s: float | None

    @classmethod
    def of(cls, profile: Profile, objective: Objective, gpu_gb: float | None, host_gb: float | None,
           tokens_per_s: float | None) -> Frame:  # fmt: skip
        """The picture of a search that is asked for with these."""
        hw = profile.hardware
        host = objective == "host_memory" or hw.shared_memory
        budget = (host_gb or hw.cpu.memory_gb) if host else (gpu_gb or hw.gpu.memory_gb)
        return cls(host, f"modelled, {hw.name}", budget, tokens_per_s)

    def view(self, shown: Sequence[tuple[Trial, Kind, str]], tried: int) -> FoundView:
        """Lay out trials with their kind and reason."""
        points = [self._point(*one) for one in shown]
        points.sort(key=lambda p: (KINDS.index(p.kind), -(p.tokens_per_s or 0.0), p.gb, p.number))
        place = "host" if self.host else "GPU"
        return FoundView(place, self.origin, tuple(points), tried, self.budget_gb, self.goal_tokens_per_s)

    def _point(self, trial: Trial, kind: Kind, reason: str) -> FoundPoint:
        gb = (trial.host_bytes if self.host else trial.gpu_bytes) / GB
        rate = trial.tokens_per_s if trial.ran else None
        numbers = f"{rate:,.0f} tokens/s, {gb:.1f} GB" if rate is not None else trial.verdict
        return FoundPoint(trial.number, kind, gb, rate, reason, f"{MARKS[kind]} #{trial.number}: {numbers}")


class Growing:
    """The picture of a search that is under way: give it each trial, ask it for a view now and then.

    The set that no other plan beats is kept up to date one trial at a time, and of the others an even selection, so
    that neither grows with the search. `add` may be called in another thread than `view`.
    """

    def __init__(self, frame: Frame):
        self.frame = frame
        self.tried = 0
        self.trials: list[Trial] = []
        """All of them, by number."""
        self._kept: list[Trial] = []
        self._others: list[Trial] = []
        self._every = 1
        """Of the trials that others beat, every so many-th is shown."""

    def add(self, trial: Trial) -> None:
        """Take in the next trial."""
        self.trials.append(trial)
        self.tried += 1
        goal = self.frame.goal_tokens_per_s or 0.0
        if trial.ran and trial.tokens_per_s >= goal and not any(_beats(k, trial) for k in self._kept):
            self._kept = [*(k for k in self._kept if not _beats(trial, k)), trial]
        if trial.number % self._every == 0:
            self._others = [*self._others, trial]
            if len(self._others) > MAX_POINTS // 2:
                self._every *= 2
                self._others = [t for t in self._others if t.number % self._every == 0]

    def view(self, best: int | None, chosen: int | None = None) -> FoundView:
        """What is known by now.

        Args:
            best: number of the best trial so far; None where none fits.
            chosen: number of a trial that shall be among those shown.
        """
        kept, others, tried = self._kept, self._others, self.tried
        kept = sorted(kept, key=lambda t: -t.tokens_per_s)[: MAX_POINTS // 2]
        numbers = {t.number for t in kept}
        first = [self.trials[n] for n in {0, best, chosen} - numbers if n is not None and n < tried]
        shown: dict[int, tuple[Trial, Kind, str]] = {}
        for trial in (*others, *first, *kept):
            kind: Kind
            if not trial.ran:
                kind, reason = "does not fit", trial.reason
            elif trial.number == best:
                kind, reason = "best", "the best so far"
            elif trial.number == 0:
                kind, reason = "planner", "the planner's own plan"
            elif trial.number in numbers:
                kind, reason = "pareto", "no plan that was tried so far beats it"
            else:
                kind, reason = "rejected", "beaten by one that was tried, or too slow"
            shown[trial.number] = trial, kind, reason
        return self.frame.view(list(shown.values()), tried)


def _beats(a: Trial, b: Trial) -> bool:
    return a.tokens_per_s >= b.tokens_per_s and a.gpu_bytes <= b.gpu_bytes and a.host_bytes <= b.host_bytes


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
