"""What a Tuner is about, said or checked: its model, where its edits go, where its numbers come from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from superoffload.draft import KEY as DRAFT
from superoffload.errors import InputError
from superoffload.profiler import Profile
from superoffload.units import format_bytes
from superoffload.widgets.parts import escape
from superoffload.widgets.session import Session

AUTOSAVE_FOLDER = ".superoffload"


def profile_of(model: Any, batch: Any) -> Profile:
    """Profile a model here. Raises InputError where it is none, or there is no batch."""
    if not hasattr(model, "named_parameters"):
        raise InputError(
            f"Tuner got a {type(model).__name__}", expected="a Profile or a torch model with batch=",
            remedy='For example Tuner(so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200"))',
        )  # fmt: skip
    if batch is None:
        raise InputError("a model alone cannot be profiled", expected="Tuner(model, batch=batch)")
    from superoffload.profiling import profile

    return profile(model, batch)


def check_model(model: Any, profile: Profile) -> None:
    """Raises InputError where the profile is another model's."""
    from superoffload.model_source import fingerprint

    if fingerprint(model) != profile.model_fingerprint:
        raise InputError(
            f'the profile is of "{profile.model}", and the {type(model).__name__} given as model= has other parameters',
            remedy="Profile this model: Tuner(model, batch=batch)",
        )


def dtype(profile: Profile) -> str:
    """Of the most weights."""
    return max(profile.blocks, key=lambda b: b.params).dtype if profile.blocks else "bfloat16"


def autosave_path(choice: str | os.PathLike[str] | bool, profile: Profile) -> Path | None:
    """Where edits are saved: a file, True for one named after model and machine, False for nowhere."""
    if choice is False:
        return None
    if choice is True:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{profile.model}-{profile.hardware.name}").strip("-")
        return Path(AUTOSAVE_FOLDER) / f"{stem}.json"
    return Path(choice)


def foot_html(s: Session, draft_is_followed: bool) -> str:
    """What the figures are, what they are compared with, reasons, and memory item by item."""
    items = "".join(f"<li><b>{escape(k)}</b> {escape(v)}</li>" for k, v in s.plan.reasons.items())
    memory = "".join(
        f"<li><b>{escape(i.place)}</b> {escape(i.name)}: {format_bytes(i.bytes)}</li>" for i in s.trace.memory.items
    )
    notes = [f"Numbers are {s.trace.source} for {s.trace.hardware}."]
    if s.is_draft:
        later = "when the knobs rest" if draft_is_followed else "when the plan is exported or pinned"
        notes.append(f"A draft, {s.trace.context[DRAFT]}: all are simulated {later}.")
    for key in ("retargeted", "calibrated"):
        if key in s.profile.context:
            told = s.profile.context[key]
            notes.append(("" if key == "retargeted" else "Calibrated: ") + told[:1].upper() + told[1:] + ".")
    if s.baseline is not None:
        notes.append(f"Baseline: {s.baseline.step_s:.4g} s per step ({s.baseline.label}).")
    if s.autosave is not None:
        notes.append(f"Edits are saved in {s.autosave}.")
    return (
        f'<div class="so-foot">{escape(" ".join(notes))}'
        f"<details><summary>Reasons of the automatic choices</summary><ul>{items}</ul></details>"
        f"<details><summary>Memory item by item</summary><ul>{memory}</ul></details></div>"
    )
