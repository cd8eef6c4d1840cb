"""Figures are pure functions of records, of a bounded size and with a fixed number of traces."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from superoffload.estimating import estimate
from superoffload.hardware import Hardware
from superoffload.memory import Ledger, LedgerItem
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.tracing import Trace, TraceEvent
from superoffload.widgets import figures, theme, timeline_figures
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.live import same


def test_timeline_draws_spans_where_the_trace_has_them(trace: Trace) -> None:
    fig = timeline_figures.timeline_figure([tv.timeline(trace)])
    adam = next(t for t in fig.data if t.name == "Adam on CPU")
    assert np.allclose(adam.base, [0.071, 0.083, 0.171, 0.183])
    assert np.allclose(adam.x, 0.012)
    assert set(adam.y.tolist()) == {3.0}
    waits = next(t for t in fig.data if t.name == "Waits")
    assert "queued behind" in waits.hovertext[0].replace("<br>", " ")
    assert waits.text[0] == "weights of layers.0"


def test_the_number_of_traces_is_the_same_for_every_trace(trace: Trace, many_events: Trace) -> None:
    counts = {len(timeline_figures.timeline_figure([tv.timeline(t)]).data) for t in (trace, many_events)}
    counts.add(len(timeline_figures.timeline_figure([tv.timeline(trace), tv.timeline(many_events)]).data))
    assert len(counts) == 1


def test_the_lane_between_chips_is_drawn_where_it_has_spans(trace: Trace) -> None:
    several = trace.model_copy(
        update={"events": (*trace.events, TraceEvent("interconnect", "all_to_all", "all-to-all", 0.02, 0.01, 10**8))}
    )
    for views, lanes in (([trace], 5), ([several], 6), ([trace, several], 6)):
        figure = timeline_figures.timeline_figure([tv.timeline(t) for t in views])
        assert len(figure.layout.yaxis.ticktext) == len(figure.layout.yaxis.tickvals) == lanes
        assert tuple(figure.layout.yaxis.range) == (lanes - 0.5, -0.5)
        assert sum(s.type == "rect" for s in figure.layout.shapes) == lanes
    (bar,) = [b for b in timeline_figures.timeline_figure([tv.timeline(several)]).data if b.name == "All-to-all"]
    assert list(bar.y) == [5.0]
    assert list(bar.x) == pytest.approx([0.01])


def test_two_traces_share_each_lane_without_overlap(trace: Trace, make_trace: Callable[..., Trace]) -> None:
    fig = timeline_figures.timeline_figure([tv.timeline(trace), tv.timeline(make_trace(source="measured"))])
    forward = next(t for t in fig.data if t.name == "Forward")
    rows = sorted(set(np.round(forward.y, 3).tolist()))
    assert len(rows) == 2
    assert rows[1] - rows[0] >= forward.width
    assert "measured, gh200" in json.dumps(fig.layout.to_plotly_json())


def test_drawn_traces_stay_small_on_the_wire(many_events: Trace) -> None:
    fig = timeline_figures.timeline_figure([tv.timeline(many_events)])
    assert len(fig.to_json()) < 100_000


def test_memory_is_drawn_in_percent_of_capacity(trace: Trace) -> None:
    fig = figures.plot_memory(trace.memory)
    bars = fig.data[0]
    assert np.allclose(bars.x[:2], [14 / 96 * 100, 6 / 96 * 100])
    assert any("20.0 of 96 GB" in a.text for a in fig.layout.annotations)
    over = Ledger(items=(LedgerItem("gpu", "weights", 192 * 10**9),), gpu_capacity_bytes=96 * 10**9)
    fig = figures.plot_memory(over)
    assert fig.layout.xaxis.range[1] > 200
    assert any("over" in a.text for a in fig.layout.annotations)


def test_layer_map_marks_flow_and_retained(small_profile: Profile, trace: Trace) -> None:
    view = vm.layer_map(small_profile, Plan(bucket_mb=1.0, retained_buckets=2, flow_blocks=(2,), activations="none",
                                            activations_by_block={1: "full"}))  # fmt: skip
    fig = figures.state_figure(view, vm.memory_rows(trace.memory))
    on_cpu, on_gpu, buckets, _, marks = fig.data
    assert [b.activations for b in view.blocks] == ["", "full", "none", ""]
    assert list(marks.marker.symbol) == ["line-ew-open", "circle", "line-ew-open", "line-ew-open"]
    assert list(marks.marker.opacity) == [0, 1, 1, 0], "embedding and head have no policy"
    assert max(marks.y) < 0 and fig.layout.yaxis.range[0] < min(marks.y), "below the bars, and seen"
    assert on_gpu.y.tolist() == [2**18, 2**18, 0, 0]
    assert on_cpu.y.tolist() == [0, 2**18, 2**19, 2**18]
    assert list(on_cpu.marker.pattern.shape) == ["", "", "/", ""]
    assert buckets.marker.color.tolist() == [0, 0, 0, 0, 1, 1]
    assert [colour for _, colour in buckets.marker.colorscale] == [theme.STATE_COLOURS[x] for x in ("cpu", "gpu")]


def test_many_buckets_share_bars_that_keep_retained_ones_apart(gh200: Hardware) -> None:
    profile = estimate("llama-70b", micro_batch=1, seq_len=2048, hardware=gh200)
    plan = Plan(bucket_mb=64.0, retained_buckets=1001, micro_batch=1, seq_len=2048)
    view = vm.layer_map(profile, plan)
    bars, count = view.bucket_bars, len(view.bucket_params)
    assert len(bars) <= vm.MAX_BUCKET_BARS + 1 < count
    assert [k for bar in bars for k in bar] == list(range(count))
    bar = figures.bucket_trace(view, theme.LIGHT)
    assert bars[int((bar["marker"]["color"] == 0).sum())].start == count - 1001
    assert float((bar["y"] * bar["width"]).sum()) == pytest.approx(profile.params, rel=1e-4)
    assert bar["customdata"][-1].tolist() == [bars[-1].start, count - 1]
    assert sum(b.retained_params for b in view.blocks) == sum(view.bucket_params[-1001:])


def test_plot_timeline_titles_every_trace(trace: Trace, make_trace: Callable[..., Trace]) -> None:
    assert "modelled, gh200" in timeline_figures.plot_timeline(trace).layout.title.text
    both = timeline_figures.plot_timeline([trace, make_trace(source="measured")]).layout.title.text
    assert "modelled, gh200" in both
    assert "measured, gh200" in both


@pytest.mark.parametrize("colour", sorted({*theme.KIND_COLOURS.values(), *theme.STATE_COLOURS.values()}))
def test_text_reads_on_every_colour(colour: str) -> None:
    def luminance(c: str) -> float:
        channels = [int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    hi, lo = sorted((luminance(colour), luminance(theme.text_on(colour))), reverse=True)
    assert (hi + 0.05) / (lo + 0.05) >= 4.5


def test_same_compares_arrays_by_value_and_type() -> None:
    assert same({"x": np.array([1.0])}, {"x": np.array([1.0])})
    assert not same(np.array([1.0], np.float32), np.array([1.0], np.float64))
    assert not same(np.array([1.0]), [1.0])


@pytest.mark.parametrize(("dress", "background"), [(theme.LIGHT, "#FFFFFF"), (theme.DARK, "#111111")])
def test_text_of_figures_has_the_contrast_of_aa(dress: theme.Theme, background: str) -> None:
    """On JupyterLab's own backgrounds; axe does not look into drawings."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for ink in (dress.text, dress.muted, dress.warn):
        dark, light = sorted((luminance(ink), luminance(background)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, ink
