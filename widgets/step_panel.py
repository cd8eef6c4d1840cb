"""The Tuner's pictures: timeline with its legend and waits, and where the state lives; clicks on them are edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.tracing import Trace
from superoffload.widgets import figures
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.measured_view import overlay
from superoffload.widgets.parts import Guard, escape, legend_html, put
from superoffload.widgets.session import Session
from superoffload.widgets.theme import LIGHT, Theme
from superoffload.widgets.timeline_figures import timeline_spec

TIMELINE_HEIGHT, STATE_HEIGHT = 216, 216
"""Pixels: the whole Tuner stands on one screen of 1280 × 800."""
STEPS = (1, 2, 3)
"""How many steps the timeline may draw."""
STEPS_HELP = "Steps drawn: how many, in steady state. Adam and uploads of one run beside the forward of the next."


class StepPanel(W.VBox):  # type: ignore[misc]
    """Shows one session's step.

    How many steps are drawn is how one looks at a plan and no part of it: it is neither saved nor undone.

    Args:
        guard: shows what goes wrong.
        edit: called with the fields of the plan that a click changes.
    """

    def __init__(self, session: Session, guard: Guard, edit: Callable[[dict[str, Any]], None]):
        self._session, self._edit = session, edit
        self._measured: Trace | None = None
        self._theme: Theme = LIGHT
        self.steps = W.Dropdown(
            options=[(f"{n} step{'s' if n > 1 else ''}", n) for n in STEPS], tooltip=STEPS_HELP,
            layout=W.Layout(width="74px", flex="0 0 74px", margin="0"),
        )  # fmt: skip
        self.steps.observe(guard(lambda _: self.draw_timeline()), names="value")
        self.legend = W.HTML(layout=W.Layout(flex="1 1 0", min_width="0", margin="0"))
        self.waits = W.HTML(layout=W.Layout(width="100%", margin="0"))
        below = W.HBox([self.legend, self.steps], layout=W.Layout(width="100%", align_items="flex-start"))
        below.add_class("so-below-timeline")
        self.timeline = LiveFigure(self._timeline_spec())
        self.state = LiveFigure(self._state_spec())
        layer, bucket, mark = self._layer_clicked, self._bucket_clicked, self._mark_clicked
        for trace, clicked in ((0, layer), (1, layer), (2, bucket), (4, mark)):
            self.state.on_point(trace, guard(clicked))
        super().__init__(
            [self.timeline, below, self.waits, self.state],
            layout=W.Layout(flex="1 1 0", min_width="0", overflow="hidden", margin="0 0 0 10px"),
        )

    def tell(self, measured: Trace | None) -> None:
        """Write what stands below the timeline, for the session's step and a measured one that is laid under it."""
        self._measured, trace = measured, self._session.trace
        lines = tv.stall_lines(trace) or ("No lane waits.",)
        told = "".join(f'<div title="{escape(x)}">{escape(x)}</div>' for x in lines)
        put(self.waits, f'<div class="so-stalls">{told}</div>')
        kinds = {e.kind for t in (trace, measured) if t is not None for e in t.events}
        note = "" if measured is None else "In each lane: predicted above, measured below"
        put(self.legend, legend_html((k for k in tv.KIND_TITLES if k in kinds), bool(trace.stalls), note))
        fixed = measured is not None or trace.source == "measured"
        self.steps.disabled = fixed
        self.steps.tooltip = "Steps drawn: what was measured is drawn as it was, one step." if fixed else STEPS_HELP

    def draw(self, theme: Theme) -> None:
        """Draw both pictures."""
        self._theme = theme
        self.draw_timeline()
        self.state.show_spec(self._state_spec())

    def draw_timeline(self) -> None:
        self.timeline.show_spec(self._timeline_spec())

    def _timeline_spec(self) -> figures.Spec:
        trace, measured = self._session.trace, self._measured
        views = [tv.steady_steps(trace, self.steps.value)] if measured is None else overlay(trace, measured)
        return timeline_spec(views, theme=self._theme, height=TIMELINE_HEIGHT, legend=False)

    def _state_spec(self) -> figures.Spec:
        s = self._session
        layers = vm.layer_map(s.profile, s.plan, s.buckets)
        return figures.state_spec(layers, vm.memory_rows(s.trace.memory), theme=self._theme, height=STATE_HEIGHT)

    # ---- clicks --------------------------------------------------------------------------------------------------

    def _layer_clicked(self, trace: Any, points: Any, _: Any) -> None:
        flow = set(self._session.plan.flow_blocks) ^ self._layers_of(points, "cannot flow")
        self._edit({"flow_blocks": tuple(sorted(flow))})

    def _mark_clicked(self, trace: Any, points: Any, _: Any) -> None:
        wanted = set(self._session.recomputed) ^ self._layers_of(points, "is not recomputed")
        self._edit({"recomputed": tuple(sorted(wanted))})

    def _layers_of(self, points: Any, lacks: str) -> set[int]:
        for i in points.point_inds:
            block = self._session.profile.blocks[i]
            if block.kind != "layer":
                raise InputError(f"block {i} ({block.name}) {lacks}", expected="a transformer layer")
        return set(points.point_inds)

    def _bucket_clicked(self, trace: Any, points: Any, _: Any) -> None:
        s = self._session
        bars = vm.layer_map(s.profile, s.plan, s.buckets).bucket_bars
        self._edit({"retained_buckets": len(s.buckets) - bars[min(points.point_inds)].start})
