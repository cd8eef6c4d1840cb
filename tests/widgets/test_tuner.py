"""The Tuner driven from Python, with a comm that counts what would go to the browser."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ipywidgets.embed import dependency_state

from superoffload.config import OptimizerConfig, TunedConfig
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.hardware import Hardware, preset
from superoffload.plan import ACTIVATIONS, Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.simulator import simulate
from superoffload.tracing import Trace
from superoffload.widgets import RunPanel, Tuner
from superoffload.widgets.controls import ACTIVATION_HELP
from superoffload.widgets.live import FigureCode, LiveFigure
from superoffload.widgets.session import Session

Sent = list[tuple[str, int]]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")


def text(t: Tuner) -> str:
    return str(t.messages.value)


def test_a_knob_changes_plan_trace_and_config_together(tuner: Tuner) -> None:
    seen: list[tuple[str, Any]] = []

    def watch(change: Any) -> None:
        t = change["owner"]
        agree = t.plan.retained_buckets == t.trace.plan.retained_buckets == t.config.plan.retained_buckets
        seen.append((change["name"], agree))

    tuner.observe(watch, names=["plan", "trace", "config"])
    before = tuner.trace.step_s
    tuner.controls.retained.value = 0
    assert tuner.plan.retained_buckets == 0
    assert tuner.trace.step_s > before, "without retained buckets the step must be longer"
    assert tuner.config.plan == tuner.plan
    assert {name for name, _ in seen} == {"plan", "trace", "config"}
    assert all(consistent for _, consistent in seen), "an observer saw a plan and a trace that do not belong together"
    assert tuner.trace == simulate(tuner.session.profile, tuner.plan)


def test_one_edit_is_few_small_messages(tuner: Tuner, sent: Sent) -> None:
    tuner.controls.bucket.value = 32.0
    sizes = [n for _, n in sent]
    assert sizes, "nothing reached the front end"
    assert max(sizes) < 100_000
    assert sum(sizes) < 150_000
    assert len(sizes) < 40


def test_an_edit_that_changes_nothing_sends_no_figure(tuner: Tuner, sent: Sent) -> None:
    tuner.session.edit(adam_threads=tuner.plan.adam_threads)
    tuner._refresh()
    assert sum(n for _, n in sent) < 5_000


def test_plan_can_be_set_from_another_cell(tuner: Tuner, profile: Profile) -> None:
    plan = make_plan(profile, retained_buckets=5, bucket_mb=128.0, check=False)
    tuner.plan = plan
    assert tuner.controls.retained.value == 5
    assert tuner.controls.bucket.value == 128.0
    assert tuner.trace.plan.bucket_mb == 128.0


def test_config_can_be_set_and_its_optimizer_is_kept(tuner: Tuner) -> None:
    config = tuner.config.replace(
        plan=tuner.plan.replace(retained_buckets=7), optimizer=OptimizerConfig(lr=3e-4, max_grad_norm=None)
    )
    tuner.config = config
    assert tuner.plan.retained_buckets == 7
    assert tuner.config.optimizer == config.optimizer
    with pytest.raises(InputError, match="tuned for the model"):
        tuner.config = config.replace(model=config.model.replace(fingerprint="another", name="other"))
    assert tuner.config.model.name == "llama-7b"


def test_flow_by_slider_text_and_click_are_equal(tuner: Tuner) -> None:
    tuner.controls.flow.value = 4
    assert tuner.plan.flow_blocks == (5, 13, 21, 29)
    tuner.controls.flow_which.value = "1-3, 9"
    assert tuner.plan.flow_blocks == (1, 2, 3, 9)

    class Points:
        point_inds = (9,)

    tuner.step._layer_clicked(None, Points, None)
    assert tuner.plan.flow_blocks == (1, 2, 3)
    assert tuner.controls.flow_which.value == "1-3"
    assert tuner.controls.flow.value == 3
    Points.point_inds = (len(tuner.session.buckets) - 1,)
    tuner.step._bucket_clicked(None, Points, None)
    assert tuner.plan.retained_buckets == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("0-3", "block 0 cannot flow"),
        ("x", "not a block number"),
        ("²", "not a block number"),
        ("99", "block 99"),
        ("1-999999999", "block 999999999"),
        ("1-99999999999999", "not a block number"),
        ("9-2", "runs backwards"),
    ],
)
def test_a_wrong_block_is_explained_and_the_knob_goes_back(tuner: Tuner, typed: str, said: str) -> None:
    tuner.controls.flow_which.value = typed
    assert said in text(tuner)
    assert 'role="alert"' in text(tuner)
    assert tuner.plan.flow_blocks == ()
    assert tuner.controls.flow_which.value == ""
    tuner.controls.retained.value = 3
    assert said not in text(tuner)


def test_a_click_on_the_embedding_says_why_it_cannot_flow(tuner: Tuner) -> None:
    for block in (0, 2):
        tuner.state._js2py_pointsCallback = {
            "event_type": "plotly_click",
            "points": {"trace_indexes": [0], "point_indexes": [block], "xs": [block], "ys": [1]},
        }
        assert ("block 0" in text(tuner)) == (block == 0)
    assert tuner.plan.flow_blocks == (2,)


def test_a_broken_callback_is_shown_and_the_dashboard_lives(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Trace:
        raise ZeroDivisionError("a <defect> of ours")

    before = tuner.plan
    with monkeypatch.context() as patch:
        patch.setattr(tuner.session, "_simulate", broken)
        tuner.controls.retained.value = 1
    assert "ZeroDivisionError" in text(tuner)
    assert "a &lt;defect&gt; of ours" in text(tuner)
    assert "Traceback" in text(tuner)
    assert tuner.plan == before
    assert tuner.controls.retained.value == before.retained_buckets
    tuner.controls.retained.value = 2
    assert tuner.plan.retained_buckets == 2
    assert text(tuner) == ""


def test_a_plan_that_does_not_fit_says_why_and_what_would(profile: Profile, sent: Sent) -> None:
    big = estimate("llama-70b", micro_batch=4, seq_len=2048, hardware="gh200")
    t = Tuner(big, autosave=False)
    assert not t.trace.memory.fits
    assert "memory" in text(t)
    assert 'role="alert"' in text(t)
    t.close_all()


def test_micro_batch_estimates_again(tuner: Tuner) -> None:
    tuner.controls.batch.value = 8
    assert (tuner.session.profile.micro_batch, tuner.plan.micro_batch) == (8, 8)
    assert tuner.trace.tokens_per_step == 8 * 2048


def test_a_measured_profile_fixes_its_shape_with_a_sentence(small_profile: Profile, sent: Sent) -> None:
    t = Tuner(small_profile, autosave=False)
    assert t.controls.batch.disabled
    assert t.controls.sequence.disabled
    assert "profile again" in t.controls.knobs["seq_len"].why.value
    with pytest.raises(InputError, match="profile again"):
        t.plan = t.plan.replace(seq_len=256)
    t.machine.value = "h200-pcie5"
    assert (t.trace.source, t.trace.hardware) == ("modelled", "h200-pcie5")
    assert "scaled by" in t._foot.value
    t.close_all()


def test_another_machine_keeps_what_was_set_by_hand(tuner: Tuner) -> None:
    tuner.controls.down.value = "cpu"
    tuner.machine.value = "h200-pcie5"
    assert tuner.trace.hardware == "h200-pcie5"
    assert tuner.plan.cast_down == "cpu"
    assert "cast_down" not in tuner.plan.reasons
    assert "adam_threads" in tuner.plan.reasons
    assert tuner.plan.adam_threads <= preset("h200-pcie5").cpu.cores
    assert tuner.config.hardware.name == "h200-pcie5"
    tuner.undo.click()
    assert (tuner.machine.value, tuner.trace.hardware) == ("gh200", "gh200")


def test_a_slider_is_never_beyond_its_limits_on_the_way(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser clamps such a value and sends it back as an edit, so every single message must be possible."""
    slider = tuner.controls.threads
    limits: dict[str, int] = {}
    beyond: list[dict[str, int]] = []

    def send_state(key: Any = None) -> None:
        names = [key] if isinstance(key, str) else sorted(key or ())
        for order in (names, names[::-1]):  # the order within a message is a set's
            shown = dict(limits)
            for name in order:
                if name in ("min", "max", "value"):
                    shown[name] = getattr(slider, name)
                    if not shown["min"] <= shown["value"] <= shown["max"]:
                        beyond.append(shown)
        limits.update({name: getattr(slider, name) for name in ("min", "max", "value")})

    for there, back in (("laptop", "gh200"), ("h200-pcie5", "gh200")):
        limits.update(min=slider.min, max=slider.max, value=slider.value)
        monkeypatch.setattr(slider, "send_state", send_state)
        tuner.machine.value = there
        tuner.machine.value = back
    assert not beyond
    assert "adam_threads" in tuner.plan.reasons


