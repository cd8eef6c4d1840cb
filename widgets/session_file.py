"""A tuning session as one record: what an autosave file holds."""

from __future__ import annotations

from typing import ClassVar

from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.widgets import view_models as vm


class SavedSession(Record):
    """All that is needed to open a session again as it was left."""

    schema_name: ClassVar[str] = "superoffload.tuner_session"

    profile: Profile
    """The profile that predictions build on: the one that the session was opened with, or corrected since."""
    uncalibrated: Profile | None = None
    """That profile before it was corrected, so that a calibration can be taken back in a later session too."""
    hardware: Hardware
    plan: Plan
    baseline: vm.Numbers | None = None
    baseline_plan: Plan | None = None
    """Of a modelled baseline: its trace is simulated again."""
    baseline_hardware: Hardware | None = None
