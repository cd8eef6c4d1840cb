"""Follows a training run by reading its folder: it needs neither the process nor the kernel that started it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go

from superoffload.widgets import theme as themes
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.figures import loss_figure, loss_spec
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import Guard, Messages, button, escape, style_sheet
from superoffload.widgets.run_views import RunView, read_run

REFRESH_S = 2.0
FINISHED = ("finished", "interrupted", "failed")


def plot_loss(run: str | os.PathLike[str] | RunView, *, theme: themes.Theme = themes.PAPER) -> go.Figure:
    """Draw the loss and tokens per second of a run folder.

    Raises:
        InputError: the folder is not a run folder.
    """
    return loss_figure(run if isinstance(run, RunView) else read_run(run), theme=theme)


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
        self._stamp: tuple[Any, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self.figure: LiveFigure | None = None
        self.head = W.HTML()
        self.follow = W.ToggleButton(
            follow,
            description="Follow",
            tooltip="Read the folder again every two seconds",
            layout=W.Layout(width="76px"),
        )
        self.follow.observe(lambda _: self._keep_following(), names="value")
        row = W.HBox(
            [self.head, self.follow, button("Refresh", "Read the folder now", self._guard(lambda _: self.refresh()))],
            layout=W.Layout(justify_content="space-between", align_items="center"),
        )
        self.head.layout.flex = "1 1 auto"
        self._body = W.VBox([])
        super().__init__([style_sheet(), self._bridge, row, self.messages, self._body], layout=W.Layout(width="100%"))
        self.add_class("so-panel")
        self.add_class("so-run")
        self._guard(self.refresh)()
        self._keep_following()

    def refresh(self) -> RunView | None:
        """Read the folder again. Raises InputError where there is no run."""
        self.view = read_run(self.folder)
        self._draw()
        return self.view

    def _draw(self) -> None:
        if self.view is None:
            return
        self.head.value = head_html(self.view)
        spec = loss_spec(self.view, theme=themes.DARK if self._bridge.theme == "dark" else themes.LIGHT)
        if self.figure is None:
            self.figure = LiveFigure(spec)
            self._body.children = [self.figure]
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
            stamp = _stamp(self.folder)
            if stamp != self._stamp:
                self._stamp = stamp
                self._guard(self.refresh)()
            if self.view is not None and self.view.state in FINISHED:
                self.follow.value = False

    def close(self) -> None:
        """Stop following and close the widgets."""
        if self._task is not None:
            self._task.cancel()
        super().close()


def head_html(view: RunView) -> str:
    """State of the run in one line: where it is, how fast, what the verdicts were."""

    def last(values: tuple[float, ...]) -> float:
        return next((v for v in reversed(values) if math.isfinite(v)), math.nan)

    parts = [f"<b>{escape(view.folder)}</b>", f"{escape(view.state)}"]
    goal = view.status.get("steps") or view.status.get("total_steps")
    if view.steps:
        parts.append(f"step {view.steps[-1]}" + (f" of {escape(goal)}" if goal else ""))
        parts.append(f"loss {last(view.loss):.4f} (first {view.loss[0]:.4f})")
        parts.append(f"{last(view.tokens_per_s):,.0f} tokens/s measured")
    if view.verdict_counts:
        parts.append(", ".join(f"{n} {escape(v)}" for v, n in view.verdict_counts))
    error = view.status.get("error") or view.status.get("message")
    if view.state == "failed" and error:
        parts.append(f'<span class="so-worse">{escape(error)}</span>')
    updated = view.status.get("updated") or view.status.get("time")
    if isinstance(updated, int | float) and view.state == "running" and time.time() - updated > 60:
        parts.append(f'<span class="so-worse">silent for {time.time() - updated:.0f} s</span>')
    return " · ".join(parts)


def _stamp(folder: str | os.PathLike[str]) -> tuple[Any, ...]:
    out: list[Any] = []
    for name in ("metrics.jsonl", "status.json"):
        try:
            info = os.stat(os.path.join(folder, name))
            out += [info.st_size, info.st_mtime_ns]
        except OSError:
            out += [0, 0]
    return tuple(out)
