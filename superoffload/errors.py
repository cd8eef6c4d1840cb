"""Errors of the project: each says what was wrong, what was expected and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SuperOffloadError(Exception):
    """Base of every error the project raises on purpose; the CLI maps it to exit code 1."""

    exit_code = 1

    def __init__(self, what: str, *, expected: str | None = None, remedy: str | None = None):
        self.what, self.expected, self.remedy = what, expected, remedy
        parts = [what if what.endswith("?") else what.rstrip(".") + "."]
        if expected:
            parts.append(f"Expected {expected.rstrip('.')}.")
        if remedy:
            parts.append(remedy.rstrip(".") + ".")
        super().__init__(" ".join(parts))


class InputError(SuperOffloadError, ValueError):
    """A value given by the user is wrong; the CLI maps it to exit code 2."""

    exit_code = 2


class DoesNotFit(InputError):
    """A plan needs more memory than the hardware has; `ledger` holds the byte accounting."""

    def __init__(self, what: str, *, ledger: object = None, expected: str | None = None, remedy: str | None = None):
        super().__init__(what, expected=expected, remedy=remedy)
        self.ledger = ledger
        self.nearest: object = None
        """The nearest plan that fits, where there is one."""


class NotSupported(InputError):
    """The request is valid, but this version of the engine cannot run it."""


class EngineError(SuperOffloadError, RuntimeError):
    """The training engine failed or was used in a way that would train wrongly."""


class MissingDependency(SuperOffloadError, ImportError):
    """An optional dependency is not installed; the remedy names the extra that brings it."""


def did_you_mean(value: str, options: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for a near miss among `options`, else an empty string."""
    close = difflib.get_close_matches(value, list(options), n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""


def unknown_name(kind: str, value: str, options: Iterable[str], remedy: str | None = None) -> InputError:
    """Build the error for a name that is not among the known ones."""
    names = sorted(options)
    return InputError(
        f'unknown {kind} "{value}"{did_you_mean(value, names)}',
        expected="one of " + ", ".join(names),
        remedy=remedy,
    )
