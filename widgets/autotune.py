"""The search over plans with buttons: progress, current best, a cancel that stops, and a picture to choose from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as W
import traitlets

from superoffload.autotune import search
from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.search_result import OBJECTIVES, SearchResult, Trial
from superoffload.widgets import compare_views as cv
from superoffload.widgets import search_views as sv
from superoffload.widgets import theme as themes
from superoffload.widgets.background import Background
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Messages, button, escape, style_sheet
from superoffload.widgets.search_figures import ORDER, search_spec

if TYPE_CHECKING:
    from superoffload.widgets.tuner import Tuner

TRIALS = 300
PICTURE_HEIGHT = 300


class Autotune(W.VBox):  # type: ignore[misc]
    """Search for a better plan in the background, and load the one that is chosen.

    Args:
        profile: measured or estimated; or a Tuner, whose model and machine are searched and that takes the plans.
        tuner: takes the chosen plan, beside a profile.

    Traits: `result` is the last search, `plan` the plan that was chosen last (None before); both can be observed from
    other cells. `run()`, `cancel()` and `wait()` are the buttons for scripts.
    """

    result = traitlets.Instance(SearchResult, allow_none=True)
    plan = traitlets.Instance(Plan, allow_none=True)

    def __init__(self, profile: Profile | Tuner, tuner: Tuner | None = None):
        if not isinstance(profile, Profile):
            if not hasattr(profile, "session"):
                raise InputError(
                    f"Autotune got a {type(profile).__name__}", expected="a Profile or a Tuner",
                    remedy='For example Autotune(so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware=hw))',
                )  # fmt: skip
            tuner, profile = profile, profile.session.profile
        bridge = ThemeBridge()
        self._build(profile, tuner, bridge, style_sheet(), bridge)
        bridge.observe(self._guard(lambda _: self.draw(), keep=True), names="theme")
        self.add_class("so-panel")

    @classmethod
    def inside(cls, tuner: Tuner, bridge: ThemeBridge) -> Autotune:
        """One for a Tuner that has a style sheet and follows the theme with `bridge`."""
        panel = cls.__new__(cls)
        panel._build(tuner.session.profile, tuner, bridge)
        return panel

    def _build(self, profile: Profile, tuner: Tuner | None, bridge: ThemeBridge, *before: W.Widget) -> None:
        self._profile, self._tuner, self._bridge = profile, tuner, bridge
        self._job = Background("superoffload-search")
        self._told, self._quiet = "", False
        self._view: sv.FoundView | None = None
        self.messages = Messages()
        self._guard = guard = Guard(self.messages)

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
        self.start = button("Search", "Try many plans in the background", guard(lambda _: self.run()))
        self.start.button_style = "primary"
        self.stop = button("Cancel", "Stop after the present plan", guard(lambda _: self.cancel()))
        self.stop.disabled = True
        self.progress = W.IntProgress(0, 0, 1, layout=W.Layout(width="120px", visibility="hidden"))
        self.status = W.HTML(layout=W.Layout(flex="1 1 0", min_width="0"))
        self.found = W.Select(
            options=[], rows=9, layout=W.Layout(width="276px", height="150px"), description="Plans found",
            style={"description_width": "0px"},
            tooltip="Plans that were tried: the best, those that no other beats, then the rejected ones",
        )  # fmt: skip
        self.found.observe(guard(lambda change: self._selected(change["new"]), keep=True), names="value")
        self.load = button("Load this plan", "Show it in the Tuner", guard(lambda _: self.load_selected()))
        self.load.disabled = True
        self.detail = W.HTML(layout=W.Layout(width="100%"))
        self.figure: LiveFigure | None = None
        self._picture = W.VBox([], layout=W.Layout(flex="1 1 0", min_width="0", overflow="hidden"))
        side = W.VBox(
            [W.HTML('<div class="so-note">Plans that were tried; arrow keys select</div>'), self.found, self.load,
             self.detail],
            layout=W.Layout(width="290px", flex="0 0 290px", margin="0 0 0 8px"),
        )  # fmt: skip
        self._body = W.HBox([self._picture, side], layout=W.Layout(width="100%", display="none"))
        row = W.Layout(align_items="center", flex_flow="row wrap", width="100%")
        super().__init__(
            [
                *before,
                W.HBox([self.objective, self.gpu, self.host, self.goal, self.tokens, self.trials], layout=row),
                W.HBox([self.start, self.stop, self.progress, self.status],
                       layout=W.Layout(align_items="center", width="100%")),
                self.messages, self._body,
            ],
            layout=W.Layout(width="100%"),
        )  # fmt: skip
        self.add_class("so-autotune")
        self.offer()

    # ---- what is asked -------------------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        """What is searched: the Tuner's model on its present machine, or the profile that was given."""
        return self._tuner.session.profile if self._tuner is not None else self._profile

    def offer(self) -> None:
        """Say in the empty fields what empty means."""
        hw = self.profile.hardware
        shared = hw.shared_memory
        self.gpu.placeholder = "shared" if shared else f"all {hw.gpu.memory_gb:.4g}"
        self.gpu.disabled = shared
        self.host.placeholder = f"all {hw.cpu.memory_gb:.4g}"
        self.tokens.placeholder = f"{self._usual_tokens():,}"
        self.goal.layout.display = "none" if self.objective.value == "throughput" else None
        goal = self._usual_goal()
        self.goal.placeholder = f"{goal:,}" if goal else "needed"

    def _usual_tokens(self) -> int:
        return self._tuner.session.plan.tokens_per_step if self._tuner is not None else self._profile.tokens

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
            if plan.compile_blocks:
                arguments["compile_blocks"] = True  # a person's choice, not the search's
        return arguments

    # ---- the search ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._job.running

    def run(self) -> None:
        """Start the search. Raises InputError while one is running, or for what cannot be asked."""
        if self.running:
            raise InputError(f"a search is running ({self._told or 'it has just begun'})",
                             remedy="Wait for it, or cancel it")  # fmt: skip
        self.offer()
        profile, arguments = self.profile, self.asked()

        def work(stop: threading.Event, tell: Callable[..., None]) -> SearchResult:
            return search(profile, cancel=stop, progress=tell, **arguments)

        self._told = ""
        self.progress.max, self.progress.value = self.trials.value, 0
        self.progress.layout.visibility = "visible"
        self.stop.disabled = False
        self.status.value = '<div class="so-note" role="status">The planner makes its own plan first …</div>'
        self._job.start(work, self._guard(self._ended), self._progressed)

    def cancel(self) -> None:
        """Stop the search after the plan that is being tried; what it has found by then is shown."""
        self._job.stop()
        self.stop.disabled = True
        if self.running:
            self.status.value = '<div class="so-note" role="status">Stopping …</div>'

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the search has ended: for scripts, not for a notebook."""
        self._job.wait(timeout_s)

    def close(self) -> None:
        """Stop a search that is under way and close the widgets."""
        if hasattr(self, "_job"):  # ipywidgets closes what was never built, too
            self._job.drop()
        super().close()

    def _progressed(self, done: int, total: int, best: Trial | None) -> None:
        if self._job.stopping:
            return
        self.progress.max, self.progress.value = total, done
        self._told = f"plan {done:,} of {total:,}"
        self.status.value = f'<div class="so-note">{escape(sv.so_far_line(done, total, best))}</div>'

    def _ended(self, result: SearchResult | None, error: Exception | None) -> None:
        self.progress.layout.visibility = "hidden"
        self.stop.disabled = True
        self.status.value = ""
        if error is not None or result is None:
            raise error or RuntimeError("the search gave no result")
        self._view = sv.found_view(result)
        self.result = result
        chosen = (result.best or result.nearest).number
        self._quiet = True
        try:
            self.found.options = [(p.label, p.number) for p in self._view.points]
            self.found.value = chosen if any(p.number == chosen for p in self._view.points) else None
        finally:
            self._quiet = False
        self._body.layout.display = None
        self._selected(self.found.value)
        self.messages.notice(escape(sv.outcome_line(result)), "good" if result.best is not None else "warn")

    # ---- choosing ------------------------------------------------------------------------------------------------

    def _selected(self, number: int | None) -> None:
        if self._quiet:
            return
        self.load.disabled = number is None or self._tuner is None
        self.load.layout.display = None if self._tuner is not None else "none"
        self.detail.value = self._detail_html(number)
        if number is not None and self._tuner is None:
            self.plan = self.plan_of(number)
        self.draw()

    def plan_of(self, number: int) -> Plan:
        """The plan of a trial, with the search named as the reason of the fields that it chose."""
        assert self.result is not None
        trial = self.result.trials[number]
        if trial.plan.reasons:
            return trial.plan
        told = f"found by the search (plan #{number})"
        return trial.plan.replace(reasons=dict.fromkeys(self.result.candidates, told))

    def load_selected(self) -> None:
        """Load the selected plan into the Tuner.

        Raises:
            InputError: nothing is selected, there is no Tuner, or it cannot show this plan.
        """
        number = self.found.value
        if number is None or self.result is None:
            raise InputError("no plan is selected", remedy="Choose one in the list or in the picture")
        if self._tuner is None:
            raise InputError("there is no Tuner to load the plan into", expected="Autotune(tuner), or its trait plan")
        self._tuner.session.end_entry()
        self._tuner.plan = self.plan = self.plan_of(number)
        self.detail.value = self._detail_html(number)
        text = f"#{number} is in the Tuner"
        searched = self.result.profile.hardware.name
        if self._tuner.session.hardware.name != searched:
            text += f", which shows {self._tuner.session.hardware.name}; it was found for {searched}"
        self.messages.notice(escape(f"{text}. Undo there takes it back."))

    def _clicked(self, kind: sv.Kind) -> Callable[..., None]:
        def clicked(trace: Any, points: Any, state: Any) -> None:
            assert self._view is not None
            point = self._view.of(kind)[points.point_inds[0]]
            self.found.value = point.number
            if self._tuner is not None and point.tokens_per_s is not None:
                self.load_selected()

        return clicked

    def _detail_html(self, number: int | None) -> str:
        if number is None or self.result is None:
            return ""
        trial = self.result.trials[number]
        before = self._tuner.session.plan if self._tuner is not None else self.result.trials[0].plan
        than = "the Tuner's plan" if self._tuner is not None else "the planner's own"
        told = cv.changes(before, trial.plan)
        items = "".join(f"<li>{escape(f)}: {escape(a)} → <b>{escape(b)}</b></li>" for f, a, b in told)
        same = f"<div>The same as {than}.</div>"
        return (
            f'<div class="so-note" role="status"><div>{escape(trial.reason[:1].upper() + trial.reason[1:])}.</div>'
            + (f"<div>Other than {than}:</div><ul>{items}</ul>" if told else same)
            + "</div>"
        )

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the picture in the present theme."""
        if self._view is None:
            return
        theme = themes.DARK if self._bridge.theme == "dark" else themes.LIGHT
        spec = search_spec(self._view, self.found.value, theme=theme, height=PICTURE_HEIGHT)
        if self.figure is None:
            self.figure = LiveFigure(spec)
            for trace, kind in enumerate(ORDER):
                self.figure.on_point(trace, self._guard(self._clicked(kind)))
            self._picture.children = [self.figure]
        else:
            self.figure.show_spec(spec)


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
