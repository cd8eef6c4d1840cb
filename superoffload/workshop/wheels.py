"""A folder of wheels for a room without internet: whether it installs a package on this machine, without trying."""

from __future__ import annotations

import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version


def missing(folder: Path, wanted: str) -> tuple[list[str], list[str]]:
    """Follow `wanted` and everything that it needs through the wheels of a folder.

    Of several versions the newest that a requirement allows is taken, as pip would; it does not go back to an older
    one where two requirements disagree, but names the one that is not met.

    Args:
        folder: the wheels; other files are passed over.
        wanted: a requirement, ``"superoffload[lab]"``.

    Returns:
        What is not met, each with who asks for it, and the file names that would be installed.
    """
    here = _usable(folder)
    chosen: dict[str, tuple[Version, Path]] = {}
    seen: set[tuple[str, str]] = set()
    absent: list[str] = []
    queue = [(Requirement(wanted), "")]
    while queue:
        need, by = queue.pop(0)
        name = canonicalize_name(need.name)
        asked = f"{need.name}{need.specifier}" + (f" (for {by})" if by else "")
        if name not in chosen:
            fits = [(v, p) for v, p in here.get(name, ()) if need.specifier.contains(v, prereleases=True)]
            if not fits:
                absent.append(asked)
                continue
            chosen[name] = max(fits)
        version, path = chosen[name]
        if not need.specifier.contains(version, prereleases=True):
            absent.append(f"{asked}, but {version} was taken")
            continue
        for extra in ("", *need.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue += [(r, need.name) for r in _requires(path, extra)]
    return absent, sorted(path.name for _, path in chosen.values())


def _usable(folder: Path) -> dict[str, list[tuple[Version, Path]]]:
    """Wheels whose tags this Python accepts, by name."""
    tags = frozenset(sys_tags())
    found: dict[str, list[tuple[Version, Path]]] = {}
    for path in folder.glob("*.whl"):
        try:
            name, version, _, wheel_tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if wheel_tags & tags:
            found.setdefault(name, []).append((version, path))
    return found


def _requires(path: Path, extra: str) -> list[Requirement]:
    """What a wheel asks for on this machine: for an extra, or without any."""
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(wheel.read(name).decode("utf-8", "replace"))
    environment = {**{k: str(v) for k, v in default_environment().items()}, "extra": extra}
    needs = [Requirement(text) for text in header.get_all("Requires-Dist") or ()]
    return [r for r in needs if (r.marker.evaluate(environment) if r.marker else not extra)]
