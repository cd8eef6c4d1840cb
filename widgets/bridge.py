"""Own JavaScript: reports the notebook's theme, gives slider handles an accessible name and menus their keys, and lets
figures fit their place."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets


class ThemeBridge(anywidget.AnyWidget):
    """Takes no room. `theme` follows the notebook; put it inside a container with the class ``so-panel``."""

    _esm = Path(__file__).with_name("bridge.js")
    theme = traitlets.Unicode("light").tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self.layout.height = "0px"
        self.layout.margin = "0"
