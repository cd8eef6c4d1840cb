"""The gate: whether the next step should speculate. The engine asks it before every step, and the workshop lets people
play with the same one; so it needs no torch."""

from __future__ import annotations

from typing import Protocol

from superoffload.plan import Speculate

CLIP_RATE_WEIGHT = 0.1
"""Weight of the newest step in the running rate of clipped and skipped steps."""
EXTRA_WEIGHT = 0.25
"""Weight of the newest sample in the running cost of a wrong guess: one that was measured while the machine did
something else must not decide."""
ASSUMED_EXTRA = 0.25
"""What a wrong guess costs, as a fraction of what a right one saves, until it has been measured."""
LEAST_EXTRA = 0.15
"""Never assumed to be less: writing records and taking the memory's bandwidth during backward cost something too."""


class Outcome(Protocol):
    """What the gate reads of a finished step; `engine.stats.StepRecord` says what each means."""

    @property
    def verdict(self) -> str: ...
    @property
    def speculated(self) -> int: ...
    @property
    def undone(self) -> int: ...
    @property
    def speculated_s(self) -> float: ...
    @property
    def undo_s(self) -> float: ...


class Gate:
    """Whether the next step should speculate.

    A right guess saves the Adam time that ran before the verdict, a wrong one costs what undo-and-redo takes beyond the
    step that would have been due then anyway. `auto` speculates while saving · (1 - p) > extra · p, p being the recent
    rate of clipped and skipped steps. With clipping it starts by waiting (p = 1): a model trained from scratch clips
    nearly every step at first.
    """

    def __init__(self, mode: Speculate, *, clips: bool):
        self._mode = mode
        self.clip_rate = 1.0 if clips else 0.0
        self.extra = ASSUMED_EXTRA
        """Cost of a wrong guess over the saving of a right one."""

    def observe(self, record: Outcome) -> None:
        """Learn from a finished step."""
        wrong = record.verdict != "commit"
        self.clip_rate += CLIP_RATE_WEIGHT * (float(wrong) - self.clip_rate)
        if record.undone and record.speculated_s > 0:
            # A skipped step would have cost nothing, a clipped one what a step costs.
            due = record.speculated_s * record.undone / record.speculated if record.verdict == "clip" else 0.0
            seen = max(LEAST_EXTRA, (record.undo_s - due) / record.speculated_s)
            self.extra += EXTRA_WEIGHT * (seen - self.extra)

    def cancelled(self) -> None:
        """A step was speculated on and taken back before `step()`: a wrong guess too."""
        self.clip_rate += CLIP_RATE_WEIGHT * (1.0 - self.clip_rate)

    @property
    def open(self) -> bool:
        if self._mode == "auto":
            return (1.0 - self.clip_rate) > self.extra * self.clip_rate
        return self._mode == "on"
