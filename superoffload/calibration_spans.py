"""What the spans of a measured step say against the model's graph of the same step: the comparisons behind
`superoffload.calibration`.

Spans on a real machine hold waits too, and copies and Adam slow each other down, which the simulator adds by itself. So
of each block the median of its micro-batches counts, of layers the median layer, and of copies and Adam the lower
quartile of those that ran alone.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from superoffload.graph import StepGraph, transfer_s
from superoffload.hardware import Curve, Hardware
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.tracing import Lane, Trace, TraceEvent

Part = Literal["layers forward", "layers backward", "head", "link down", "link up", "CPU Adam"]
MIN_SAMPLES = 4
"""Copies or Adam calls, alone on the host's memory, from which a lower quartile is taken; with fewer nothing is
corrected."""
MIN_COPY_BYTES = 1_000_000
"""Smaller copies say more about launching than about bandwidth."""
ACCOMPANIED = 0.1
"""Share of a copy's or an Adam call's time beside other work on the host's memory up to which it counts as alone."""
EDGE_S = 1e-6
COMPARED = ("copy_down", "copy_up", "fetch", "adam")
COPIES: dict[Part, Lane] = {"link down": "link_down", "link up": "link_up", "CPU Adam": "cpu_adam"}
SLOWED_BY: dict[Lane, tuple[Lane, ...]] = {
    "link_down": ("link_up",),
    "link_up": ("link_down", "cpu_adam"),
    "cpu_adam": ("link_down", "link_up"),
}
"""Beside an H200 downloads keep their rate whatever Adam does, uploads and Adam do not (`simulator.share_memory`)."""


Seconds = dict[tuple[str, int], float]
"""Modelled seconds of one micro-batch by kind and block."""


class Correction(Record):
    """What one kind of work takes, against what the profile says."""

    part: Part
    modelled_s: float
    """Of one operation alone: of one layer, of the head, of one copy or bucket at the quartile."""
    measured_s: float
    factor: float
    """By which the profile's times are multiplied: measured over modelled."""
    samples: int
    """Layers, copies or buckets that were compared."""
    beside: bool = False
    """Whether none ran alone, so that the simulation of the step, with what shares memory and link, was compared."""


def compare(profile: Profile, step: StepGraph, simulated: Trace, trace: Trace) -> list[Correction]:
    """Everything in which a measured step can be compared with the graph of its plan.

    Args:
        simulated: the step of that graph.
        trace: the measured one.
    """
    said = _said(step, simulated, trace.plan.accumulation)
    return [
        *_of_layers(profile, said, trace),
        *_of_head(profile, said, trace),
        *_of_links(profile.hardware, trace),
        *_of_adam(step, trace),
    ]


def _of_layers(profile: Profile, said: Seconds, trace: Trace) -> list[Correction]:
    """Forward of the layers, recomputation included, which is one more of them, and backward."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for e in trace.events:
        if e.lane == "gpu" and e.kind in ("forward", "recompute", "backward"):
            took[e.kind, e.block].append(e.duration_s)
    layers = [i for i, b in enumerate(profile.blocks) if b.kind == "layer"]
    typical = {key: statistics.median_low(times) for key, times in took.items()}
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    for i in layers:
        again = said["recompute", i]
        if ("forward", i) in typical and (not again or ("recompute", i) in typical):
            forward.append((said["forward", i] + again, typical["forward", i] + typical.get(("recompute", i), 0.0)))
        elif ("forward", i) in typical:
            forward.append((said["forward", i], typical["forward", i]))
    found = _median("layers forward", forward)
    factor = found[0].factor if found else 1.0
    for i in layers:
        if ("backward", i) in typical:
            # A model that recomputes by its own means shows it as part of backward.
            within = 0.0 if ("recompute", i) in typical else factor * said["recompute", i]
            backward.append((said["backward", i], typical["backward", i] - within))
    return found + _median("layers backward", backward)


def _said(step: StepGraph, simulated: Trace, accumulation: int) -> Seconds:
    """Where the CPU is the "GPU" its spans are slower beside Adam: then those of the simulated step, else the
    graph's."""
    said: Seconds = defaultdict(float)
    if step.shared_cores:
        for e in simulated.events:
            if e.lane == "gpu" and e.start_s < simulated.step_s:
                said[e.kind, e.block] += e.duration_s / accumulation
    else:
        for op in step.ops:
            if op.lane == "gpu":
                said[op.kind, op.block] += op.seconds / accumulation
    return said


