"""What a session's numbers are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.tracing import Trace
from superoffload.widgets import view_models as vm


@dataclass(frozen=True, slots=True)
class Baseline:
    """Numbers, and where more is known, the step that they are of."""

    numbers: vm.Numbers
    trace: Trace | None = None
    on: Hardware | None = None
    """The machine of `trace`, where it is known as a whole and not by name alone."""

    @classmethod
    def of(cls, what: Trace | vm.Numbers, looking_at: Hardware) -> Baseline:
        """Compare with a step, or with numbers alone.

        Args:
            looking_at: the machine that the session shows now.
        """
        if not isinstance(what, Trace):
            return cls(what)
        return cls(vm.numbers(what), what, looking_at if what.hardware == looking_at.name else None)

    @property
    def modelled(self) -> tuple[Plan, Hardware] | None:
        """From what `trace` can be simulated again; None where it cannot."""
        if self.trace is None or self.trace.source != "modelled" or self.on is None:
            return None
        return self.trace.plan, self.on
