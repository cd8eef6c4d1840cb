"""What the panels show, as frozen records computed from Profile, Plan, Trace and Ledger.

Nothing here knows plotly or ipywidgets, so that a test compares records and another front end may draw them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from superoffload.draft import KEY as DRAFT
from superoffload.graph import buckets_of
from superoffload.layout import BucketCut
from superoffload.memory import Ledger, Place
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.tracing import Trace
from superoffload.units import format_bytes, format_count, format_seconds

MAX_BUCKET_BARS = 600
"""The strip of buckets has a few hundred pixels: of more buckets, neighbours share a bar."""

Verdict = Literal["better", "worse", "same", ""]

GPU_COMPUTE = ("forward", "recompute", "backward")


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


def sentence(text: str) -> str:
    """A clause as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}."


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


def size_line(profile: Profile) -> str:
    """One line under the model's name: ``"6.74B parameters, 34 blocks"``."""
    return f"{format_count(profile.params)} parameters, {len(profile.blocks)} blocks"


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
