"""The machine that is looked at: chosen from a menu, its figures changed by hand to see what if."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as W

from superoffload import hardware as hw_module
from superoffload.hardware import Hardware
from superoffload.what_if import EDITED, FIGURES, edited
from superoffload.widgets.parts import Guard, Messages, button, escape

SOURCES = {"preset": "published or assumed", "probed": "measured"}


class MachineMenu(W.Dropdown):  # type: ignore[misc]
    """The machines by name: the profile's own first, then the presets, then one whose figures were changed.

    Args:
        own: the profile's machine.
        chosen: called with the machine that a person chooses.
    """

    def __init__(self, own: Hardware, chosen: Callable[[Hardware], None]):
        self._known = hardware_choices(own)
        super().__init__(
            options=list(self._known), layout=W.Layout(width="118px"), tooltip="Machine: simulate on another one"
        )
        self.observe(lambda change: chosen(self._known[change["new"]]()), names="value")

    def show(self, hardware: Hardware) -> None:
        """Set the menu to this machine."""
        title = self._title(hardware.name)
        if title is None or hardware.name.endswith(EDITED):  # of an edited one the newest figures count
            title = hardware.name if hardware.name.endswith(EDITED) else f"{hardware.name} ({hardware.source})"
            self._known[title] = lambda: hardware
            self._offer()
        if self.value != title:
            self.value = title

    def own_is(self, hardware: Hardware) -> None:
        """The profile's own machine is another record of its name now."""
        self._known |= hardware_choices(hardware)
        self._offer()

    def named(self, name: str) -> Hardware | None:
        """The machine of this name, where there is one."""
        title = self._title(name)
        return self._known[title]() if title else None

    def _title(self, name: str) -> str | None:
        return next((t for t in self._known if t == name or t.startswith(f"{name} (")), None)

    def _offer(self) -> None:
        if tuple(self.options) != tuple(self._known):
            value = self.value
            with self.hold_trait_notifications():  # options alone would choose the first of them
                self.options = list(self._known)
                self.value = value


class MachinePanel(W.VBox):  # type: ignore[misc]
    """One number for each figure; a change is planned and simulated at once.

    Args:
        present: the machine that is shown now.
        take: called with a machine that shall be shown.
        named: the unchanged machine of a name, where it is known.
    """

    def __init__(
        self,
        present: Callable[[], Hardware],
        take: Callable[[Hardware], None],
        named: Callable[[str], Hardware | None],
    ):
        self._present, self._take, self._named, self._quiet = present, take, named, False
        self.messages = Messages()
        guard = Guard(self.messages)
        self.numbers: dict[str, W.FloatText] = {}
        for name, figure in FIGURES.items():
            title = f"{figure.title}, {figure.unit}" if figure.unit else figure.title
            field = W.FloatText(
                description=title, continuous_update=False, tooltip=f"{title}: {figure.help}", step=1,
                layout=W.Layout(width="246px", margin="0 8px 0 0"), style={"description_width": "148px"},
            )  # fmt: skip
            field.observe(guard(lambda change, n=name: self._edited(n, change["new"])), names="value")
            self.numbers[name] = field
        self.reset = button(
            "Undo all changes", "The machine as it is described, or was measured", guard(lambda _: self._reset())
        )
        self.told = W.HTML()
        wrap = W.Layout(flex_flow="row wrap", align_items="center")
        super().__init__([W.HBox([*self.numbers.values(), self.reset], layout=wrap), self.messages, self.told])
        self.follow()

    @property
    def base(self) -> Hardware:
        """The present machine before anything of it was changed; itself where that is not known."""
        now = self._present()
        return (self._named(now.name.removesuffix(EDITED)) if now.name.endswith(EDITED) else None) or now

    def follow(self) -> None:
        """Show the figures of the machine that is shown now."""
        now, base = self._present(), self.base
        self._quiet = True
        try:
            for name, field in self.numbers.items():
                value = round(FIGURES[name].read(now), 3)
                if field.value != value:
                    field.value = value
        finally:
            self._quiet = False
        told = [
            f"{f.title} {f.read(base):,.6g} → {f.read(now):,.6g} {f.unit}".rstrip()
            for f in FIGURES.values()
            if f.read(now) != f.read(base)
        ]
        self.reset.disabled = not told
        if told:
            text = f"{'; '.join(told)}. Everything is modelled for {now.name}."
        else:
            text = f"The figures of {now.name} are {SOURCES[now.source]}. Change one and the plan follows."
        if self.told.value != (note := f'<div class="so-note">{escape(text)}</div>'):
            self.told.value = note

    def _edited(self, name: str, value: float) -> None:
        if self._quiet:
            return
        now, base = self._present(), self.base
        changed = {n: f.read(now) for n, f in FIGURES.items() if f.read(now) != f.read(base)}
        try:
            self._take(edited(base, **{**changed, name: value}))
        finally:
            self.follow()  # after a refused value the field goes back to what is true

    def _reset(self) -> None:
        self._take(self.base)
        self.follow()


def hardware_choices(own: Hardware) -> dict[str, Callable[[], Hardware]]:
    """Machines of the picker by title: the profile's own first, then the presets."""
    choices: dict[str, Callable[[], Hardware]] = {}
    names = hw_module.preset_names()
    if own.name not in names:
        choices[f"{own.name} ({own.source})"] = lambda: own
    for name in names:
        choices[name] = (lambda: own) if name == own.name else (lambda n=name: hw_module.preset(n))  # type: ignore[misc]
    return choices
