"""The search over plans with buttons: progress, current best, a cancel that stops, and a picture to choose from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as W
import traitlets

from superoffload.autotune import search
from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.search_result import SearchResult, Trial
from superoffload.search_space import AXES
from superoffload.widgets import compare_views as cv
from superoffload.widgets import search_views as sv
from superoffload.widgets import theme as themes
from superoffload.widgets import view_models as vm
from superoffload.widgets.background import Background
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Messages, button, escape, style_sheet
from superoffload.widgets.search_figures import ORDER, search_spec
from superoffload.widgets.search_form import SearchForm

if TYPE_CHECKING:
    from superoffload.widgets.tuner import Tuner

DRAW_EVERY_S = 1.0
"""The picture of a search that is under way is drawn anew no oftener than this."""
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
        self._begun: sv.Growing | None = None
        self._growing: sv.Growing | None = None
        """Of the search that is under way; set when something of it is shown."""
        self._drawn_at = 0.0
        self.messages = Messages()
        self._guard = guard = Guard(self.messages)

        self.form = SearchForm(lambda: self.profile, tuner)
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
        super().__init__(
            [
                *before,
                self.form,
                W.HBox([self.start, self.stop, self.progress, self.status],
                       layout=W.Layout(align_items="center", width="100%")),
                self.messages, self._body,
            ],
            layout=W.Layout(width="100%"),
        )  # fmt: skip
        self.add_class("so-autotune")

    @property
    def profile(self) -> Profile:
        """What is searched: the Tuner's model on its present machine, or the profile that was given."""
        return self._tuner.session.profile if self._tuner is not None else self._profile

    # ---- the search ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._job.running

    def run(self) -> None:
        """Start the search. Raises InputError while one is running, or for what cannot be asked."""
        if self.running:
            raise InputError(f"a search is running ({self._told or 'it has just begun'})",
                             remedy="Wait for it, or cancel it")  # fmt: skip
        self.form.offer()
        profile, arguments = self.profile, self.form.asked()

        growing = sv.Growing(
            sv.Frame.of(profile, arguments["objective"], arguments["gpu_budget_gb"], arguments["host_budget_gb"],
                        arguments.get("tokens_per_s"))
        )  # fmt: skip

        def work(stop: threading.Event, tell: Callable[..., None]) -> SearchResult:
            return search(profile, cancel=stop, progress=tell, tried=growing.add, **arguments)

        self._begun, self._drawn_at = growing, 0.0

        self._told = ""
        self.progress.max, self.progress.value = self.form.trials.value, 0
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
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self._drawn_at = time.monotonic()
            self._grow(best.number if best is not None else None)

    def _grow(self, best: int | None) -> None:
        """Show what a running search has found; the list holds what no plan beats so far, the picture others too."""
        chosen = self.found.value
        if self._growing is None:  # until now it showed the search before
            self._growing, chosen = self._begun, None
        assert self._growing is not None
        self._view = self._growing.view(best, chosen)
        kinds = ("best", "planner", "pareto")
        self._list([p for p in self._view.points if p.kind in kinds or p.number == chosen], chosen)
        self._body.layout.display = None
        self._selected(self.found.value)

    def _list(self, points: Sequence[sv.FoundPoint], chosen: int | None) -> None:
        """Offer these points, and keep one of them selected."""
        options = [(p.label, p.number) for p in points]
        self._quiet = True
        try:
            if options != list(self.found.options):
                self.found.options = options
            self.found.value = chosen if any(p.number == chosen for p in points) else None
        finally:
            self._quiet = False

    def _ended(self, result: SearchResult | None, error: Exception | None) -> None:
        self.progress.layout.visibility = "hidden"
        self.stop.disabled = True
        self.status.value = ""
        if error is not None or result is None:
            if self._growing is not None:
                self._growing = None
                self._forget()
            raise error or RuntimeError("the search gave no result")
        self._growing, self._view = None, sv.found_view(result)
        self.result = result
        self._list(self._view.points, (result.best or result.nearest).number)
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

    def _trials(self) -> Sequence[Trial]:
        """What the list and the picture are about."""
        if self._growing is not None:
            return self._growing.trials
        return self.result.trials if self.result is not None else ()

    def plan_of(self, number: int) -> Plan:
        """The plan of a trial, with the search named as the reason of the fields that it chose."""
        trial = self._trials()[number]
        if trial.plan.reasons:
            return trial.plan
        told = f"found by the search (plan #{number})"
        fields = self.result.candidates if self._growing is None and self.result is not None else AXES
        return trial.plan.replace(reasons=dict.fromkeys(fields, told))

    def load_selected(self) -> None:
        """Load the selected plan into the Tuner.

        Raises:
            InputError: nothing is selected, there is no Tuner, or it cannot show this plan.
        """
        number = self.found.value
        if number is None:
            raise InputError("no plan is selected", remedy="Choose one in the list or in the picture")
        if self._tuner is None:
            raise InputError("there is no Tuner to load the plan into", expected="Autotune(tuner), or its trait plan")
        self._tuner.plan = self.plan = self.plan_of(number)
        self.detail.value = self._detail_html(number)
        text = f"#{number} is in the Tuner"
        assert self._view is not None
        searched = self._view.origin.removeprefix("modelled, ")
        if self._tuner.session.hardware.name != searched:
            text += f", which shows {self._tuner.session.hardware.name}; it was found for {searched}"
        self.messages.notice(escape(f"{text}. Undo there takes it back."))

    def _clicked(self, kind: sv.Kind) -> Callable[..., None]:
        def clicked(trace: Any, points: Any, state: Any) -> None:
            assert self._view is not None
            point = self._view.of(kind)[points.point_inds[0]]
            self._list_too(point)
            self.found.value = point.number
            if self._tuner is not None and point.tokens_per_s is not None:
                self.load_selected()

        return clicked

    def _list_too(self, point: sv.FoundPoint) -> None:
        """The list of a running search does not hold every point of the picture."""
        if point.number not in [number for _, number in self.found.options]:
            self._quiet = True
            try:
                self.found.options = [*self.found.options, (point.label, point.number)]
            finally:
                self._quiet = False

    def _forget(self) -> None:
        """A search has failed: go back to what the last one found."""
        self._view = sv.found_view(self.result) if self.result is not None else None
        self._list(self._view.points if self._view is not None else (), None)
        if self._view is None:
            self._body.layout.display = "none"
        self._selected(None)

    def _detail_html(self, number: int | None) -> str:
        if number is None or self._view is None:
            return ""
        trial = self._trials()[number]
        before = self._tuner.session.plan if self._tuner is not None else self._trials()[0].plan
        than = "the Tuner's plan" if self._tuner is not None else "the planner's own"
        reason = trial.reason or next((p.reason for p in self._view.points if p.number == number), "tried")
        told = cv.changes(before, trial.plan)
        items = "".join(f"<li>{escape(f)}: {escape(a)} → <b>{escape(b)}</b></li>" for f, a, b in told)
        same = f"<div>The same as {than}.</div>"
        return (
            f'<div class="so-note" role="status"><div>{escape(vm.sentence(reason))}</div>'
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
