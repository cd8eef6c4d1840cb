"""Why a lane waited: every gap named by the dependency that ended last, followed back to what made it late."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from superoffload.tracing import Lane, Stall
from superoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from superoffload.simulator import Timeline

MIN_SHARE = 1e-3
"""Gaps shorter than this share of a step are not named."""
_WHO: dict[Lane, str] = {"gpu": "GPU", "cpu_adam": "CPU Adam"}


def find_stalls(timeline: Timeline) -> tuple[Stall, ...]:
    """Gaps of the GPU and of CPU Adam within one period that starts where the GPU has ended a step.

    The links are left out: they carry little and idle most of the time, which is no fault.
    """
    n, last = timeline.n, timeline.full_steps - 1
    origin, period = timeline.boundary(last - 1), timeline.step_s
    found: list[Stall] = []
    for lane in _WHO:
        spans = sorted(
            (timeline.start[s * n + i], s * n + i)
            for s in (last - 1, last, last + 1)
            for i in timeline.lane(lane)
            if timeline.start[s * n + i] >= 0 and timeline.end[s * n + i] >= origin
        )
        reach = origin
        for start, x in spans:
            # A gap that begins in this period belongs to it, also where it ends in the next.
            if start - reach > MIN_SHARE * period and reach < origin + period - 1e-9:
                found.append(_stall(timeline, lane, reach, x, origin))
            reach = max(reach, timeline.end[x])
    found.sort(key=lambda s: (s.start_s, s.lane))
    return tuple(found)


def _stall(timeline: Timeline, lane: Lane, since: float, x: int, origin: float) -> Stall:
    op = timeline.graph.ops[x % timeline.n]
    length = timeline.start[x] - since
    releaser = timeline.released_by[x]
    if releaser < 0:
        waits_for, why = "nothing", "nothing held it back"
    else:
        waits_for = timeline.graph.ops[releaser % timeline.n].name
        why = _because(timeline, releaser, since)
        ring = ("copy_down", "reduce_scatter")
        if op.kind == "backward" and op.bucket >= 0 and timeline.graph.ops[releaser % timeline.n].kind in ring:
            why = f" to free a slot of the gradient ring{why}"
    who = f"{_WHO[lane]} waits {format_seconds(length)}"
    return Stall(lane, since - origin, length, waits_for, f"{who}: {op.name} needs {waits_for}{why}")


def _because(timeline: Timeline, x: int, since: float) -> str:
    """Continue the sentence: why the operator instance `x` ended only after `since`."""
    ops, n = timeline.graph.ops, timeline.n
    op = ops[x % n]
    took, queued = timeline.end[x] - timeline.start[x], timeline.start[x] - timeline.ready[x]
    before = timeline.released_by[x]
    if op.kind == "copy_up":
        behind = _queue(timeline, x)
        if behind and timeline.ready[x] <= since:
            return f", which was queued behind {_count(behind, 'transfer')} on the link"
        return f", whose Adam{_why_adam(timeline, before, since)}" if before >= 0 else ""
    if op.kind == "adam":
        return f", which{_why_adam(timeline, x, since)}"
    if op.kind == "fetch":
        what = f" ({format_bytes(op.link_bytes)}, {format_seconds(took)} on the link)"
        if queued > took:
            return f"{what}, which was queued behind {_count(_queue(timeline, x), 'transfer')}"
        if before >= 0 and ops[before % n].lane == "gpu" and op.name.startswith("activations"):
            return f"{what}, which is asked for only when {ops[before % n].name} has ended"
        if before >= 0 and timeline.ready[x] > timeline.start[x] - 1e-9 and ops[before % n].lane == "gpu":
            return f"{what}, which had to wait for a free slot until {ops[before % n].name} had ended"
        if before >= 0 and ops[before % n].kind == "adam":
            return f"{what} after {ops[before % n].name}, which{_why_adam(timeline, before, since)}"
        return what
    if op.kind == "copy_down":
        behind = _queue(timeline, x)
        what = f", whose {format_bytes(op.link_bytes)}"
        if behind and queued > took:
            return f"{what} were queued behind {_count(behind, 'bucket')} on the link for {format_seconds(queued)}"
        if before >= 0 and timeline.ready[x] > since:
            return f"{what} were complete only after {ops[before % n].name}"
        return f"{what} take {format_seconds(took)} on the link"
    if op.kind in ("all_to_all", "reduce_scatter", "all_gather"):
        return _why_collective(timeline, x, since)
    if op.kind == "verdict":
        return ", which is complete only when backward has ended"
    return ""


def _why_collective(timeline: Timeline, x: int, since: float) -> str:
    """Say why a collective ended late: others before it, what it waited for, or its own length."""
    ops, n = timeline.graph.ops, timeline.n
    op = ops[x % n]
    took, queued = timeline.end[x] - timeline.start[x], timeline.start[x] - timeline.ready[x]
    what = f", which sends {format_bytes(op.link_bytes)} in {format_seconds(took)}"
    behind = _queue(timeline, x)
    if behind and queued > took:
        return f"{what} and was queued behind {_count(behind, 'collective')} for {format_seconds(queued)}"
    before = timeline.released_by[x]
    if op.kind == "all_gather" and before >= 0 and timeline.ready[x] > since:
        return f"{what} after {ops[before % n].name}{_because(timeline, before, since)}"
    return what


def _why_adam(timeline: Timeline, x: int, since: float) -> str:
    """Say why an Adam ended late: its place in the queue, what released it, or its own length."""
    ops, n = timeline.graph.ops, timeline.n
    took, queued = timeline.end[x] - timeline.start[x], timeline.start[x] - timeline.ready[x]
    behind = _queue(timeline, x)
    if behind and queued > took:
        return f" was queued behind {_count(behind, 'bucket')} for {format_seconds(queued)}"
    before = timeline.released_by[x]
    if before >= 0 and timeline.ready[x] > since:
        first = ops[before % n]
        what = "the gradient norm was known" if first.kind == "verdict" else f"{first.name} had landed"
        return f" could start only when {what} and took {format_seconds(took)}"
    return f" took {format_seconds(took)}"


def _queue(timeline: Timeline, x: int) -> int:
    """How many operators of the same lane ran, at least in part, between readiness and start of `x`."""
    lane, ready, start = timeline.graph.ops[x % timeline.n].lane, timeline.ready[x], timeline.start[x]
    if start - ready <= 1e-12:
        return 0
    step, count = x // timeline.n, 0
    for s in (step - 1, step, step + 1):
        if 0 <= s <= timeline.full_steps:
            starts, ends = timeline.spans(lane, s)
            count += bisect_left(starts, start) - bisect_right(ends, ready)  # begun before, less those ended by then
    return count


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
