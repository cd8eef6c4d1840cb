"""A machine that is known to be off by this much: calibration has to find how much, and nothing else may change."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from superoffload.calibration import calibrate, drift
from superoffload.cli import main
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.simulator import simulate
from superoffload.tracing import Trace, TraceEvent

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OFF = {
    "layers forward": 1.2,
    "layers backward": 0.9,
    "head": 1.3,
    "link down": 1.25,
    "link up": 1.1,
    "CPU Adam": 1.15,
}
FORMS = {
    "waits": {"speculate": "off", "activations": "full"},
    "speculates": {"speculate": "on", "activations": "full"},
    "keeps all": {"speculate": "off", "activations": "none", "retained_buckets": 10},
    "offloads inputs": {"speculate": "off", "activations": "offload_inputs"},
    "compiled": {"speculate": "on", "activations": "none", "compile_blocks": True},
}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("paper-2b", micro_batch=8, seq_len=2048, hardware="h200-pcie5")


def skewed(profile: Profile, off: dict[str, float] = OFF) -> Profile:
    """The profile of the machine as it really is."""

    def times(value: float | None, part: str) -> float | None:
        return None if value is None else value * off[part]

    blocks = []
    for b in profile.blocks:
        update: dict[str, float | None] = {}
        if b.kind == "layer":
            for name in ("forward_s", "full_recompute_s", "selective_recompute_s", "compiled_forward_s"):
                update[name] = times(getattr(b, name), "layers forward")
            for name in ("backward_s", "compiled_backward_s"):
                update[name] = times(getattr(b, name), "layers backward")
        elif b.kind == "head":
            update = {"forward_s": times(b.forward_s, "head"), "backward_s": times(b.backward_s, "head")}
        blocks.append(b.model_copy(update=update))
    hw = profile.hardware
    down, up = hw.link.down, hw.link.up
    link = hw.link.replace(
        down=down.replace(gb_per_s=tuple(x / off["link down"] for x in down.gb_per_s)),
        up=up.replace(gb_per_s=tuple(x / off["link up"] for x in up.gb_per_s)),
    )
    cpu = hw.cpu.replace(adam_gb_per_s=tuple(x / off["CPU Adam"] for x in hw.cpu.adam_gb_per_s))
    return profile.replace(blocks=tuple(blocks), hardware=hw.replace(link=link, cpu=cpu))


def as_measured(profile: Profile, plan: Plan) -> Trace:
    """What the engine would record of that step: a block's backward is one span of its trace."""
    trace = simulate(profile, plan)
    inside = [e for e in trace.events if e.start_s < trace.step_s]
    joined: list[TraceEvent] = []
    for _, group in itertools.groupby(
        sorted(inside, key=lambda e: (e.lane, e.start_s)), key=lambda e: (e.lane, e.kind, e.block, e.step)
    ):
        pieces = list(group)
        if pieces[0].lane == "gpu" and pieces[0].kind == "backward":
            joined.append(replace(pieces[0], duration_s=pieces[-1].end_s - pieces[0].start_s, bucket=-1))
        else:
            joined += pieces
    return trace.replace(source="measured", events=tuple(joined), window_s=trace.step_s)


@pytest.mark.parametrize("form", FORMS)
def test_finds_what_is_off_and_predicts_other_plans(profile: Profile, form: str) -> None:
    real = skewed(profile)
    plan = make_plan(profile, adam_threads=16, **FORMS[form])
    found = calibrate(profile, as_measured(real, plan))
    factors = {c.part: c.factor for c in found.corrections}
    assert set(factors) <= set(OFF)
    assert {"layers forward", "layers backward", "head", "link down"} <= set(factors)
    for c in found.corrections:
        if c.beside:  # where memory is full, its own rate does not show, and does not matter
            assert 0.9 < c.factor < 1.3
        else:
            assert c.factor == pytest.approx(OFF[c.part], rel=0.03), c.part
    assert abs(found.unexplained) < 0.03 < abs(found.modelled_step_s / found.measured_step_s - 1)
    for other in FORMS.values():
        if other.get("compile_blocks", False) != plan.compile_blocks:
            continue  # another program
        q = make_plan(profile, adam_threads=16, **other)
        assert simulate(found.profile, q).step_s == pytest.approx(simulate(real, q).step_s, rel=0.045)


def test_where_the_cpu_is_the_gpu() -> None:
    """Its spans are slower beside Adam, which the simulator adds by itself and calibration must not add again."""
    profile = estimate("smollm2-135m", micro_batch=2, seq_len=256, hardware="laptop", dtype="float32")
    real = skewed(profile)
    for form in ("waits", "speculates"):
        plan = make_plan(profile, **FORMS[form])
        found = calibrate(profile, as_measured(real, plan))
        assert abs(found.unexplained) < 0.03 < abs(found.modelled_step_s / found.measured_step_s - 1)
        factors = {c.part: c.factor for c in found.corrections}
        assert factors["layers forward"] == pytest.approx(1.2, rel=0.05)
        assert factors["layers backward"] == pytest.approx(0.9, rel=0.05)


