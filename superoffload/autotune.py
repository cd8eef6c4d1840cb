"""The search over plans: what the planner chooses one field after another, tried together, with the reasons kept.

Each plan is checked against the memory budgets and, where it fits, simulated; nothing is measured here. A space that
is small is tried as a whole. In any other the search descends: from the planner's own plan, then again and again from
the best so far with some fields drawn anew, always to a neighbour that is better (docs/search.md says why this, and
not a library).
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, Literal

from superoffload import planner
from superoffload.config import library_versions
from superoffload.errors import InputError, did_you_mean
from superoffload.plan import Plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.search_asked import given_chips, sequences_per_step, start_batch, within
from superoffload.search_basins import basins
from superoffload.search_reasons import reasons_of
from superoffload.search_result import (
    OBJECTIVES,
    Objective,
    SearchResult,
    SearchSettings,
    Trial,
    front,
    judge,
    order,
    ranked,
)
from superoffload.search_space import Point, Space, plan_key
from superoffload.search_trying import Trying

FINALISTS = 8
"""So many of the best plans are simulated with their own buckets; as many again of those that differ in the bucket size
alone, and of the Pareto set those nearest to the objective."""
LEADERS = 4
"""So many of the best are, whenever the search asks which is the best."""
SETTLING = 80
"""Trials kept back (a quarter at most) for the neighbours of the best plan, which give the reasons for its values."""
REDRAWN = (0.2, 0.35, 0.6)
"""Chances of each field to be drawn anew where a descent has ended; one of them is taken each time."""
STUCK = 200
"""A search ends early when so many descents in a row have found no plan that was not tried before."""

Score = tuple[float, ...]
Cancel = threading.Event | Callable[[], bool]


def search(
    profile: Profile,
    *,
    objective: Objective = "throughput",
    tokens: int | Literal["free"] | None = None,
    gpu_budget_gb: float | None = None,
    host_budget_gb: float | None = None,
    tokens_per_s: float | None = None,
    chips: int | None = None,
    trials: int = 1000,
    seed: int = 0,
    cancel: Cancel | None = None,
    progress: Callable[[int, int, Trial | None], None] | None = None,
    tried: Callable[[Trial], None] | None = None,
    **knobs: Any,
) -> SearchResult:
    """Try many plans and keep each with its verdict.

    Args:
        profile: measured or estimated.
        objective: `throughput`: most tokens/s within the budgets. `gpu_memory`, `host_memory`: the least memory with
            at least `tokens_per_s`.
        tokens: per optimizer step; micro_batch · accumulation is searched with this product. Omitted: the profile's
            micro-batch (or that given) times the accumulation given. `"free"`: any micro-batch, and steps of any size.
        gpu_budget_gb, host_budget_gb: decimal GB; omitted, what the machine has.
        tokens_per_s: the least throughput, for the memory objectives.
        chips: Superchips that are used, of those that the profile's hardware has; omitted, all. How many share a
            sequence is searched, unless it or `data_parallel` is given.
        trials: how many plans are tried at most.
        seed: the same seed gives the same result.
        cancel: an Event, or a function that returns True, asked between trials: the search then returns what it has,
            with the best plan simulated exactly.
        progress: called after each trial with (trials done, trials at most, the best so far or None).
        tried: called with each plan when it has been tried, before the others have given it its verdict.
        knobs: plan fields that stay as given, as for `make_plan`.

    Returns:
        Every plan that was tried. `best` is never worse than the planner's own plan with the same knobs, which is
        trial 0; it is None where no plan meets the budgets.

    Raises:
        InputError: an unknown objective, knob or impossible value; a budget above what the machine has; `tokens` that
            are no whole number of sequences.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            f'unknown objective "{objective}"{did_you_mean(str(objective), OBJECTIVES)}',
            expected=f"one of {', '.join(OBJECTIVES)}",
        )
    if (objective == "throughput") != (tokens_per_s is None):
        raise InputError(
            f'objective = "{objective}" with tokens_per_s = {tokens_per_s}',
            expected="tokens_per_s with gpu_memory and host_memory, and only there",
        )
    given = {name: value for name, value in knobs.items() if value is not None}
    run = _Search(profile, objective, tokens, gpu_budget_gb, host_budget_gb, tokens_per_s, chips, trials, seed, given)
    return run.go(cancel, progress, tried)


class _Cancelled(Exception):
    """Ends the search from within a trial."""


