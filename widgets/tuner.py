"""The Tuner: knobs, two-processor timeline, memory, headline numbers and export on one screen."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import ipywidgets as W

from superoffload.config import ModelRef, OptimizerConfig, TrainingConfig, TunedConfig
from superoffload.draft import DRAFT_OPERATORS
from superoffload.errors import InputError, SuperOffloadError
from superoffload.hardware import Hardware
from superoffload.measured_step import MeasuredStep
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation
from superoffload.tracing import Trace
from superoffload.widgets import session as sessions
from superoffload.widgets import theme as themes
from superoffload.widgets import view_models as vm
from superoffload.widgets.at_rest import AtRest
from superoffload.widgets.autotune import Autotune
from superoffload.widgets.block_text import parse_blocks
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.compare_panel import ComparePanel
from superoffload.widgets.controls import Controls
from superoffload.widgets.drawers import Drawer, Drawers
from superoffload.widgets.export_panel import ExportPanel
from superoffload.widgets.foot import foot_html
from superoffload.widgets.machine_panel import MachineMenu, MachinePanel
from superoffload.widgets.measure_panel import MeasurePanel
from superoffload.widgets.opening import autosave_path, check_model, left_session, profile_of, put_aside
from superoffload.widgets.parts import (
    Guard,
    Latest,
    button,
    cards_html,
    escape,
    loop_runs,
    put,
    style_sheet,
)
from superoffload.widgets.report import Shown
from superoffload.widgets.session_file import SavedSession
from superoffload.widgets.step_panel import StepPanel
from superoffload.widgets.tuner_traits import TunerTraits

if TYPE_CHECKING:
    from torch import nn

OPEN_WITH_DRAFT_ABOVE = 60_000
"""Operators of a step that takes more than a second to simulate: the Tuner opens with a draft of it."""


class Tuner(TunerTraits):
    """Turn the knobs of a plan and see the step change.

    Args:
        profile: a profile; or a torch model, which is then profiled on `batch` (takes some seconds); or a measured step
            (`superoffload.load_measured`), which opens with its plan and its timeline under the predicted one.
        plan: start from this plan; the cost model chooses one when omitted.
        hardware: look at another machine, a record or a preset name.
        baseline: a trace or plan that the headline numbers are compared with.
        batch: a batch of the model's inputs; with it the panel can also measure real steps.
        model: the torch model of a profile that was made before, to measure real steps with `batch`.
        autosave: file that keeps the edits; by default ``.superoffload/<model>-<hardware>.json`` in the working folder,
            False keeps them in memory only. Edits that it holds of this model are taken over; anything else that it
            holds is put aside, not overwritten.
        model_source: where training finds the weights (preset, Hugging Face id, folder): goes into the config.

    Traits `plan`, `trace` and `config` can be read, observed and set from other cells.

    Raises:
        InputError: the arguments do not belong together.
    """

    def __init__(
        self,
        profile: Profile | MeasuredStep | nn.Module,
        plan: Plan | None = None,
        hardware: Hardware | str | None = None,
        baseline: Trace | Plan | None = None,
        *,
        batch: Any = None,
        model: nn.Module | None = None,
        autosave: str | os.PathLike[str] | bool = True,
        model_source: ModelRef | str | None = None,
    ):
        if isinstance(hardware, str):
            from superoffload.hardware import preset

            hardware = preset(hardware)
        recorded = profile if isinstance(profile, MeasuredStep) else None
        if recorded is not None:
            profile, plan = recorded.profile, plan or recorded.plan
        if not isinstance(profile, Profile):
            model, profile = profile, profile_of(profile, batch)
        elif model is not None:
            check_model(model, profile)
        path, draft_above = autosave_path(autosave, profile), OPEN_WITH_DRAFT_ABOVE if loop_runs() else None
        session = sessions.Session(profile, plan, hardware, baseline, path, draft_above=draft_above)
        # With a plan, machine or baseline of its own this call says itself what is to be shown.
        told = self._after(left_session(path, profile), session, go_on=plan is hardware is baseline is None)
        self._build(session, model, batch, model_source)
        if told:
            self.messages.notice(told)
        self.recorded = recorded
        if recorded is not None:
            self.show_measured(recorded.trace)

    @staticmethod
    def _after(left: SavedSession | None, session: sessions.Session, *, go_on: bool) -> str:
        """Go on from what the autosave file holds, or keep that from being overwritten; say which."""
        path = session.autosave
        if path is None or not path.is_file():
            return ""
        if left is not None and go_on:
            try:
                with session.drafting(OPEN_WITH_DRAFT_ABOVE) if loop_runs() else nullcontext():
                    if not session.go_on_from(left):
                        return ""
            except SuperOffloadError:
                pass  # of another version, or for a batch that this profile cannot tell about
            else:
                return f"Opened as it was left in {escape(str(path))}. <i>Undo</i> goes back to the automatic plan."
        if left is not None and left.baseline is None and session.shows(left.plan):
            return ""
        return f"What {escape(str(path))} held is kept in {escape(str(put_aside(path)))}."

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        batch: Any = None,
        model_source: ModelRef | str | None = None,
    ) -> Tuner:
        """Open the Tuner as an earlier session left it, and go on saving there.

        Args:
            model: the torch model of that session, to measure real steps with `batch`.

        Raises:
            InputError: no such file, not a saved session, or a session of another model.
        """
        session = sessions.Session.restore(path)
        if model is not None:
            check_model(model, session.given)
        tuner = cls.__new__(cls)
        tuner._build(session, model, batch, model_source)
        return tuner

    def _build(self, session: sessions.Session, model: Any, batch: Any, source: ModelRef | str | None) -> None:
        self._keep(session, source)
        self._model, self._batch = model, batch
        self.recorded: MeasuredStep | None = None
        """The measured step that this was opened on."""
        self._guard = Guard(self.messages)
        self._bridge = ThemeBridge()
        self._bridge.observe(self._guard(lambda _: self._follow_theme(), keep=True), names="theme")
        self._edits = Latest(self._guard(self._apply))
        self.at_rest = AtRest(session, self._guard, self.messages.state, self._refresh)
        session.saver = self.at_rest.save
        self.controls = Controls(session, self._edits.put, self._guard(self._choose))
        self._title, self._cards = W.HTML(), W.HTML(layout=W.Layout(width="100%", margin="2px 0"))
        self._foot = W.HTML()
        self.machine = MachineMenu(session.given.hardware, self._guard(self._take_machine))
        self.machine.show(session.hardware)
        on = self._guard
        self.undo = button("Undo", "Take back the last edit", on(lambda _: self._step_history(session.undo)))
        self.redo = button("Redo", "Do the edit again", on(lambda _: self._step_history(session.redo)))
        self.auto = button("Auto", "Let the cost model choose every knob", on(lambda _: self._run(session.choose_all)))
        self.pin = button(
            "Pin baseline", "Compare with the present numbers from now on", on(lambda _: self._toggle_pin())
        )
        self.drawers = Drawers(
            {
                "Machine": Drawer("Change this machine's figures: what if?", "66px",
                                  lambda: MachinePanel(self._present_machine, self._take_machine, self.machine.named)),
                "Compare": Drawer("Other plans beside this one, and what-if sweeps", "72px",
                                  lambda: ComparePanel(self, self._bridge)),
                "Autotune": Drawer("Search for a better plan", "70px", lambda: Autotune.inside(self, self._bridge)),
                "Measure": Drawer("Run real steps with this plan", "66px",
                                  lambda: MeasurePanel(self, self._model, self._batch)),
                "Export": Drawer("Write the tuned config, a report, a trace, pictures", "56px",
                                 lambda: ExportPanel(self._exported, self.config)),
            },
            self._guard, self._drawer_opened,
        )  # fmt: skip
        self.what_if, self.compare, self.autotune, self.measure, self.export = self.drawers.toggles.values()
        self.step = StepPanel(session, self._guard, self._apply)
        self.timeline, self.state = self.step.timeline, self.step.state
        tools = W.HBox(
            [self.what_if, self.machine, self.auto, self.undo, self.redo, self.pin,
             self.compare, self.autotune, self.measure, self.export],
            layout=W.Layout(flex="0 0 auto", align_items="center"),
        )  # fmt: skip
        self._title.layout.flex = "1 1 0"
        self._title.layout.min_width = "120px"
        head = W.HBox([self._title, tools], layout=W.Layout(width="100%", align_items="center", flex_flow="row wrap"))
        body = W.HBox([self.controls, self.step], layout=W.Layout(width="100%", align_items="flex-start"))
        super().__init__(
            [style_sheet(), self._bridge, head, self._cards, self.messages, self.drawers, body, self._foot],
            layout=W.Layout(width="100%"),
        )
        self.add_class("so-panel")
        self.add_class("so-tuner")
        self._refresh(figures_too=False)

    # ---- callbacks -----------------------------------------------------------------------------------------------

    def adopted(self, new: Plan | Trace | TunedConfig) -> None:
        if isinstance(new, TunedConfig) and self.export_panel is not None:
            self.export_panel.adopt(new)
        self._refresh()

    def _apply(self, changes: dict[str, Any]) -> None:
        try:
            if isinstance(changes.get("flow_blocks"), str):
                changes = {**changes, "flow_blocks": parse_blocks(changes["flow_blocks"], self.session.layers)}
            if "recomputed" in changes:
                text = changes.pop("recomputed")
                blocks = parse_blocks(text, self.session.layers, "is not recomputed") if isinstance(text, str) else text
                changes |= self.session.recomputing(blocks)
            with self._live():
                self.session.edit(**changes)
        finally:
            self._refresh()  # after a refused edit the knob goes back to what is true

    def _choose(self, field: str) -> None:
        self._run(lambda: self.session.choose(field))

    def _live(self) -> AbstractContextManager[None]:
        """Around what a hand does: a large model is drafted, and simulated exactly when the hand rests. Where no loop
        runs there is no rest to wait for."""
        return self.session.drafting(DRAFT_OPERATORS) if loop_runs() else nullcontext()

    def _run(self, action: Any) -> None:
        with self._live():
            action()
        self._refresh()

    def _step_history(self, action: Any) -> None:
        with self._live():
            action()
        self.machine.show(self.session.hardware)
        self._refresh()

    def _present_machine(self) -> Hardware:
        return self.session.hardware

    def _take_machine(self, hardware: Hardware) -> None:
        if hardware == self.session.hardware:
            return
        try:
            with self._live():
                self.session.set_hardware(hardware)
        finally:
            self.machine.show(self.session.hardware)
            self._refresh()

    def _toggle_pin(self) -> None:
        draft = self.session.is_draft
        if self.session.baseline is None:
            self.session.pin()
        else:
            self.session.unpin()
        self._refresh(figures_too=draft)

    @property
    def export_panel(self) -> ExportPanel | None:
        """None until it was opened; so are the others."""
        return self.drawers.panels.get("Export")

    @property
    def machine_panel(self) -> MachinePanel | None:
        return self.drawers.panels.get("Machine")

    @property
    def measure_panel(self) -> MeasurePanel | None:
        return self.drawers.panels.get("Measure")

    @property
    def compare_panel(self) -> ComparePanel | None:
        return self.drawers.panels.get("Compare")

    @property
    def autotune_panel(self) -> Autotune | None:
        return self.drawers.panels.get("Autotune")

    def _drawer_opened(self, name: str) -> None:
        if name == "Compare" and self.compare_panel is not None:
            self.compare_panel.refresh()  # what was edited while it was closed

    def _exported(self, optimizer: OptimizerConfig, training: TrainingConfig) -> Shown:
        self._optimizer, self._training = optimizer, training
        draft = self.session.is_draft
        self.session.settle()
        self._refresh(figures_too=draft)
        return Shown(self.config, self.session.profile, self.session.trace, self.measured, self.session.baseline)

    # ---- drawing -------------------------------------------------------------------------------------------------

    def show_measured(self, trace: Trace | None) -> None:
        """Overlay a measured trace on the simulated one; None takes it away, and so does another plan."""
        self.measured = trace
        self._refresh()

    def load(self, profile: Profile, plan: Plan) -> str:
        """Take over a plan that was found elsewhere, and the machine of its profile; says so in words.

        Raises:
            InputError: the plan is for a batch that this Tuner cannot show.
        """
        self.check_size(plan)
        mine = self.session.plan.speculate
        if mine == "auto" and resolve_speculation(self.session.plan).speculate == plan.speculate:
            plan = plan.replace(speculate=mine)  # a simulated plan says what `auto` was taken for
        other = profile.hardware if profile.hardware != self.session.hardware else None
        self.session.set_plan(plan, other)
        self.machine.show(self.session.hardware)
        self._refresh()
        return f"in the Tuner{f', which shows {other.name} now' if other else ''}; Undo there takes it back"

    def show_recorded(self) -> None:
        """Go back to the plan of the measured step that this was opened on, and lay it under the prediction."""
        if self.recorded is None:
            raise InputError("this was not opened on a measured step", expected='Tuner(so.load_measured("committed"))')
        self.session.set_plan(self.recorded.plan)
        self.show_measured(self.recorded.trace)

    def take_profile(self, profile: Profile, uncalibrated: Profile | None = None) -> None:
        """Predict from another profile of the same model from now on; the plan and a measured overlay stay.

        Args:
            uncalibrated: what `profile` was before it was corrected, where it was.
        """
        self.session.replace_profile(profile, uncalibrated)
        self.machine.own_is(profile.hardware)
        self.machine.show(self.session.hardware)
        self._refresh()

    def _draw_figures(self) -> None:
        self.step.draw(themes.DARK if self._bridge.theme == "dark" else themes.LIGHT)

    def _follow_theme(self) -> None:
        self._draw_figures()
        for panel in (self.compare_panel, self.autotune_panel):
            if panel is not None:
                panel.draw()

    def _refresh(self, figures_too: bool = True) -> None:
        s = self.session
        if self.measured is not None and self.measured.plan.replace(reasons={}) != s.plan.replace(reasons={}):
            self.measured = None  # it would be compared with what it is not
        self.publish()
        self.controls.show_plan(self._edits.pending)
        put(self._title, f'<div class="so-head"><b>{escape(s.given.model)}</b>'
             f"<span>{escape(vm.size_line(s.profile))}</span></div>")  # fmt: skip
        put(self._cards, cards_html(vm.headline(s.trace, s.baseline)))
        put(self._foot, foot_html(s, self.at_rest.draft_is_followed))
        self.pin.description = "Pin baseline" if s.baseline is None else "Unpin"
        self.undo.disabled, self.redo.disabled = not s.can_undo, not s.can_redo
        self.messages.state(vm.overflow_line(s.trace.memory) or (s.save_error or ""))
        self.at_rest.shown()
        self.step.tell(self.measured)
        if figures_too:
            self._draw_figures()
        if self.drawers.is_open("Compare") and self.compare_panel is not None:
            self.compare_panel.follow()
        if self.autotune_panel is not None:
            self.autotune_panel.form.offer()
        if self.machine_panel is not None:
            self.machine_panel.follow()