def test_knobs_that_do_nothing_are_out_of_sight(tuner: Tuner) -> None:
    knobs = tuner.controls.knobs
    tuner.controls.speculate.value = "off"
    assert knobs["undo"].layout.display == knobs["accumulate_on"].layout.display == "none"
    tuner.controls.speculate.value = "on"
    tuner.controls.accumulation.value = 4
    assert knobs["undo"].layout.display is knobs["accumulate_on"].layout.display is None
    tuner.controls.accumulate_on.value = "cpu"
    tuner.controls.undo.value = "snapshot"
    assert (tuner.plan.accumulate_on, tuner.plan.undo) == ("cpu", "snapshot")
    few = tuner.controls.undo_count
    titles = dict(few.options)
    assert titles["all"] == len(tuner.session.buckets) - tuner.plan.retained_buckets > 8
    few.value = least = min(titles.values())
    assert tuner.plan.undo_buckets == least == titles["all"] // 8
    few.value = titles["all"]
    assert tuner.plan.undo_buckets is None, "all, however many there will be"


def test_the_loss_in_chunks_by_hand_and_back(tuner: Tuner) -> None:
    knob, before = tuner.controls.knobs["seq_len"], tuner.trace.memory.total("gpu")
    assert tuner.controls.chunks.layout.display is None and knob.auto.layout.display == "none"
    tuner.controls.chunks.value = 8
    assert tuner.plan.loss_chunks == 8
    assert tuner.trace.memory.total("gpu") < before
    assert tuner.controls.chunks.tooltip.endswith("Set by hand") and knob.auto.layout.display is None
    knob.auto.click()
    assert knob.auto.layout.display == "none" and "GB in passing" in tuner.controls.chunks.tooltip
    assert "loss_chunks" in tuner.plan.reasons


