"""Autotune without a browser: progress, a cancel that ends the thread, refusal, errors, and plans that are loaded."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

import superoffload.widgets.autotune as panels
from superoffload.autotune import search
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.search_result import SearchResult, Trial, front
from superoffload.simulator import simulate
from superoffload.widgets import Autotune, Tuner
from superoffload.widgets import search_views as sv
from superoffload.widgets.search_figures import ORDER, SELECTED, search_figure
from superoffload.widgets.theme import DARK

Sent = list[tuple[str, int]]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200")


@pytest.fixture(scope="module")
def result(profile: Profile) -> SearchResult:
    return search(profile, gpu_budget_gb=24, trials=60)


def opened(tuner: Tuner, trials: int = 40) -> Autotune:
    tuner.autotune.value = True
    panel = tuner.autotune_panel
    assert panel is not None
    panel.form.trials.value = trials
    return panel


# ---- records and picture ---------------------------------------------------------------------------------------------


def test_the_view_has_every_kind_in_the_lists_order(result: SearchResult) -> None:
    view = sv.found_view(result)
    assert (view.place, view.origin, view.budget_gb) == ("GPU", "modelled, gh200", 24)
    assert len(view.points) == len(result.trials) == view.tried
    kinds = [sv.KINDS.index(p.kind) for p in view.points]
    assert kinds == sorted(kinds) and view.points[0].kind == "best"
    assert result.best is not None and view.points[0].number == result.best.number
    for p in view.points:
        trial = result.trials[p.number]
        assert (p.tokens_per_s is None) == (not trial.ran) == (p.kind == "does not fit")
        assert p.reason == trial.reason != ""
    unfit = view.of("does not fit")
    assert unfit and all("tokens/s" not in p.label for p in unfit)


def test_what_is_drawn_is_bounded_and_keeps_the_best(result: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sv, "MAX_POINTS", 30)
    view = sv.found_view(result)
    assert len(view.points) == 30 and view.tried == len(result.trials)
    kept = {t.number for t in result.pareto}
    assert kept <= {p.number for p in view.points}


def test_the_picture_shows_what_does_not_fit_without_a_number(result: SearchResult) -> None:
    view = sv.found_view(result)
    number = view.of("does not fit")[0].number
    figure = search_figure(view, number)
    unfit = figure.data[ORDER.index("does not fit")]
    assert unfit.yaxis == "y2" and "tokens/s" not in unfit.hovertemplate
    assert "lacks" in unfit.hovertext[0].replace("<br>", " ")
    best = figure.data[ORDER.index("best")]
    assert best.y[0] == pytest.approx(result.best.tokens_per_s if result.best else 0)
    assert "modelled" in best.hovertemplate
    ring = figure.data[SELECTED]
    assert (ring.yaxis, list(ring.x)) == ("y2", [view.of("does not fit")[0].gb])
    symbols = {figure.data[i].marker.symbol for i in range(len(ORDER))}
    assert len(symbols) == len(ORDER), "told apart without colours"


def test_least_host_memory_is_drawn_over_the_host(profile: Profile) -> None:
    found = search(profile, objective="host_memory", tokens_per_s=10_000, trials=20)
    view = sv.found_view(found)
    assert (view.place, view.goal_tokens_per_s) == ("host", 10_000)
    assert view.points[0].gb == pytest.approx(found.trials[view.points[0].number].host_bytes / 1e9)


def test_a_growing_view_is_the_front_of_what_was_tried_and_stays_small(profile: Profile) -> None:
    tried: list[Trial] = []
    growing = sv.Growing(sv.Frame.of(profile, "throughput", 24.0, None, None))
    best: list[Trial | None] = []

    def add(trial: Trial) -> None:
        tried.append(trial)
        growing.add(trial)
        if len(tried) in (1, 40, 400):
            view = growing.view(trial.number if trial.ran else None)
            kept = {p.number for p in view.points if p.kind in ("best", "planner", "pareto")}
            assert {t.number for t in front([t for t in tried if t.ran])} <= kept
            assert view.tried == len(tried) and len(view.points) <= sv.MAX_POINTS + 2

    found = search(profile, gpu_budget_gb=24, trials=400, tried=add, progress=lambda done, total, b: best.append(b))
    assert [t.number for t in tried] == list(range(len(found.trials)))
    assert best[-1] is not None
    view = growing.view(best[-1].number, chosen=3)
    assert view.of("best")[0].number == best[-1].number and 3 in {p.number for p in view.points}
    assert (view.place, view.budget_gb, view.origin) == ("GPU", 24.0, "modelled, gh200")
    assert all(p.reason for p in view.points) and all("lacks" in p.reason for p in view.of("does not fit"))
    goal = sv.Growing(sv.Frame.of(profile, "gpu_memory", None, None, 1e9))
    for trial in tried:
        goal.add(trial)
    assert not goal.view(None).of("pareto"), "none is fast enough"


# ---- the panel -------------------------------------------------------------------------------------------------------


def test_it_finds_what_the_search_finds_and_says_so(profile: Profile, sent: Sent) -> None:
    panel = Autotune(profile)
    seen: list[Any] = []
    panel.observe(lambda change: seen.append(change["new"]), names="result")
    panel.form.gpu.value, panel.form.trials.value = "24", 60
    panel.start.click()
    panel.wait(60)
    again = search(profile, gpu_budget_gb=24, tokens=profile.tokens, trials=60)
    assert panel.result == again and seen == [again]
    assert again.best is not None
    assert panel.found.value == again.best.number
    assert "60 plans tried" in panel.messages.value
    assert panel.plan == again.best.plan, "without a Tuner the trait holds what is selected"
    panel.found.value = 3
    assert panel.plan is not None and panel.plan.replace(reasons={}) == again.trials[3].plan
    assert again.trials[3].reason[1:].split("<")[0][:20] in panel.detail.value
    assert panel.load.layout.display == "none"
    panel.close_all()


def test_progress_and_cancel_in_a_running_loop(tuner: Tuner) -> None:
    """As in a kernel: the loop goes on turning, news arrives, and cancel ends the thread."""

    async def go() -> None:
        panel = opened(tuner, 100_000)
        panel.start.click()
        assert panel.running
        turns, began = 0, time.monotonic()
        while "best so far" not in panel.status.value and time.monotonic() - began < 30:
            await asyncio.sleep(0.01)
            turns += 1
        assert "modelled" in panel.status.value and panel.progress.value >= 1
        assert turns > 5, "the loop stood still"
        panel.start.click()
        assert "a search is running (plan" in panel.messages.value and "cancel it" in panel.messages.value
        panel.stop.click()
        assert panel.stop.disabled
        began = time.monotonic()
        while panel.running and time.monotonic() - began < 20:
            await asyncio.sleep(0.01)
        assert not panel.running
        await asyncio.sleep(0.05)
        assert not [t for t in threading.enumerate() if t.name == "superoffload-search"]
        assert panel.result is not None and panel.result.cancelled
        assert 1 <= len(panel.result.trials) < 100_000
        assert "stopped early" in panel.messages.value
        assert panel.progress.layout.visibility == "hidden" and panel.status.value == ""

    asyncio.run(go())


def test_the_picture_grows_and_its_points_load_while_the_search_goes_on(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "DRAW_EVERY_S", 0.05)

    async def go() -> None:
        panel = opened(tuner, 100_000)
        panel.form.gpu.value = "24"
        panel.start.click()
        seen: list[int] = []
        began = time.monotonic()
        while time.monotonic() - began < 40 and not (len(set(seen)) >= 3 and len(panel.found.options) >= 3):
            await asyncio.sleep(0.02)
            if panel._view is not None:
                seen.append(panel._view.tried)
        assert panel.running and panel.result is None and panel.figure is not None
        assert seen == sorted(seen) and len(set(seen)) >= 3, "it grows"
        assert panel._view is not None and panel._body.layout.display is None
        drawn = sum(len(panel.figure.data[i].x) for i in range(len(ORDER)))
        assert drawn == len(panel._view.points)
        kept = [p for p in panel._view.points if p.kind in ("best", "pareto")]
        click(panel, kept[-1].kind, panel._view.of(kept[-1].kind).index(kept[-1]))
        assert f"#{kept[-1].number} is in the Tuner" in panel.messages.value
        assert tuner.plan.replace(reasons={}) == panel._trials()[kept[-1].number].plan
        assert f"found by the search (plan #{kept[-1].number})" in tuner.plan.reasons["bucket_mb"]
        await asyncio.sleep(0.5)
        assert panel.found.value == kept[-1].number, "what is selected stays so while the list changes"
        unfit = panel._view.of("does not fit")
        if unfit:
            click(panel, "does not fit", 0)
            assert panel.found.value == unfit[0].number and "the GPU lacks" in panel.detail.value
        panel.stop.click()
        began = time.monotonic()
        while panel.running and time.monotonic() - began < 20:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert panel.result is not None and panel._growing is None
        assert len(panel.found.options) == len(sv.found_view(panel.result).points)
        assert panel.result.best is not None and panel.found.value == panel.result.best.number

    asyncio.run(go())


def test_a_second_search_shows_the_first_until_it_has_something(tuner: Tuner) -> None:
    panel = opened(tuner, 30)
    panel.start.click()
    panel.wait(60)
    first = panel._view
    assert first is not None and panel._growing is None
    panel.form.gpu.value = "500"
    panel.start.click()
    panel.wait(60)
    assert "at most 96" in panel.messages.value
    assert panel._view is first and len(panel.found.options) == len(first.points), "a refused search leaves it"
    panel.form.gpu.value = "24"
    panel.start.click()
    panel.wait(60)
    assert panel.result is not None and panel.result.settings.gpu_budget_gb == 24
    assert panel._view is not None and panel._view.budget_gb == 24


def test_closing_the_panel_ends_the_search(profile: Profile, sent: Sent) -> None:
    panel = Autotune(profile)
    panel.form.trials.value = 100_000
    panel.run()
    panel.close()
    panel.wait(20)
    assert not panel.running and panel.result is None


def test_messages_are_few_and_small(tuner: Tuner, sent: Sent) -> None:
    panel = opened(tuner, 400)
    sent.clear()
    began = time.monotonic()
    panel.start.click()
    panel.wait(120)
    took = time.monotonic() - began
    assert panel.result is not None and len(panel.result.trials) > 200
    assert max(n for _, n in sent if n < 1_000_000) < 100_000  # plotly's own code apart
    assert len(sent) < 60 + 4 * took / 0.2
    sent.clear()
    panel.found.value = panel.found.options[5][1]
    assert sum(n for _, n in sent) < 5_000 and len(sent) < 15


def test_a_plan_is_loaded_by_list_and_by_click(tuner: Tuner) -> None:
    panel = opened(tuner)
    panel.form.gpu.value = "24"
    panel.start.click()
    panel.wait(60)
    assert panel.result is not None and panel.figure is not None and panel._view is not None
    kept = panel._view.of("pareto")
    assert len(kept) >= 2
    before = tuner.plan
    panel.found.value = kept[1].number
    assert tuner.plan == before, "walking through the list loads nothing"
    panel.load.click()
    assert tuner.plan.replace(reasons={}) == panel.result.trials[kept[1].number].plan
    assert f"found by the search (plan #{kept[1].number})" in tuner.controls.knobs["bucket_mb"].why.value
    assert f"#{kept[1].number} is in the Tuner" in panel.messages.value
    assert "The same as the Tuner" in panel.detail.value
    trial = panel.result.trials[kept[1].number]
    if trial.exact:
        assert tuner.trace.tokens_per_s == pytest.approx(trial.tokens_per_s)

    click(panel, "pareto", 0)
    assert panel.found.value == kept[0].number
    assert tuner.plan.replace(reasons={}) == panel.result.trials[kept[0].number].plan
    tuner.undo.click()
    assert tuner.plan.replace(reasons={}) == trial.plan


def test_a_click_on_what_does_not_fit_says_why_and_loads_nothing(tuner: Tuner) -> None:
    panel = opened(tuner, 60)
    panel.form.gpu.value = "24"
    panel.start.click()
    panel.wait(60)
    assert panel._view is not None
    before = tuner.plan
    point = panel._view.of("does not fit")[0]
    click(panel, "does not fit", 0)
    assert panel.found.value == point.number
    assert "Does not fit: the GPU lacks" in panel.detail.value
    assert tuner.plan == before


def click(panel: Autotune, kind: sv.Kind, index: int) -> None:
    """What the browser sends for a click on a point."""
    assert panel.figure is not None
    panel.figure._js2py_pointsCallback = {
        "event_type": "plotly_click",
        "points": {"trace_indexes": [ORDER.index(kind)], "point_indexes": [index], "xs": [0], "ys": [0]},
    }


def test_nothing_that_meets_the_budget_is_said_with_the_nearest(tuner: Tuner) -> None:
    panel = opened(tuner, 30)
    panel.form.gpu.value = "2"
    panel.start.click()
    panel.wait(60)
    assert panel.result is not None and panel.result.best is None
    assert "None meets what is asked; the nearest is #" in panel.messages.value
    assert panel.found.value == panel.result.nearest.number


@pytest.mark.parametrize(
    ("field", "typed", "said"),
    [
        ("gpu", "lots", '"lots" for the GPU&#x27;s budget'),
        ("host", "-3", '"-3" for the host&#x27;s budget'),
        ("gpu", "500", "at most 96"),
        ("tokens", "1000", "a multiple of seq_len"),
    ],
)
def test_what_cannot_be_asked_is_said_in_the_panel(tuner: Tuner, field: str, typed: str, said: str) -> None:
    panel = opened(tuner)
    getattr(panel.form, field).value = typed
    panel.start.click()
    panel.wait(60)
    assert said.replace("&#x27;", "'") in panel.messages.value.replace("&#x27;", "'").replace("&quot;", '"')
    assert panel.result is None and not panel.running
    getattr(panel.form, field).value = ""
    panel.start.click()
    panel.wait(60)
    assert panel.result is not None, "it works again"


def test_a_defect_of_the_search_is_shown_and_the_panel_lives(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> SearchResult:
        raise ZeroDivisionError("a <defect>")

    panel = opened(tuner)
    with monkeypatch.context() as patch:
        patch.setattr(panels, "search", broken)
        panel.start.click()
        panel.wait(20)
    assert "ZeroDivisionError" in panel.messages.value and "a &lt;defect&gt;" in panel.messages.value
    assert panel.stop.disabled and panel.progress.layout.visibility == "hidden"


def test_the_least_memory_needs_a_throughput(profile: Profile, tuner: Tuner, sent: Sent) -> None:
    panel = Autotune(profile)
    panel.form.objective.value = "gpu_memory"
    assert panel.form.goal.layout.display is None
    panel.start.click()
    assert "Fill in Tokens/s" in panel.messages.value
    inside = opened(tuner)
    inside.form.objective.value = "gpu_memory"
    assert inside.form.asked()["tokens_per_s"] == round(0.9 * tuner.trace.tokens_per_s)
    inside.form.goal.value = "12,345"
    assert inside.form.asked()["tokens_per_s"] == 12345
    panel.close_all()


def test_it_asks_for_the_tuners_model_machine_and_batch(tuner: Tuner) -> None:
    panel = opened(tuner)
    tuner.controls.accumulation.value = 2
    assert panel.form.asked()["tokens"] == tuner.plan.tokens_per_step == 2 * 4 * 2048
    assert panel.form.tokens.placeholder == "16,384"
    tuner.machine.value = "h200-pcie5"
    assert panel.profile.hardware.name == "h200-pcie5"
    assert panel.form.gpu.placeholder == "all 141"
    tuner.machine.value = "laptop"
    assert panel.form.gpu.disabled and panel.form.asked()["gpu_budget_gb"] is None


def test_a_measured_profile_keeps_the_batch_that_its_tuner_can_show(small_profile: Profile, sent: Sent) -> None:
    t = Tuner(small_profile, make_plan(small_profile), autosave=False)
    panel = opened(t, 20)
    assert panel.form.asked()["micro_batch"] == small_profile.micro_batch
    panel.start.click()
    panel.wait(60)
    panel.load.click()
    assert "is in the Tuner" in panel.messages.value
    t.close_all()


def test_a_plan_found_for_another_machine_says_so(tuner: Tuner, profile: Profile) -> None:
    panel = opened(tuner)
    panel.start.click()
    panel.wait(60)
    tuner.machine.value = "gb200"
    panel.load.click()
    assert "shows gb200; it was found for gh200" in panel.messages.value
    assert tuner.trace == simulate(tuner.session.profile, tuner.plan)


def test_without_a_tuner_loading_is_refused_with_words(profile: Profile, sent: Sent) -> None:
    panel = Autotune(profile)
    with pytest.raises(InputError, match="no plan is selected"):
        panel.load_selected()
    with pytest.raises(InputError, match="a Profile or a Tuner"):
        Autotune("llama-7b")  # type: ignore[arg-type]
    gc.collect()  # what was never built is closed without a complaint
    panel.close_all()


def test_alone_it_takes_a_tuner_and_follows_the_theme(tuner: Tuner) -> None:
    panel = Autotune(tuner)
    panel.form.trials.value = 20
    panel.start.click()
    panel.wait(60)
    panel._bridge.theme = "dark"
    assert panel.figure is not None and panel.figure.layout.font.color == DARK.text
    panel.load.click()
    assert panel.plan == tuner.plan
