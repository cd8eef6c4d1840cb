"""Figures as PNG or SVG: the browser that shows the notebook draws them, so that no other one need be installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anywidget
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from superoffload.errors import SuperOffloadError
from superoffload.widgets.figures import Spec

Format = Literal["png", "svg"]
WIDTH, PNG_SCALE = 1100, 2
"""Pixels of a figure's width, and of a PNG's for each of them."""

Done = Callable[[Sequence[bytes]], None]
Failed = Callable[[Exception], None]


class Painter(anywidget.AnyWidget):
    """Takes no room. Ask it for pictures while it is displayed.

    A page may be open twice, and one that was closed answers nothing: the first view that says it is there draws.
    Plotly's code, 5 MB, is sent to a page once, when it first draws, and is in no saved notebook.
    """

    _esm = Path(__file__).with_name("picture.js")

    def __init__(self) -> None:
        super().__init__()
        self.layout.height = self.layout.margin = "0"
        self._asked = 0
        self._waiting: dict[int, tuple[Sequence[Spec], Format, Done, Failed]] = {}
        self._drawing: dict[int, tuple[Done, Failed]] = {}
        self.on_msg(self._heard)

    def paint(self, specs: Sequence[Spec], format: Format, done: Done, failed: Failed) -> None:
        """Draw figures.

        Args:
            specs: each with its height in its layout.
            done: called with one file's content for each figure.
            failed: called with what went wrong.
        """
        self._asked += 1
        self._waiting = {self._asked: (specs, format, done, failed)}  # the newest request is the one that counts
        self.send({"kind": "ask", "id": self._asked})

    def _heard(self, _: Any, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        number = message.get("id", 0)
        if message.get("kind") == "here" and number in self._waiting:
            specs, format, done, failed = self._waiting.pop(number)
            self._drawing[number] = done, failed
            figures = json.loads(json.dumps(specs, cls=PlotlyJSONEncoder))
            code = [] if message["has_code"] else [get_plotlyjs().encode()]
            scale = PNG_SCALE if format == "png" else 1
            self.send({"kind": "draw", "id": number, "figures": figures, "format": format, "width": WIDTH,
                       "scale": scale}, code)  # fmt: skip
        elif message.get("kind") in ("drawn", "failed") and number in self._drawing:
            done, failed = self._drawing.pop(number)
            if message["kind"] == "drawn":
                done([bytes(b) for b in buffers])
            else:
                what = message.get("what", "")
                remedy = "Export the report instead: its figures have a button for a picture"
                failed(SuperOffloadError(f"the browser could not draw: {what}", remedy=remedy))