def test_a_model_whose_loss_has_no_chunks_shows_no_such_knob(small_profile: Profile) -> None:
    assert Tuner(small_profile).controls.chunks.layout.display == "none"


def test_auto_hands_one_knob_back(tuner: Tuner) -> None:
    chosen = tuner.plan.retained_buckets
    tuner.controls.retained.value = chosen + 9
    knob = tuner.controls.knobs["retained_buckets"]
    assert "set by hand" in knob.why.value
    assert knob.auto.layout.display is None
    knob.auto.click()
    assert tuner.plan.retained_buckets == chosen
    assert "retained_buckets" in tuner.plan.reasons
    assert knob.auto.layout.display == "none"


def test_undo_and_redo_walk_through_edits(tuner: Tuner) -> None:
    start = tuner.plan
    tuner.controls.retained.value = 1
    tuner.controls.retained.value = 2  # the same slider: one edit
    tuner.controls.up.value = "cpu"
    tuner.undo.click()
    assert (tuner.plan.cast_up, tuner.plan.retained_buckets) == (start.cast_up, 2)
    tuner.undo.click()
    assert tuner.plan == start
    assert tuner.undo.disabled
    tuner.redo.click()
    assert tuner.plan.retained_buckets == 2
    tuner.controls.threads.value = 3
    assert tuner.redo.disabled


def test_baseline_gives_differences(tuner: Tuner) -> None:
    assert "%" not in tuner._cards.value.split("Tokens/s")[0]
    tuner.pin.click()
    tuner.controls.retained.value = 0
    assert "so-worse" in tuner._cards.value
    tuner.pin.click()
    assert "so-worse" not in tuner._cards.value


def test_every_number_says_modelled_and_for_what(tuner: Tuner) -> None:
    assert tuner._cards.value.count("modelled, gh200") == 5
    assert "modelled for gh200" in tuner._foot.value


