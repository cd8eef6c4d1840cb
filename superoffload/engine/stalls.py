"""Names the gaps of the GPU lane in a measured trace by the dependency that ended last."""

from __future__ import annotations

from collections.abc import Sequence

from superoffload.tracing import LANE_TITLES, Stall, TraceEvent
from superoffload.units import format_seconds

SHORTEST_S = 50e-6
"""Gaps below this are launch latency, not a wait for anything of ours."""


def name_stalls(events: Sequence[TraceEvent], window_s: float) -> tuple[Stall, ...]:
    """Find the GPU's gaps in `events` and say what each waited for.

    A gap is put down to the event on another lane that ended last inside it; where none did, the GPU waited for the
    host to launch work.
    """
    gpu = sorted((e for e in events if e.lane == "gpu"), key=lambda e: e.start_s)
    others = [e for e in events if e.lane not in ("gpu", "validator")]
    stalls: list[Stall] = []
    reach = 0.0
    for e in gpu:
        gap = e.start_s - reach
        if gap > max(SHORTEST_S, 1e-3 * window_s):
            stalls.append(_name(reach, gap, e, others))
        reach = max(reach, e.end_s)
    return tuple(stalls)


def _name(start: float, gap: float, waiting: TraceEvent, others: Sequence[TraceEvent]) -> Stall:
    end = start + gap
    slack = 0.05 * gap
    ended = [o for o in others if start < o.end_s <= end + slack and not _of_another_block(o, waiting)]
    length = format_seconds(gap)
    if not ended:
        cause = f"GPU waits {length} before {waiting.name}: the host had not launched it yet"
        return Stall("gpu", start, gap, "launch", cause)
    last = max(ended, key=lambda o: o.end_s)
    queued = sum(1 for o in ended if o.lane == last.lane) - 1
    behind = f", the last of {queued + 1} on that lane in the meantime" if queued else ""
    cause = f"GPU waits {length}: {waiting.name} needs {last.name} ({LANE_TITLES[last.lane]}){behind}"
    return Stall("gpu", start, gap, last.name, cause)


def _of_another_block(event: TraceEvent, waiting: TraceEvent) -> bool:
    """Whether `event` fetches weights that `waiting` does not read."""
    return event.kind == "fetch" and event.block not in (-1, waiting.block)
