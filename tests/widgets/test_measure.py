"""Measure runs the engine on a real module and leaves it bit-identical (DESIGN I10)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from superoffload.engine import OffloadAdamW  # noqa: E402
from superoffload.errors import InputError  # noqa: E402
from superoffload.hardware import preset  # noqa: E402
from superoffload.host_load import DISTURBED  # noqa: E402
from superoffload.measuring import WARMUP_STEPS, Cancelled, measure_steps  # noqa: E402
from superoffload.plan import Plan  # noqa: E402
from superoffload.profiler import Profile  # noqa: E402
from superoffload.profiling import profile as measure_profile  # noqa: E402
from superoffload.simulator import simulate  # noqa: E402
from superoffload.tracing import Trace  # noqa: E402
from superoffload.widgets import Tuner  # noqa: E402


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


BATCH = torch.arange(32).reshape(2, 16) % 64


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    m = Tiny().to(request.param).eval()
    m.layers[1].train()
    m.head.weight.grad = torch.ones_like(m.head.weight)
    return m


def state(m: nn.Module) -> dict[str, object]:
    """Everything that measuring must not change, as bytes."""

    def raw(t: Tensor | None) -> object:
        return None if t is None else (str(t.dtype), t.detach().contiguous().view(-1).view(torch.uint8).tolist())

    return {
        "parameters": {n: raw(p) for n, p in m.named_parameters()},
        "gradients": {n: raw(p.grad) for n, p in m.named_parameters()},
        "buffers": {n: raw(b) for n, b in m.named_buffers()},
        "modes": [x.training for x in m.modules()],
        "random": torch.get_rng_state().tolist(),
        "hooks": [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in m.modules()],
    }


@pytest.fixture
def profiled(model: nn.Module) -> Profile:
    return measure_profile(model, BATCH, hardware=preset("laptop"), repeats=1)


def plan_for(p: Profile, **fields: object) -> Plan:
    return Plan(bucket_mb=0.03, activations="none", micro_batch=p.micro_batch, seq_len=p.seq_len, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{}, {"accumulation": 2}, {"retained_buckets": 1, "cast_down": "cpu"}, {"flow_blocks": (1,)}]
)
def test_measuring_leaves_the_model_bit_identical(
    model: nn.Module, profiled: Profile, fields: dict[str, object]
) -> None:
    before = state(model)
    done: list[int] = []
    trace = measure_steps(model, BATCH, profiled, plan_for(profiled, **fields), steps=2, progress=done.append)
    assert state(model) == before
    assert done == [1, 2, 3, 4]
    assert (trace.source, trace.hardware) == ("measured", "laptop")
    assert trace.step_s > 0
    assert trace.tokens_per_step == 32 * int(fields.get("accumulation", 1))  # type: ignore[call-overload]
    assert {"forward", "backward"} <= {e.kind for e in trace.events}


def test_steps_of_the_warm_up_are_not_timed(model: nn.Module, profiled: Profile) -> None:
    slow = [True]
    handle = model.register_forward_pre_hook(lambda *_: time.sleep(0.5) if slow[0] else None)

    def progress(done: int) -> None:
        slow[0] = done < WARMUP_STEPS

    trace = measure_steps(model, BATCH, profiled, plan_for(profiled), steps=2, progress=progress)
    handle.remove()
    assert trace.step_s < 0.5


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_are_measured_in_a_thread(
    model: nn.Module, profiled: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the panel does; the layers draw random numbers and count their calls in a buffer."""
    from superoffload.engine import compiling

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    before, found = state(model), []
    plan = plan_for(profiled, compile_blocks=True, flow_blocks=(1,))
    thread = threading.Thread(target=lambda: found.append(measure_steps(model, BATCH, profiled, plan, steps=2)))
    thread.start()
    thread.join()
    after = state(model)
    assert {k: v for k, v in after.items() if k != "random"} == {k: v for k, v in before.items() if k != "random"}
    assert after["random"] == before["random"]
    assert found[0].source == "measured"
    assert found[0].plan.compile_blocks


