"""What waits until the hand rests: saving an edit, advice on a plan that does not fit, the exact step after a draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from superoffload.draft import operators
from superoffload.tracing import Trace
from superoffload.widgets.background import Background
from superoffload.widgets.parts import Guard, Latest, loop_runs
from superoffload.widgets.session import Session

SAVE_AFTER_S = 0.3
"""An edit is on the disk this much later: writing it costs as much as simulating it."""
ADVISE_AFTER_S = 0.4
"""What does not fit is said at once; a plan that would fit is looked for when the hand rests."""
EXACT_AFTER_S = 0.2
"""A draft is followed by the exact simulation when the hand rests so long."""
MOST_OPERATORS = 200_000
"""Of a step of more operators the draft stays: to simulate it would take many seconds, in which the kernel is slow."""


class AtRest:
    """Does this for one session; the newest change is the only one that counts.

    Args:
        guard: shows what goes wrong.
        advise: called with advice.
        refresh: called when the session's draft has become exact.
    """

    def __init__(self, session: Session, guard: Guard, advise: Callable[[str], None], refresh: Callable[[], None]):
        self._session, self._guard, self._advise, self._refresh = session, guard, advise, refresh
        self._saves = Latest(lambda _: session.save(), SAVE_AFTER_S, at_rest=True)
        self._advice = Latest(guard(self._look_for_advice, keep=True), ADVISE_AFTER_S, at_rest=True)
        self._exact = Latest(guard(self._simulate, keep=True), EXACT_AFTER_S, at_rest=True)
        self._advising, self._simulating = Background("advice"), Background("exact simulation")

    def save(self) -> None:
        self._saves.put(now=True)

    def shown(self) -> None:
        """Something else is shown: what is worked on for another state is dropped, what this one needs is put down."""
        self._simulating.drop()
        self._advising.drop()
        if self._session.is_draft and self.draft_is_followed:
            self._exact.put(now=True)
        if not self._session.trace.memory.fits:
            self._advice.put(now=True)

    @property
    def draft_is_followed(self) -> bool:
        """Whether the exact step comes by itself."""
        s = self._session
        return operators(s.profile, s.plan, len(s.buckets)) <= MOST_OPERATORS

    @property
    def busy(self) -> bool:
        """Whether something is still to come."""
        waiting = any(latest.pending for latest in (self._saves, self._advice, self._exact))
        return waiting or self._advising.running or self._simulating.running

    def _look_for_advice(self, _: Any) -> None:
        def done(advice: str | None, error: Exception | None) -> None:
            if error is not None:
                raise error
            if advice:
                self._advise(advice)

        if not loop_runs():
            done(self._session.fit_advice(), None)
        elif not self._session.trace.memory.fits:  # it may have been made to fit in the meantime
            self._advising.start(lambda stop, tell: self._session.fit_advice(), self._guard(done, keep=True))

    def _simulate(self, _: Any) -> None:
        """Put the exact trace in the place of a draft, once a thread has simulated it."""
        session, draft = self._session, self._session.trace

        def done(exact: Trace | None, error: Exception | None) -> None:
            if error is not None:
                raise error
            if exact is not None and session.take_exact(exact, draft):
                self._refresh()

        if session.is_draft:
            self._simulating.start(lambda stop, tell: session.exact(stop), self._guard(done, keep=True))
