"""What the panels show, as frozen records computed from Profile, Plan, Trace and Ledger.

Nothing here knows plotly or ipywidgets, so that a test compares records and another front end may draw them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from superoffload.draft import KEY as DRAFT
from superoffload.graph import buckets_of
from superoffload.layout import BucketCut
from superoffload.memory import Ledger, Place
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.tracing import LANE_TITLES, LANES, Trace, TraceEvent
from superoffload.units import format_bytes, format_count, format_seconds

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
MAX_BUCKET_BARS = 600
"""The strip of buckets has a few hundred pixels: of more buckets, neighbours share a bar."""

Verdict = Literal["better", "worse", "same", ""]

GPU_COMPUTE = ("forward", "recompute", "backward")


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


@dataclass(frozen=True, slots=True)
class HeadlineItem:
    """One number of the head of the dashboard, with its difference to the pinned baseline."""

    name: str
    value: str
    label: str
    """``"modelled, gh200"``."""
    delta: str = ""
    verdict: Verdict = ""
    help: str = ""


@dataclass(frozen=True, slots=True)
class MemorySegment:
    name: str
    nbytes: int
    start: int
    """Bytes below it in the stacked bar."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    place: Place
    title: str
    segments: tuple[MemorySegment, ...]
    capacity: int
    """Bytes; 0 where unknown."""

    @property
    def total(self) -> int:
        return sum(s.nbytes for s in self.segments)

    @property
    def over(self) -> bool:
        return bool(self.capacity) and self.total > self.capacity


