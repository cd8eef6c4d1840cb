"""Panels that open above the knobs, one button each; a panel is made when it is first opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ipywidgets as W

from superoffload.widgets.parts import Guard


@dataclass(frozen=True, slots=True)
class Drawer:
    """One panel."""

    tooltip: str
    width: str
    """Of its button."""
    make: Callable[[], W.Widget]


class Drawers(W.VBox):  # type: ignore[misc]
    """The open panels, in the order of `drawers`.

    Args:
        drawers: by the text of the button.
        guard: shows what fails when a panel is made.
        opened: called with the name of a panel that has just been opened.
    """

    def __init__(self, drawers: Mapping[str, Drawer], guard: Guard, opened: Callable[[str], None]):
        self._drawers, self._opened = drawers, opened
        self.panels: dict[str, W.Widget] = {}
        """Those that were opened before, by name."""
        self.toggles: dict[str, W.ToggleButton] = {}
        for name, drawer in drawers.items():
            toggle = W.ToggleButton(
                False, description=name, tooltip=drawer.tooltip, layout=W.Layout(width=drawer.width, flex="0 0 auto")
            )
            toggle.observe(guard(lambda change, name=name: self._show(name, change["new"])), names="value")
            self.toggles[name] = toggle
        super().__init__([], layout=W.Layout(width="100%"))

    def is_open(self, name: str) -> bool:
        return bool(self.toggles[name].value)

    def _show(self, name: str, open_now: bool) -> None:
        if open_now and name not in self.panels:
            panel = self._drawers[name].make()
            panel.layout.margin, panel.layout.padding = "4px 0", "6px 8px"
            panel.layout.border = "1px solid var(--jp-border-color2, #D8DCE2)"
            self.panels[name] = panel
        self.children = [self.panels[n] for n in self._drawers if self.is_open(n) and n in self.panels]
        if open_now:
            self._opened(name)