def test_a_profile_that_is_right_stays(profile: Profile) -> None:
    found = calibrate(profile, as_measured(profile, make_plan(profile, activations="full")))
    assert [c.factor for c in found.corrections] == pytest.approx([1.0] * len(found.corrections), abs=0.02)
    assert found.strange == ()


@pytest.mark.parametrize("speculate", ["off", "on"])
def test_casts_on_the_cpu_are_not_adam(profile: Profile, speculate: str) -> None:
    plan = make_plan(profile, activations="full", cast_down="cpu", cast_up="cpu", speculate=speculate)
    trace = as_measured(profile, plan)
    assert {e.kind for e in trace.events if e.lane == "cpu_adam"} == {"adam", "cpu_cast"}, "spans of their own"
    found = calibrate(profile, trace)
    assert [c.factor for c in found.corrections] == pytest.approx([1.0] * len(found.corrections), abs=0.03)


def test_copies_cut_finer_than_the_graph_are_as_fast(profile: Profile) -> None:
    """The engine copies each tensor that a layer saves, the graph counts the layer's as one."""
    plan = make_plan(profile, activations="offload_saved", speculate="on")
    events: list[TraceEvent] = []
    for e in as_measured(profile, plan).events:
        n = 8 if e.block >= 0 and e.lane in ("link_down", "link_up") else 1
        events += [
            replace(e, start_s=e.start_s + k * e.duration_s / n, duration_s=e.duration_s / n, bytes=e.bytes // n)
            for k in range(n)
        ]
    found = calibrate(profile, as_measured(profile, plan).replace(events=tuple(events)))
    assert [c.factor for c in found.corrections] == pytest.approx([1.0] * len(found.corrections), abs=0.06)


def test_auto_that_waited_is_compared_with_waiting(profile: Profile) -> None:
    """Before enough steps have committed, or while most are clipped, `auto` waits."""
    plan = make_plan(profile, activations="full", speculate="off")
    waited = as_measured(profile, plan)
    found = calibrate(profile, waited.replace(plan=plan.replace(speculate="auto")))
    assert abs(found.unexplained) < 0.01
    assert [c.factor for c in found.corrections] == pytest.approx([1.0] * len(found.corrections), abs=0.02)


def test_corrections_survive_another_batch(profile: Profile) -> None:
    found = calibrate(profile, as_measured(skewed(profile), make_plan(profile, activations="full", speculate="off")))
    half, plain = rescale(found.profile, micro_batch=4), rescale(profile, micro_batch=4)
    layer = next(i for i, b in enumerate(plain.blocks) if b.kind == "layer")
    assert half.blocks[layer].forward_s == pytest.approx(1.2 * plain.blocks[layer].forward_s, rel=0.02)
    assert half.context["calibrated"] == found.profile.context["calibrated"]
    assert rescale(half, micro_batch=8).blocks == found.profile.blocks


def test_only_what_was_run_is_corrected(profile: Profile) -> None:
    plan = make_plan(profile, compile_blocks=True, activations="none")
    found = calibrate(profile, as_measured(skewed(profile), plan)).profile
    for before, after in zip(profile.blocks, found.blocks, strict=True):
        assert after.forward_s == before.forward_s or before.kind == "head"
        assert after.tensor_numels == before.tensor_numels and after.activation_bytes == before.activation_bytes
        if before.kind == "layer":
            assert after.compiled_forward_s == pytest.approx(before.compiled_forward_s * 1.2, rel=0.03)
    assert found.hardware.gpu == profile.hardware.gpu
    assert found.hardware.cpu.dram_gb_per_s == profile.hardware.cpu.dram_gb_per_s
    assert "calibrated" in found.hardware.sources["link.down"] and "head x 1.3" in found.context["calibrated"]


def test_waits_within_a_span_of_one_micro_batch_are_not_work(profile: Profile) -> None:
    plan = make_plan(profile, activations="full", accumulation=3)
    trace = as_measured(profile, plan)
    first = {e.block: e for e in reversed(trace.events) if e.kind == "forward"}
    slow = {id(e) for e in first.values()}
    late = tuple(replace(e, duration_s=e.duration_s * 5) if id(e) in slow else e for e in trace.events)
    factors = {c.part: c.factor for c in calibrate(profile, trace.replace(events=late)).corrections}
    assert factors["layers forward"] == pytest.approx(1.0, abs=0.02)


def test_a_model_that_recomputes_by_its_own_means(profile: Profile) -> None:
    """Its recomputation has no span of its own and lies in backward."""
    plan = make_plan(profile, activations="full", speculate="off")
    events: list[TraceEvent] = []
    for e in as_measured(skewed(profile), plan).events:
        if e.kind == "backward" and events and events[-1].kind == "recompute" and events[-1].block == e.block:
            again = events.pop()
            e = replace(e, start_s=again.start_s, duration_s=e.end_s - again.start_s)
        events.append(e)
    trace = as_measured(skewed(profile), plan).replace(events=tuple(events))
    assert not any(e.kind == "recompute" for e in trace.events)
    factors = {c.part: c.factor for c in calibrate(profile, trace).corrections}
    assert factors["layers forward"] == pytest.approx(1.2, rel=0.02)
    assert factors["layers backward"] == pytest.approx(0.9, rel=0.02)


def test_the_h200s_own_step() -> None:
    """3.14B, 8,192 tokens, half retained, from the probe and the profile of that machine: recorded once, so exact."""
    hw = Hardware.load(RESULTS / "probe_nvidia-h200_2026-11-30.json")
    profile = Profile.load(RESULTS / "profile_bench-3b_4x2048_nvidia-h200_2026-11-30.json").replace(hardware=hw)
    trace = Trace.load(RESULTS / "trace_step_3b_8192_engine_50_h200_2026-11-30.json")
    found = calibrate(profile, trace)
    factors = {c.part: c.factor for c in found.corrections}
    assert factors["layers forward"] == pytest.approx(1.013, abs=0.005)
    assert factors["layers backward"] == pytest.approx(1.0, abs=0.01)
    assert factors["CPU Adam"] == pytest.approx(0.91, abs=0.02)
    assert [c.part for c in found.corrections if c.beside] == ["link up"], "every upload ran beside Adam"
    assert factors["link up"] == pytest.approx(1.08, abs=0.02)
    assert abs(found.unexplained) < 0.02


def test_refuses_what_says_nothing(profile: Profile) -> None:
    plan = make_plan(profile, activations="full")
    trace = as_measured(profile, plan)
    with pytest.raises(InputError, match="is modelled"):
        calibrate(profile, trace.replace(source="modelled"))
    with pytest.raises(InputError, match="blocks and"):
        calibrate(estimate("paper-1b", micro_batch=8, seq_len=2048, hardware="h200-pcie5"), trace)
    with pytest.raises(InputError, match="no span that could be compared"):
        calibrate(profile, trace.replace(events=()))
    with pytest.raises(InputError, match=r"4,096 tokens a step, its plan says 16,384 and the profile 16,384"):
        calibrate(profile, trace.replace(tokens_per_step=4096))


def test_what_is_too_far_off_for_drift_is_said(profile: Profile) -> None:
    trace = as_measured(skewed(profile, {**OFF, "CPU Adam": 4.0}), make_plan(profile, activations="full"))
    found = calibrate(profile, trace)
    assert [c.part for c in found.strange] == ["CPU Adam"]
    assert any("too far for drift" in line for line in found.lines())


def test_history_shows_drift_of_one_profile(profile: Profile, tmp_path: Path) -> None:
    history = tmp_path / "deep" / "history.jsonl"
    plan = make_plan(profile, activations="full", speculate="off")
    calibrate(profile, as_measured(profile, plan)).remember(history)
    other = estimate("paper-1b", micro_batch=8, seq_len=2048, hardware="h200-pcie5")
    calibrate(other, as_measured(other, make_plan(other))).remember(history)
    last = calibrate(profile, as_measured(skewed(profile), plan))
    last.remember(history)
    lines = drift(history, last)
    assert len([x for x in lines if x.startswith(last.date)]) == 2
    assert any(x.startswith("layers forward has drifted by +20") for x in lines)
    assert any(x.startswith("layers backward has drifted by −9.") for x in lines), lines
    history.write_text(history.read_text() + '{"date": 3}\n')
    with pytest.raises(InputError, match=r"line 4 of .* is not of a history"):
        drift(history, last)


def test_command_writes_a_profile_that_plans(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(profile, activations="full", speculate="off")
    given, trace, out = tmp_path / "profile.json", tmp_path / "trace.json", tmp_path / "calibrated.json"
    profile.save(given)
    as_measured(skewed(profile), plan).save(trace)
    arguments = ["calibrate", "--profile", str(given), "--trace", str(trace), "--out", str(out)]
    assert main([*arguments, "--history", str(tmp_path / "h.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "layers forward" in shown and "1.200" in shown and "Link GPU→CPU" in shown
    assert Profile.load(out).context["calibrated"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {c["part"] for c in told["corrections"]} >= {"layers forward", "head"}
    assert main(["plan", "--profile", str(out)]) == 0