def test_export_writes_what_the_panel_shows(tuner: Tuner, tmp_path: Path) -> None:
    tuner.export.value = True
    panel = tuner.export_panel
    assert panel is not None
    panel.path.value = str(tmp_path / "my tuned.json")
    panel.lr.value, panel.clip.value, panel.steps.value = 2e-4, 0.0, 50
    panel.write.click()
    config = TunedConfig.load(tmp_path / "my tuned.json")
    assert config == tuner.config
    assert (config.optimizer.lr, config.optimizer.max_grad_norm, config.training.steps) == (2e-4, None, 50)
    assert config.plan == tuner.plan
    assert f"superoffload train --config '{tmp_path}/my tuned.json' --data DATA.txt --out run" == panel.command()
    panel.path.value = str(tmp_path)
    panel.write.click()
    assert "is a folder" in panel.messages.value
    panel.path.value, panel.steps.value = str(tmp_path / "other.json"), 0
    panel.write.click()
    assert "steps" in panel.messages.value
    assert not (tmp_path / "other.json").exists()


def test_autosave_and_restore(profile: Profile, sent: Sent, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    t = Tuner(profile, autosave=path)
    t.pin.click()
    t.controls.retained.value = 11
    t.machine.value = "gb200"
    again = Tuner.restore(path)
    assert again.plan == t.plan
    assert again.trace == t.trace
    assert again.session.baseline == t.session.baseline
    assert again.machine.value == "gb200"
    with pytest.raises(InputError, match="no such file"):
        Tuner.restore(tmp_path / "missing.json")
    t.close_all()


def test_opened_again_it_goes_on_where_it_was_left(profile: Profile, sent: Sent, tmp_path: Path) -> None:
    """As after a restart of the kernel, when the same cell runs again."""
    path = tmp_path / "session.json"
    t = Tuner(profile, autosave=path)
    chosen = t.plan
    t.pin.click()
    t.controls.retained.value = 11
    t.machine.value = "gb200"
    again = Tuner(profile, autosave=path)
    assert again.plan == t.plan and again.trace == t.trace
    assert again.session.baseline == t.session.baseline
    assert again.session.pinned is not None and again.session.pinned.events == t.session.pinned.events
    assert again.machine.value == "gb200" and "as it was left" in again.messages.value
    assert Tuner.restore(path).plan == t.plan, "what was saved is still there"
    again.undo.click()
    assert again.plan == chosen and again.session.hardware == profile.hardware
    t.close_all()


def test_what_an_autosave_file_holds_is_never_overwritten_by_other_edits(
    profile: Profile, small_profile: Profile, sent: Sent, tmp_path: Path
) -> None:
    path, aside = tmp_path / "session.json", tmp_path / "session.before.json"
    t = Tuner(profile, autosave=path)
    t.controls.retained.value = 11
    left = t.plan
    other = Tuner(small_profile, autosave=path)
    assert aside.name in other.messages.value
    other.controls.threads.value = 2
    assert Tuner.restore(aside).plan == left
    assert Tuner.restore(path).plan == other.plan
    given = Tuner(small_profile, other.plan, autosave=path)
    assert given.plan == other.plan and not given.messages.value, "the same plan takes the place of nothing"
    path.write_text("{")
    Tuner(small_profile, autosave=path)
    assert aside.read_text() == "{"
    t.close_all()


def test_a_place_that_cannot_be_written_does_not_stop_the_tuning(profile: Profile, sent: Sent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    t = Tuner(profile, autosave=tmp_path / "file" / "session.json")
    t.controls.retained.value = 3
    assert t.plan.retained_buckets == 3
    assert "could not be written" in text(t)
    t.close_all()


def test_wrong_arguments_say_what_is_expected() -> None:
    with pytest.raises(InputError, match="a Profile or a torch model"):
        Tuner("llama-7b")  # type: ignore[arg-type]


def test_a_reopened_view_gets_the_present_data(tuner: Tuner) -> None:
    before = tuner.timeline.get_state()["_widget_data"]
    tuner.controls.retained.value = 0
    after = tuner.timeline.get_state()["_widget_data"]
    names = [t["name"] for t in after]
    adam = names.index("Adam on CPU")
    assert after[adam]["x"]["shape"] != before[adam]["x"]["shape"] or bytes(after[adam]["x"]["buffer"]) != bytes(
        before[adam]["x"]["buffer"]
    )


def test_figures_share_one_copy_of_plotlys_code(tuner: Tuner, sent: Sent) -> None:
    source = FigureCode.shared()
    assert len(source.code) > 1_000_000
    figure = LiveFigure({"data": [{"type": "bar", "x": [1]}], "layout": {}})
    assert figure._code_source is tuner.timeline._code_source is source
    assert figure.get_state()["_code_source"] == f"IPY_MODEL_{source.model_id}", "live.js reads it like this"
    assert source.model_id in dependency_state([figure], drop_defaults=False), (
        "an export of the figure takes the code along"
    )
    assert sum(n for _, n in sent) < 100_000
    before = source.model_id
    source.close()
    assert FigureCode.shared().model_id != before, "a new one where somebody has closed it"


def test_the_theme_reaches_the_figures(tuner: Tuner) -> None:
    light = tuner.timeline.layout.font.color
    tuner._bridge.theme = "dark"
    assert tuner.timeline.layout.font.color != light
    assert tuner.timeline.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_session_refuses_a_plan_of_another_shape(small_profile: Profile, gh200: Hardware) -> None:
    with pytest.raises(InputError, match="256"):
        Session(small_profile, Plan(micro_batch=2, seq_len=256))


def test_run_panel_follows_a_folder(tmp_path: Path, sent: Sent, write_run: Callable[..., Path]) -> None:
    panel = RunPanel(tmp_path / "run")
    assert "superoffload train" in panel.messages.value
    write_run(tmp_path / "run", 3)
    panel.refresh()
    assert panel.figure is not None
    assert "step 3 of 10" in panel.head.value
    write_run(tmp_path / "run", 6)
    sent.clear()
    panel.refresh()
    assert panel.figure.data[0].x.tolist() == [1, 2, 3, 4, 5, 6]
    assert max(n for _, n in sent) < 100_000
    panel.close()


def test_in_a_running_loop_only_the_latest_value_is_worked_on(profile: Profile, sent: Sent) -> None:
    async def drag() -> tuple[int, int]:
        t = Tuner(profile, autosave=False)
        runs = 0
        simulate_once = t.session._simulate

        def counted() -> Trace:
            nonlocal runs
            runs += 1
            return simulate_once()

        t.session._simulate = counted  # type: ignore[method-assign]
        for n in range(1, 31):  # a hand drags faster than a simulation runs
            t.controls.retained.value = n
        await asyncio.sleep(0.2)
        result = (runs, t.plan.retained_buckets)
        t.close_all()
        return result

    assert asyncio.run(drag()) == (1, 30)


def test_what_does_not_fit_is_said_before_advice_is_looked_for(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_it() -> tuple[str, str]:
        t = Tuner(estimate("llama-70b", micro_batch=1, seq_len=2048, hardware="gh200"), autosave=False)
        at_once = text(t)
        monkeypatch.setattr(t.session, "fit_advice", lambda: "retained_buckets = 0 would fit")
        t.controls.flow_which.value = "0"
        await asyncio.sleep(0.8)
        later = text(t)
        t.close_all()
        return at_once, later

    at_once, later = asyncio.run(open_it())
    assert "short" in at_once
    assert "would fit" in later
    assert "cannot flow" in later, "advice must not wipe out an error"


def test_a_refresh_between_two_keys_does_not_put_the_slider_back(tuner: Tuner) -> None:
    """What refreshes by itself (a theme, advice that was worked out) must not swallow a key."""

    async def press() -> list[int]:
        seen: list[int] = []
        slider = tuner.controls.retained
        start = slider.value
        slider.observe(lambda change: seen.append(change["new"] - start), names="value")
        for _ in range(3):
            slider.value -= 1  # one key; the edit is handed over a moment later
            tuner._refresh()
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert tuner.plan.retained_buckets == start - 3
        return seen

    assert asyncio.run(press()) == [-1, -2, -3]


def test_every_activation_policy_is_offered_and_explained(tuner: Tuner) -> None:
    control = tuner.controls.activations
    assert {value for _, value in control.options} == set(ACTIVATIONS)
    for policy in ACTIVATIONS:
        control.value = policy
        assert tuner.plan.activations == policy
        assert tuner.trace.plan.activations == policy
        assert control.tooltip == ACTIVATION_HELP[policy]
    tuner.session.edit(activations_by_block={3: "full"})
    tuner._refresh()
    assert control.tooltip.endswith("Other blocks: 3 full.")
    assert tuner.plan.activations_by_block == {3: "full"}


def test_compiled_layers_are_a_knob(tuner: Tuner) -> None:
    control = tuner.controls.compiled
    tuner.session.edit(activations="none")
    before = tuner.trace.step_s
    assert control.value is False
    assert "changes the bits" in control.tooltip
    assert not control.disabled
    control.value = True
    assert tuner.plan.compile_blocks is tuner.trace.plan.compile_blocks is True
    assert tuner.trace.step_s < before
    assert "Set by hand" in control.tooltip
    tuner.controls.activations.value = "selective"
    assert "sees no operation of a compiled layer" in text(tuner)
    assert tuner.plan.activations == "none"
    control.value = False
    assert tuner.plan.compile_blocks is False


def test_a_profile_without_compiled_layers_says_how_to_get_them(small_profile: Profile, sent: Sent) -> None:
    t = Tuner(small_profile, autosave=False)
    assert t.controls.compiled.disabled
    assert "compile_blocks=True" in t.controls.compiled.tooltip
    t.close_all()


def test_a_hand_on_a_large_model_sees_a_draft_and_then_the_exact_step(profile: Profile, sent: Sent) -> None:
    async def turn() -> None:
        t = Tuner(profile, autosave=False)
        seen: list[bool] = []
        t.observe(lambda change: seen.append("draft" in change["new"].context), names="trace")
        t.controls.bucket.value = 8.0
        await asyncio.sleep(0.15)
        assert seen == [True] and t.session.is_draft
        assert "modelled draft, gh200" in t._cards.value and "in place of" in t._foot.value
        for _ in range(200):
            await asyncio.sleep(0.02)
            if not t.session.is_draft:
                break
        assert seen == [True, False] and "draft" not in t._cards.value + t._foot.value
        assert t.trace == simulate(t.session.profile, t.plan) == t.session.trace
        t.controls.bucket.value = 4.0
        await asyncio.sleep(0.1)
        assert t.session.is_draft
        t.pin.click()  # what is kept is exact
        assert not t.session.is_draft and "draft" not in t._cards.value
        assert t.session.baseline is not None and t.session.baseline.step_s == t.trace.step_s
        t.plan = t.plan.replace(bucket_mb=2.0)
        assert "draft" not in t.trace.context, "a program gets what it asked for"
        t.close_all()

    asyncio.run(turn())


def test_a_draft_of_a_value_that_has_gone_is_not_followed(profile: Profile, sent: Sent) -> None:
    async def turn() -> None:
        t = Tuner(profile, autosave=False)
        simulated: list[float] = []
        exact = t.session.exact

        def counted(stop: Any = None) -> Trace:
            simulated.append(t.session.plan.bucket_mb)
            return exact(stop)

        t.session.exact = counted  # type: ignore[method-assign]
        t.at_rest._exact._delay = 1.0
        for size in (8.0, 4.0, 2.0, 8.0):
            t.controls.bucket.value = size
            await asyncio.sleep(0.1)
        for _ in range(500):
            await asyncio.sleep(0.02)
            if not t.session.is_draft:
                break
        assert simulated == [8.0] and not t.session.is_draft
        t.close_all()

    asyncio.run(turn())


def test_an_observer_that_fails_in_another_cell_stops_nothing(tuner: Tuner) -> None:
    heard: list[int] = []

    def broken(change: Any) -> None:
        raise ZeroDivisionError("in a cell of mine")

    tuner.observe(broken, names="plan")
    tuner.observe(lambda change: heard.append(len(change["new"].events)), names="trace")
    cards, drawn = tuner._cards.value, tuner.timeline.data[1].x
    tuner.controls.retained.value = 0
    assert tuner.plan.retained_buckets == 0 and heard, "the observers of the other traits are told"
    assert tuner._cards.value != cards and tuner.timeline.data[1].x is not drawn, "numbers and figures follow"
    assert "in a cell of mine" in text(tuner) and "unobserve_all" in text(tuner) and "Traceback" in text(tuner)
    assert "defect of the dashboard" not in text(tuner)
    with pytest.raises(ZeroDivisionError, match="a cell of mine"):
        tuner.plan = tuner.plan.replace(retained_buckets=9)
    assert tuner.session.plan.retained_buckets == tuner.controls.retained.value == 9, "whole, though the cell failed"


def test_plans_set_from_a_cell_are_entries_of_their_own(tuner: Tuner) -> None:
    """However quickly they follow; only one knob that is dragged is one entry."""
    start = tuner.plan
    for n in (3, 5, 7):
        tuner.plan = tuner.plan.replace(retained_buckets=n)
    tuner.undo.click()
    assert tuner.plan.retained_buckets == 5
    tuner.undo.click()
    tuner.undo.click()
    assert tuner.plan == start and tuner.undo.disabled


def test_report_trace_and_pictures_are_written_beside_the_config(tuner: Tuner, tmp_path: Path) -> None:
    tuner.pin.click()
    tuner.controls.retained.value = 3
    tuner.export.value = True
    panel = tuner.export_panel
    assert panel is not None
    panel.path.value = str(tmp_path / "mine.json")
    panel.report.click()
    page = (tmp_path / "mine-report.html").read_text()
    assert "mine-report.html" in panel.messages.value
    assert page.count("Plotly.newPlot") >= 2 and "modelled, gh200" in page and "beside the baseline" in page
    head = page[: page.index("<script>")] + page[page.rindex("</script>", 0, page.index("<body>")) :]
    assert "http" not in head.split("<body>")[0], "nothing is fetched"
    assert "<td>3</td>" in page and "set by hand" in page, "every knob with its reason"
    assert "superoffload train --config" in page
    assert TunedConfig.from_json(html.unescape(page[page.rindex("<pre>") + 5 : page.rindex("</pre>")])) == tuner.config
    panel.perfetto.click()
    events = json.loads((tmp_path / "mine-trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(tuner.trace.events) + len(tuner.trace.stalls)
    asked: list[Any] = []
    panel.painter.send = lambda content, buffers=None: asked.append((content, buffers))
    panel.svg.click()
    assert "browser draws" in panel.messages.value
    panel.painter._heard(None, {"kind": "here", "id": 1, "has_code": False}, [])
    panel.painter._heard(None, {"kind": "here", "id": 1, "has_code": True}, [])  # a second page that is open
    assert len(asked) == 2, "one page draws"
    (_, none), (drawing, code) = asked
    assert none is None and b"Plotly" in code[0] and drawing["format"] == "svg"
    titles = [f["layout"].get("title", {}).get("text", "") for f in drawing["figures"]]
    assert titles[0] == f"llama-7b: {tuner.trace.step_s * 1e3:.0f} ms per step (modelled, gh200)"
    assert "click" not in json.dumps(drawing["figures"]), "nobody clicks on paper"
    panel.painter._heard(None, {"kind": "drawn", "id": 1}, [b"<svg>1", b"<svg>2"])
    assert (tmp_path / "mine-timeline.svg").read_bytes() == b"<svg>1"
    assert (tmp_path / "mine-memory.svg").read_bytes() == b"<svg>2"
    panel.png.click()
    panel.painter._heard(None, {"kind": "here", "id": 2, "has_code": True}, [])
    assert asked[-1][1] == [], "plotly's code is sent once a page"
    panel.painter._heard(None, {"kind": "failed", "id": 2, "what": "no <canvas>"}, [])
    assert "no &lt;canvas&gt;" in panel.messages.value and "report instead" in panel.messages.value


def test_figures_of_the_machine_are_changed_by_hand(profile: Profile, sent: Sent, tmp_path: Path) -> None:
    tuner = Tuner(profile, autosave=tmp_path / "session.json")
    tuner.what_if.value = True
    panel = tuner.machine_panel
    assert panel is not None and panel.reset.disabled
    step, memory = tuner.trace.step_s, tuner.trace.memory.gpu_capacity_bytes
    assert panel.numbers["gpu_memory_gb"].value == 96
    panel.numbers["gpu_memory_gb"].value = 40
    assert tuner.trace.memory.gpu_capacity_bytes < memory and tuner.trace.memory.fits, "planned anew for less"
    assert tuner.trace.hardware == tuner.machine.value == "gh200 edited"
    assert "GPU memory 96 → 40 GB" in panel.told.value and "modelled" in panel.told.value
    panel.numbers["adam_gb_per_s"].value = 50
    assert tuner.trace.step_s > step
    assert "GPU memory 96 → 40 GB" in panel.told.value and "CPU Adam" in panel.told.value
    panel.numbers["adam_gb_per_s"].value = -1
    assert "CPU Adam = -1" in panel.messages.value and panel.numbers["adam_gb_per_s"].value == 50
    again = Tuner.restore(tmp_path / "session.json")
    again.what_if.value = True
    assert again.machine.value == "gh200 edited" and again.trace == tuner.trace
    assert "GPU memory 96 → 40 GB" in again.machine_panel.told.value  # type: ignore[union-attr]
    tuner.undo.click()
    assert panel.numbers["adam_gb_per_s"].value > 100 and tuner.machine.value == "gh200 edited"
    panel.reset.click()
    assert tuner.machine.value == "gh200" and tuner.trace.step_s == pytest.approx(step)
    assert panel.reset.disabled and "gh200" in panel.told.value
    tuner.machine.value = "gb200"
    assert panel.numbers["gpu_memory_gb"].value == preset("gb200").gpu.memory_gb
    tuner.close_all()


def test_layers_are_recomputed_by_mark_and_by_text(tuner: Tuner) -> None:
    def click(block: int) -> None:
        tuner.state._js2py_pointsCallback = {
            "event_type": "plotly_click",
            "points": {"trace_indexes": [4], "point_indexes": [block], "xs": [block], "ys": [-1]},
        }

    assert tuner.plan.activations == "none" and tuner.controls.recomputed.value == ""
    activations = tuner.trace.memory.total("gpu")
    click(3)
    assert (tuner.plan.activations, tuner.plan.activations_by_block) == ("none", {3: "full"})
    assert tuner.controls.recomputed.value == "3" and tuner.state.data[4].marker.symbol[3] == "circle"
    assert tuner.trace.memory.total("gpu") < activations
    tuner.controls.recomputed.value = "2-4"
    assert tuner.plan.activations_by_block == dict.fromkeys((2, 3, 4), "full")
    click(3)
    assert tuner.controls.recomputed.value == "2, 4"
    click(0)
    assert "block 0" in text(tuner) and "is not recomputed" in text(tuner)
    tuner.controls.recomputed.value = "33"
    assert "block 33 is not recomputed" in text(tuner) and tuner.controls.recomputed.value == "2, 4"
    tuner.controls.recomputed.value = "1-32"
    assert (tuner.plan.activations, tuner.plan.activations_by_block) == ("full", {}), "all alike is one policy"
    click(5)
    assert tuner.plan.activations_of(5) == "none" and len(tuner.session.recomputed) == 31
    tuner.controls.activations.value = "selective"
    tuner.undo.click()
    tuner.controls.recomputed.value = ""
    assert (tuner.plan.activations, tuner.plan.activations_by_block) == ("none", {})


def test_the_timeline_draws_as_many_steps_as_asked_for(tuner: Tuner, sent: Sent, tmp_path: Path) -> None:
    tuner.session.autosave = tmp_path / "session.json"
    plan, step_s = tuner.plan, tuner.trace.step_s
    forward = next(t for t in tuner.timeline.data if t.name == "Forward")
    one, tail = len(forward.x), tuner.trace.window_s - step_s
    for steps in (2, 3):
        sent.clear()
        tuner.step.steps.value = steps
        assert tuner.timeline.layout.xaxis.range[1] == pytest.approx((steps * step_s + tail) * 1.002)
        assert max(size for _, size in sent) < 100_000
        assert one < len(forward.x)
    marks = [a.text for a in tuner.timeline.layout.annotations]
    assert marks[:3] == ["step 1", "step 2", "step 3"]
    # It is how one looks at the plan: nothing was edited, and so nothing is saved or can be undone.
    assert tuner.plan == plan and not tuner.session.can_undo and not tuner.session.autosave.exists()
    tuner.controls.retained.value += 1
    assert tuner.step.steps.value == 3
    assert tuner.timeline.layout.xaxis.range[1] > 3 * tuner.trace.step_s
    tuner.show_measured(tuner.trace.replace(source="measured", plan=tuner.plan))
    assert tuner.step.steps.disabled and "as it was" in tuner.step.steps.tooltip
    assert tuner.timeline.layout.xaxis.range[1] < 1.01 * max(tuner.trace.step_s, tuner.trace.window_s)
    tuner.show_measured(None)
    assert not tuner.step.steps.disabled and tuner.timeline.layout.xaxis.range[1] > 3 * tuner.trace.step_s
