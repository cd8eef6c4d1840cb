"""What a search is asked: the objective, budgets and number of plans, as fields that say what empty means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.profiler import Profile
from superoffload.search_result import OBJECTIVES
from superoffload.widgets import search_views as sv

if TYPE_CHECKING:
    from superoffload.widgets.tuner import Tuner

TRIALS = 300


class SearchForm(W.HBox):  # type: ignore[misc]
    """The fields.

    Args:
        profile: called for what would be searched now.
        tuner: whose plan says what is usual, and what the search may not change since the Tuner could not show it.
    """

    def __init__(self, profile: Callable[[], Profile], tuner: Tuner | None):
        self._profile, self._tuner = profile, tuner

        def text(label: str, width: str, space: str, told: str) -> W.Text:
            return W.Text(
                "", description=label, tooltip=told, layout=W.Layout(width=width, margin="0 6px 0 0"),
                style={"description_width": space},
            )  # fmt: skip

        self.objective = W.Dropdown(
            options=[(sv.OBJECTIVE_TITLES[o], o) for o in OBJECTIVES], description="Find",
            layout=W.Layout(width="170px", margin="0 6px 0 0"), style={"description_width": "30px"},
        )  # fmt: skip
        self.gpu = text("GPU GB", "118px", "54px", "Most memory of the GPU, in decimal GB; empty: all that there is")
        self.host = text("Host GB", "124px", "58px", "Most memory of the host, in decimal GB; empty: all that there is")
        self.goal = text("Tokens/s", "118px", "60px", "The least throughput, for the memory objectives")
        self.tokens = text("Tokens/step", "144px", "80px", "Tokens of an optimizer step, kept by all plans")
        self.trials = W.BoundedIntText(
            TRIALS, min=1, max=100_000, description="Plans", tooltip="How many plans are tried at most",
            layout=W.Layout(width="112px"), style={"description_width": "40px"},
        )  # fmt: skip
        self.objective.observe(lambda _: self.offer(), names="value")
        super().__init__(
            [self.objective, self.gpu, self.host, self.goal, self.tokens, self.trials],
            layout=W.Layout(align_items="center", flex_flow="row wrap", width="100%"),
        )
        self.offer()

    def offer(self) -> None:
        """Say in the empty fields what empty means."""
        hw = self._profile().hardware
        shared = hw.shared_memory
        self.gpu.placeholder = "shared" if shared else f"all {hw.gpu.memory_gb:.4g}"
        self.gpu.disabled = shared
        self.host.placeholder = f"all {hw.cpu.memory_gb:.4g}"
        self.tokens.placeholder = f"{self._usual_tokens():,}"
        self.goal.layout.display = "none" if self.objective.value == "throughput" else None
        goal = self._usual_goal()
        self.goal.placeholder = f"{goal:,}" if goal else "needed"

    def _usual_tokens(self) -> int:
        return self._tuner.session.plan.tokens_per_step if self._tuner is not None else self._profile().tokens

    def _usual_goal(self) -> int | None:
        """Nine tenths of what the Tuner shows."""
        if self._tuner is None or not self._tuner.session.trace.memory.fits:
            return None
        return round(0.9 * self._tuner.session.trace.tokens_per_s)

    def asked(self) -> dict[str, Any]:
        """The search's arguments as the fields say. Raises InputError for what is no number."""
        objective = self.objective.value
        arguments: dict[str, Any] = {
            "objective": objective,
            "gpu_budget_gb": None if self.gpu.disabled else _number(self.gpu, "the GPU's budget, in GB"),
            "host_budget_gb": _number(self.host, "the host's budget, in GB"),
            "tokens": int(_number(self.tokens, "the tokens of a step") or self._usual_tokens()),
            "trials": self.trials.value,
        }
        if objective != "throughput":
            arguments["tokens_per_s"] = _number(self.goal, "the least tokens/s") or self._usual_goal()
            if arguments["tokens_per_s"] is None:
                raise InputError(f"{sv.OBJECTIVE_TITLES[objective]} at how many tokens/s?", remedy="Fill in Tokens/s")
        if self._tuner is not None:
            plan, session = self._tuner.session.plan, self._tuner.session
            if session.why_fixed("micro_batch"):
                arguments["micro_batch"] = plan.micro_batch  # the Tuner could not show any other
            if plan.chips > 1 or session.hardware.interconnect is not None:
                arguments["data_parallel"] = plan.data_parallel  # as with the micro-batch
                arguments["sequence_parallel"] = plan.sequence_parallel
            if plan.compile_blocks:
                arguments["compile_blocks"] = True  # a person's choice, not the search's
        return arguments


def _number(field: W.Text, what: str) -> float | None:
    """The field's number, None where it is empty."""
    text = field.value.replace(",", "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f'"{field.value}" for {what}', expected="a number above 0, or nothing")
    return value
