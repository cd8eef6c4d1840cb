"""Dashboards for Jupyter: tune a plan, look at the two processors, follow a run.

from superoffload.widgets import Tuner, Compare, Autotune, RunPanel
from superoffload.widgets import plot_timeline, plot_measured, plot_memory, plot_loss, plot_run, plot_profile
"""

from __future__ import annotations

from superoffload.errors import MissingDependency

try:
    import anywidget  # noqa: F401
    import ipywidgets  # noqa: F401
    import plotly  # noqa: F401
except ModuleNotFoundError as e:
    raise MissingDependency(
        f'superoffload.widgets needs "{e.name}", which is not installed',
        remedy="Install it: pip install 'superoffload[lab]'",
    ) from e

from superoffload.widgets.autotune import Autotune
from superoffload.widgets.compare import Compare
from superoffload.widgets.figures import plot_memory
from superoffload.widgets.measured_view import plot_measured
from superoffload.widgets.profile_figures import plot_profile
from superoffload.widgets.run_figures import plot_loss, plot_run
from superoffload.widgets.run_panel import RunPanel
from superoffload.widgets.timeline_figures import plot_timeline
from superoffload.widgets.tuner import Tuner

__all__ = [
    "Autotune",
    "Compare",
    "RunPanel",
    "Tuner",
    "plot_loss",
    "plot_measured",
    "plot_memory",
    "plot_profile",
    "plot_run",
    "plot_timeline",
]
