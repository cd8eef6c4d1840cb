"""Plans side by side: a table of what differs, their timelines on one axis, and what-if sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as W

from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.profile_scaling import retarget
from superoffload.profiler import Profile
from superoffload.tracing import Trace
from superoffload.widgets import compare_views as cv
from superoffload.widgets import theme as themes
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.compare_figures import compare_spec, drawn
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Messages, escape, legend_html, style_sheet
from superoffload.widgets.sweep_panel import SweepPanel

PAGES = ("Side by side", "What if")


class Compare(W.VBox):  # type: ignore[misc]
    """Look at two to six plans beside each other.

    Args:
        plans: plans, or traces of them (a measured one, say), as a list or by name. The others are compared with the
            first.
        profile: measured or estimated.
        hardware: another machine than the profile's, a record or a preset name.

    `traces` holds what is shown, by name; `sweeps.sweep` the last what-if sweep, and its trait `sweeps.chosen` the plan
    of the cell that was loaded last.

    Raises:
        InputError: fewer than two plans, more than six, or one that does not belong to the profile.
    """

    def __init__(
        self,
        plans: Sequence[Plan | Trace] | Mapping[str, Plan | Trace],
        profile: Profile,
        hardware: Hardware | str | None = None,
    ):
        profile = profile if hardware is None else retarget(profile, hardware)
        self._bridge = ThemeBridge()
        self._build(style_sheet(), self._bridge)
        self._bridge.observe(self._guard(lambda _: self.draw(), keep=True), names="theme")
        self.add_class("so-panel")
        self.show(plans, profile)

    @classmethod
    def inside(cls, bridge: ThemeBridge) -> Compare:
        """An empty one for a panel that has a style sheet and follows the theme with `bridge`; call `show`."""
        compare = cls.__new__(cls)
        compare._bridge = bridge
        compare._build()
        return compare

    def _build(self, *before: W.Widget) -> None:
        self.traces: dict[str, Trace] = {}
        self.profile: Profile | None = None
        self.messages = Messages()
        self._guard = Guard(self.messages)
        self.page = W.ToggleButtons(
            options=PAGES, tooltips=["Table of differences and timelines", "Heat maps of tokens/s"],
            style={"button_width": "auto"},
        )  # fmt: skip
        self.page.observe(self._guard(lambda _: self._turn()), names="value")
        self.head, self.table, self.legend = W.HTML(), W.HTML(), W.HTML()
        self.timeline: LiveFigure | None = None
        self.sweeps = SweepPanel(self._theme)
        self._side = W.VBox([self.table], layout=W.Layout(width="100%"))
        self._body = W.VBox([self._side], layout=W.Layout(width="100%"))
        top = W.HBox([self.page, self.head], layout=W.Layout(align_items="center", width="100%"))
        super().__init__([*before, top, self.messages, self._body], layout=W.Layout(width="100%"))
        self.add_class("so-compare")

    def show(self, plans: Sequence[Plan | Trace] | Mapping[str, Plan | Trace], profile: Profile | None = None) -> None:
        """Compare other plans, of the same profile where none is given.

        Raises:
            InputError: as at the beginning; what was shown stays.
        """
        profile = profile if profile is not None else self.profile
        assert profile is not None
        self.traces, self.profile = cv.traces_of(cv.named(plans), profile), profile
        self.draw()
        if self.page.value == PAGES[1]:
            self._sweep()

    @property
    def comparison(self) -> cv.Comparison:
        """The table as a record."""
        return cv.comparison(self.traces)

    def draw(self) -> None:
        """Draw everything in the present theme."""
        assert self.profile is not None
        table = self.comparison
        self.head.value = (
            f'<div class="so-note"><b>{escape(self.profile.model)}</b> {escape(vm.size_line(self.profile))}</div>'
        )
        self.table.value = comparison_html(table)
        spec = compare_spec(self.traces, theme=self._theme())
        if self.timeline is None:
            self.timeline = LiveFigure(spec)
            self._side.children = [self.table, self.timeline, self.legend]
        else:
            self.timeline.show_spec(spec)
        shown = [t for _, t in drawn(self.traces)]
        kinds = {e.kind for t in shown for e in t.events}
        self.legend.value = legend_html(
            (k for k in tv.KIND_TITLES if k in kinds), any(t.stalls for t in shown),
            "In each lane from the top: the letters at the right; the stroke in the GPU's lane ends a step",
        )  # fmt: skip
        self.sweeps.draw()

    def _theme(self) -> themes.Theme:
        return themes.DARK if self._bridge.theme == "dark" else themes.LIGHT

    def _turn(self) -> None:
        """Show the chosen page; a sweep begins when its page is first seen."""
        what_if = self.page.value == PAGES[1]
        self._body.children = [self.sweeps if what_if else self._side]
        if what_if:
            self._sweep()

    def _sweep(self) -> None:
        if self.profile is not None:
            self.sweeps.show(self.profile, {name: t.plan for name, t in self.traces.items()})

    def close(self) -> None:
        """Give up a sweep that is under way and close the widgets."""
        if hasattr(self, "sweeps"):  # ipywidgets closes what was never built, too
            self.sweeps.close()
        super().close()


def comparison_html(table: cv.Comparison) -> str:
    """The table of differences."""
    head = "".join(
        f'<th scope="col"><span class="so-letter">{c.letter}</span> {escape(c.name)}<br>'
        f"<span>{escape(c.origin)}</span></th>"
        for c in table.columns
    )

    def row(r: cv.Row) -> str:
        cells = "".join(
            f"<td{f' title={chr(34)}{escape(c.help)}{chr(34)} class=so-why-not' if c.help else ''}>"
            f"{escape(c.text)}" + (f' <span class="d so-{c.verdict}">{escape(c.delta)}</span>' if c.delta else "")
            + "</td>"
            for c in r.cells
        )  # fmt: skip
        return f'<tr><th scope="row">{escape(r.title)}</th>{cells}</tr>'

    body = "".join(map(row, table.headline))
    span = f'scope="colgroup" colspan="{len(table.columns) + 1}"'
    if table.fields:
        body += f'<tr class="so-part"><th {span}>Fields that differ</th></tr>'
        body += "".join(map(row, table.fields))
    else:
        body += f'<tr class="so-part"><th {span}>No field of the plans differs</th></tr>'
    lacking = "".join(
        f"<div><b>{c.letter} does not fit:</b> {escape(c.lacks)}.</div>" for c in table.columns if c.lacks
    )
    first = table.columns[0]
    return (
        f'<div class="so-scroll"><table class="so-table"><caption>Differences are to {first.letter}, '
        f"{escape(first.name)}</caption><tr><td></td>{head}</tr>{body}</table></div>"
        + (f'<div class="so-note so-worse">{lacking}</div>' if lacking else "")
    )