def test_cancel_and_errors_leave_it_bit_identical_too(model: nn.Module, profiled: Profile) -> None:
    before = state(model)
    stop = threading.Event()
    with pytest.raises(Cancelled):
        measure_steps(model, BATCH, profiled, plan_for(profiled), stop=stop, progress=lambda _: stop.set())
    assert state(model) == before
    cannot_run = plan_for(profiled).replace(flow_blocks=(99,))
    with pytest.raises(InputError, match="flow_blocks"):
        measure_steps(model, BATCH, profiled, cannot_run)
    assert state(model) == before

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    handle = model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        measure_steps(model, BATCH, profiled, plan_for(profiled))
    handle.remove()
    assert state(model) == before


def test_an_attached_optimizer_is_not_thrown_away(model: nn.Module, profiled: Profile) -> None:
    with OffloadAdamW(model, plan=plan_for(profiled)), pytest.raises(InputError, match=r"opt\.close"):
        measure_steps(model, BATCH, profiled, plan_for(profiled))


def test_the_panel_measures_in_a_thread_and_overlays(model: nn.Module, profiled: Profile) -> None:
    t = Tuner(profiled, plan_for(profiled), autosave=False)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    assert panel.start.disabled
    assert "Tuner(model, batch=batch)" in panel.messages.value

    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    panel.steps.value = 2
    panel.start.click()
    panel.start.click()
    refused = panel.messages.value
    panel.wait(60)
    assert not panel.running
    assert "a measurement is running" in refused or "Measured" in refused
    assert "Measured" in panel.messages.value
    assert isinstance(t.measured, Trace)
    rows = {round(float(y), 3) for trace in t.timeline.data if trace.name == "Forward" for y in trace.y}
    assert len(rows) == 2, "predicted and measured spans share the lane"
    assert t.config.measurement is not None
    assert t.config.measurement["source"] == "measured"
    t.controls.retained.value = t.plan.retained_buckets + 1
    assert t.measured is None, "an overlay of another plan would mislead"
    assert t.config.measurement is None


def test_the_panel_calibrates_and_goes_back(model: nn.Module, profiled: Profile) -> None:
    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    assert panel.correct.disabled
    with pytest.raises(InputError, match="Measure steps first"):
        panel.calibrate()
    panel.start.click()
    panel.wait(60)
    assert not panel.correct.disabled and panel.back.disabled
    before, plan, predicted = t.session.given, t.plan, t.trace.step_s
    panel.correct.click()
    assert "Busy in a step" in panel.messages.value and "modelled now" in panel.messages.value
    assert "calibrated" in t.session.given.context and t.session.given.source == "measured"
    assert t.plan == plan and t.measured is not None, "the plan and the overlay stay"
    assert t.trace.step_s != predicted
    once = t.session.given
    panel.correct.click()
    assert t.session.given.blocks == once.blocks, "from the profile as it was, not twice"
    t.machine.value = "gh200"
    panel.correct.click()
    assert 'role="alert"' in panel.messages.value and "Choose" in panel.messages.value
    t.machine.value = next(x for x in t.machine.options if x.startswith(before.hardware.name))
    assert t.session.hardware == t.session.given.hardware, "the machine of the picker is the corrected one"
    panel.back.click()
    assert t.session.given == before and panel.back.disabled
    assert t.trace.step_s == simulate(before, t.plan).step_s, "the machine's change chose some knobs anew"


