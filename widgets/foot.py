"""The lines below a Tuner: where its numbers come from, the reasons of its plan, its memory item by item."""

from __future__ import annotations

from superoffload.draft import KEY as DRAFT
from superoffload.host_load import DISTURBED
from superoffload.units import format_bytes
from superoffload.widgets import view_models as vm
from superoffload.widgets.parts import escape
from superoffload.widgets.session import Session


def foot_html(s: Session, draft_is_followed: bool) -> str:
    """The foot of a session; `draft_is_followed` says whether a draft's exact step comes by itself."""
    items = "".join(f"<li><b>{escape(k)}</b> {escape(v)}</li>" for k, v in s.plan.reasons.items())
    memory = "".join(
        f"<li><b>{escape(i.place)}</b> {escape(i.name)}: {format_bytes(i.bytes)}</li>" for i in s.trace.memory.items
    )
    notes = [f"Numbers are {s.trace.source} for {s.trace.hardware}."]
    if s.is_draft:
        later = "when the knobs rest" if draft_is_followed else "when the plan is exported or pinned"
        notes.append(f"A draft, {s.trace.context[DRAFT]}: all are simulated {later}.")
    for key in ("retargeted", "calibrated", DISTURBED):
        if key in s.profile.context:
            notes.append(("Calibrated: " if key == "calibrated" else "") + vm.sentence(s.profile.context[key]))
    if s.baseline is not None:
        notes.append(f"Baseline: {s.baseline.step_s:.4g} s per step ({s.baseline.label}).")
    if s.autosave is not None:
        notes.append(f"Edits are saved in {s.autosave}.")
    return (
        f'<div class="so-foot">{escape(" ".join(notes))}'
        f"<details><summary>Reasons of the automatic choices</summary><ul>{items}</ul></details>"
        f"<details><summary>Memory item by item</summary><ul>{memory}</ul></details></div>"
    )
