"""Compare without a browser: the table as records, what does not fit, sweeps in the background, and in the Tuner."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plotly.colors import sample_colorscale

from superoffload.errors import InputError, NotSupported
from superoffload.estimating import estimate
from superoffload.graph import buckets_of
from superoffload.plan import Plan
from superoffload.plan_presets import preset_plan
from superoffload.planner import make_plan
from superoffload.planner_pace import seconds_of
from superoffload.profiler import Profile
from superoffload.simulator import simulate
from superoffload.sweeps import setting, sweep
from superoffload.tracing import LANES, Trace
from superoffload.widgets import Compare, Tuner
from superoffload.widgets import compare_views as cv
from superoffload.widgets import sweep_panel as sweep_panels
from superoffload.widgets.compare_figures import compare_spec, sweep_figure
from superoffload.widgets.theme import DARK, LIGHT, Theme

Sent = list[tuple[str, int]]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("bench-3b", micro_batch=2, seq_len=2048, hardware="gh200")


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return make_plan(profile)


@pytest.fixture
def compare(profile: Profile, plan: Plan, sent: Sent) -> Iterator[Compare]:
    c = Compare({"mine": plan, "era": preset_plan("ZeRO-Offload-like", profile)}, profile)
    sent.clear()
    yield c
    c.close_all()


def rows(table: cv.Comparison) -> dict[str, tuple[cv.Cell, ...]]:
    return {r.title: r.cells for r in (*table.headline, *table.fields)}


def test_only_fields_that_differ_are_listed(profile: Profile, plan: Plan) -> None:
    other = plan.replace(cast_down="gpu", flow_blocks=(1, 2, 3, 7), retained_buckets=0)
    table = cv.comparison(cv.traces_of({"a": plan, "b": other}, profile))
    assert [c.letter for c in table.columns] == ["A", "B"]
    fields = {r.title: tuple(c.text for c in r.cells) for r in table.fields}
    wanted = {"Cast down": (plan.cast_down, "gpu"), "Flow blocks": ("none", "4: 1-3, 7")}
    if plan.retained_buckets:
        wanted["Retained buckets"] = (str(plan.retained_buckets), "0")
    assert fields == wanted
    assert cv.comparison(cv.traces_of({"a": plan, "b": plan}, profile)).fields == ()


def test_headline_numbers_with_the_difference_to_the_first(trace: Trace, make_trace: Callable[..., Trace]) -> None:
    table = rows(cv.comparison({"one": trace, "two": make_trace(slower=2.0, source="measured")}))
    assert table["Step time"] == (cv.Cell("100 ms"), cv.Cell("200 ms", "+100.0 %", "worse"))
    assert table["Tokens/s"][1] == cv.Cell("40,960", "−50.0 %", "worse")
    assert table["GPU memory"] == (cv.Cell("20.0 of 96 GB"), cv.Cell("20.0 of 96 GB", "±0", "same"))


def test_every_column_says_modelled_or_measured(compare: Compare, make_trace: Callable[..., Trace]) -> None:
    assert compare.table.value.count("modelled, gh200") == 2
    compare.show({"modelled": make_trace(), "measured": make_trace(source="measured")})
    assert "measured, gh200" in compare.table.value


def test_what_does_not_fit_has_a_reason_and_no_number(profile: Profile, plan: Plan, sent: Sent) -> None:
    far = plan.replace(micro_batch=64, activations="none")
    traces = cv.traces_of({"far": far, "mine": plan}, profile)
    table = cv.comparison(traces)
    lacks = table.columns[0].lacks
    assert "the GPU lacks" in lacks
    headline = rows(table)
    for title in ("Step time", "Tokens/s", "MFU", "GPU busy", "Exposed optimizer"):
        assert headline[title][0] == cv.Cell("does not fit", help=lacks)
        assert headline[title][1].delta == "", "there is no number to compare with"
    assert headline["GPU memory"][0].delta.endswith("GB over")
    letters = {note["text"] for note in compare_spec(traces)["layout"]["annotations"]}
    assert letters == {"B"}, "what does not fit takes no time, so it has no timeline"
    c = Compare([far, far], profile)
    assert "lacks" in c.table.value
    assert c.timeline is not None and "No plan fits" in c.timeline.layout.annotations[0].text
    c.close_all()


def test_timelines_share_one_axis(trace: Trace, make_trace: Callable[..., Trace]) -> None:
    spec = compare_spec({"fast": trace, "slow": make_trace(slower=3.0)})
    assert spec["layout"]["xaxis"]["range"][1] == pytest.approx(0.6, rel=0.01), "the longest window"
    forward = next(t for t in spec["data"] if t["name"] == "Forward")
    assert len({round(float(y), 3) for y in forward["y"]}) == 2
    ends = [s["x0"] for s in spec["layout"]["shapes"] if s["type"] == "line"]
    assert ends == [pytest.approx(0.1), pytest.approx(0.3)]
    assert len(spec["layout"]["annotations"]) == 2 * len(LANES)


@pytest.mark.parametrize(
    ("plans", "said"),
    [([Plan()], "1 plan to compare"), ([Plan()] * 7, "7 plans"), ({"a": Plan(), "b": "x"}, '"b" is a str')],
)
def test_wrong_plans_say_what_is_expected(profile: Profile, plans: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Compare(plans, profile)
    with pytest.raises(InputError, match="unknown hardware preset"):
        Compare([Plan(), Plan()], profile, hardware="gh-200")
    gc.collect()  # what was never built is closed without a complaint


def test_a_plan_of_another_model_is_named(profile: Profile, plan: Plan, compare: Compare) -> None:
    before = compare.traces
    with pytest.raises(InputError, match='plan "odd"'):
        compare.show({"mine": plan, "odd": plan.replace(flow_blocks=(99,))})
    assert compare.traces is before, "what was shown stays"


def test_another_machine(profile: Profile, plan: Plan, sent: Sent) -> None:
    c = Compare([plan, plan.replace(speculate="off")], profile, hardware="h200-pcie5")
    assert {t.hardware for t in c.traces.values()} == {"h200-pcie5"}
    assert c.traces["plan 1"].plan.speculate == "on"
    c.close_all()


def test_a_sweep_is_what_the_function_says(compare: Compare, profile: Profile, plan: Plan) -> None:
    compare.page.value = "What if"
    panel = compare.sweeps
    panel.wait(60)
    assert panel.sweep == sweep(profile, simulate(profile, plan).plan, "bucket_mb", "retained")
    assert panel.view is not None and panel.figure is not None
    drawn = [list(row) for row in panel.figure.data[0].z]
    assert drawn == [list(row) for row in panel.view.tokens_per_s]
    own = panel.view.tokens_per_s[panel.view.own[1]][panel.view.own[0]]
    assert own == pytest.approx(compare.traces["mine"].tokens_per_s)
    assert "modelled, gh200" in panel.view.title
    panel.plan.value = "era"
    panel.wait(60)
    assert panel.view.title.endswith("everything else as in era")


def test_points_that_do_not_fit_are_crosses_with_a_reason(profile: Profile, plan: Plan) -> None:
    found = sweep(profile, plan, "micro_batch", "seq_len", xs=(1, 64), ys=(512, 16384))
    view = cv.sweep_view(found, "mine")
    numbers, crosses, texts = sweep_figure(view).data
    column, row = view.x_labels.index("64"), view.y_labels.index("16,384")
    assert numbers.z[row][column] is None and crosses.z[row][column] == 1
    assert texts.text[row * len(view.x_labels) + column] == "✕"
    assert "the GPU lacks" in crosses.hovertext[row][column].replace("<br>", " ")
    assert "tokens/s" not in crosses.hovertext[row][column]
    assert f"✕: {view.unfit} points without a number" in cv.sweep_line(view)
    table = sweep_panels.table_html(view)
    assert table.count("does not fit: the GPU lacks") == view.unfit


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_number_of_the_heat_map_can_be_read(profile: Profile, plan: Plan, theme: Theme) -> None:
    """Contrast of at least 4.5 (AA) between a cell and its text."""
    figure = sweep_figure(cv.sweep_view(sweep(profile, plan, "micro_batch", "retained"), "mine"), theme=theme)
    numbers, crosses, texts = figure.data
    flat = [v for row in numbers.z for v in row]
    grey = crosses.colorscale[1][1]
    for value, ink in zip(flat, texts.textfont.color, strict=True):
        share = None if value is None else (value - numbers.zmin) / (numbers.zmax - numbers.zmin)
        cell = grey if share is None else sample_colorscale("Cividis", [share])[0]
        a, b = sorted((luminance(cell), luminance(ink)))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (cell, ink)


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    if colour.startswith("#"):
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        rgb = [int(float(part)) for part in re.findall(r"[\d.]+", colour)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_usual_sweeps_and_the_same_axis_twice(compare: Compare) -> None:
    compare.page.value = "What if"
    panel = compare.sweeps
    panel.usual[2].click()
    panel.wait(60)
    assert panel.sweep is not None and (panel.sweep.x, panel.sweep.y) == ("link_gb_per_s", "flow")
    panel.x.value = "flow"
    assert "both axes are" in panel.messages.value


def test_a_measured_profile_says_why_it_has_no_other_sequence(small_profile: Profile, sent: Sent) -> None:
    plan = make_plan(small_profile)
    c = Compare([plan, plan.replace(speculate="off")], small_profile)
    c.page.value = "What if"
    c.sweeps.usual[1].click()
    c.sweeps.wait(60)
    assert "cannot be swept" in c.sweeps.messages.value and "so.estimate" in c.sweeps.messages.value
    with pytest.raises(NotSupported):
        sweep(small_profile, plan, "micro_batch", "seq_len")
    c.close_all()


def test_the_newest_sweep_wins_and_stop_stops(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    asked: list[tuple[str, str]] = []

    def slow(p: Profile, q: Plan, x: str, y: str, **more: Any) -> Any:
        asked.append((x, y))
        return sweep(p, q, x, y, **more)

    monkeypatch.setattr(sweep_panels, "sweep", slow)

    async def go() -> None:
        compare.page.value = "What if"
        panel = compare.sweeps
        for axis in ("flow", "adam_threads", "accumulation"):
            panel.x.value = axis  # quicker than a sweep
        await asyncio.sleep(0.5)
        assert asked == [("accumulation", "retained")], "only the newest is begun"
        panel._take_usual("link_gb_per_s", "bucket_mb")
        await asyncio.sleep(0.4)
        panel.stop.click()
        panel.wait(20)
        assert not panel.running
        await asyncio.sleep(0.05)
        assert panel.progress.layout.visibility == "hidden"

    asyncio.run(go())


def click_cell(panel: sweep_panels.SweepPanel, column: int, row: int) -> None:
    """What the browser sends for a click on a cell."""
    assert panel.figure is not None and panel.view is not None
    trace = 0 if panel.view.tokens_per_s[row][column] is not None else 1
    panel.figure._js2py_pointsCallback = {
        "event_type": "plotly_click",
        "points": {"trace_indexes": [trace], "point_indexes": [[row, column]], "xs": [column], "ys": [row]},
    }


def test_the_setting_of_a_point_is_the_plan_that_was_simulated(profile: Profile, plan: Plan) -> None:
    for x, y in (("bucket_mb", "retained"), ("micro_batch", "flow"), ("link_gb_per_s", "adam_threads")):
        found = sweep(profile, plan, x, y)
        for point in (found.points[0], found.points[-1], found.at(*found.own)):
            if point.tokens_per_s is None:
                continue
            at, chosen = setting(profile, plan, {x: point.x, y: point.y})
            assert chosen.tokens_per_step / seconds_of(at, chosen) == point.tokens_per_s
    assert setting(profile, plan, {}) == (profile, plan)
    assert setting(profile, plan, {"link_gb_per_s": 64.0})[0].hardware.link.down.peak == pytest.approx(64.0)
    with pytest.raises(InputError, match="sweep axis"):
        setting(profile, plan, {"links": 1.0})


def test_a_cell_is_chosen_by_click_and_by_menu(compare: Compare) -> None:
    compare.page.value = "What if"
    panel = compare.sweeps
    assert panel.take.layout.display == "none" and panel.point is None
    with pytest.raises(InputError, match="no point is chosen"):
        sweep_panels.SweepPanel(lambda: LIGHT).load_point()
    panel.wait(60)
    assert panel.view is not None and panel.sweep is not None and panel.figure is not None
    assert panel.point == panel.view.best, "the menus stand on the best one"
    assert [c.tooltip for c in panel.cell.values()] == [panel.view.x_title, panel.view.y_title]
    seen: list[Plan] = []
    panel.observe(lambda change: seen.append(change["new"]), names="chosen")
    click_cell(panel, 1, 2)
    assert panel.point == (1, 2) and panel.chosen is not None
    expected = setting(compare.profile, compare.traces["mine"].plan,
                       {"bucket_mb": panel.sweep.xs[1], "retained": panel.sweep.ys[2]})[1]  # fmt: skip
    assert panel.chosen.replace(reasons={}) == expected.replace(reasons={})
    assert "bucket_mb" not in panel.chosen.reasons, "it was said of another value"
    assert panel.view.x_labels[1] in panel.messages.value and "tokens/s" in panel.messages.value
    assert len(panel.figure.layout.shapes) == 4, "both frames are drawn"
    panel.cell["x"].value, panel.cell["y"].value = 0, 3
    assert panel.chosen == seen[-1] and len(seen) == 1, "menus alone load nothing"
    assert panel.view.y_labels[3] in panel.told.value
    panel.take.click()
    assert len(seen) == 2 and panel.chosen.bucket_mb == panel.sweep.xs[0]


def test_a_cell_without_a_number_says_why_and_loads_nothing(compare: Compare) -> None:
    compare.page.value = "What if"
    panel = compare.sweeps
    panel._take_usual("micro_batch", "seq_len")
    panel.wait(60)
    assert panel.view is not None
    row, column = next(
        (r, c) for r, values in enumerate(panel.view.tokens_per_s) for c, v in enumerate(values) if v is None
    )
    click_cell(panel, column, row)
    assert panel.point == (column, row) and panel.chosen is None
    assert "does not fit" in panel.told.value and panel.take.disabled
    with pytest.raises(InputError, match="has no number"):
        panel.load_point()


def test_a_cell_of_the_tuners_sweep_is_loaded_into_it(tuner: Tuner) -> None:
    tuner.compare.value = True
    assert tuner.compare_panel is not None
    compare = tuner.compare_panel.compare
    tuner.compare_panel.wait(60)
    compare.page.value = "What if"
    panel = compare.sweeps
    panel.wait(60)
    assert panel.view is not None and panel.sweep is not None
    before = tuner.plan
    column = (panel.view.own[0] + 1) % len(panel.sweep.xs)
    click_cell(panel, column, panel.view.own[1])
    assert tuner.plan.bucket_mb == panel.sweep.xs[column] != before.bucket_mb
    assert tuner.plan.speculate == before.speculate, "auto stays auto"
    assert "bucket_mb" not in tuner.plan.reasons and "set by hand" in tuner.controls.knobs["bucket_mb"].why.value
    assert "in the Tuner" in panel.messages.value
    tuner.undo.click()
    assert tuner.plan == before
    panel.wait(60)
    panel.usual[2].click()
    panel.wait(60)
    assert panel.sweep.x == "link_gb_per_s"
    click_cell(panel, 0, panel.view.own[1])
    assert tuner.session.hardware.name == f"gh200 with {panel.sweep.xs[0]:g} GB/s each way"
    assert tuner.trace.tokens_per_s == pytest.approx(panel.view.tokens_per_s[panel.view.own[1]][0])
    assert tuner.session.hardware.name in panel.messages.value
    tuner.undo.click()
    assert tuner.session.hardware.name == "gh200" and tuner.plan == before
    tuner.undo.click()


def test_a_batch_that_the_tuner_cannot_show_is_refused_with_words(small_profile: Profile, sent: Sent) -> None:
    t = Tuner(small_profile, make_plan(small_profile), autosave=False)
    other = t.plan.replace(micro_batch=4)
    with pytest.raises(InputError, match="micro_batch = 4 is not what was profiled"):
        t.load(t.session.profile, other)
    t.close_all()


def test_messages_are_few_and_small(compare: Compare, profile: Profile, plan: Plan, sent: Sent) -> None:
    compare.show({"mine": plan.replace(retained_buckets=3), "era": preset_plan("ZeRO-Offload-like", profile)})
    assert 0 < max(n for _, n in sent) < 100_000
    assert len(sent) < 20
    sent.clear()
    compare.page.value = "What if"
    compare.sweeps.wait(60)
    assert max(n for _, n in sent) < 100_000
    assert len(sent) < 140, "a sweep's progress is told five times a second"


def test_a_whole_comparison_of_six_is_small(profile: Profile, sent: Sent) -> None:
    names = ("planner's own", "ZeRO-Offload-like", "FSDP-offload-like", "+ casts", "+ speculation", "+ repartition")
    big = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    c = Compare({n: preset_plan(n, big) for n in names}, big)
    assert max(n for _, n in sent if n < 1_000_000) < 100_000  # plotly's own code apart
    assert c.timeline is not None and len({float(y) for t in c.timeline.data for y in t.y}) >= 6 * 4
    c.close_all()


def test_the_theme_reaches_both_pages(compare: Compare) -> None:
    compare.page.value = "What if"
    compare.sweeps.wait(60)
    compare._bridge.theme = "dark"
    assert compare.timeline is not None and compare.sweeps.figure is not None
    assert compare.timeline.layout.font.color == compare.sweeps.figure.layout.font.color == DARK.text
    assert LIGHT.text != DARK.text


def test_every_field_of_a_plan_has_a_title() -> None:
    assert set(cv.FIELD_TITLES) == set(Plan.knobs())


# ---- in the Tuner ----------------------------------------------------------------------------------------------------


def test_the_tuner_compares_with_its_baseline_and_presets(tuner: Tuner, profile: Profile) -> None:
    pinned = tuner.trace
    tuner.pin.click()
    tuner.controls.retained.value = 7
    tuner.compare.value = True
    panel = tuner.compare_panel
    assert panel is not None
    assert panel.compare.traces == {"this plan": tuner.trace, "pinned baseline": pinned}
    panel.ticks["ZeRO-Offload-like"].value = True
    panel.wait(60)
    era = simulate(profile, preset_plan("ZeRO-Offload-like", profile, tuner.plan))
    assert panel.compare.traces["ZeRO-Offload-like"] == era
    tuner.controls.retained.value = 0
    assert panel.compare.traces["this plan"] == tuner.trace, "it follows the knobs"
    tuner.pin.click()
    assert "pinned baseline" not in panel.compare.traces and panel.ticks["pinned baseline"].disabled
    tuner.controls.batch.value = 4
    panel.wait(60)
    assert panel.compare.traces["ZeRO-Offload-like"].tokens_per_step == 4 * 2048, "planned anew for another batch"


def test_without_a_baseline_it_begins_with_a_preset(tuner: Tuner) -> None:
    tuner.compare.value = True
    panel = tuner.compare_panel
    assert panel is not None
    panel.wait(60)
    assert list(panel.compare.traces) == ["this plan", "ZeRO-Offload-like"]
    for tick in panel.ticks.values():
        tick.value = False
    assert "Tick what the present plan is to be compared with" in panel.messages.value
    assert panel.compare.layout.display == "none"


def test_measured_steps_are_compared_with_the_prediction(tuner: Tuner) -> None:
    tuner.compare.value = True
    panel = tuner.compare_panel
    assert panel is not None and panel.ticks["measured steps"].disabled
    panel.wait(60)
    measured = tuner.trace.replace(source="measured", step_s=2 * tuner.trace.step_s, plan=tuner.plan)
    tuner.show_measured(measured)
    assert not panel.ticks["measured steps"].disabled
    panel.ticks["measured steps"].value = True
    assert panel.compare.traces["measured steps"] == measured
    assert "measured, gh200" in panel.compare.table.value
    tuner.controls.retained.value = tuner.plan.retained_buckets + 1
    assert "measured steps" not in panel.compare.traces, "it would be compared with what it is not"


def test_no_more_than_six_are_drawn(tuner: Tuner) -> None:
    tuner.pin.click()
    tuner.compare.value = True
    panel = tuner.compare_panel
    assert panel is not None
    usable = [t for t in panel.ticks.values() if not t.disabled]
    assert len(usable) > cv.MOST_PLANS - 1
    for tick in usable:
        tick.value = True
    assert sum(t.value for t in usable) == cv.MOST_PLANS - 1
    assert "take a tick away" in panel.messages.value
    panel.wait(60)


def test_a_preset_that_fails_says_so(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.widgets import compare_panel

    def fail(*_: Any) -> Plan:
        raise InputError("no such plan", remedy="Take another")

    tuner.compare.value = True
    panel = tuner.compare_panel
    assert panel is not None
    panel.wait(60)
    monkeypatch.setattr(compare_panel, "preset_plan", fail)
    panel.ticks["+ casts"].value = True
    panel.wait(60)
    assert "no such plan" in panel.messages.value and "Take another" in panel.messages.value


def test_a_closed_comparison_costs_an_edit_nothing(tuner: Tuner, sent: Sent) -> None:
    tuner.compare.value = True
    assert tuner.compare_panel is not None
    tuner.compare_panel.wait(60)
    tuner.compare.value = False
    shown = tuner.compare_panel.compare.traces
    sent.clear()
    tuner.controls.bucket.value = 32.0
    assert sum(n for _, n in sent) < 150_000
    assert tuner.compare_panel.compare.traces is shown
    tuner.compare.value = True
    assert tuner.compare_panel.compare.traces["this plan"] == tuner.trace


def test_a_pinned_baseline_survives_in_its_file(profile: Profile, sent: Sent, tmp_path: Any) -> None:
    t = Tuner(profile, autosave=tmp_path / "session.json")
    t.pin.click()
    pinned = t.trace
    t.controls.retained.value = 4
    t.machine.value = "h200-pcie5"
    again = Tuner.restore(tmp_path / "session.json")
    assert again.session.pinned is not None
    assert again.session.pinned.replace(plan=pinned.plan, context=pinned.context) == pinned
    assert again.session.baseline == t.session.baseline
    t.close_all()


def test_buckets_are_shares_of_what_there_is(profile: Profile, plan: Plan) -> None:
    found = sweep(profile, plan, "bucket_mb", "retained", xs=(256,), ys=(1.0,))
    count = len(buckets_of(profile, 256.0))
    whole = plan.replace(bucket_mb=256.0, retained_buckets=count)
    point = found.at(256.0, 1.0)
    assert (point.tokens_per_s is None) == (not simulate(profile, whole).memory.fits)
