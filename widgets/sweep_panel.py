"""What if: a heat map of tokens/s over two quantities, simulated in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.sweeps import AXES, Sweep, sweep
from superoffload.widgets.background import Background
from superoffload.widgets.compare_figures import empty_view, sweep_spec
from superoffload.widgets.compare_views import SweepView, sweep_line, sweep_view
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Latest, Messages, button, escape
from superoffload.widgets.theme import Theme

USUAL = {
    "Buckets": ("bucket_mb", "retained", "Bucket size against retained buckets"),
    "Batch": ("micro_batch", "seq_len", "Micro-batch against sequence length"),
    "Link": ("link_gb_per_s", "flow", "The link from PCIe to C2C against layers whose weights flow"),
}
"""Button -> its two axes and what it is for."""
REST_S = 0.3
"""A sweep starts when the hand has rested so long."""


class SweepPanel(W.VBox):  # type: ignore[misc]
    """Two menus of quantities, a heat map, and the same as a table.

    Args:
        theme: asked for the colours at each drawing.
    """

    def __init__(self, theme: Callable[[], Theme]):
        self._theme, self._quiet = theme, False
        self._profile: Profile | None = None
        self._plans: dict[str, Plan] = {}
        self._job = Background("superoffload-sweep")
        self.sweep: Sweep | None = None
        """The last one that was completed."""
        self.view: SweepView | None = None
        self.messages = Messages()
        guard = Guard(self.messages)
        self._starts = Latest(guard(lambda _: self.run()), REST_S)
        titles = [(axis.title, name) for name, axis in AXES.items()]

        def menu(text: str, options: Any, value: Any, width: str, label: str) -> W.Dropdown:
            return W.Dropdown(
                options=options, value=value, description=text, layout=W.Layout(width=width, margin="0 4px 0 0"),
                style={"description_width": label},
            )  # fmt: skip

        self.plan = menu("Plan", [], None, "156px", "32px")
        self.x = menu("Across", titles, "bucket_mb", "202px", "46px")
        self.y = menu("Up", titles, "retained", "196px", "22px")
        self.usual = [
            button(text, told, guard(lambda _, pair=(x, y): self._take_usual(*pair)))
            for text, (x, y, told) in USUAL.items()
        ]
        self.stop = button("Stop", "Stop simulating", guard(lambda _: self._stop()))
        self.progress = W.IntProgress(0, 0, 1, layout=W.Layout(width="40px", visibility="hidden"))
        self.stop.disabled = True
        for control in (self.plan, self.x, self.y):
            control.observe(lambda _: self._changed(), names="value")
        self.figure: LiveFigure | None = None
        self._place = W.VBox([], layout=W.Layout(width="100%"))
        self.line, self.table = W.HTML(), W.HTML()
        row = W.HBox(
            [self.plan, self.x, self.y, *self.usual, self.progress, self.stop],
            layout=W.Layout(align_items="center", flex_flow="row wrap"),
        )
        super().__init__([row, self.messages, self._place, self.line, self.table], layout=W.Layout(width="100%"))

    def show(self, profile: Profile, plans: Mapping[str, Plan]) -> None:
        """Sweep one of these plans; starts anew where the chosen plan or the profile has changed."""
        before = (self._profile, self._plans.get(self.plan.value))
        self._profile, self._plans = profile, dict(plans)
        self._quiet = True
        try:
            if tuple(self.plan.options) != tuple(plans):
                chosen = self.plan.value
                self.plan.options = tuple(plans)
                self.plan.value = chosen if chosen in plans else next(iter(plans))
        finally:
            self._quiet = False
        if self.figure is None:
            self.figure = LiveFigure(sweep_spec(empty_view("Simulating …"), theme=self._theme()))
            self._place.children = [self.figure]
        if before != (self._profile, self._plans[self.plan.value]):
            self._starts.put(now=True)

    @property
    def running(self) -> bool:
        return self._job.running

    def run(self) -> None:
        """Start the sweep that the menus say; one that is under way is given up.

        Raises:
            InputError: both menus say the same.
        """
        if self._profile is None:
            return
        self._job.drop()
        self._idle()
        x, y, name = self.x.value, self.y.value, self.plan.value
        if x == y:
            raise InputError(f"both axes are {AXES[x].title}", remedy="Choose another quantity in one of the menus")
        profile, plan = self._profile, self._plans[name]

        def work(stop: threading.Event, tell: Callable[..., None]) -> Sweep:
            return sweep(profile, plan, x, y, cancel=stop.is_set, progress=tell)

        self.progress.max, self.progress.value = 1, 0
        self.progress.layout.visibility = "visible"
        self.stop.disabled = False
        self._job.start(work, lambda found, error: self._ended(name, found, error), self._progressed)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the sweep has ended: for scripts, not for a notebook."""
        self._job.wait(timeout_s)

    def draw(self) -> None:
        """Draw the last sweep again, in the present theme."""
        if self.figure is not None:
            self.figure.show_spec(sweep_spec(self.view or empty_view("Simulating …"), theme=self._theme()))

    def close(self) -> None:
        """Give up a sweep that is under way and close the widgets."""
        if hasattr(self, "_job"):
            self._job.drop()
        super().close()

    def _changed(self) -> None:
        if not self._quiet:
            self._starts.put(now=True)

    def _take_usual(self, x: str, y: str) -> None:
        self._quiet = True
        try:
            self.x.value, self.y.value = x, y
        finally:
            self._quiet = False
        self._starts.put(now=True)

    def _stop(self) -> None:
        self._job.stop()
        self.stop.disabled = True

    def _progressed(self, done: int, total: int) -> None:
        self.progress.max, self.progress.value = total, done

    def _idle(self) -> None:
        self.progress.layout.visibility = "hidden"
        self.stop.disabled = True

    def _ended(self, name: str, found: Sweep | None, error: Exception | None) -> None:
        self._idle()
        if error is not None or found is None:
            self.messages.error(error or RuntimeError("the sweep gave nothing"))
            return
        if found.cancelled:
            self.messages.notice(
                f"Stopped after {len(found.points)} of {len(found.xs) * len(found.ys)} points; the picture is older.",
                "warn",
            )
            return
        self.sweep, self.view = found, sweep_view(found, name)
        self.draw()
        self.line.value = f'<div class="so-note">{escape(sweep_line(self.view))}</div>'
        self.table.value = table_html(self.view)


def table_html(view: SweepView) -> str:
    """The heat map as a table: what a screen reader reads, with the reasons written out."""
    head = "".join(f'<th scope="col">{escape(x)}</th>' for x in view.x_labels)
    rows = []
    for label, values, reasons in zip(view.y_labels, view.tokens_per_s, view.reasons, strict=True):
        cells = "".join(
            f"<td>{value:,.0f}</td>" if value is not None else f'<td class="so-why-not">{escape(reason)}</td>'
            for value, reason in zip(values, reasons, strict=True)
        )
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    corner = f'<th scope="col">{escape(view.y_title)} \\ {escape(view.x_title)}</th>'
    return (
        f'<div class="so-note"><details><summary>As a table</summary><div class="so-scroll"><table class="so-table">'
        f"<caption>{escape(view.title)}</caption><tr>{corner}{head}</tr>{''.join(rows[::-1])}</table></div>"
        "</details></div>"
    )
