"""Measures real steps in the background, lays them over the predicted timeline, and corrects the profile by them."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import ipywidgets as W

from superoffload.calibration import Calibration, calibrate
from superoffload.errors import InputError
from superoffload.host_load import DISTURBED
from superoffload.measured_step import lanes_busy
from superoffload.tracing import LANE_TITLES, Trace
from superoffload.units import format_off, format_seconds
from superoffload.widgets import view_models as vm
from superoffload.widgets.background import on_loop
from superoffload.widgets.measured_view import lanes_html
from superoffload.widgets.parts import Guard, Messages, button, escape

if TYPE_CHECKING:
    from superoffload.widgets.tuner import Tuner


FAR = (-40.0, 60.0)
"""Percent of difference between prediction and measurement beyond which another load is the likeliest reason."""


class MeasurePanel(W.VBox):  # type: ignore[misc]
    """Start, progress, cancel. The steps run in a thread, so that the kernel goes on answering.

    Args:
        tuner: the Tuner whose plan is measured and whose timeline takes the overlay.
        model: the torch model, or None where the Tuner was opened on a profile alone.
        batch: the batch of every micro-batch.
    """

    def __init__(self, tuner: Tuner, model: Any, batch: Any):
        self._tuner, self._model, self._batch = tuner, model, batch
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.messages = Messages()
        guard = Guard(self.messages)
        self.steps = W.BoundedIntText(
            3, min=2, max=50, description="Steps", layout=W.Layout(width="110px"), style={"description_width": "40px"}
        )
        self.start = button("Measure steps", "Run real steps with this plan", guard(lambda _: self.run()))
        self.start.button_style = "primary"
        self.cancel = button("Cancel", "Stop after the present micro-batch", guard(lambda _: self.stop()))
        self.clear = button("Remove overlay", "Show the prediction alone", guard(lambda _: tuner.show_measured(None)))
        self.correct = button(
            "Calibrate", "Correct the profile by the measured step: later predictions build on it",
            guard(lambda _: self.calibrate()),
        )  # fmt: skip
        self.back = button(
            "Undo calibration", "Predict from the profile as it was measured", guard(lambda _: self.uncalibrate())
        )
        self.recorded = button(
            "Recorded step", "The measured step that the Tuner was opened on, with its plan",
            guard(lambda _: self.show_recorded()),
        )  # fmt: skip
        self.recorded.layout.display = None if tuner.recorded is not None else "none"
        self.correct.disabled, self.back.disabled = tuner.measured is None, tuner.session.uncalibrated is None
        self.progress = W.IntProgress(0, 0, 1, layout=W.Layout(width="220px", visibility="hidden"))
        self.cancel.disabled = True
        possible = model is not None and batch is not None
        for widget in (self.start, self.steps):
            widget.disabled = not possible
        self.clear.disabled = not possible and tuner.recorded is None
        super().__init__(
            [
                W.HBox(
                    [self.steps, self.start, self.cancel, self.recorded, self.clear, self.correct, self.back,
                     self.progress],
                    layout=W.Layout(align_items="center", flex_flow="row wrap"),
                ),
                self.messages,
            ]
        )  # fmt: skip
        if tuner.recorded is not None:
            self._tell_recorded()
        elif not possible:
            self.messages.notice(
                "Measuring needs the model itself and a batch, and this panel was opened on a profile. "
                'Open <span class="so-code">Tuner(model, batch=batch)</span>, or, to see a step that was measured '
                'elsewhere, <span class="so-code">Tuner(so.load_measured("committed"))</span>',
                "warn",
            )

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Start measuring. Raises InputError while a measurement is running, or without a model."""
        if self._model is None or self._batch is None:
            raise InputError("there is no model to measure", expected="Tuner(model, batch=batch)")
        if self.running:
            raise InputError(
                f"a measurement is running (step {self.progress.value} of {self.progress.max})",
                remedy="Wait for it, or cancel it",
            )
        from superoffload.measuring import WARMUP_STEPS, measure_steps

        self._stop.clear()
        self.progress.max, self.progress.value = WARMUP_STEPS + self.steps.value, 0
        self.progress.layout.visibility = "visible"
        self.cancel.disabled = False
        session, steps = self._tuner.session, self.steps.value
        plan, profile = session.plan, session.given
        call = on_loop()

        def work() -> None:
            try:
                trace = measure_steps(
                    self._model, self._batch, profile, plan, steps=steps, stop=self._stop, progress=self._progressed
                )
            except Exception as error:  # shown in the panel, with its remedy
                call(functools.partial(self._ended, None, error))
            else:
                call(functools.partial(self._ended, trace, None))

        self._thread = threading.Thread(target=work, name="superoffload-measure", daemon=True)
        self._thread.start()

    def show_recorded(self) -> None:
        """Lay the measured step that the Tuner was opened on under its prediction again."""
        self._tuner.show_recorded()
        self.correct.disabled = False
        self._tell_recorded()

    def stop(self) -> None:
        """Ask the measurement to end; the model is put back."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the measurement has ended: for scripts, not for a notebook."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def calibrate(self) -> None:
        """Correct the profile by the step that was measured last, always from the profile as it was before.

        Raises:
            InputError: nothing was measured with this plan, or on another machine than the one that is looked at.
        """
        trace, session = self._tuner.measured, self._tuner.session
        if session.hardware != session.given.hardware:
            raise InputError(
                f"the step was measured here, and the prediction is for {session.hardware.name}",
                remedy=f"Choose {session.given.hardware.name} as the machine first",
            )
        if trace is None:
            raise InputError("no step of this plan was measured", remedy="Measure steps first")
        base = session.uncalibrated or session.given
        found = calibrate(base, trace)
        self._tuner.take_profile(found.profile, base)
        self.back.disabled = False
        self.messages.notice(_told(found), "warn" if found.strange else "good")

    def uncalibrate(self) -> None:
        """Go back to the profile as it was before."""
        before = self._tuner.session.uncalibrated
        if before is not None:
            self._tuner.take_profile(before)
            self.back.disabled = True
            self.messages.notice("The predictions are those of the profile as it was measured again.")

    def _tell_recorded(self) -> None:
        step = self._tuner.recorded
        assert step is not None
        predicted, machine = self._tuner.session.trace, step.machine.get("gpu", step.trace.hardware)
        text = (
            f"<b>{escape(step.title)}.</b> {escape(step.shows)}<br>Measured on {escape(step.date)}, one "
            f"{escape(machine)}: {format_seconds(step.trace.step_s)} per step"
        )
        if predicted.hardware == step.trace.hardware and self._tuner.measured is not None:
            told = format_off(predicted.step_s, step.trace.step_s)
            lanes = lanes_html(lanes_busy(predicted, step.trace))
            text += f"; the model says {format_seconds(predicted.step_s)} ({told}).{lanes}"
        self.messages.notice(text)

    def _progressed(self, done: int) -> None:
        self.progress.value = done

    def _ended(self, trace: Trace | None, error: Exception | None) -> None:
        self.progress.layout.visibility = "hidden"
        self.cancel.disabled = True
        if error is not None or trace is None:
            self.messages.error(error or RuntimeError("the measurement gave no trace"))
            return
        predicted, plan = self._tuner.session.trace, self._tuner.session.plan
        text = f"Measured <b>{format_seconds(trace.step_s)}</b> per step on {escape(trace.hardware)}"
        table = ""
        if trace.plan.replace(reasons={}) != plan.replace(reasons={}):
            self.messages.notice(
                f"{text}, with the plan as it was then. It has been changed meanwhile, so nothing is compared", "warn"
            )
            return
        if predicted.source == "modelled" and predicted.hardware == trace.hardware and predicted.step_s:
            off = (predicted.step_s / trace.step_s - 1) * 100
            told = format_off(predicted.step_s, trace.step_s)
            text += f"; the model predicted {format_seconds(predicted.step_s)} ({told})"
            if not FAR[0] < off < FAR[1] and DISTURBED not in trace.context:
                text += ". So far apart, one of the two was likely taken on a busy machine: measure, or profile, again"
            table = lanes_html(lanes_busy(predicted, trace))
        elif predicted.hardware != trace.hardware:
            text += f"; the prediction above is for {escape(predicted.hardware)}"
        if DISTURBED in trace.context:
            self.messages.notice(f"{text}. {escape(vm.sentence(trace.context[DISTURBED]))}{table}", "warn")
        else:
            self.messages.notice(f"{text}.{table}")
        self._tuner.show_measured(trace)
        self.correct.disabled = False


def _told(found: Calibration) -> str:
    """What a calibration did, with a table of its lanes: all figures modelled but those that say measured."""
    off = [format_off(s, found.measured_step_s) for s in (found.modelled_step_s, found.calibrated_step_s)]
    parts = ", ".join(f"{escape(c.part)} × {c.factor:.2f}" for c in found.corrections)
    rows = "".join(
        f'<tr><th scope="row">{escape(LANE_TITLES[t.lane])}</th>'
        + "".join(f"<td>{format_seconds(s)}</td>" for s in (t.measured_s, t.modelled_s, t.calibrated_s))
        + "</tr>"
        for t in found.lanes
    )
    doubt = "".join(
        f"<br>{escape(c.part)} is {c.factor:.2f} times what the profile says, too far for drift: was this machine busy?"
        for c in found.strange
    )
    return (
        f"The prediction was {off[0]} off, and is {off[1]} off with the corrections: {parts}. What is left is waiting "
        f"that the model does not know.{doubt}"
        '<div class="so-scroll"><table class="so-table"><caption>Busy in a step</caption><tr><th scope="col"></th>'
        '<th scope="col">measured</th><th scope="col">modelled before</th><th scope="col">modelled now</th></tr>'
        f"{rows}</table></div>"
    )
