"""Which backward is the last before a step, as far as anyone has said, and which gradients it gives more than once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from superoffload.engine.arguments import accelerate_syncs
from superoffload.engine.buckets import ManagedParam


class MicroBatches:
    """Counts gradients between two steps.

    Args:
        accumulation: backward passes per step, where nothing else marks them.
        early: whether gradients of a backward that is not the last are taken too; else they stay in `p.grad`.
    """

    def __init__(self, accumulation: int, *, early: bool):
        self._accumulation, self._early = accumulation, early
        self._fired: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._sync = True
        self.late: set[int] = set()
        """Parameters whose gradient is complete only at `step()`."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Every backward inside is not the last."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def collects(self, p: ManagedParam) -> bool | None:
        """Whether the gradient that just arrived is taken now, and by the last backward (True) or an earlier one
        (False); None leaves it in `p.grad` until a later one or `step()` takes it."""
        # Counted under no_sync too, so that both hints may be given at once.
        fired = self._fired[p.index] = self._fired.get(p.index, 0) + 1
        if p.index in self.late:
            return None
        if not self._sync or not accelerate_syncs() or fired < self._accumulation:
            return False if self._early else None
        self._taken[p.index] = self._taken.get(p.index, 0) + 1
        return True

    def stepped(self) -> None:
        """A step has taken what was counted. A weight shared inside one backward (a block run twice under reentrant
        checkpointing) fires more than once: it is taken at step() from then on. One that fires once again goes back to
        being taken at once."""
        again = {i for i, n in self._fired.items() if i in self.late and n > self._accumulation}
        self.late = again | {i for i, n in self._taken.items() if n > 1}
        self.forget()

    def forget(self) -> None:
        """What was counted is no step's."""
        self._fired.clear()
        self._taken.clear()


__all__ = ["MicroBatches"]
