"""Run a step graph in time: exclusive lanes, fluid sharing of host memory, one drawn period with its stalls.

The inner loop works on plain lists; records are made for the drawn window only. Everything is deterministic.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from superoffload import graph as step_graph
from superoffload.errors import InputError
from superoffload.graph import StepGraph
from superoffload.memory import ledger
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.quickly import without_collecting
from superoffload.stalls import find_stalls
from superoffload.tracing import Lane, Trace, TraceEvent

GPU, DOWN, UP, ADAM, NET = 0, 1, 2, 3, 4
_LANE = {"gpu": GPU, "link_down": DOWN, "link_up": UP, "cpu_adam": ADAM, "interconnect": NET}
DOWN_PRIORITY = 0.5
"""Share of host memory up to which downloads keep their rate beside Adam and uploads; assumed, see `share_memory`."""


@dataclass(slots=True)
class Timeline:
    """Start and end of every operator instance: instance i of step s is at s * n + i."""

    graph: StepGraph
    n: int
    full_steps: int
    ready: list[float]
    """When the last thing an instance waits for had ended."""
    start: list[float]
    """-1 where it never ran (the step after the last runs its forward only)."""
    end: list[float]
    released_by: list[int]
    """The instance that ended last among those it waits for, -1 without any."""
    _lanes: dict[Lane, list[int]] = field(default_factory=dict)
    _spans: dict[tuple[Lane, int], tuple[list[float], list[float]]] = field(default_factory=dict)

    def lane(self, lane: Lane) -> list[int]:
        """Operators of a lane."""
        if not self._lanes:
            for op in self.graph.ops:
                self._lanes.setdefault(op.lane, []).append(op.index)
        return self._lanes.get(lane, [])

    def spans(self, lane: Lane, step: int) -> tuple[list[float], list[float]]:
        """When the operators of a lane began in a step, and when they ended, each in order of time."""
        if (lane, step) not in self._spans:
            ran = [x for i in self.lane(lane) if self.start[x := step * self.n + i] >= 0]
            self._spans[lane, step] = (sorted(self.start[x] for x in ran), sorted(self.end[x] for x in ran))
        return self._spans[lane, step]

    def boundary(self, step: int) -> float:
        """When the GPU ends `step`."""
        return self.end[step * self.n + self.graph.last_gpu]

    @property
    def step_s(self) -> float:
        """Time between the last two step ends; the first step starts cold and is not counted alone."""
        last = self.full_steps - 1
        return self.boundary(last) - self.boundary(last - 1)


def share_memory(down: float, up: float, adam: float, weight: float, dram: float) -> tuple[float, float, float]:
    """Share host memory between a download, an upload and Adam.

    Two caps: `adam` is what the cores can draw, `dram` what the memory gives. As measured beside an H200, downloads
    keep their rate (a DMA write costs the memory `weight` per byte) and Adam and uploads share the rest in proportion
    to what they want. Where downloads could take more than half of the memory, they keep half.

    Args:
        down, up, adam: Bandwidth that each would have alone (all in one unit); 0 where it does not run.
        weight: Memory bandwidth per byte downloaded.
        dram: What the memory gives.

    Returns:
        Their rates (down, up, adam).
    """
    writes, others = down * weight, up + adam
    if writes + others <= dram:
        return down, up, adam
    kept = min(writes, max(DOWN_PRIORITY * dram, dram - others))
    share = min(1.0, (dram - kept) / others) if others else 1.0
    return (kept / weight if weight else down), up * share, adam * share


def _share_link(down: float, up: float, both: float) -> tuple[float, float]:
    """Rates of the two directions under their common cap: each may have half, and what the other does not want."""
    if down + up <= both:
        return down, up
    half = both / 2
    if down < half:
        return down, both - down
    return (both - up, up) if up < half else (half, half)


class Stopped(Exception):
    """A simulation was told to stop."""


def run(graph: StepGraph, full_steps: int = 2, stop: threading.Event | None = None) -> Timeline:
    """Simulate `full_steps` steps and the forward of one more, whose start overlaps the tail of the last.

    Raises:
        Stopped: `stop` has been set by another thread.
    """
    ops = graph.ops
    n = len(ops)
    total = n * (full_steps + 1)
    lane = [_LANE.get(op.lane, -1) for op in ops]
    seconds = [op.seconds for op in ops]
    priority = [-op.bucket for op in ops]
    following: list[list[int]] = [[] for _ in range(n)]
    next_step: list[list[int]] = [[] for _ in range(n)]
    same = [0] * n
    both = [0] * n
    for i, op in enumerate(ops):
        for d in op.deps:
            following[d].append(i)
        for d in op.previous:
            next_step[d].append(i)
        same[i] = len(op.deps)
        both[i] = same[i] + len(op.previous)
    forward = [op.in_forward for op in ops]
    pending = same + both * full_steps
    last_base = full_steps * n
    gpu_order = [s * n + i for s in range(full_steps) for i in range(n) if lane[i] == GPU]
    gpu_order += [last_base + i for i in range(n) if lane[i] == GPU and forward[i]]
    gpu_total = len(gpu_order)
    ready, start, end = [0.0] * total, [-1.0] * total, [-1.0] * total
    released = [-1] * total
    queues: list[list[tuple[float, float, int]]] = [[], [], [], [], []]
    push, pop = heapq.heappush, heapq.heappop
    running = [-1, -1, -1, -1, -1]
    """The instance on each lane, -1 where it is idle."""
    left = [0.0] * 5
    rates = [1.0] * 5
    rate_of = _rates(graph)
    instant: list[tuple[float, int]] = []
    """Validator operators under way: (end, instance); they disturb nobody."""
    t, gpu_next, changed, never = 0.0, 0, False, float("inf")
    _, down_queue, up_queue, adam_queue, net_queue = queues
    lanes: tuple[int, ...] = (GPU, DOWN, UP, ADAM)
    copies: tuple[tuple[int, list[tuple[float, float, int]]], ...] = (
        (DOWN, down_queue), (UP, up_queue), (ADAM, adam_queue)
    )  # fmt: skip
    if NET in lane:
        lanes, copies = (*lanes, NET), (*copies, (NET, net_queue))
    waited_for = [op.kind == "all_to_all" for op in ops]

    def offer(x: int) -> None:
        i = x % n
        where = lane[i]
        if where == ADAM:
            push(adam_queue, (float(x - i), priority[i], x))  # older step first, then the bucket needed first
        elif where in (DOWN, UP):
            push(queues[where], (t, x, x))
        elif where == NET:  # an all-to-all goes first, as the GPU does nothing else until it has ended
            push(net_queue, (0.0 if waited_for[i] else 1.0, t, x))
        elif where == -1:
            start[x], end[x] = t, t + seconds[i]
            push(instant, (end[x], x))

    for s in range(full_steps + 1):
        for i in range(n):
            if pending[s * n + i] == 0 and lane[i] != GPU and (s < full_steps or forward[i]):
                offer(s * n + i)

    turns = 0
    while True:
        turns += 1
        if stop is not None and turns % 1024 == 0 and stop.is_set():
            raise Stopped
        if running[GPU] < 0 and gpu_next < gpu_total:
            x = gpu_order[gpu_next]
            if pending[x] == 0:
                gpu_next += 1
                running[GPU], left[GPU], start[x], changed = x, seconds[x % n], t, True
        for where, queue in copies:
            if queue and running[where] < 0:
                x = pop(queue)[2]
                running[where], left[where], start[x], changed = x, seconds[x % n], t, True
        if changed:
            rates, changed = rate_of(running), False
        step = never
        for where in lanes:
            if running[where] >= 0:
                need = left[where] / rates[where]
                if need < step:
                    step = need
        if instant and instant[0][0] - t < step:
            step = max(0.0, instant[0][0] - t)
        if step == never:
            break
        t += step
        finished: list[int] = []
        for where in lanes:
            x = running[where]
            if x >= 0:
                rest = left[where] - step * rates[where]
                if rest <= 1e-12:
                    end[x] = t
                    running[where] = -1
                    finished.append(x)
                else:
                    left[where] = rest
        while instant and instant[0][0] <= t:
            finished.append(pop(instant)[1])
        for x in finished:
            i = x % n
            base = x - i
            for f in following[i]:
                y = base + f
                pending[y] -= 1
                if pending[y] == 0:
                    ready[y], released[y] = t, x
                    if lane[f] != GPU:
                        offer(y)
            if base < last_base:
                base += n
                for f in next_step[i]:
                    y = base + f
                    pending[y] -= 1
                    if pending[y] == 0 and (base < last_base or forward[f]):
                        ready[y], released[y] = t, x
                        if lane[f] != GPU:
                            offer(y)
        changed = bool(finished) and (running[DOWN] < 0 or running[UP] < 0 or running[ADAM] < 0)
    return Timeline(graph, n, full_steps, ready, start, end, released)


def _rates(graph: StepGraph) -> Callable[[list[int]], list[float]]:
    """Return a function from the running instances to the share of their speed alone; results are remembered, as the
    buckets of a model are nearly all alike."""
    ops, n = graph.ops, len(graph.ops)
    classes: dict[tuple[float, int, float], int] = {}
    kinds = [classes.setdefault((op.seconds, op.link_bytes, op.dram_bytes), len(classes)) for op in ops]
    known: dict[tuple[int, int, int, bool], list[float]] = {}

    def rates(current: list[int]) -> list[float]:
        gpu, down, up, adam, _ = current
        key = (
            -1 if down < 0 else kinds[down % n],
            -1 if up < 0 else kinds[up % n],
            -1 if adam < 0 else kinds[adam % n],
            gpu >= 0,
        )
        found = known.get(key)
        if found is None:
            found = known[key] = compute(gpu, down, up, adam)
        return found

    def compute(gpu: int, down: int, up: int, adam: int) -> list[float]:
        d, u, a = (None if x < 0 else ops[x % n] for x in (down, up, adam))
        link_d = d.link_bytes / d.seconds if d and d.seconds else 0.0
        link_u = u.link_bytes / u.seconds if u and u.seconds else 0.0
        fair_d, fair_u = _share_link(link_d, link_u, graph.both_bytes_per_s)
        weight = d.dram_bytes / d.link_bytes if d and d.link_bytes else 1.0
        up_weight = u.dram_bytes / u.link_bytes if u and u.link_bytes else 1.0
        want_a = a.dram_bytes / a.seconds if a and a.seconds else 0.0
        want_d, want_u = fair_d, fair_u * up_weight
        got_d, got_u, got_a = share_memory(want_d, want_u, want_a, weight, graph.dram_bytes_per_s)
        shared = 1.0 / (1.0 + graph.shared_cores) if graph.shared_cores and gpu >= 0 and adam >= 0 else 1.0
        return [
            shared,
            got_d / link_d if link_d else 1.0,
            got_u / (link_u * up_weight) if link_u else 1.0,
            shared * (got_a / want_a if want_a else 1.0),
            1.0,  # collectives share nothing that is modelled
        ]

    return rates


def resolve_speculation(plan: Plan) -> Plan:
    """Resolve `auto`: the engine speculates once most steps commit, and a step that commits is what is simulated."""
    if plan.speculate != "auto":
        return plan
    reason = "auto is simulated as on: a step that is neither clipped nor skipped, as most are after the first ones"
    return plan.model_copy(update={"speculate": "on", "reasons": {**plan.reasons, "speculate": reason}})


@without_collecting()
def step_seconds(profile: Profile, plan: Plan) -> float:
    """Seconds per step in steady state, without making a trace."""
    return run(step_graph.build(profile, resolve_speculation(plan))).step_s


@without_collecting()
def simulate(profile: Profile, plan: Plan, steps: int = 3, *, stop: threading.Event | None = None) -> Trace:
    """Simulate the step that the engine would run and draw one period of it.

    Args:
        profile: Seconds and bytes per block.
        plan: Made for the profile's micro-batch and sequence length.
        steps: Steps to simulate: the first starts cold, the last only runs its forward, so at least 3.
        stop: Another thread may set it to end this early.

    Returns:
        A trace whose window starts where the GPU has ended a step: it shows the tail of that step's Adam and uploads
        beside the next forward, a whole step, and the same tail of the drawn step.

    Raises:
        InputError: the plan does not belong to the profile.
        Stopped: `stop` was set.
    """
    if steps < 3:
        raise InputError(f"steps = {steps}", expected="at least 3: one cold, one drawn, one whose forward overlaps it")
    resolved = resolve_speculation(plan)
    profile = step_graph.fitted(profile, plan)
    timeline = run(step_graph.build(profile, resolved), full_steps=steps - 1, stop=stop)
    hw = profile.hardware
    events, window = drawn_window(timeline)
    context = {
        "profile": profile.source,
        "hardware": f"{hw.name} ({hw.source}); origins of its numbers are in Hardware.sources",
        "engine": "block-wise forward and backward, buckets in backward order, Adam newest bucket first "
        + ("as soon as a gradient has landed" if resolved.speculate == "on" else "after the gradient norm is known"),
        "schedule": f"{len(timeline.graph.buckets)} buckets, {resolved.retained_buckets} of them retained",
    }
    if "rescaled" in profile.context:
        context["rescaled"] = profile.context["rescaled"]
    if plan.chips > 1:
        context["chips"] = (
            f"{plan.chips} in step, one of them drawn: states divided over all, each sequence over "
            f"{plan.sequence_parallel}; modelled only, the engine trains on one"
        )
    if plan.speculate == "auto":
        context["speculate"] = resolved.reasons["speculate"]
    return Trace.model_construct(
        source="modelled",
        step_s=timeline.step_s,
        tokens_per_step=resolved.tokens_per_step,
        model_flops_per_step=profile.model_flops * resolved.accumulation * resolved.chips,
        peak_bf16_tflops=hw.gpu.peak_bf16_tflops * resolved.chips,
        hardware=hw.name,
        model=profile.model,
        plan=resolved,
        memory=ledger(profile, resolved),
        events=events,
        stalls=find_stalls(timeline),
        window_s=window,
        context=context,
    )


def drawn_window(timeline: Timeline) -> tuple[tuple[TraceEvent, ...], float]:
    """Events from the end of the step before the last full one until the last one's uploads have ended.

    Consecutive pieces of one block's backward are drawn as one span.
    """
    ops, n, last = timeline.graph.ops, timeline.n, timeline.full_steps - 1
    origin = timeline.boundary(last - 1)
    finish = max(timeline.end[last * n : (last + 1) * n])
    events: list[TraceEvent] = []
    piece: TraceEvent | None = None
    for s in (last - 1, last, last + 1):
        for i, op in enumerate(ops):
            begin, end = timeline.start[s * n + i], timeline.end[s * n + i]
            if begin < 0 or end <= origin or begin >= finish:
                continue
            begin, end = max(begin, origin) - origin, min(end, finish) - origin
            if op.lane == "gpu" and op.kind == "backward":
                if piece and piece.block == op.block and piece.step == s and begin - piece.end_s < 1e-9:
                    piece = TraceEvent("gpu", "backward", op.name, piece.start_s, end - piece.start_s, block=op.block,
                                       step=s)  # fmt: skip
                    events[-1] = piece
                else:
                    piece = TraceEvent("gpu", "backward", op.name, begin, end - begin, block=op.block, step=s)
                    events.append(piece)
                continue
            at, parts = begin, op.parts or ((op.kind, 1.0),)
            for kind, share in parts:
                length = (end - begin) * share
                name = op.name if kind == op.kind else f"cast of bucket {op.bucket}"
                events.append(TraceEvent(op.lane, kind, name, at, length, op.link_bytes, op.block, op.bucket, s))
                at += length
    # As pairs, whose first parts compare faster than a function is called; the number keeps equal ones in their order.
    order = sorted((e.start_s, e.lane, e.start_s + e.duration_s, k) for k, e in enumerate(events))
    return tuple(events[k] for *_, k in order), finish - origin
