"""The timeline as frozen records: the spans and waits of a window of a trace, few enough to be drawn and sent at once.

Nothing here knows plotly or ipywidgets, so that a test compares records and another front end may draw them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from superoffload.tracing import LANES, Trace, TraceEvent
from superoffload.units import format_seconds
from superoffload.widgets.view_models import GPU_COMPUTE, origin

KIND_TITLES: dict[str, str] = {
    "forward": "Forward",
    "recompute": "Recompute",
    "backward": "Backward",
    "gpu_adam": "Adam on GPU",
    "norm": "Norm",
    "cast": "Cast on GPU",
    "copy_down": "Gradients down",
    "copy_up": "Weights up",
    "fetch": "Flow fetch",
    "adam": "Adam on CPU",
    "cpu_cast": "Cast on CPU",
    "verdict": "Verdict",
    "undo": "Undo",
    "launch": "Launch",
    "reduce_scatter": "Reduce-scatter",
    "all_gather": "All-gather",
    "all_to_all": "All-to-all",
}
"""Every kind of span in the order in which the legend lists it."""

MAX_BARS = 1200
"""Most spans drawn at once: more than a screen has pixels for, few enough for one small message."""
MAX_STALLS = 60


@dataclass(frozen=True, slots=True)
class BarGroup:
    """All drawn spans of one kind, as columns of equal length; a span may stand for several merged events."""

    kind: str
    lane: tuple[int, ...]
    """Index into LANES."""
    start_s: tuple[float, ...]
    duration_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    label: tuple[str, ...]
    """Which buckets or blocks: ``"bucket 12"`` or ``"12 buckets, 3 to 14"``."""


@dataclass(frozen=True, slots=True)
class StallBar:
    lane: int
    start_s: float
    duration_s: float
    waits_for: str
    cause: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The spans and waits of a window of one trace."""

    label: str
    """Origin of the numbers and the machine: ``"modelled, gh200"``."""
    groups: tuple[BarGroup, ...]
    stalls: tuple[StallBar, ...]
    step_starts_s: tuple[float, ...]
    """Where a step begins, in seconds from the beginning of the window."""
    window_s: float
    """Length of the window."""
    merged: int
    """How many events were merged into a neighbour to keep the drawing bounded."""

    @property
    def lanes(self) -> int:
        """How many of LANES, from the first on, are drawn: the last one only where it has spans."""
        last = len(LANES) - 1
        return last + any(lane == last for g in self.groups for lane in g.lane)

    @property
    def bars(self) -> int:
        return sum(len(g.start_s) for g in self.groups)


def step_starts(trace: Trace) -> dict[int, float]:
    """Seconds at which the GPU begins each step of the trace, by step number."""
    first: dict[int, float] = {}
    for e in trace.events:
        if e.lane == "gpu" and e.kind in GPU_COMPUTE and e.start_s < first.get(e.step, float("inf")):
            first[e.step] = e.start_s
    return dict(sorted(first.items()))


