"""Measured steps under their prediction: the figure, the table, and the Tuner that opens on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import superoffload as so
from superoffload.measured_step import MeasuredStep, lanes_busy
from superoffload.widgets import Tuner, plot_measured
from superoffload.widgets.measured_view import lanes_html, overlay


@pytest.fixture
def step() -> MeasuredStep:
    return so.load_measured("committed")


@pytest.fixture
def opened(step: MeasuredStep) -> Iterator[Tuner]:
    t = Tuner(step, autosave=False)
    yield t
    t.close_all()


@pytest.mark.parametrize("name", so.measured_steps())
def test_both_timelines_are_one_step_with_what_it_overlaps_of_the_one_before(name: str) -> None:
    step = so.load_measured(name)
    predicted = step.predicted()
    views = overlay(predicted, step.trace)
    assert [v.window_s for v in views] == pytest.approx([predicted.step_s, step.trace.window_s])
    assert predicted.window_s > predicted.step_s, "it goes on, and that is not shown twice"
    for view, length in zip(views, (predicted.step_s, step.trace.window_s), strict=True):
        first = {g.kind: min(g.start_s) for g in view.groups}
        assert first["forward"] < 0.15 * length < first["backward"] < 0.8 * length
        assert max(x + t for g in view.groups for x, t in zip(g.start_s, g.duration_s, strict=True)) <= length + 1e-9


def test_the_figure_says_what_is_measured_and_how_far_off_the_model_is(step: MeasuredStep) -> None:
    title = plot_measured(step).layout.title.text
    assert step.title in title and "measured on NVIDIA H200" in title and "modelled (−1." in title


def test_the_table_has_a_row_for_each_lane_that_works(step: MeasuredStep) -> None:
    text = lanes_html(lanes_busy(step.predicted(), step.trace))
    assert text.count("<tr>") == 5 and "CPU Adam" in text and "model off" in text


def test_a_tuner_opens_on_a_measured_step_and_goes_back_to_it(opened: Tuner, step: MeasuredStep) -> None:
    assert opened.plan.replace(reasons={}) == step.plan.replace(reasons={})
    assert opened.measured == step.trace
    opened.plan = opened.plan.replace(speculate="off")
    assert opened.measured is None, "it is not of this plan"
    opened.show_recorded()
    assert opened.measured == step.trace and opened.plan.speculate == "on"


def test_its_measure_panel_tells_and_calibrates_without_a_model(opened: Tuner, step: MeasuredStep) -> None:
    opened.measure.value = True
    panel = opened.measure_panel
    assert panel is not None
    assert step.title in panel.messages.value and "model off" in panel.messages.value
    assert panel.start.disabled and not panel.correct.disabled
    before = opened.trace.step_s
    panel.correct.click()
    assert opened.trace.step_s != before and "error" not in panel.messages.value
    panel.back.click()
    assert opened.trace.step_s == before
    panel.clear.click()
    assert opened.measured is None
    panel.recorded.click()
    assert opened.measured == step.trace and step.shows in panel.messages.value


def test_a_tuner_on_a_profile_has_no_recorded_step(step: MeasuredStep) -> None:
    t = Tuner(step.profile, autosave=False)
    try:
        with pytest.raises(so.InputError, match="not opened on a measured step"):
            t.show_recorded()
        t.measure.value = True
        panel = t.measure_panel
        assert panel is not None and panel.recorded.layout.display == "none" and panel.correct.disabled
        assert "load_measured" in panel.messages.value
    finally:
        t.close_all()
