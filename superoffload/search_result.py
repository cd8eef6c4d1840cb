"""What a search found: every plan that was tried, with its verdict and one sentence why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.units import GB, format_bytes

Objective = Literal["throughput", "gpu_memory", "host_memory"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "gpu_memory", "host_memory")
Verdict = Literal["best", "pareto", "dominated", "too slow", "does not fit", "impossible"]
ALIKE = 1e-3
"""Throughputs within 0.1 % are alike: less memory then decides."""
SAME_BYTES = 1_000_000
"""Differences in memory below this are not worth a word."""
SAME_SPEED = 5e-5
"""Nor are those in speed below 0.005 %."""


class Trial(Record):
    """One plan that was tried. All numbers are modelled."""

    number: int = Field(ge=0)
    """In the order of trying; 0 is the planner's own plan."""
    plan: Plan
    verdict: Verdict
    reason: str
    """One sentence: what the plan lacks, which one is better and by how much, or what it is kept for."""
    step_s: float | None = None
    """Seconds per step; None where the plan does not fit (it is not simulated then)."""
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    """Model FLOPs utilisation, 0 to 1; 0 where the peak is not known."""
    gpu_bytes: int = 0
    host_bytes: int = 0
    """Includes what is pinned."""
    pinned_bytes: int = 0
    exact: bool = False
    """Whether it was simulated with its own buckets and micro-batches; the others with fewer (docs/search.md)."""

    @property
    def ran(self) -> bool:
        """Whether it fits, and so was simulated."""
        return self.step_s is not None


class Measured(Record):
    """A plan of the search that was run on this machine."""

    number: int
    """Of its trial."""
    predicted_s: float
    """Modelled seconds per step."""
    measured_s: float | None = None
    """Median of the measured steps; None where the plan failed."""
    tokens_per_s: float = 0.0
    """Measured."""
    failure: str = ""
    headline: dict[str, Any] = Field(default_factory=dict)
    """The measured step's numbers, as a tuned config keeps them."""


class SearchSettings(Record):
    """What was asked for: with the profile, all that the result depends on."""

    objective: Objective = "throughput"
    tokens: int | Literal["free"] | None = None
    gpu_budget_gb: float | None = Field(default=None, gt=0)
    host_budget_gb: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    chips: int | None = Field(default=None, ge=1)
    trials: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0)
    knobs: dict[str, Any] = Field(default_factory=dict)
    """Plan fields that were given, as JSON values."""


class SearchResult(Record):
    """All trials of a search, with what it takes to run it again."""

    schema_name: ClassVar[str] = "superoffload.search"

    settings: SearchSettings
    profile: Profile
    method: Literal["exhaustive", "local"]
    """`exhaustive`: every plan of the space. `local`: descents from the planner's plan and from random ones."""
    candidates: dict[str, int]
    """Searched field -> number of values it could have."""
    trials: tuple[Trial, ...]
    cancelled: bool = False
    """Whether it was stopped early; the trials are those until then."""
    versions: dict[str, str] = Field(default_factory=dict)
    measured: tuple[Measured, ...] = ()
    """Plans that were run afterwards (`measuring.measure_best`)."""

    @property
    def winner(self) -> Trial | None:
        """Of the plans that were measured the one with most tokens/s; the best as modelled where none was."""
        ran = [m for m in self.measured if m.measured_s]
        return self.trials[max(ran, key=lambda m: m.tokens_per_s).number] if ran else self.best

    @property
    def nearest(self) -> Trial:
        """The fastest plan that fits, else the one that lacks least memory."""
        ran = [t for t in self.trials if t.ran]
        if ran:
            return max(ran, key=lambda t: t.tokens_per_s)
        hw, asked = self.profile.hardware, self.settings
        gpu = 0.0 if hw.shared_memory else (asked.gpu_budget_gb or hw.gpu.memory_gb) * GB
        host = (asked.host_budget_gb or hw.cpu.memory_gb) * GB

        def over(t: Trial) -> tuple[bool, float]:
            lacks = (max(0.0, t.gpu_bytes - gpu) if gpu else 0.0) + max(0.0, t.host_bytes - host)
            return t.verdict == "impossible", lacks

        return min(self.trials, key=over)

    @property
    def best(self) -> Trial | None:
        """The best plan for the objective, None where none meets the budgets."""
        return next((t for t in self.trials if t.verdict == "best"), None)

    @property
    def pareto(self) -> tuple[Trial, ...]:
        """Plans that no other beats in tokens/s, GPU bytes and host bytes at once, fastest first."""
        kept = [t for t in self.trials if t.verdict in ("best", "pareto")]
        return tuple(sorted(kept, key=lambda t: (-t.tokens_per_s, t.gpu_bytes, t.host_bytes)))

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> number of trials, most frequent first."""
        return dict(Counter(t.verdict for t in self.trials).most_common())

    def to_json(self, *, indent: int | None = None) -> str:
        """As for every record; on one line, as a thousand plans are long enough."""
        return super().to_json(indent=indent)

    def repeat(self) -> SearchResult:
        """Search again with the same settings: an equal result, if this one was not cancelled."""
        from superoffload.autotune import search

        settings = {name: getattr(self.settings, name) for name in SearchSettings.model_fields if name != "knobs"}
        return search(self.profile, **settings, **self.settings.knobs)


def order(objective: Objective, trial: Trial) -> tuple[float, ...]:
    """Sort key of trials that fit: the best for `objective` first, of equals the one with less memory."""
    if objective == "throughput":
        return (-trial.tokens_per_s, trial.gpu_bytes, trial.host_bytes, trial.number)
    first, second = trial.gpu_bytes, trial.host_bytes
    if objective == "host_memory":
        first, second = second, first
    return (first, -trial.tokens_per_s, second, trial.number)


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other beats in tokens/s, GPU and host bytes, fastest first; of equals the first tried."""
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (-t.tokens_per_s, t.gpu_bytes, t.host_bytes, t.number)):
        if not any(k.gpu_bytes <= trial.gpu_bytes and k.host_bytes <= trial.host_bytes for k in kept):
            kept.append(trial)
    return kept