def test_a_calibration_is_taken_back_after_reopening(model: nn.Module, profiled: Profile, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    t = Tuner(profiled, plan_for(profiled), autosave=path)
    t.show_measured(measure_steps(model, BATCH, profiled, t.plan, steps=2))
    t.measure.value = True
    t.measure_panel.correct.click()  # type: ignore[union-attr]
    once = t.session.given
    again = Tuner.restore(path, model=model, batch=BATCH)
    assert again.session.given == once != profiled
    again.measure.value = True
    panel = again.measure_panel
    assert panel is not None and not panel.back.disabled and not panel.start.disabled
    again.show_measured(t.measured)
    panel.calibrate()
    assert again.session.given.blocks == once.blocks, "corrected from the profile as it was measured, not twice"
    panel.back.click()
    assert again.session.given == profiled and panel.back.disabled
    assert Tuner.restore(path).session.uncalibrated is None
    with pytest.raises(InputError, match="other parameters"):
        Tuner.restore(path, model=nn.Linear(2, 2), batch=BATCH)


def test_a_plan_that_changed_meanwhile_is_not_compared(model: nn.Module, profiled: Profile) -> None:
    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    trace = measure_steps(model, BATCH, profiled, t.plan, steps=2)
    t.controls.retained.value = t.plan.retained_buckets + 1
    panel._ended(trace, None)
    assert "changed meanwhile" in panel.messages.value and "predicted" not in panel.messages.value
    assert t.measured is None and panel.correct.disabled


def test_calibration_keeps_machines_and_models_the_baseline_anew(model: nn.Module, profiled: Profile) -> None:
    box = preset("gh200").replace(name="other-box")
    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH, hardware=box)
    own = next(x for x in t.machine.options if x.startswith(profiled.hardware.name))
    other = t.machine.value
    t.machine.value = own
    t.session.pin()
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    panel.start.click()
    panel.wait(60)
    panel.correct.click()
    assert t.session.can_undo, "a correction takes no edit away"
    assert t.session.pinned is not None and t.session.baseline is not None
    assert t.session.pinned.step_s == t.session.baseline.step_s == pytest.approx(t.trace.step_s)
    t.machine.value = other
    assert t.session.hardware.name == "other-box"
    t.machine.value = own
    assert t.session.hardware == t.session.given.hardware
    t.undo.click()
    t.undo.click()
    assert t.session.hardware == t.session.given.hardware, "before them this machine was shown, as it is corrected now"


def test_what_cannot_be_measured_is_refused_in_the_panel(model: nn.Module, profiled: Profile) -> None:
    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    with OffloadAdamW(model, plan=plan_for(profiled)):
        panel.start.click()
        panel.wait(60)
    assert "opt.close()" in panel.messages.value
    assert 'role="alert"' in panel.messages.value
    assert t.measured is None


def test_another_model_than_the_profiled_one_is_refused(profiled: Profile) -> None:
    with pytest.raises(InputError, match="other parameters"):
        Tuner(profiled, autosave=False, model=Tiny(layers=2), batch=BATCH)


def test_a_model_is_profiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import superoffload.hardware

    monkeypatch.setattr(superoffload.hardware, "probe", lambda refresh=False: preset("laptop"))
    model = Tiny()
    before = state(model)
    t = Tuner(model, batch=BATCH, autosave=False)
    assert state(model) == before
    assert t.session.given.source == "measured"
    assert (t.plan.micro_batch, t.plan.seq_len) == (2, 16)
    with pytest.raises(InputError, match="batch=batch"):
        Tuner(model)


def test_a_step_that_was_measured_beside_others_says_so(model: nn.Module, profiled: Profile) -> None:
    t = Tuner(profiled, plan_for(profiled), autosave=False, model=model, batch=BATCH)
    t.measure.value = True
    panel = t.measure_panel
    assert panel is not None
    told = "the step was measured while other processes kept 1.5 of 2 cores busy: its times are too long"
    trace = measure_steps(model, BATCH, profiled, t.plan, steps=2)
    for context, shown in (({DISTURBED: told}, True), ({}, False)):
        panel._ended(trace.replace(context=context), None)
        assert (told[1:] in panel.messages.value) is shown