class _Search:
    def __init__(
        self,
        profile: Profile,
        objective: Objective,
        tokens: int | Literal["free"] | None,
        gpu_budget_gb: float | None,
        host_budget_gb: float | None,
        tokens_per_s: float | None,
        chips: int | None,
        trials: int,
        seed: int,
        given: dict[str, Any],
    ):
        self.asked = profile
        profile = within(profile, gpu_budget_gb, host_budget_gb)
        used = given_chips(profile, chips, given)
        profile = rescale(profile, seq_len=given.get("seq_len"), sequence_parallel=used["sequence_parallel"])
        alone = sequences_per_step(profile, tokens, given, used["data_parallel"])
        # What the planner would do by itself it shall give its reasons for.
        asked = {**given, **({} if used == planner.arranged(profile, given) else used)}
        start = planner.make_plan(profile, check=False, **start_batch(profile, alone, given), **asked)
        sequences = None if alone is None else alone * used["data_parallel"]
        named = {{"flow": "flow_blocks", "buckets": "bucket_mb"}.get(name, name) for name in given}
        fixed = named | ({"micro_batch"} if sequences is not None and "accumulation" in given else set())
        self.settings = SearchSettings.from_dict(
            {
                "objective": objective, "tokens": tokens, "gpu_budget_gb": gpu_budget_gb,
                "host_budget_gb": host_budget_gb, "tokens_per_s": tokens_per_s, "chips": chips,
                "trials": trials, "seed": seed,
                "knobs": start.model_dump(mode="json", include=named),
            },
            where="the search",
        )  # fmt: skip
        self.space = Space(rescale(profile, micro_batch=start.micro_batch), start, frozenset(fixed), sequences)
        self.start = start
        self.rng = random.Random(seed)
        self.trials: list[Trial] = []
        self.scores: list[Score] = []
        self.numbers: dict[tuple[Any, ...], int] = {}
        """Plan -> number of its trial."""
        self.points: dict[Point, int] = {}
        """Point -> number of its trial; several points may be the same plan."""
        self.trying = Trying(self.space.task)
        self.best = 0
        self.cancel: Callable[[], bool] = lambda: False
        self.progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None
        self.tried: Callable[[Trial], None] = lambda trial: None

    def go(
        self,
        cancel: Cancel | None,
        progress: Callable[[int, int, Trial | None], None] | None,
        tried: Callable[[Trial], None] | None,
    ) -> SearchResult:
        if cancel is not None:
            self.cancel = cancel.is_set if isinstance(cancel, threading.Event) else cancel
        self.progress, self.tried = progress or self.progress, tried or self.tried
        whole = self.space.size <= self.settings.trials
        cancelled = False
        self.points[self.space.start] = self.trial(self.start)  # also of a search that is cancelled at once
        try:
            if whole:
                for point in itertools.product(*(range(len(v)) for v in self.space.values.values())):
                    self.at(point)
            else:
                self._descend()
            self._settle()
        except _Cancelled:
            cancelled = True
            self._leader(lambda: None)
        trials = judge(self.settings, self.trials)
        best = next((t for t in trials if t.verdict == "best"), None)
        if best is not None:
            why = reasons_of(best, self.settings, self.space, self.points, self.trials, self.trying)
            told = best.model_copy(update={"plan": best.plan.model_copy(update={"reasons": why})})
            trials = tuple(told if t.number == best.number else t for t in trials)
        return SearchResult(
            settings=self.settings,
            profile=self.asked,
            method="exhaustive" if whole else "local",
            candidates={name: len(values) for name, values in self.space.values.items()},
            trials=trials,
            cancelled=cancelled,
            versions=library_versions(),
        )

    # One trial

    def at(self, point: Point) -> int:
        """Number of the trial at `point`, which is made where there is none yet."""
        if point not in self.points:
            self.points[point] = self.trial(self.space.plan(point))
        return self.points[point]

    def trial(self, plan: Plan) -> int:
        key = plan_key(plan)
        if key in self.numbers:
            return self.numbers[key]
        self._check()
        number = self.numbers[key] = len(self.trials)
        plan = plan.model_copy(update={"reasons": {}})
        trial, over = self.trying.first(number, plan)
        self.trials.append(trial)
        self.scores.append(self._score(trial, over))
        if self.scores[number] < self.scores[self.best]:
            self.best = number
        self.tried(trial)
        best = self.trials[self.best]
        self.progress(number + 1, self.settings.trials, best if best.ran else None)
        return number

    def _check(self) -> None:
        if self.trials and self.cancel():
            raise _Cancelled

    def _score(self, trial: Trial, over: int) -> Score:
        """Smaller is better: first those that fit and are fast enough, then the nearest to that."""
        if not trial.ran:
            return (2.0, float(over))
        goal = self.settings.tokens_per_s or 0.0
        if trial.tokens_per_s < goal:
            return (1.0, goal - trial.tokens_per_s)
        return (0.0, *order(self.settings.objective, trial))

    # Which plans are tried

    def _descend(self) -> None:
        """Go to the first better neighbour, in random order, until there is none; then start anew: from the best so
        far with another combination of the basins' fields, or with any fields drawn anew."""
        limit = self.settings.trials - min(SETTLING, self.settings.trials // 4)
        values = list(self.space.values.values())
        promising = basins(self.space, self._check)
        here, descents, stuck = self.space.start, 0, 0
        while len(self.trials) < limit and stuck < STUCK:
            before = len(self.trials)
            self._down(here, limit)
            stuck = 0 if len(self.trials) > before else stuck + 1
            here, descents = self.point_of(self.best), descents + 1
            promising = [b for b in promising if b[0] > self._least_tokens_per_s()]
            if promising and descents % 2:
                _, chosen = promising.pop(0)
                here = self._down(tuple(chosen.get(i, k) for i, k in enumerate(here)), limit, frozen=tuple(chosen))
            else:
                chance = self.rng.choice(REDRAWN)
                here = tuple(
                    self.rng.randrange(len(v)) if self.rng.random() < chance else k
                    for k, v in zip(here, values, strict=True)
                )

    def _down(self, here: Point, limit: int, frozen: tuple[int, ...] = ()) -> Point:
        """Where a descent from `here` ends that leaves the `frozen` axes as they are."""
        while len(self.trials) < limit:
            score = self.scores[self.at(here)]
            moves = [m for m in self.space.moves(here) if all(m[i] == here[i] for i in frozen)]
            self.rng.shuffle(moves)
            for move in moves:
                if len(self.trials) >= limit:
                    return here
                if self.scores[self.at(move)] < score:
                    here = move
                    break
            else:
                return here
        return here

    def _least_tokens_per_s(self) -> float:
        """What a plan has to reach to be of use."""
        if self.settings.objective != "throughput":
            return self.settings.tokens_per_s or 0.0
        return self.trials[self.best].tokens_per_s

    def point_of(self, number: int) -> Point:
        return next(p for p, n in self.points.items() if n == number)

    def _settle(self) -> None:
        """Find the best plan for good, and try its neighbours for the reasons; one of them may be better still."""
        asked: set[int] = set()
        best = self._leader(self._check)
        while best is not None and best not in asked:
            asked.add(best)
            for move in self.space.moves(self.point_of(best)):
                if len(self.trials) < self.settings.trials:
                    self.at(move)
            if (best := self._leader(self._check)) in asked:
                best = self._finals()

    def _finals(self) -> int | None:
        """Simulate the best plans, the planner's, and some of the Pareto set with their own buckets and micro-batches;
        return the number of the best one. Quick simulations hardly tell bucket sizes apart, so plans that differ from
        the best only there come too."""
        objective = self.settings.objective
        enough = ranked(self.settings, self.trials)
        chosen = {t.number: None for t in enough[:FINALISTS]}
        if enough and "bucket_mb" in self.space.values:
            best = _but_for_buckets(enough[0].plan)
            alike = [t.number for t in enough if _but_for_buckets(t.plan) == best]
            chosen |= dict.fromkeys(alike[:FINALISTS])
        nearest = sorted(front(enough), key=lambda t: order(objective, t))
        chosen |= {t.number: None for t in nearest[:FINALISTS]}
        for number in chosen:
            self._check()
            self._exactly(number)
        return self._leader(self._check)

    def _leader(self, check: Callable[[], None]) -> int | None:
        """Simulate the planner's plan exactly, the best few, and whatever is best then; return the number of the best.

        Args:
            check: called before each simulation; raises where the search is to end.
        """
        first = [t.number for t in self.trials[:1] if t.ran]
        for number in [*first, *(t.number for t in ranked(self.settings, self.trials)[:LEADERS])]:
            check()
            self._exactly(number)
        while (enough := ranked(self.settings, self.trials)) and not enough[0].exact:
            self._exactly(enough[0].number)  # a quick simulation that was too good: the first must be an exact one
        return enough[0].number if enough else None

    def _exactly(self, number: int) -> None:
        self.trials[number] = self.trying.exact(self.trials[number])


def _but_for_buckets(plan: Plan) -> tuple[Any, ...]:
    return plan_key(plan.model_copy(update={"bucket_mb": 1.0, "retained_buckets": 0}))
