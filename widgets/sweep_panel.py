"""What if: a heat map of tokens/s over two quantities, simulated in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as W
import traitlets

from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.sweeps import AXES, Sweep, setting, sweep
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
Load = Callable[[Profile, Plan], str]
REST_S = 0.3
"""A sweep starts when the hand has rested so long."""


class SweepPanel(W.VBox):  # type: ignore[misc]
    """Two menus of quantities, a heat map, and the same as a table.

    Args:
        theme: asked for the colours at each drawing.
        load: takes the profile and the plan of a cell that a person chooses, and says in a word where they are now;
            without it the trait alone holds the plan.

    Trait `chosen`: the plan of the cell that was loaded last, None before.
    """

    chosen = traitlets.Instance(Plan, allow_none=True)

    def __init__(self, theme: Callable[[], Theme], load: Load | None = None):
        self._theme, self._quiet, self.load = theme, False, load
        self._profile: Profile | None = None
        self._plans: dict[str, Plan] = {}
        self._job = Background("superoffload-sweep")
        self.sweep: Sweep | None = None
        """The last one that was completed."""
        self.view: SweepView | None = None
        self.messages = Messages()
        self._guard = guard = Guard(self.messages)
        self._starts = Latest(guard(lambda _: self.run(), keep=True), REST_S)
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
        self.cell = {
            way: W.Dropdown(
                options=[("", None)], description=text, style={"description_width": "initial"},
                layout=W.Layout(width=width, margin="0 6px 0 0", display="none"),
            )
            for way, text, width in (("x", "Point across", "180px"), ("y", "up", "120px"))
        }  # fmt: skip
        for control in self.cell.values():
            control.observe(guard(lambda _: self._pointed(), keep=True), names="value")
        self.take = button("Load this point", "Its plan", guard(lambda _: self.load_point()))
        self.take.layout.display = "none"
        self.told = W.HTML(layout=W.Layout(flex="1 1 0", min_width="0"))
        self._swept: tuple[Profile, Plan] | None = None
        """What the last sweep that was completed was about."""
        self.figure: LiveFigure | None = None
        self._place = W.VBox([], layout=W.Layout(width="100%"))
        choice = W.HBox(
            [*self.cell.values(), self.take, self.told], layout=W.Layout(align_items="center", flex_flow="row wrap")
        )
        self.line, self.table = W.HTML(), W.HTML()
        row = W.HBox(
            [self.plan, self.x, self.y, *self.usual, self.progress, self.stop],
            layout=W.Layout(align_items="center", flex_flow="row wrap"),
        )
        super().__init__(
            [row, self.messages, self._place, choice, self.line, self.table], layout=W.Layout(width="100%")
        )

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
            for trace in (0, 1):  # with a number, and without
                self.figure.on_point(trace, self._guard(self._clicked))
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
        self._job.start(work, lambda found, error: self._ended(name, (profile, plan), found, error), self._progressed)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the sweep has ended: for scripts, not for a notebook."""
        self._job.wait(timeout_s)

    def draw(self) -> None:
        """Draw the last sweep again, in the present theme."""
        if self.figure is not None:
            view = self.view or empty_view("Simulating …")
            self.figure.show_spec(sweep_spec(view, self.point if self.view else None, theme=self._theme()))

    def close(self) -> None:
        """Give up a sweep that is under way and close the widgets."""
        if hasattr(self, "_job"):
            self._job.drop()
        super().close()

    def _changed(self) -> None:
        if not self._quiet:
            self.messages.clear()
            self._starts.put(now=True)

    def _take_usual(self, x: str, y: str) -> None:
        self.messages.clear()
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

    # ---- choosing a cell -----------------------------------------------------------------------------------------

    @property
    def point(self) -> tuple[int, int] | None:
        """Column and row of the chosen cell."""
        x, y = (control.value for control in self.cell.values())
        return None if x is None or y is None else (x, y)

    def load_point(self) -> None:
        """Take over the plan of the chosen cell, and with another link the machine.

        Raises:
            InputError: no cell is chosen, it has no number, or who is to take it cannot show it.
        """
        at = self.point
        if at is None or self.view is None or self.sweep is None or self._swept is None:
            raise InputError("no point is chosen", remedy="Click a cell of the heat map, or choose in the two menus")
        column, row = at
        if self.view.tokens_per_s[row][column] is None:
            raise InputError(f"this point has no number: {self.view.reasons[row][column]}", remedy="Choose another")
        values = {self.sweep.x: self.sweep.xs[column], self.sweep.y: self.sweep.ys[row]}
        profile, plan = setting(*self._swept, values)
        # What the cost model said of these fields was about the values that they had.
        changed = [f for f in Plan.knobs() if getattr(plan, f) != getattr(self._swept[1], f)]
        plan = plan.replace(reasons={k: v for k, v in plan.reasons.items() if k not in changed})
        told = "its plan is in the trait `chosen`" if self.load is None else self.load(profile, plan)
        self.chosen = plan
        self.messages.notice(f"{escape(self.point_line(at))}: {escape(told)}.")

    def point_line(self, at: tuple[int, int]) -> str:
        """A cell in words."""
        assert self.view is not None
        view, (column, row) = self.view, at
        value = view.tokens_per_s[row][column]
        number = f"{value:,.0f} tokens/s" if value is not None else view.reasons[row][column]
        return f"{view.x_title} {view.x_labels[column]}, {view.y_title} {view.y_labels[row]}: {number}"

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        at = int(points.xs[0]), int(points.ys[0])
        self._choose(at)
        if self.view is not None and self.view.tokens_per_s[at[1]][at[0]] is not None:
            self.load_point()

    def _choose(self, at: tuple[int, int]) -> None:
        self._quiet = True
        try:
            for control, value in zip(self.cell.values(), at, strict=True):
                control.value = value
        finally:
            self._quiet = False
        self._pointed()

    def _pointed(self) -> None:
        """Say what the chosen cell is."""
        if self._quiet or self.view is None or self.point is None:
            return
        column, row = self.point
        self.take.disabled = self.view.tokens_per_s[row][column] is None
        self.told.value = f'<div class="so-note" role="status">{escape(self.point_line(self.point))}</div>'
        self.draw()

    def _offer_points(self) -> None:
        """The menus of the sweep that is shown; at first they stand on its best cell."""
        assert self.view is not None
        view = self.view
        self._quiet = True
        try:
            for (way, control), title, labels in zip(
                self.cell.items(), (view.x_title, view.y_title), (view.x_labels, view.y_labels), strict=True
            ):
                control.tooltip = title
                control.options = [(label, i) for i, label in enumerate(labels)]
                control.value = (view.best or view.own)[0 if way == "x" else 1]
                control.layout.display = None
            self.take.layout.display = None
        finally:
            self._quiet = False
        self._pointed()

    def _ended(self, name: str, swept: tuple[Profile, Plan], found: Sweep | None, error: Exception | None) -> None:
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
        self.sweep, self.view, self._swept = found, sweep_view(found, name), swept
        self._offer_points()
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
