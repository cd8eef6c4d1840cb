"""What the workshop's notebooks compute: experiments on the cost model, checks of exercises, the capstone's scores.

Nothing here needs torch or draws anything; `superoffload.widgets.workshop` does the drawing. Every number is the cost
model's unless its name or docstring says that it was measured.
"""

from superoffload.links import LINK_NAMES, LINKS_GB_PER_S, link_at
from superoffload.plan_presets import pcie_era_plan
from superoffload.workshop.experiments import (
    LinkPoint,
    adam_gb_per_s,
    cast_steps,
    flow_cost,
    flow_efficiency,
    link_sweep,
    retained_steps,
)
from superoffload.workshop.score import Challenge, Score, leaderboard
from superoffload.workshop.several import Exchange, exchange, long_profile, on_chips, plain_plan
from superoffload.workshop.storm import StepTimes, break_even_clip_rate, run_storm, step_times, storm_verdicts

__all__ = [
    "LINKS_GB_PER_S",
    "LINK_NAMES",
    "Challenge",
    "Exchange",
    "LinkPoint",
    "Score",
    "StepTimes",
    "adam_gb_per_s",
    "break_even_clip_rate",
    "cast_steps",
    "exchange",
    "flow_cost",
    "flow_efficiency",
    "leaderboard",
    "link_at",
    "link_sweep",
    "long_profile",
    "on_chips",
    "pcie_era_plan",
    "plain_plan",
    "retained_steps",
    "run_storm",
    "step_times",
    "storm_verdicts",
]
