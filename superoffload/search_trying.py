"""What one plan of a search comes to: its memory against the budgets and, where it fits, its simulated step."""

from __future__ import annotations

from typing import Any, get_args

from superoffload import simulator
from superoffload.errors import InputError
from superoffload.memory import Place, ledger
from superoffload.plan import Plan
from superoffload.planner_pace import Pace
from superoffload.profiler import Profile
from superoffload.search_result import Trial
from superoffload.search_space import Task, plan_key
from superoffload.units import TERA

QUICK_BUCKETS = 64
"""Buckets of a quick simulation, at most."""
OF_THE_LAST = frozenset({"speculate", "undo", "undo_buckets", "adam_threads", "cast_up", "accumulation"})
"""Fields that only matter once the last micro-batch's gradients come."""
OF_GRADIENTS = frozenset({"bucket_mb", "retained_buckets", "master", "cast_down"})
"""And those that do so where gradients wait on the GPU."""


class Trying:
    """Tries plans; what a quick simulation tells about several plans is remembered."""

    def __init__(self, task: Task):
        self._task = task
        self._seconds: dict[tuple[Any, ...], float] = {}
        """Plan of a quick simulation -> seconds."""
        self._between: dict[tuple[Any, ...], float] = {}
        """`between` of a plan -> seconds of a micro-batch that is neither the first nor the last."""

    def first(self, number: int, plan: Plan) -> tuple[Trial, int]:
        """Try a plan, with a quick simulation; also return how many bytes it is over the budgets. The verdict of one
        that fits is for later, when the others are known."""
        profile = self._task.of(plan)
        try:
            account = ledger(profile, plan)
        except InputError as e:
            return Trial(number=number, plan=plan, verdict="impossible", reason=f"impossible: {e.what}"), 2**62
        memory: dict[str, Any] = {f"{place}_bytes": account.total(place) for place in get_args(Place)}
        over = account.overflow()
        if over:
            found = Trial.model_construct(
                number=number, plan=plan, verdict="does not fit", reason=f"does not fit: {account.shortage()}", **memory
            )
            return found, sum(over.values())
        return self.quick(Trial.model_construct(number=number, plan=plan, verdict="dominated", reason="", **memory)), 0

    def quick(self, trial: Trial) -> Trial:
        """The trial with the numbers of a quick simulation."""
        profile = self._task.of(trial.plan)
        return self._timed(profile, trial, self._quickly(profile, trial.plan), exact=False)

    def exact(self, trial: Trial) -> Trial:
        """The trial simulated with its own buckets and micro-batches; itself where it was."""
        if trial.exact:
            return trial
        profile = self._task.of(trial.plan)
        return self._timed(profile, trial, simulator.step_seconds(profile, trial.plan), exact=True)

    def _timed(self, profile: Profile, trial: Trial, seconds: float, *, exact: bool) -> Trial:
        plan = trial.plan
        flops, peak = profile.model_flops * plan.accumulation, profile.hardware.gpu.peak_bf16_tflops * TERA
        return trial.model_copy(
            update={
                "step_s": seconds, "tokens_per_s": plan.tokens_per_step / seconds,
                "mfu": flops / seconds / peak if peak else 0.0, "exact": exact,
            }
        )  # fmt: skip

    def _quickly(self, profile: Profile, plan: Plan) -> float:
        """Seconds per step with fewer buckets and micro-batches."""
        quick = Pace(profile).coarse(plan, QUICK_BUCKETS)
        key = plan_key(quick)
        if key not in self._seconds:
            self._seconds[key] = self._few(profile, quick)
        return self._seconds[key]

    def _few(self, profile: Profile, plan: Plan) -> float:
        """Seconds of a step, simulated with two micro-batches and, where it is not known from another plan, one more
        for what each of the others takes."""
        if plan.accumulation <= 3:
            return simulator.step_seconds(profile, plan)
        two = simulator.step_seconds(profile, plan.model_copy(update={"accumulation": 2}))
        key = between(plan)
        if key not in self._between:
            three = simulator.step_seconds(profile, plan.model_copy(update={"accumulation": 3}))
            self._between[key] = three - two
        return two + (plan.accumulation - 2) * self._between[key]


def between(plan: Plan) -> tuple[Any, ...]:
    """What a micro-batch in the middle of a step depends on."""
    no_matter = OF_THE_LAST if plan.accumulate_on == "cpu" else OF_THE_LAST | OF_GRADIENTS
    return tuple(part for name, part in zip(Plan.knobs(), plan_key(plan), strict=True) if name not in no_matter)
