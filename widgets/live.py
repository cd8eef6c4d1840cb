"""Plotly figures that are updated in place: one small message per change, and the current data after a reopened tab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets as W
import numpy as np
import plotly
import plotly.graph_objects as go
import traitlets

from superoffload.widgets.figures import Spec


class FigureCode(W.Widget):  # type: ignore[misc]
    """Plotly's JavaScript for the notebook, some 5 MB. Every FigureWidget carries it in its own state; here all figures
    of a kernel share one."""

    code = traitlets.Unicode().tag(sync=True)
    _shared: FigureCode | None = None

    @classmethod
    def shared(cls) -> FigureCode:
        """The one of this kernel; a new one where somebody has closed it."""
        if cls._shared is None or cls._shared.comm is None:
            cls._shared = cls(code=str(go.FigureWidget._esm))
        return cls._shared


class LiveFigure(go.FigureWidget):  # type: ignore[misc]
    """A FigureWidget that turns into another picture of the same traces by sending only what differs."""

    _esm = Path(__file__).with_name("live.js")
    _code_source = traitlets.Instance(FigureCode).tag(sync=True, **W.widget_serialization)
    """A reference, so that an export of this figure takes its code along."""
    _code_version = traitlets.Unicode(plotly.__version__).tag(sync=True)

    @traitlets.default("_code_source")
    def _find_code(self) -> FigureCode:
        return FigureCode.shared()

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self._config = {"displayModeBar": False, "displaylogo": False, "responsive": True}
        self._shown = spec

    def on_point(self, trace: int, callback: Callable[..., None]) -> None:
        """Call `callback` when a point of this trace is clicked. plotly itself calls the handlers of every trace at
        every click, most of them without a point, and those would wipe away what the right one has said."""
        self.data[trace].on_click(lambda source, points, state: points.point_inds and callback(source, points, state))

    def show_spec(self, spec: Spec) -> None:
        """Become `spec`, which has the same traces in the same order, in one message.

        Differences are taken against the last picture shown and not against the present state, so that a person's
        zoom survives an update that does not touch the axis.
        """
        old = self._shown
        if len(spec["data"]) != len(old["data"]):
            raise AssertionError("a live figure keeps its number of traces")
        with self.batch_update():
            for trace, before, after in zip(self.data, old["data"], spec["data"], strict=True):
                changes = _changes(before, after)
                if changes:
                    trace.update(changes, overwrite=True)
            changes = _changes(old["layout"], spec["layout"])
            if changes:
                self.layout.update(changes, overwrite=True)
        self._shown = spec

    def get_state(self, *args: Any, **kwargs: Any) -> Any:
        """State for a newly opened view: plotly would send the data of the first display for ever."""
        if hasattr(self, "_shown"):
            # Written behind the traits' back: an assignment would send the whole figure to the open views.
            self._trait_values["_widget_data"] = [dict(t) for t in self._data]
            self._trait_values["_widget_layout"] = dict(self._layout)
        return super().get_state(*args, **kwargs)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    keys = (*after, *(k for k in before if k not in after))
    return {k: after.get(k) for k in keys if not same(before.get(k), after.get(k))}


def same(a: Any, b: Any) -> bool:
    """Equality of plotly property values, arrays compared by value and dtype."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
