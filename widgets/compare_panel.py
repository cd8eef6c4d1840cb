"""The Tuner's plan beside its pinned baseline, the measured steps and named arrangements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import ipywidgets as W

from superoffload.plan_presets import PRESETS, preset_plan
from superoffload.profiler import Profile
from superoffload.simulator import simulate
from superoffload.tracing import Trace
from superoffload.widgets.background import Background
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.compare import Compare
from superoffload.widgets.compare_views import MOST_PLANS
from superoffload.widgets.parts import Guard, Latest, Messages, escape

if TYPE_CHECKING:
    from superoffload.widgets.tuner import Tuner

THIS, PINNED, MEASURED = "this plan", "pinned baseline", "measured steps"
FIRST = "ZeRO-Offload-like"
"""What is compared with at first where nothing is pinned."""
REST_S = 0.25
"""The comparison follows the knobs when the hand has rested so long."""


class ComparePanel(W.VBox):  # type: ignore[misc]
    """Ticks for what the present plan is compared with, and the comparison.

    Args:
        tuner: its plan is the first; its edits are followed by calling `follow`.
        bridge: reports the theme.
    """

    def __init__(self, tuner: Tuner, bridge: ThemeBridge):
        self._tuner = tuner
        self._job = Background("superoffload-presets")
        self._made: dict[str, Trace] = {}
        """Presets that were planned and simulated, for `_made_for`."""
        self._made_for: tuple[Profile, int] | None = None
        self.messages = Messages()
        self._guard = guard = Guard(self.messages)
        self._latest = Latest(guard(lambda _: self.refresh(), keep=True), REST_S)
        self.ticks: dict[str, W.Checkbox] = {}
        helps = {PINNED: "What Pin baseline keeps", MEASURED: "What Measure ran with this plan"}
        helps |= {name: preset.what for name, preset in PRESETS.items()}
        for name, told in helps.items():
            tick = W.Checkbox(
                False, description=name, indent=False, tooltip=told, layout=W.Layout(width="auto", margin="0 8px 0 0")
            )
            tick.observe(guard(lambda change, name=name: self._ticked(name, change["new"])), names="value")
            self.ticks[name] = tick
        self.compare = Compare.inside(bridge)
        self.compare.sweeps.load = tuner.load
        self.compare.layout.display = "none"
        self.compare.head.layout.display = "none"  # the Tuner has it
        row = W.HBox(list(self.ticks.values()), layout=W.Layout(flex_flow="row wrap", width="100%"))
        row.add_class("so-ticks")
        super().__init__([row, self.messages, self.compare], layout=W.Layout(width="100%"))
        self._offer()
        self.ticks[PINNED if not self.ticks[PINNED].disabled else FIRST].value = True

    def follow(self) -> None:
        """Bring the comparison up to the Tuner's plan when the hand rests."""
        self._latest.put(now=True)

    def refresh(self) -> None:
        """Compare what is ticked now; presets that are not planned yet follow when they are."""
        self._offer()
        session = self._tuner.session
        now = (session.profile, session.plan.accumulation)
        if self._made_for is None or self._made_for[0] is not now[0] or self._made_for[1] != now[1]:
            self._made, self._made_for = {}, now
        wanted = [name for name, tick in self.ticks.items() if tick.value and not tick.disabled]
        missing = [name for name in wanted if name in PRESETS and name not in self._made]
        shown: dict[str, Trace] = {THIS: session.trace}
        for name in wanted:
            trace = {PINNED: session.pinned, MEASURED: self._tuner.measured}.get(name, self._made.get(name))
            if trace is not None:
                shown[name] = trace
        enough = len(shown) > 1
        self.compare.layout.display = None if enough else "none"
        if enough:
            self.compare.show(shown, session.profile)
        self.messages.state("" if wanted else "Tick what the present plan is to be compared with")
        if missing:
            self._make(missing)

    def draw(self) -> None:
        """Draw again in the present theme."""
        if self.compare.traces:
            self.compare.draw()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the presets are planned: for scripts, not for a notebook."""
        self._job.wait(timeout_s)

    def close(self) -> None:
        """Give up what is being planned and close the widgets."""
        if hasattr(self, "compare"):
            self._job.drop()
            self.compare.close()
        super().close()

    def _offer(self) -> None:
        self.ticks[PINNED].disabled = self._tuner.session.pinned is None
        self.ticks[MEASURED].disabled = self._tuner.measured is None

    def _ticked(self, name: str, on: bool) -> None:
        others = sum(t.value and not t.disabled for t in self.ticks.values())
        if on and others > MOST_PLANS - 1:
            self.ticks[name].value = False
            self.messages.notice(f"No more than {MOST_PLANS} plans are drawn at once: take a tick away first.", "warn")
            return
        self.refresh()

    def _make(self, names: list[str]) -> None:
        """Plan and simulate presets in the background: for a large model a plan takes seconds."""
        session, wanted_for = self._tuner.session, self._made_for
        profile, like = session.profile, session.plan

        def work(stop: threading.Event, tell: Callable[..., None]) -> dict[str, Trace]:
            found: dict[str, Trace] = {}
            for name in names:
                if stop.is_set():
                    break
                found[name] = simulate(profile, preset_plan(name, profile, like))
            return found

        def done(found: dict[str, Trace] | None, error: Exception | None) -> None:
            if error is not None or found is None:
                raise error or RuntimeError("no preset was planned")
            if self._made_for is wanted_for:
                self._made |= found
            self.messages.clear()
            self.refresh()

        self.messages.notice(f"Planning {escape(', '.join(names))} …", "warn")
        self._job.start(work, self._guard(done, keep=True))
