"""Writes the tuned config, a report, a trace and pictures; shows exactly how to train with the config, and does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ipywidgets as W

from superoffload.cli_running import require_torch
from superoffload.config import OptimizerConfig, TrainingConfig, TunedConfig
from superoffload.errors import InputError
from superoffload.export import chrome_trace
from superoffload.record import write_atomic
from superoffload.run_control import command_line, train_arguments
from superoffload.widgets.parts import Guard, Messages, button, escape
from superoffload.widgets.picture import Format, Painter
from superoffload.widgets.report import Shown, report_html, state_picture, timeline_picture
from superoffload.widgets.train_row import TrainRow

SCHEDULES = ("constant", "linear", "cosine")


class ExportPanel(W.VBox):  # type: ignore[misc]
    """Path, optimizer and length of the run; the buttons write files and the panel shows the command line.

    Args:
        look: what the Tuner shows with the given optimizer and training settings, none of it a draft.
        config: where the fields start.
    """

    def __init__(self, look: Callable[[OptimizerConfig, TrainingConfig], Shown], config: TunedConfig):
        self._look, self._training = look, config.training
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
            tooltip="What the run trains on: text file or folder, Hugging Face data set, or the word sample",
        )  # fmt: skip
        self.write = button("Write config", "Write the tuned config to this file", guard(lambda _: self.export()))
        self.write.button_style = "primary"
        self.painter = Painter()

        def other(text: str, tooltip: str, action: Callable[[], object]) -> W.Button:
            return button(text, tooltip, guard(lambda _: action()))

        self.report = other("Report", "A page with numbers, figures and reasons; opens offline", self.write_report)
        self.perfetto = other("Trace", "The step in Chrome's format, for ui.perfetto.dev", self.write_trace)
        self.png = other("PNG", "Pictures of the timeline and of memory", lambda: self.paint("png"))
        self.svg = other("SVG", "The same pictures as vector graphics", lambda: self.paint("svg"))
        self.lines = W.HTML()
        self.train = TrainRow(self.prepare_run, guard, self.messages)
        super().__init__(
            [
                W.HBox(
                    [self.path, self.lr, self.clip, self.steps, self.schedule], layout=W.Layout(flex_flow="row wrap")
                ),
                W.HBox(
                    [self.data, self.write, self.report, self.perfetto, self.png, self.svg],
                    layout=W.Layout(flex_flow="row wrap", align_items="center"),
                ),
                self.train,
                self.painter,
                self.messages,
                self.lines,
                self.train.place,
            ]
        )
        for field in (self.path, self.data, self.train.out):
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
        path, data = Path(self.path.value.strip() or "tuned.json").expanduser(), self.data.value.strip() or "DATA.txt"
        return command_line(train_arguments(path, data), self.train.folder)

    def snippet(self) -> str:
        """The Python lines that do the same in one's own loop."""
        path = self.path.value.strip() or "tuned.json"
        return (
            f"cfg = so.TunedConfig.load({path!r})\n"
            "opt = so.OffloadAdamW.from_config(model, cfg)   # then: loss.backward(); opt.step(); opt.zero_grad()"
        )

    def export(self) -> Path:
        """Write the tuned config whole or not at all, and say where it is."""
        path = self._target()
        self._write({path: self._look(*self.settings()).config.to_json() + "\n"})
        self._show_lines()
        return path

    def prepare_run(self) -> tuple[Path, str]:
        """Write the config of a run that could begin here; return its file and the data.

        Raises:
            SuperOffloadError: what is missing, with its remedy.
        """
        path, data, shown = self._target(), self.data.value.strip(), self._look(*self.settings())
        require_torch("training")
        from superoffload.train.ready import check_ready

        check_ready(shown.config, data, shown.trace.memory)
        self._write({path: shown.config.to_json() + "\n"})
        return path, data

    def write_report(self) -> Path:
        """Write the report beside the config's place."""
        shown = self._look(*self.settings())
        page = report_html(shown, command=self.command(), snippet=self.snippet())
        path = self._target("-report.html")
        self._write({path: page})
        return path

    def write_trace(self) -> Path:
        """Write the step as a Chrome trace."""
        shown = self._look(*self.settings())
        path = self._target("-trace.json")
        self._write({path: json.dumps(chrome_trace(shown.measured or shown.trace))})
        return path

    def paint(self, format: Format) -> None:
        """Have the browser draw the timeline and the memory, and write both when they come."""
        shown = self._look(*self.settings())
        targets = [self._target(f"-{name}.{format}") for name in ("timeline", "memory")]
        guard = Guard(self.messages)

        def done(files: Sequence[bytes]) -> None:
            self._write(dict(zip(targets, files, strict=True)))

        self.messages.notice("The browser draws …", "")
        self.painter.paint(
            [timeline_picture(shown), state_picture(shown)], format, guard(done, keep=True), self.messages.error
        )

    def _target(self, ending: str = "") -> Path:
        """The path of the config, or of a file beside it: ``tuned-report.html`` belongs to ``tuned.json``."""
        name = self.path.value.strip()
        if not name:
            raise InputError("the file has no name", expected="a path such as tuned.json")
        target = Path(name).expanduser()
        if target.is_dir():
            raise InputError(
                f"{target} is a folder", expected="a file name", remedy=f"Write to {target / 'tuned.json'}"
            )
        return target.with_name(target.stem + ending) if ending else target

    def _write(self, files: Mapping[Path, str | bytes]) -> None:
        """Write files, each whole or not at all, and say where they are."""
        told = []
        for path, content in files.items():
            existed = path.exists()
            try:
                write_atomic(path, content)
            except OSError as e:
                raise InputError(
                    f"{path} could not be written: {e.strerror or e}",
                    remedy="Choose a file in a folder that you may write to",
                ) from e
            told.append(f"{'Replaced' if existed else 'Wrote'} <b>{escape(path)}</b> ({path.stat().st_size:,} bytes).")
        self.messages.notice(" ".join(told))

    def _show_lines(self) -> None:
        self.lines.value = (
            f'Train with it from a shell<span class="so-code">{escape(self.command())}</span>'
            f'or in Python<span class="so-code">{escape(self.snippet())}</span>'
        )
