"""View records are plain values: they are compared by equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from superoffload.estimating import estimate
from superoffload.graph import build, fitted
from superoffload.memory import Ledger, LedgerItem
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation, run, simulate
from superoffload.tracing import LANES, Trace, TraceEvent
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm


def test_timeline_of_the_last_step_counts_from_its_beginning(trace: Trace) -> None:
    view = tv.timeline(trace, steps=1)
    assert view.label == "modelled, gh200"
    assert view.window_s == pytest.approx(0.1)
    assert view.step_starts_s == (0.0,)
    assert [g.kind for g in view.groups] == [
        "forward",
        "recompute",
        "backward",
        "copy_down",
        "copy_up",
        "adam",
        "verdict",
    ]
    down = next(g for g in view.groups if g.kind == "copy_down")
    assert down.lane == (LANES.index("link_down"),) * 2
    assert down.start_s == pytest.approx((0.05, 0.06))
    assert down.duration_s == pytest.approx((0.01, 0.01))
    assert (down.nbytes, down.label) == ((10**8, 10**8), ("bucket 0", "bucket 1"))
    assert [(s.lane, s.waits_for) for s in view.stalls] == [(0, "weights of layers.0")]
    assert "queued behind bucket 0" in view.stalls[0].cause
    assert view.merged == 0


def test_whole_trace_marks_every_step(trace: Trace) -> None:
    view = tv.timeline(trace)
    assert view.step_starts_s == pytest.approx((0.0, 0.1))
    assert view.bars == len(trace.events)
    assert len(view.stalls) == 2


def test_window_clips_what_reaches_out(trace: Trace) -> None:
    view = tv.timeline(trace, window=(0.04, 0.06))
    backward = next(g for g in view.groups if g.kind == "backward")
    assert backward.start_s == pytest.approx((0.0,))
    assert backward.duration_s == pytest.approx((0.02,))


def test_merging_bounds_the_bars_and_loses_no_byte(many_events: Trace) -> None:
    view = tv.timeline(many_events, max_bars=500)
    assert 100 < view.bars <= 500
    group = view.groups[0]
    assert sum(group.nbytes) == 5000 * 1000
    assert view.merged == 5000 - view.bars
    assert group.label[0].startswith("buckets 0–")
    ends = [s + d for s, d in zip(group.start_s, group.duration_s, strict=True)]
    assert all(start >= end for start, end in zip(group.start_s[1:], ends, strict=False)), "merged bars overlap"


def test_headline_numbers_and_differences(trace: Trace, make_trace: Callable[..., Trace]) -> None:
    items = {i.name: i for i in vm.headline(trace)}
    assert items["Step time"].value == "100 ms"
    assert items["Tokens/s"].value == "81,920"
    assert items["MFU"].value == "40.4 %"
    assert items["GPU busy"].value == "70.0 %"
    assert items["Exposed optimizer"].value == "30 ms"
    assert all(i.label == "modelled, gh200" and i.delta == "" for i in items.values())
    slow = {i.name: i for i in vm.headline(make_trace(slower=2.0), vm.numbers(trace))}
    assert (slow["Step time"].delta, slow["Step time"].verdict) == ("+100.0 %", "worse")
    assert (slow["Tokens/s"].delta, slow["Tokens/s"].verdict) == ("−50.0 %", "worse")
    assert (slow["GPU busy"].delta, slow["GPU busy"].verdict) == ("±0", "same")
    assert slow["MFU"].delta == "−20.2 pts"
    assert {i.name: i for i in vm.headline(trace.replace(peak_bf16_tflops=0.0), vm.numbers(trace))}["MFU"].delta == ""
    far = {i.name: i for i in vm.headline(make_trace(slower=0.05), vm.numbers(trace))}
    assert (far["Tokens/s"].delta, far["Tokens/s"].verdict) == ("×20", "better")
    fast = {i.name: i for i in vm.headline(make_trace(slower=0.5), vm.numbers(trace))}
    assert (fast["Exposed optimizer"].delta, fast["Exposed optimizer"].verdict) == ("−50.0 %", "better")


def test_unknown_peak_prints_no_utilisation(trace: Trace) -> None:
    assert {i.name: i.value for i in vm.headline(trace.replace(peak_bf16_tflops=0.0))}["MFU"] == "n/a"


def test_numbers_round_trip(trace: Trace) -> None:
    n = vm.numbers(trace)
    assert vm.Numbers.from_json(n.to_json()) == n


def test_memory_rows_stack_largest_first_and_show_pinned_inside_host(trace: Trace) -> None:
    gpu, host, pinned = vm.memory_rows(trace.memory)
    assert gpu.segments == (
        vm.MemorySegment("weights", 14 * 10**9, 0),
        vm.MemorySegment("activations", 6 * 10**9, 14 * 10**9),
    )
    assert (host.total, pinned.total) == (93 * 10**9, 13 * 10**9)
    assert not gpu.over
    full = Ledger(items=(LedgerItem("gpu", "weights", 100),), gpu_capacity_bytes=60, host_capacity_bytes=10)
    assert vm.memory_rows(full)[0].over
    assert "GPU memory is 40 B short" in vm.overflow_line(full)
    assert "largest item is weights" in vm.overflow_line(full)
    assert vm.overflow_line(trace.memory) == ""


def test_layer_map_retains_the_first_layers(small_profile: Profile) -> None:
    view = vm.layer_map(small_profile, Plan(bucket_mb=1.0, retained_buckets=2, flow_blocks=(2,)))
    assert len(view.bucket_params) == 6
    mib = 2**18
    # Backward completes head, layers.1, layers.0, embedding: the last two are half of layers.0, and the embedding.
    assert [b.retained_params for b in view.blocks] == [mib, mib, 0, 0]
    assert [b.flow for b in view.blocks] == [False, False, True, False]
    assert view.layer_indices == (1, 2)


def test_each_lane_tells_its_longest_wait(trace: Trace) -> None:
    cause = "GPU waits 30 ms: layers.0 weights, Adam of bucket 1 queued behind bucket 0"
    assert tv.stall_lines(trace) == (f"{cause} (2 waits, 60 ms in all)",)
    adam = trace.stalls[0]
    adam = type(adam)("cpu_adam", 0.0, 0.07, "verdict", "CPU Adam waits 70 ms: the norm")
    assert tv.stall_lines(trace.replace(stalls=(adam, trace.stalls[0]))) == (cause, "CPU Adam waits 70 ms: the norm")
    assert tv.stall_lines(trace.replace(stalls=())) == ()


def test_steps_in_a_row_join_what_reaches_into_the_next(trace: Trace) -> None:
    begun = [TraceEvent("cpu_adam", "adam", "bucket 2", t, length, 0, -1, 2, k)
             for k, (t, length) in enumerate([(0.0, 0.02), (0.09, 0.03)])]  # fmt: skip
    once = trace.replace(events=tuple(begun), stalls=trace.stalls[:1], window_s=0.12)
    assert tv.steady_steps(once, 1) == tv.timeline(once)
    view = tv.steady_steps(once, 3)
    (adam,) = view.groups
    assert view.window_s == pytest.approx(0.32)
    assert adam.start_s == pytest.approx((0.0, 0.09, 0.19, 0.29))
    assert adam.duration_s == pytest.approx((0.02, 0.03, 0.03, 0.03))
    assert [s.start_s for s in view.stalls] == pytest.approx([0.07, 0.17, 0.27])
    measured = trace.replace(source="measured")
    assert tv.steady_steps(measured, 3) == tv.timeline(measured)


@pytest.mark.parametrize("knobs", [
    {"speculate": "on"}, {"speculate": "off"}, {"flow": (2, 3, 9)}, {"retained_buckets": 3, "accumulation": 2},
    {"activations": "offload_inputs", "retained_buckets": 0},
])  # fmt: skip
@pytest.mark.parametrize("hardware", ["gh200", "h200-pcie5"])
def test_repeated_steps_are_what_the_simulator_does_in_that_time(hardware: str, knobs: dict[str, Any]) -> None:
    """Three steps of the view against six that are simulated: who works on what, at many moments."""
    profile = estimate("bench-3b", micro_batch=2, seq_len=2048, hardware=hardware)
    plan = resolve_speculation(make_plan(profile, check=False, **knobs))
    trace, steps = simulate(profile, plan), 3
    view = tv.steady_steps(trace, steps, max_bars=10**6)
    long = run(build(fitted(profile, plan), plan), full_steps=6)
    origin = long.boundary(6 - 1 - steps)
    ops = long.graph.ops

    def simulated(at_s: float) -> set[str]:
        x = at_s + origin
        return {op.lane for i, op in enumerate(ops) for s in range(7)
                if 0 <= long.start[s * long.n + i] <= x < long.end[s * long.n + i]}  # fmt: skip

    def drawn(at_s: float) -> set[str]:
        return {LANES[lane] for g in view.groups for lane, start, length in zip(g.lane, g.start_s, g.duration_s,
                strict=True) if start <= at_s < start + length}  # fmt: skip

    moments = np.random.default_rng(7).uniform(0, steps * trace.step_s, 150)
    assert [drawn(t) for t in moments] == [simulated(t) for t in moments]
    assert {"gpu", "cpu_adam"} <= set().union(*map(drawn, moments))
