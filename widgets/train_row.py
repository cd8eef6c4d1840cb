"""Starts a training run with the plan as tuned, or looks at one that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.widgets.parts import Messages, button, escape
from superoffload.widgets.run_panel import RunPanel, refuse_taken
from superoffload.widgets.run_reader import METRICS

FOLDER = "run"


def free_folder(name: str = FOLDER) -> str:
    """`name`, or the first of name-2, name-3, ... that holds no run yet."""
    number, folder = 1, name
    while (Path(folder) / METRICS).exists():
        number += 1
        folder = f"{name}-{number}"
    return folder


class TrainRow(W.HBox):  # type: ignore[misc]
    """Folder of the run, Train and Attach; whoever shows this puts `place`, which takes the run's panel, below it.

    Args:
        prepare: checks that a run could begin, writes its config, and returns that file and the data.
        guard: shows what goes wrong.
        messages: where it is shown.
    """

    def __init__(
        self,
        prepare: Callable[[], tuple[Path, str]],
        guard: Callable[[Callable[..., Any]], Callable[..., None]],
        messages: Messages,
    ):
        self._prepare, self._messages = prepare, messages
        self.run: RunPanel | None = None
        """Of the run that was started or attached to last."""
        self.out = W.Text(
            free_folder(), description="Run folder", layout=W.Layout(width="220px", margin="0 6px 0 0"),
            style={"description_width": "68px"}, tooltip="Where the run writes its numbers and checkpoints",
        )  # fmt: skip
        self.start = button(
            "Train", "Write the config and start the run as a process of its own, which outlives the notebook",
            guard(lambda _: self.train()),
        )  # fmt: skip
        self.start.button_style = "primary"
        self.look = button(
            "Attach", "Follow the run in this folder, whoever started it", guard(lambda _: self.attach())
        )
        self.place = W.VBox([])
        super().__init__([self.out, self.start, self.look], layout=W.Layout(flex_flow="row wrap", align_items="center"))

    @property
    def folder(self) -> str:
        """Of the run."""
        return str(Path(self.out.value.strip() or FOLDER).expanduser())

    def train(self) -> None:
        """Start the run whose command line is shown."""
        refuse_taken(Path(self.folder))
        config, data = self._prepare()
        self._show(RunPanel.start(config, data, self.folder))
        self._messages.notice(
            f"Wrote <b>{escape(config)}</b>, and started the run in <b>{escape(self.folder)}</b>. It is a process of "
            "its own, which goes on when this notebook is closed; Attach finds it again."
        )

    def attach(self) -> None:
        """Follow a run that was started elsewhere or before."""
        if not Path(self.folder).is_dir():
            raise InputError(f"there is no folder {self.folder}", expected="the folder that a run writes to")
        self._show(RunPanel(self.folder))

    def _show(self, panel: RunPanel) -> None:
        if self.run is not None:
            self.run.close()
        self.run = panel
        self.place.children = [panel]