def ranked(settings: SearchSettings, trials: Sequence[Trial]) -> list[Trial]:
    """Trials that fit and are fast enough, the best first.

    Of plans within ALIKE of the fastest, but not slower than the planner's own, the one with the least memory is best.
    """
    goal = settings.tokens_per_s or 0.0
    enough = sorted((t for t in trials if t.ran and t.tokens_per_s >= goal), key=lambda t: order(settings.objective, t))
    if settings.objective == "throughput" and enough:
        own = trials[0].tokens_per_s if trials[0].ran else 0.0
        least = max(own, enough[0].tokens_per_s * (1 - ALIKE))
        alike = [t for t in enough if t.tokens_per_s >= least]
        alike.sort(key=lambda t: (t.gpu_bytes + t.host_bytes, -t.tokens_per_s, t.number))
        enough = alike + enough[len(alike) :]
    return enough


def judge(settings: SearchSettings, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Give each trial that was simulated its verdict and its reason, among all others."""
    goal = settings.tokens_per_s or 0.0
    enough = ranked(settings, trials)
    best = enough[0] if enough else None
    kept = front(enough)
    numbers = {t.number for t in kept}
    judged = []
    for t in trials:
        if not t.ran:
            judged.append(t)
            continue
        verdict: Verdict
        if t.tokens_per_s < goal:
            verdict = "too slow"
            reason = f"too slow: {t.tokens_per_s:,.0f} tokens/s, {_percent(1 - t.tokens_per_s / goal)} below the goal"
        elif best is not None and t.number == best.number:
            verdict, reason = "best", _why_best(settings, t)
        elif t.number in numbers and best is not None:
            verdict, reason = "pareto", f"kept: {difference(t, best)} than the best, #{best.number}"
        else:
            verdict = "dominated"
            by = next(k for k in kept if _beats(k, t))
            told = difference(t, by)
            reason = f"beaten: {'no better' if told == SAME else told} than #{by.number}"
        judged.append(t.model_copy(update={"verdict": verdict, "reason": reason}))
    return tuple(judged)


def _beats(a: Trial, b: Trial) -> bool:
    return a.tokens_per_s >= b.tokens_per_s and a.gpu_bytes <= b.gpu_bytes and a.host_bytes <= b.host_bytes


def _why_best(settings: SearchSettings, trial: Trial) -> str:
    speed = f"{trial.tokens_per_s:,.0f} tokens/s"
    if settings.objective == "throughput":
        return f"the best: {speed}; no other plan within the budgets has more, or 0.1 % less with less memory"
    place, size = ("GPU", trial.gpu_bytes) if settings.objective == "gpu_memory" else ("host", trial.host_bytes)
    return f"the best: {format_bytes(size)} of {place} memory, the least with {settings.tokens_per_s:,.0f} tokens/s"


SAME = "the same"


def difference(trial: Trial, other: Trial) -> str:
    """How `trial` differs from `other`, to be followed by "than": ``"3 % slower, with 2.1 GB less on the GPU"``."""
    memory = []
    for place, bytes_ in (("GPU", trial.gpu_bytes - other.gpu_bytes), ("host", trial.host_bytes - other.host_bytes)):
        if abs(bytes_) >= SAME_BYTES:
            memory.append(f"{format_bytes(abs(bytes_))} {'more' if bytes_ > 0 else 'less'} on the {place}")
    ratio = trial.tokens_per_s / other.tokens_per_s - 1
    if abs(ratio) >= SAME_SPEED:
        speed = f"{_percent(abs(ratio))} {'faster' if ratio > 0 else 'slower'}"
        return f"{speed} with {' and '.join(memory) if memory else 'the same memory'}"
    return f"no faster with {' and '.join(memory)}" if memory else SAME


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def gigabytes(n: int) -> str:
    """Decimal GB with one digit, for tables."""
    return f"{n / GB:.1f}"