def timeline(
    trace: Trace,
    *,
    steps: int | None = None,
    window: tuple[float, float] | None = None,
    max_bars: int = MAX_BARS,
    max_stalls: int = MAX_STALLS,
) -> TimelineView:
    """Columns of spans by kind, merged so that at most about `max_bars` are drawn, and cut to a window.

    Neighbours of the same lane and kind are merged only where the gap between them is smaller than the grain of the
    drawing, so a drawn bar never hides a visible gap.

    Args:
        trace: simulated or measured.
        steps: show only the last so many steps.
        window: show only from, to (seconds of the trace); takes precedence over `steps`.
        max_bars: bound of what is drawn.
        max_stalls: the longest so many waits are drawn.

    Returns:
        The view; its times count from the beginning of the window, so that several views align.
    """
    starts = step_starts(trace)
    end = max([trace.window_s, *(e.end_s for e in trace.events)], default=0.0)
    if window is None:
        shown = list(starts.values())[-steps:] if steps else []
        window = (shown[0] if shown else 0.0, end)
    lo, hi = window
    events = [_clip(e, lo, hi) for e in trace.events if e.end_s > lo and e.start_s < hi]
    events.sort(key=lambda e: (e.kind, e.lane, e.start_s))
    runs, grain = _merge(events, max_bars, hi - lo)
    ends = _ends(runs, grain)
    by_kind: dict[str, list[tuple[list[TraceEvent], float]]] = defaultdict(list)
    for run, until in zip(runs, ends, strict=True):
        by_kind[run[0].kind].append((run, until))
    groups = [
        BarGroup(
            kind,
            tuple(LANES.index(r[0].lane) for r, _ in by_kind[kind]),
            tuple(r[0].start_s for r, _ in by_kind[kind]),
            tuple(until - r[0].start_s for r, until in by_kind[kind]),
            tuple(sum(e.bytes for e in r) for r, _ in by_kind[kind]),
            tuple(_label(r) for r, _ in by_kind[kind]),
        )
        for kind in KIND_TITLES
        if kind in by_kind
    ]
    waits = [s for s in trace.stalls if s.start_s + s.duration_s > lo and s.start_s < hi]
    longest = sorted(waits, key=lambda s: -s.duration_s)[:max_stalls]
    stalls = []
    for s in sorted(longest, key=lambda s: (LANES.index(s.lane), s.start_s)):
        start, stop = max(s.start_s, lo), min(s.start_s + s.duration_s, hi)
        stalls.append(StallBar(LANES.index(s.lane), start - lo, stop - start, s.waits_for, s.cause))
    marks = tuple(t - lo for t in starts.values() if lo <= t < hi)
    return TimelineView(origin(trace), tuple(groups), tuple(stalls), marks, hi - lo, len(events) - len(runs))


