"""Starts, follows and steers a training run through its folder: it needs neither the process nor the kernel that
started it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.run_control import ENDED, TRAIN_LOG, Request, ask, is_going_on, start, train_arguments
from superoffload.widgets import theme as themes
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Messages, button, escape, style_sheet
from superoffload.widgets.run_figures import run_spec
from superoffload.widgets.run_html import head_html, how_html, numbers_html, rollbacks_html
from superoffload.widgets.run_reader import METRICS, RunReader, read_status, stamp
from superoffload.widgets.run_views import RunView

REFRESH_S = 2.0


class RunPanel(W.VBox):  # type: ignore[misc]
    """Attach to any run folder, running or finished, also after a kernel restart or from another notebook.

    Args:
        folder: what ``superoffload train --out`` wrote to. It may appear later: the panel says so and waits.
        follow: read it again every two seconds until the run ends.
    """

    def __init__(self, folder: str | os.PathLike[str], *, follow: bool = True):
        self.folder = folder
        self.view: RunView | None = None
        self.messages = Messages()
        self._guard = Guard(self.messages)
        self._bridge = ThemeBridge()
        self._bridge.observe(lambda _: self._draw(), names="theme")
        self._reader = RunReader(folder)
        self._stamp: tuple[int, ...] = ()
        self._asked: tuple[Request, Any] | None = None
        """What was asked and is not answered, with the checkpoint that there was then."""
        self._failed = False
        """Whether the last look at the folder ended in the error that is shown."""
        self._process: subprocess.Popen[bytes] | None = None
        """The run's process where this panel started it."""
        self._began = 0.0
        """When that was, on the clock of `time.time`."""
        self._task: asyncio.Task[None] | None = None
        self.figure: LiveFigure | None = None
        self.head, self.numbers, self.how, self.rollbacks = W.HTML(), W.HTML(), W.HTML(), W.HTML()
        self.follow = W.ToggleButton(
            follow,
            description="Follow",
            tooltip="Read the folder again every two seconds",
            layout=W.Layout(width="76px"),
        )
        self.follow.observe(lambda _: self._keep_following(), names="value")
        said: tuple[tuple[Request, str, str], ...] = (
            ("pause", "Pause", "Hold the run after the step in progress; it keeps its memory"),
            ("go on", "Go on", "Let a paused run go on"),
            ("checkpoint", "Checkpoint", "Save a checkpoint after the step in progress"),
            ("stop", "Stop", "End the run after the step in progress, with a checkpoint to resume from"),
        )
        self.requests = {
            request: button(title, tip, self._guard(lambda _, r=request: self.ask(r))) for request, title, tip in said
        }
        again = button("Refresh", "Read the folder now", lambda _: self._look())
        steering = W.HBox(list(self.requests.values()))
        row = W.HBox(
            [steering, W.HBox([self.follow, again])],
            layout=W.Layout(justify_content="space-between", flex_flow="row wrap"),
        )
        self._body = W.VBox([])
        super().__init__(
            [style_sheet(), self._bridge, self.head, row, self.messages, self._body], layout=W.Layout(width="100%")
        )
        self.add_class("so-panel")
        self.add_class("so-run")
        self._look()
        self._keep_following()

    @classmethod
    def start(
        cls,
        config: str | os.PathLike[str],
        data: str | os.PathLike[str],
        folder: str | os.PathLike[str] = "run",
        *,
        steps: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> RunPanel:
        """Start `superoffload train` as a process of its own and follow it. It goes on when the notebook is closed or
        its kernel ends; `RunPanel(folder)` finds it again.

        Args:
            config, data, steps, resume: as on the command line.
            folder: of the run; what the process prints goes to ``train.log`` in it.

        Raises:
            InputError: the folder holds a run that goes on, or one that is over and `resume` does not name it.
        """
        path = Path(folder)
        refuse_taken(path, resume is not None)
        arguments = train_arguments(config, data, steps=steps, resume=resume)
        panel = cls(path, follow=False)
        panel._began, panel._process = time.time(), start(arguments, path)
        panel._say(f"Started as process {panel._process.pid}; loading the model.")
        panel.follow.value = True
        return panel

    def ask(self, request: Request) -> None:
        """Ask the run to pause, go on, save a checkpoint or stop; it answers after the step in progress.

        Raises:
            InputError: there is no run, or it has ended.
        """
        ask(self.folder, request)
        self._asked = request, read_status(self.folder).get("checkpoint")
        self._say(f"Asked the run to {escape(request if request != 'checkpoint' else 'save a checkpoint')}: "
                  "it answers after the step in progress.")  # fmt: skip

    def refresh(self) -> RunView | None:
        """Read the folder again. Raises InputError where there is no run, with what its process said if it ended."""
        if (view := self._read()) is None:
            return None  # it is still loading
        self.view = view
        self._draw()
        self._tell_answer()
        if self.view.state not in ENDED and not is_going_on(self.view.status):
            raise InputError(
                f"the run's process is gone, and the last that it said is {self.view.state}",
                remedy=f"Continue from its last checkpoint: superoffload train --resume {self.folder} ...",
            )
        return self.view

    def _look(self) -> None:
        """Read the folder again without being asked to: an error stays until a look goes well, a message stays."""
        try:
            self.refresh()
        except Exception as e:
            self.messages.error(e)
            self._failed = True
        else:
            if self._failed:
                self.messages.clear()
            self._failed = False

    def _say(self, body_html: str) -> None:
        self.messages.notice(body_html)
        self._failed = False

    def _read(self) -> RunView | None:
        """What the folder says of this panel's run, and not of one before it; None while its process is loading."""
        if self._process is None:
            return self._reader.read()
        code = self._process.poll()
        try:
            view = self._reader.read()
            if float(view.status.get("started", 0.0)) >= self._began - 1.0:
                return view
        except InputError:
            pass
        if code is None:
            return None
        said = _last_lines(Path(self.folder) / TRAIN_LOG)
        raise InputError(f"the run ended with exit code {code} before its first step: {said}")

    def _tell_answer(self) -> None:
        """Say what the run did with the last request, once it has."""
        if self._asked is None or self.view is None:
            return
        (request, checkpoint), status = self._asked, self.view.status
        state, saved = self.view.state, status.get("checkpoint")
        step = f"step {self.view.steps[-1]:,}" if self.view.steps else "the first step"
        resume = f"<code>superoffload train --resume {escape(self.folder)} ...</code>"
        answers: dict[Request, tuple[bool, str]] = {
            "pause": (state == "paused", f"Paused after {step}. It keeps its memory."),
            "go on": (state == "running", "It goes on."),
            "checkpoint": (saved != checkpoint, f"Saved {escape(saved)}."),
            "stop": (state in ENDED, f"Stopped after {step}. Continue it with {resume}"),
        }
        done, text = answers[request]
        if done or state in ENDED:
            self._asked = None
            self._say(text if done else "It ended before it could answer.")

    def _draw(self) -> None:
        if self.view is None:
            return
        self.head.value = head_html(self.view)
        state = self.view.state
        going = is_going_on(self.view.status)
        usable = {"pause": going and state != "paused", "go on": state == "paused", "checkpoint": going, "stop": going}
        for request, widget in self.requests.items():
            widget.disabled = not usable[request]
        self.numbers.value, self.how.value = numbers_html(self.view), how_html(self.view)
        self.rollbacks.value = rollbacks_html(self.view)
        spec = run_spec(self.view, theme=themes.DARK if self._bridge.theme == "dark" else themes.LIGHT)
        if self.figure is None:
            self.figure = LiveFigure(spec)
            self._body.children = [self.numbers, self.figure, self.how, self.rollbacks]
        else:
            self.figure.show_spec(spec)

    def _keep_following(self) -> None:
        if not self.follow.value or (self._task is not None and not self._task.done()):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # a script or test: refresh() is there
        self._task = loop.create_task(self._follow())

    async def _follow(self) -> None:
        while self.follow.value:
            await asyncio.sleep(REFRESH_S)
            # A process that ended without a word has written nothing.
            over = self.view is not None and not is_going_on(self.view.status)
            ended = self._process is not None and self._process.poll() is not None
            if (now := stamp(self.folder)) != self._stamp or over or ended:
                self._stamp = now
                self._look()
            if ended or (self.view is not None and not is_going_on(self.view.status)):
                self.follow.value = False

    def close(self) -> None:
        """Stop following and close the widgets."""
        if self._task is not None:
            self._task.cancel()
        super().close()


def refuse_taken(folder: Path, resume: bool = False) -> None:
    """Raise InputError where the folder holds a run that goes on, or one that is over and is not resumed."""
    if not (folder / METRICS).exists():
        return
    status = read_status(folder)
    if is_going_on(status):
        raise InputError(
            f"{folder} holds a run that is {status.get('state')}",
            remedy=f'Follow it with RunPanel("{folder}"), or stop it',
        )
    if not resume:
        raise InputError(
            f"{folder} already holds a run", remedy=f'Give another folder, or continue it with resume="{folder}"'
        )


def _last_lines(path: Path, count: int = 3) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it said nothing"
    return " / ".join(line.strip() for line in lines if line.strip() and "\r" not in line)[-600:] or "it said nothing"