def _median(part: Part, pairs: list[tuple[float, float]]) -> list[Correction]:
    """Of (modelled, measured), the pair with the median ratio."""
    pairs = sorted((p for p in pairs if p[0] > 0 and p[1] > 0), key=lambda p: p[1] / p[0])
    if not pairs:
        return []
    said, took = pairs[(len(pairs) - 1) // 2]
    return [Correction(part=part, modelled_s=said, measured_s=took, factor=took / said, samples=len(pairs))]


def _of_head(profile: Profile, said: Seconds, trace: Trace) -> list[Correction]:
    """From the begin of the last block's forward to the end of its backward: the loss between has no span."""
    head = len(profile.blocks) - 1
    if profile.blocks[head].kind != "head":
        return []
    whole = sum(seconds for (_, block), seconds in said.items() if block == head)
    spans = sorted((e for e in trace.events if e.lane == "gpu" and e.block == head), key=lambda e: e.start_s)
    took = [b.end_s - a.start_s for a, b in itertools.pairwise(spans) if a.kind == "forward" and b.kind == "backward"]
    return _median("head", [(whole, t) for t in took])


def compare_beside(simulated: Trace, trace: Trace, known: Sequence[Part]) -> list[Correction]:
    """Copies and Adam that never ran alone, against the same spans of a simulated step."""
    found = []
    for part, lane in COPIES.items():
        if part in known:
            continue
        found += _beside(part, [e for e in _whole(simulated, lane) if e.kind in COMPARED],
                         [e for e in _whole(trace, lane) if e.kind in COMPARED])  # fmt: skip
    return found


def _beside(part: Part, said: list[TraceEvent], took: list[TraceEvent]) -> list[Correction]:
    """Seconds per byte of copies, which a trace may cut finer than the graph, or of the median Adam call."""
    if len(said) < MIN_SAMPLES or len(took) < MIN_SAMPLES:
        return []
    if part == "CPU Adam":
        said_s, took_s = (statistics.median(e.duration_s for e in events) for events in (said, took))
    else:
        size = statistics.median(e.bytes for e in took)
        rates = [sum(e.duration_s for e in events) / max(1, sum(e.bytes for e in events)) for events in (said, took)]
        said_s, took_s = (rate * size for rate in rates)
    if not said_s or not took_s:
        return []
    return [Correction(part=part, modelled_s=said_s, measured_s=took_s, factor=took_s / said_s, samples=len(took),
                       beside=True)]  # fmt: skip


def _of_links(hw: Hardware, trace: Trace) -> list[Correction]:
    found = []
    curves: dict[Part, Curve] = {"link down": hw.link.down, "link up": hw.link.up}
    for part, curve in curves.items():
        spans = [
            (transfer_s(curve, e.bytes), e.duration_s)
            for e in _alone(trace, COPIES[part])
            if e.kind in COMPARED and e.bytes >= MIN_COPY_BYTES
        ]
        found += _lower_quartile(part, spans)
    return found


def _of_adam(step: StepGraph, trace: Trace) -> list[Correction]:
    # Passes that cast are part of the graph's operator, and spans of their own in a trace.
    said = {
        op.bucket: op.seconds * dict(op.parts).get("adam", 1.0)
        for op in step.ops
        if op.lane == "cpu_adam" and op.kind == "adam"
    }
    spans = [(said[e.bucket], e.duration_s) for e in _alone(trace, "cpu_adam") if e.kind == "adam" and e.bucket in said]
    return _lower_quartile("CPU Adam", spans)


def _whole(trace: Trace, lane: Lane) -> list[TraceEvent]:
    """Events of a lane but for those that the window may have cut."""
    return [e for e in trace.events if e.lane == lane and e.start_s > EDGE_S and e.end_s < trace.window_s - EDGE_S]


def _alone(trace: Trace, lane: Lane) -> list[TraceEvent]:
    """Events of a lane that nothing slowed down which shares memory or link with it: that is the simulator's to say."""
    others: list[tuple[float, float]] = []
    for e in sorted(trace.events, key=lambda e: e.start_s):
        if e.lane not in SLOWED_BY[lane]:
            continue
        if others and e.start_s <= others[-1][1]:
            others[-1] = (others[-1][0], max(others[-1][1], e.end_s))
        else:
            others.append((e.start_s, e.end_s))
    ends = [end for _, end in others]
    found = []
    for e in _whole(trace, lane):
        shared, i = 0.0, bisect.bisect_right(ends, e.start_s)
        while i < len(others) and others[i][0] < e.end_s:
            shared += min(e.end_s, others[i][1]) - max(e.start_s, others[i][0])
            i += 1
        if shared <= ACCOMPANIED * e.duration_s:
            found.append(e)
    return found


def _lower_quartile(part: Part, spans: Sequence[tuple[float, float]]) -> list[Correction]:
    if len(spans) < MIN_SAMPLES:
        return []
    ordered = sorted(spans, key=lambda s: s[1] / s[0])
    said, took = ordered[len(ordered) // 4]
    return [Correction(part=part, modelled_s=said, measured_s=took, factor=took / said, samples=len(spans))]


__all__ = ["Correction", "Part", "compare", "compare_beside"]
