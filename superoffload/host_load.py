"""What else a machine did while something was measured on it.

A profile that was taken while a build ran beside it is as neat as any other, and wrong. Linux counts the time of all
processors together (`/proc/stat`): what of it was not this process's own, others had, and what a hypervisor kept from
the machine is counted apart ("steal"). Other systems do not say, and nothing is claimed of them.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from superoffload.doctor import usable_cores

STAT = Path("/proc/stat")
KEY, DISTURBED = "beside", "disturbed"
"""Where the context of a profile or trace says what else the machine did, and, if that was much, what it means."""
MUCH = 0.1
"""Share of the cores from which a measurement is not to be trusted: two cores' worth of Adam slows down by as much."""


class BusyMachine(UserWarning):
    """Something was measured while other programs had a good part of the processor."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Means over the time that was watched, in cores."""

    others: float
    """Kept busy by other processes where this one might have run: those that other cores have room for do not count."""
    stolen: float
    """Kept from this machine by its hypervisor."""
    cores: int
    """That this process may use."""

    @property
    def much(self) -> bool:
        return self.others + self.stolen > MUCH * self.cores

    def __str__(self) -> str:
        taken = f", the hypervisor took {self.stolen:.1f}" if self.stolen >= 0.05 else ""
        return f"other processes kept {self.others:.1f} of {self.cores} cores busy{taken}"

    def noted(self, what: str) -> dict[str, str]:
        """For the context of what was measured meanwhile. Warns if that was much.

        Args:
            what: was measured.
        """
        if not self.much:
            return {KEY: str(self)}
        told = f"{what} was measured while {self}: its times are too long. Measure again when nothing else runs"
        warnings.warn(told, BusyMachine, stacklevel=3)
        return {KEY: str(self), DISTURBED: told}


class HostWatch:
    """Watches from its making on."""

    def __init__(self) -> None:
        self._begin = _ticks()
        self._own_s, self._wall_s = time.process_time(), time.perf_counter()

    def noted(self, what: str) -> dict[str, str]:
        """For the context of `what` was measured since the beginning; empty where the system does not say."""
        load = self.load()
        return {} if load is None else load.noted(what)

    def load(self) -> HostLoad | None:
        """Since the beginning; None where the system does not say, or nothing has passed."""
        now, wall_s = _ticks(), time.perf_counter() - self._wall_s
        if now is None or self._begin is None or wall_s <= 0:
            return None
        busy_s, stolen_s = (b - a for a, b in zip(self._begin, now, strict=True))
        others = max(0.0, busy_s - (time.process_time() - self._own_s)) / wall_s
        cores = usable_cores()
        elsewhere = max(0, (os.cpu_count() or cores) - cores)
        return HostLoad(others=max(0.0, others - elsewhere), stolen=stolen_s / wall_s, cores=cores)


def _ticks() -> tuple[float, float] | None:
    """Seconds that all processors together have worked, and that were stolen, since the machine was started."""
    try:
        fields = STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, fields[1:9])
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return (user + nice + system + irq + soft_irq) * tick_s, steal * tick_s
