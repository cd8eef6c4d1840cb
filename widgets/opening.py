"""What a Tuner is opened on: a profile or a model, and the file that keeps its edits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from superoffload.errors import InputError
from superoffload.profiler import Profile
from superoffload.widgets.session_file import SavedSession

AUTOSAVE_FOLDER = ".superoffload"


def profile_of(model: Any, batch: Any) -> Profile:
    """Profile a torch model, or say what a Tuner is opened on."""
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
    """Raise InputError where the profile is of another model."""
    from superoffload.model_source import fingerprint

    if fingerprint(model) != profile.model_fingerprint:
        raise InputError(
            f'the profile is of "{profile.model}", and the {type(model).__name__} given as model= has other parameters',
            remedy="Profile this model: Tuner(model, batch=batch)",
        )


def dtype_of(profile: Profile) -> str:
    """The parameters' dtype, of the largest block."""
    return max(profile.blocks, key=lambda b: b.params).dtype if profile.blocks else "bfloat16"


def left_session(path: Path | None, profile: Profile) -> SavedSession | None:
    """The session of this model that was left in a Tuner's autosave file; None where there is none."""
    if path is None or not path.is_file():
        return None
    try:
        left = SavedSession.load(path)
    except InputError:
        return None
    return left if left.profile.model_fingerprint == profile.model_fingerprint else None


def put_aside(path: Path) -> Path:
    """Rename an autosave file that somebody else's edits are about to take the place of; return its new name."""
    aside = path.with_name(f"{path.stem}.before{path.suffix}")
    path.replace(aside)
    return aside


def autosave_path(choice: str | os.PathLike[str] | bool, profile: Profile) -> Path | None:
    """The file for a Tuner's `autosave`."""
    if choice is False:
        return None
    if choice is True:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{profile.model}-{profile.hardware.name}").strip("-")
        return Path(AUTOSAVE_FOLDER) / f"{stem}.json"
    return Path(choice)
