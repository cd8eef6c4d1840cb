"""What a session was before and after each edit: undo and redo."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from superoffload.hardware import Hardware
from superoffload.plan import Plan

MAX_UNDO = 200
SAME_EDIT_S = 1.0
"""Edits of one field that follow each other faster are one entry."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One state."""

    plan: Plan
    hardware: Hardware
    topic: str = ""
    """The knobs that were turned to come here, quick neighbours with the same ones being one entry; empty where it was
    something else, which is always an entry of its own."""
    at_s: float = 0.0
    """Monotonic time of the edit."""


class History:
    """States in the order in which they came, the oldest at `MAX_UNDO` entries ago; it begins with one."""

    def __init__(self, plan: Plan, hardware: Hardware):
        self._entries: list[Edit] = [Edit(plan, hardware)]
        self._position = 0

    @property
    def can_undo(self) -> bool:
        return self._position > 0

    @property
    def can_redo(self) -> bool:
        return self._position < len(self._entries) - 1

    def add(self, plan: Plan, hardware: Hardware, topic: str = "") -> None:
        """A new state; what was undone is gone."""
        del self._entries[self._position + 1 :]
        # Moving one slider back and forth is one edit: undo leads to where it stood before.
        now, last = time.monotonic(), self._entries[-1]
        if topic and len(self._entries) > 1 and last.topic == topic and now - last.at_s < SAME_EDIT_S:
            self._entries.pop()
        self._entries.append(Edit(plan, hardware, topic, now))
        del self._entries[:-MAX_UNDO]
        self._position = len(self._entries) - 1

    def neighbour(self, by: int) -> Edit:
        """The state `by` entries after the present one, which stays the present one until `move`."""
        return self._entries[self._position + by]

    def machine_is(self, old: Hardware, new: Hardware) -> None:
        """A machine's figures have been corrected: states on the old ones are states on the new ones now."""
        self._entries = [replace(e, hardware=new) if e.hardware == old else e for e in self._entries]

    def move(self, by: int) -> None:
        self._position += by