def steady_steps(trace: Trace, steps: int = 1, *, max_bars: int = MAX_BARS) -> TimelineView:
    """So many steps in a row, and what the last one leaves to the next.

    Of a modelled trace one step is known, and is repeated: from the second step on the simulator's steps are alike to
    the last operator (a test compares them). A measured trace shows what it holds, whatever `steps` says.
    """
    if trace.source == "measured" or steps <= 1 or not trace.step_s:
        return timeline(trace, max_bars=max_bars)
    one = timeline(trace, max_bars=max_bars // steps, max_stalls=MAX_STALLS // steps)
    return _repeated(one, steps, trace.step_s)


def _repeated(one: TimelineView, steps: int, step_s: float) -> TimelineView:
    """`one`, which is longer than a step by what reaches into the next, `steps` times: the last time whole."""
    shifts = [(k * step_s, step_s if k < steps - 1 else one.window_s) for k in range(steps)]
    groups = []
    for g in one.groups:
        bars: list[tuple[int, float, float, int, str]] = []
        latest: dict[int, int] = {}  # of each lane the bar that ends last
        for shift, end in shifts:
            for lane, start, length, nbytes, label in zip(
                g.lane, g.start_s, g.duration_s, g.nbytes, g.label, strict=True
            ):
                if start >= end:
                    continue
                until = shift + min(start + length, end)
                before = latest.get(lane)
                # What is under way when a step ends was cut there, and is one bar.
                if shift and start <= 0.0 and before is not None and _goes_on(bars[before], shift, label):
                    bars[before] = (lane, bars[before][1], until - bars[before][1], nbytes, label)
                    continue
                latest[lane] = len(bars)
                bars.append((lane, shift + start, until - shift - start, nbytes, label))
        lanes, starts, lengths, sizes, labels = zip(*bars, strict=True)
        groups.append(BarGroup(g.kind, lanes, starts, lengths, sizes, labels))
    stalls: list[StallBar] = []
    for shift, end in shifts:
        for s in one.stalls:
            if s.start_s < end:
                length = min(s.duration_s, end - s.start_s)
                stalls.append(StallBar(s.lane, shift + s.start_s, length, s.waits_for, s.cause))
    marks = tuple(shift + t for shift, end in shifts for t in one.step_starts_s if t < end)
    window = shifts[-1][0] + one.window_s
    return TimelineView(one.label, tuple(groups), tuple(stalls), marks, window, one.merged * steps)


def _goes_on(bar: tuple[int, float, float, int, str], at_s: float, label: str) -> bool:
    return bar[4] == label and abs(bar[1] + bar[2] - at_s) <= 1e-9 * max(1.0, at_s)


def one_step(trace: Trace) -> tuple[float, float]:
    """The window of one step: all of a measured trace; of a modelled one the first step, and not what it overlaps of
    the next, since it overlaps the same of the step before. Both begin with the update of the step before, on the GPU
    and the CPU where measured, and once the GPU has done its part where modelled."""
    return 0.0, trace.window_s if trace.source == "measured" else min(trace.step_s, trace.window_s)


def _clip(e: TraceEvent, lo: float, hi: float) -> TraceEvent:
    if lo == 0.0 and e.end_s <= hi:
        return e
    start, stop = max(e.start_s, lo), min(e.end_s, hi)
    return TraceEvent(e.lane, e.kind, e.name, start - lo, stop - start, e.bytes, e.block, e.bucket, e.step)


def stall_lines(trace: Trace) -> tuple[str, ...]:
    """The cause of the longest wait of each lane, in the order of the lanes, with what the lane waits in all."""
    lines = []
    for lane in LANES:
        waits = [s for s in trace.stalls if s.lane == lane]
        if waits:
            more = f" ({len(waits)} waits, {format_seconds(sum(s.duration_s for s in waits))} in all)"
            lines.append(max(waits, key=lambda s: s.duration_s).cause + (more if len(waits) > 1 else ""))
    return tuple(lines)


def _merge(events: list[TraceEvent], max_bars: int, span: float) -> tuple[list[list[TraceEvent]], float]:
    """Runs of neighbours, and the gap up to which they were merged; 0 where nothing was."""
    begins: list[int] = list(range(len(events)))
    merged_at, grain = 0.0, span / max_bars
    spans = [(e.kind, e.lane, e.start_s, e.end_s) for e in events]  # read some ten times each
    while len(begins) > max_bars and grain <= span:
        begins, kind, lane, begin, reach = [], "", "", 0.0, 0.0
        for i, (k, where, start, end) in enumerate(spans):
            until = reach if reach > end else end
            if k == kind and where == lane and start - reach <= grain and until - begin <= 4 * grain:
                reach = until
            else:
                begins.append(i)
                kind, lane, begin, reach = k, where, start, end
        merged_at, grain = grain, grain * 1.5
    return [events[a:b] for a, b in itertools.zip_longest(begins, begins[1:])], merged_at


def _ends(runs: list[list[TraceEvent]], grain: float) -> list[float]:
    """Where each run is drawn to end: at the next one of its kind and lane where the gap is no wider than those within
    the runs, which would else be stripes that mean nothing."""
    ends = []
    for run, following in itertools.zip_longest(runs, runs[1:]):
        end = max(e.end_s for e in run)
        if following is not None and (following[0].kind, following[0].lane) == (run[0].kind, run[0].lane):
            end = following[0].start_s if 0.0 < following[0].start_s - end <= grain else end
        ends.append(end)
    return ends


def _label(run: Iterable[TraceEvent]) -> str:
    run = list(run)
    if len(run) == 1:
        return run[0].name
    noun = "bucket" if run[0].bucket >= 0 else "block"
    ids = sorted({e.bucket if noun == "bucket" else e.block for e in run})
    if ids == [-1]:
        return f"{len(run)} × {run[0].name}"
    return f"{noun} {ids[0]}" if len(ids) == 1 else f"{noun}s {ids[0]}–{ids[-1]} ({len(run)})"