@dataclass(frozen=True, slots=True)
class BlockBar:
    """One block of the layer map."""

    index: int
    name: str
    kind: str
    params: int
    retained_params: int
    """Parameters whose master weights and moments stay on the GPU."""
    flow: bool
    """Its 16-bit weights live in CPU memory and are fetched before each use."""
    activations: str
    """What becomes of what its backward reads: one of ACTIVATIONS; empty for a block that is no layer."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Where the state of every block and bucket lives under a plan."""

    blocks: tuple[BlockBar, ...]
    bucket_params: tuple[int, ...]
    """Parameters by bucket in backward-completion order."""
    retained_buckets: int

    @property
    def bucket_bars(self) -> tuple[range, ...]:
        """Buckets that are drawn as one bar each; one bar never holds both retained and other buckets."""
        n = len(self.bucket_params)
        each, cpu = max(1, -(-n // MAX_BUCKET_BARS)), n - self.retained_buckets
        parts = (range(cpu), range(cpu, n))
        return tuple(part[i : i + each] for part in parts for i in range(0, len(part), each))

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """Blocks that may flow: the transformer layers."""
        return tuple(b.index for b in self.blocks if b.kind == "layer")


def origin(trace: Trace) -> str:
    """Say whether a trace was measured or modelled, and for which machine; and that it is a draft, where it is one."""
    return f"{trace.source}{' draft' if DRAFT in trace.context else ''}, {trace.hardware}"


def layer_map(profile: Profile, plan: Plan, buckets: BucketCut | None = None) -> LayerMap:
    """Tell for each block how much of its state is retained on the GPU and whether its weights flow."""
    cut = buckets_of(profile, plan.bucket_mb, plan.flow_blocks) if buckets is None else buckets
    kept = min(plan.retained_buckets, len(cut))
    retained = [0] * len(profile.blocks)
    for block, count in cut.params_by_block(len(cut) - kept).items():
        retained[block] = count
    flow = set(plan.flow_blocks)
    blocks = tuple(
        BlockBar(i, b.name, b.kind, b.params, retained[i], i in flow,
                 plan.activations_of(i) if b.kind == "layer" else "")
        for i, b in enumerate(profile.blocks)
    )  # fmt: skip
    return LayerMap(blocks, tuple(cut.params.tolist()), kept)


def memory_rows(ledger: Ledger) -> tuple[MemoryRow, ...]:
    """Stack the ledger's items by place; pinned memory is part of the host's and is shown again on its own."""
    places: tuple[tuple[Place, str, tuple[Place, ...], int], ...] = (
        ("gpu", "GPU", ("gpu",), ledger.gpu_capacity_bytes),
        ("host", "Host", ("host", "pinned"), ledger.host_capacity_bytes),
        ("pinned", "Pinned", ("pinned",), ledger.host_capacity_bytes),
    )
    rows = []
    for place, title, members, capacity in places:
        reach, segments = 0, []
        for item in sorted((i for i in ledger.items if i.place in members and i.bytes > 0), key=lambda i: -i.bytes):
            segments.append(MemorySegment(item.name, item.bytes, reach))
            reach += item.bytes
        rows.append(MemoryRow(place, title, tuple(segments), capacity))
    return tuple(rows)


def compute_s(trace: Trace) -> float:
    """Seconds per step in which the GPU runs forward, recompute and backward: the limit that overlap approaches.

    A window may begin or end within a step: only steps with their forward and their backward count.
    """
    by_step: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for e in trace.events:
        if e.lane == "gpu" and e.kind in GPU_COMPUTE:
            by_step[e.step][e.kind] += e.duration_s
    whole = [sum(kinds.values()) for kinds in by_step.values() if {"forward", "backward"} <= kinds.keys()]
    return statistics.median(whole) if whole else 0.0


def exposed_s(trace: Trace) -> float:
    """Seconds per step that the optimizer, the link and the waits add to the GPU's own forward and backward."""
    return max(0.0, trace.step_s - compute_s(trace)) if trace.events else 0.0


class Numbers(Record):
    """The head's numbers of one trace, small enough to be kept with a session."""

    label: str
    """Origin and machine: ``"modelled, gh200"``."""
    step_s: float
    tokens_per_s: float
    mfu: float
    gpu_busy: float
    exposed_s: float


def numbers(trace: Trace) -> Numbers:
    """Reduce a trace to the numbers of the head."""
    return Numbers(
        label=origin(trace),
        step_s=trace.step_s,
        tokens_per_s=trace.tokens_per_s,
        mfu=trace.mfu,
        gpu_busy=trace.gpu_busy,
        exposed_s=exposed_s(trace),
    )


def headline(trace: Trace, baseline: Numbers | None = None) -> tuple[HeadlineItem, ...]:
    """The five numbers of the head, each with its origin and, against a baseline, its difference."""
    now = numbers(trace)
    peak = trace.peak_bf16_tflops
    mfu = f"{now.mfu * 100:.1f} %" if peak else "n/a"
    rate = f"{trace.model_tflops:,.3g} model TFLOP/s"
    of_peak = f"{rate} of {peak:,.0f} (bf16 dense peak)" if peak else f"{rate}; this machine's peak is not known"
    rows = (
        ("step_s", "Step time", format_seconds(now.step_s), "Seconds per optimizer step in steady state"),
        ("tokens_per_s", "Tokens/s", f"{now.tokens_per_s:,.0f}", f"{trace.tokens_per_step:,} tokens per step"),
        ("mfu", "MFU", mfu, of_peak),
        ("gpu_busy", "GPU busy", f"{now.gpu_busy * 100:.1f} %", "Share of the window in which the GPU computes"),
        ("exposed_s", "Exposed optimizer", format_seconds(now.exposed_s),
         "Step time beyond the GPU's own forward and backward"),
    )  # fmt: skip
    items = []
    for field, name, value, help in rows:
        before = getattr(baseline, field) if baseline else None
        if field == "mfu" and not (now.mfu and before):  # one of the two has no peak to compare with
            before = None
        delta, verdict = difference(field, getattr(now, field), before)
        items.append(HeadlineItem(name, value, now.label, delta, verdict, help))
    return tuple(items)


def difference(field: str, now: float, before: float | None) -> tuple[str, Verdict]:
    """How a number of `Numbers` differs from the one before, and whether that is better."""
    if before is None:
        return "", ""
    if field in ("mfu", "gpu_busy"):
        change, text = (now - before) * 100, f"{(now - before) * 100:+.1f} pts"
    elif before > 0:
        change = (now / before - 1) * 100
        text = f"{change:+.1f} %" if now < 10 * before else f"×{now / before:.3g}"
    else:
        change, text = now * 1e6, f"+{format_seconds(now)}"
    if abs(change) < 0.05:
        return "±0", "same"
    lower_is_better = field in ("step_s", "exposed_s")
    return text.replace("-", "−"), "better" if (change < 0) == lower_is_better else "worse"


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


def size_line(profile: Profile) -> str:
    """One line under the model's name: ``"6.74B parameters, 34 blocks"``."""
    return f"{format_count(profile.params)} parameters, {len(profile.blocks)} blocks"


def lane_title(index: int) -> str:
    return LANE_TITLES[LANES[index]]


def overflow_line(ledger: Ledger) -> str:
    """Say what does not fit, by how much, and which item is largest; empty where everything fits."""
    parts = []
    for place, over in ledger.overflow().items():
        where: Place = "gpu" if place == "gpu" else "host"
        item = ledger.largest(where)
        capacity = ledger.gpu_capacity_bytes if where == "gpu" else ledger.host_capacity_bytes
        parts.append(
            f"{'GPU' if where == 'gpu' else 'host'} memory is {format_bytes(over)} short: the plan needs "
            f"{format_bytes(ledger.total(where))} of {format_bytes(capacity)}"
            + (f"; the largest item is {item.name} ({format_bytes(item.bytes)})" if item else "")
        )
    return "; ".join(parts)
