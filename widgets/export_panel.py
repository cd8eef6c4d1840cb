"""Writes the tuned config and shows exactly how to train with it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import ipywidgets as W

from superoffload.config import OptimizerConfig, TrainingConfig, TunedConfig
from superoffload.errors import InputError
from superoffload.widgets.parts import Guard, Messages, button, escape

SCHEDULES = ("constant", "linear", "cosine")


class ExportPanel(W.VBox):  # type: ignore[misc]
    """Path, optimizer and length of the run; the button writes the file and shows the command line.

    Args:
        make_config: builds the config of the present plan with the given optimizer and training settings.
        config: where the fields start.
    """

    def __init__(self, make_config: Callable[[OptimizerConfig, TrainingConfig], TunedConfig], config: TunedConfig):
        self._make, self._training = make_config, config.training
        self._optimizer = config.optimizer
        self.messages = Messages()
        guard = Guard(self.messages)
        style = {"description_width": "68px"}

        def box(width: str) -> W.Layout:
            return W.Layout(width=width, margin="0 6px 0 0")

        self.path = W.Text("tuned.json", description="File", layout=box("220px"), style={"description_width": "30px"})
        self.lr = W.FloatText(
            config.optimizer.lr, description="Learn. rate", layout=box("160px"), style=style, step=1e-6
        )
        self.clip = W.FloatText(
            config.optimizer.max_grad_norm or 0.0, description="Clip norm", layout=box("140px"), style=style, step=0.1,
            tooltip="Gradients are clipped to this global norm inside the optimizer; 0 does not clip",
        )  # fmt: skip
        self.steps = W.IntText(
            config.training.steps, description="Steps", layout=box("120px"), style={"description_width": "38px"}
        )
        self.schedule = W.Dropdown(
            options=SCHEDULES, value=config.training.schedule, description="Schedule", layout=box("160px"), style=style
        )
        self.data = W.Text(
            "", placeholder="DATA.txt", description="Data", layout=box("220px"), style={"description_width": "30px"},
            tooltip="Text file or Hugging Face dataset of the run; only used in the command line shown here",
        )  # fmt: skip
        self.write = button("Write config", "Write the tuned config to this file", guard(lambda _: self.export()))
        self.write.button_style = "primary"
        self.lines = W.HTML()
        super().__init__(
            [
                W.HBox(
                    [self.path, self.lr, self.clip, self.steps, self.schedule], layout=W.Layout(flex_flow="row wrap")
                ),
                W.HBox([self.data, self.write], layout=W.Layout(flex_flow="row wrap", align_items="center")),
                self.messages,
                self.lines,
            ]
        )
        for field in (self.path, self.data):
            field.observe(lambda _: self._show_lines(), names="value")
        self._show_lines()

    def settings(self) -> tuple[OptimizerConfig, TrainingConfig]:
        """Optimizer and training settings as the fields say. Raises InputError for a value out of range."""
        optimizer = self._optimizer.replace(lr=self.lr.value, max_grad_norm=self.clip.value or None)
        return optimizer, self._training.replace(steps=self.steps.value, schedule=self.schedule.value)

    def adopt(self, config: TunedConfig) -> None:
        """Show the settings of another config."""
        self._optimizer, self._training = config.optimizer, config.training
        self.lr.value, self.clip.value = config.optimizer.lr, config.optimizer.max_grad_norm or 0.0
        self.steps.value, self.schedule.value = config.training.steps, config.training.schedule

    def command(self) -> str:
        """The command line that trains with the exported file."""
        path, data = self.path.value.strip() or "tuned.json", self.data.value.strip() or "DATA.txt"
        return f"superoffload train --config {shlex.quote(path)} --data {shlex.quote(data)} --out run/"

    def snippet(self) -> str:
        """The Python lines that do the same in one's own loop."""
        path = self.path.value.strip() or "tuned.json"
        return (
            f"cfg = so.TunedConfig.load({path!r})\n"
            "opt = so.OffloadAdamW.from_config(model, cfg)   # then: loss.backward(); opt.step(); opt.zero_grad()"
        )

    def export(self) -> Path:
        """Write the file whole or not at all, and say where it is."""
        name = self.path.value.strip()
        if not name:
            raise InputError("the file has no name", expected="a path such as tuned.json")
        target = Path(name).expanduser()
        if target.is_dir():
            raise InputError(
                f"{target} is a folder", expected="a file name", remedy=f"Write to {target / 'tuned.json'}"
            )
        existed = target.exists()
        try:
            config = self._make(*self.settings())
            path = config.save(target)
        except OSError as e:
            raise InputError(
                f"{target} could not be written: {e.strerror or e}",
                remedy="Choose a file in a folder that you may write to",
            ) from e
        text = f"{'Replaced' if existed else 'Wrote'} <b>{escape(path)}</b> ({path.stat().st_size:,} bytes)."
        self.messages.notice(text)
        self._show_lines()
        return path

    def _show_lines(self) -> None:
        self.lines.value = (
            f'Train with it from a shell<span class="so-code">{escape(self.command())}</span>'
            f'or in Python<span class="so-code">{escape(self.snippet())}</span>'
        )
