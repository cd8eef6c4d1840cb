"""Sweeps over two quantities: own numbers are the simulator's, what does not fit has a reason, cancel stops."""

from __future__ import annotations

import itertools

import pytest

import superoffload as so
from superoffload.errors import InputError, NotSupported
from superoffload.graph import buckets_of
from superoffload.hardware import preset
from superoffload.links import link_at
from superoffload.memory import ledger
from superoffload.plan import Plan
from superoffload.plan_presets import PRESETS, preset_plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.simulator import simulate, step_seconds
from superoffload.sweeps import AXES, Sweep, sweep


@pytest.fixture(scope="module")
def profile() -> Profile:
    return so.estimate("bench-3b", micro_batch=2, seq_len=2048, hardware="gh200")


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return make_plan(profile)


def numbers(s: Sweep) -> list[float | None]:
    return [p.tokens_per_s for p in s.points]


def test_bucket_size_and_retained_share(profile: Profile, plan: Plan) -> None:
    s = sweep(profile, plan, "bucket_mb", "retained", xs=(32, 256), ys=(0.0, 0.5))
    assert s.xs == (32.0, 64.0, 256.0) and len(s.points) == len(s.xs) * len(s.ys)
    assert s.at(*s.own).tokens_per_s == pytest.approx(simulate(profile, plan).tokens_per_s)
    half = plan.model_copy(update={"bucket_mb": 256.0})
    half = half.model_copy(update={"retained_buckets": round(0.5 * len(buckets_of(profile, 256.0)))})
    assert s.at(256.0, 0.5).tokens_per_s == pytest.approx(half.tokens_per_step / step_seconds(profile, half))
    assert s.best is not None
    assert s.best.tokens_per_s == max(n for n in numbers(s) if n is not None)
    assert (s.model, s.hardware) == ("bench-3b", "gh200")


def test_a_point_that_does_not_fit_has_a_reason_and_no_number(profile: Profile, plan: Plan) -> None:
    s = sweep(profile, plan, "micro_batch", "seq_len", xs=(1, 64), ys=(512, 16384))
    far = s.at(64.0, 16384.0)
    assert far.tokens_per_s is None
    assert far.reason.startswith("does not fit: the GPU lacks ")
    near = s.at(1.0, 512.0)
    assert near.tokens_per_s is not None and near.reason == ""
    small = plan.replace(micro_batch=1, seq_len=512)
    assert near.tokens_per_s == pytest.approx(simulate(profile, small).tokens_per_s)
    for p in s.points:
        changed = plan.replace(micro_batch=int(p.x), seq_len=int(p.y))
        sized = rescale(profile, micro_batch=int(p.x), seq_len=int(p.y))
        assert (p.tokens_per_s is not None) == ledger(sized, changed).fits


def test_a_slow_link_slows_flow_down_and_the_own_one_stays(profile: Profile, plan: Plan) -> None:
    s = sweep(profile, plan, "link_gb_per_s", "flow", ys=(0, 13))
    row = [s.at(x, 13.0).tokens_per_s or 0.0 for x in s.xs]
    # Host memory is shared out anew at each rate, so a faster link may cost a percent somewhere.
    assert all(b >= a * 0.97 for a, b in itertools.pairwise(row)) and row[0] < 0.5 * row[-1]
    own = s.at(s.own[0], 0.0)
    assert own.tokens_per_s == pytest.approx(simulate(profile, plan).tokens_per_s)
    at_16 = so.estimate("bench-3b", micro_batch=2, seq_len=2048, hardware=link_at("gh200", 16.0))
    assert s.at(16.0, 0.0).tokens_per_s == pytest.approx(simulate(at_16, plan).tokens_per_s)
    assert "down" in s.notes[0]


@pytest.mark.parametrize("name", AXES)
def test_every_axis_has_the_plans_own_number_at_its_own_value(name: str, profile: Profile, plan: Plan) -> None:
    other = "retained" if name != "retained" else "adam_threads"
    s = sweep(profile, plan, name, other, ys=())
    assert s.ys == (s.own[1],)
    assert s.at(*s.own).tokens_per_s == pytest.approx(simulate(profile, plan).tokens_per_s)
    assert len(s.xs) > 1 and all(AXES[name].show(v) for v in s.xs)


def test_undo_memory_follows_the_bucket_size(profile: Profile, plan: Plan) -> None:
    before = len(buckets_of(profile, 64.0))
    half = plan.model_copy(update={"undo_buckets": before // 2, "bucket_mb": 64.0})
    changed = AXES["bucket_mb"].place(profile, half, 256.0)[1]
    assert changed.undo_buckets == pytest.approx(len(buckets_of(profile, 256.0)) / 2, abs=1)


def test_cancel_returns_what_there_is(profile: Profile, plan: Plan) -> None:
    seen: list[tuple[int, int]] = []
    s = sweep(profile, plan, cancel=lambda: len(seen) == 3, progress=lambda done, total: seen.append((done, total)))
    assert s.cancelled and len(s.points) == 3
    assert [d for d, _ in seen] == [1, 2, 3] and seen[0][1] == len(s.xs) * len(s.ys)


def test_what_cannot_be_swept_is_refused(profile: Profile, plan: Plan) -> None:
    with pytest.raises(InputError, match='did you mean "retained"'):
        sweep(profile, plan, "retaned", "flow")
    with pytest.raises(InputError, match="two different axes"):
        sweep(profile, plan, "flow", "flow")
    measured = profile.replace(context={}, source="measured")
    with pytest.raises(NotSupported, match="a measured profile cannot tell"):
        sweep(measured, plan, "micro_batch", "seq_len")
    s = sweep(measured, plan, "micro_batch", "retained", xs=(1,), ys=())
    assert "in proportion" in s.notes[0]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_batch_of_the_plan_they_are_compared_with(name: str, profile: Profile, plan: Plan) -> None:
    like = plan.replace(micro_batch=4, accumulation=2)
    made = preset_plan(name, profile, like)
    assert (made.micro_batch, made.seq_len, made.accumulation) == (4, 2048, 2)
    assert PRESETS[name].what.endswith(".")


def test_the_techniques_one_by_one_are_never_slower(profile: Profile) -> None:
    names = ("ZeRO-Offload-like", "+ casts", "+ speculation", "+ repartition", "planner's own")
    rates = [simulate(profile, preset_plan(n, profile)).tokens_per_s for n in names]
    assert all(b >= a * 0.997 for a, b in itertools.pairwise(rates))
    assert rates[-1] > 1.3 * rates[0]


def test_presets_are_what_they_say(profile: Profile) -> None:
    gpu = preset_plan("all on the GPU", profile)
    assert gpu.retained_buckets == len(buckets_of(profile, gpu.bucket_mb)) and not gpu.flow_blocks
    assert ledger(profile, gpu).total("pinned") == 0
    fsdp = preset_plan("FSDP-offload-like", profile)
    assert len(fsdp.flow_blocks) == sum(b.kind == "layer" for b in profile.blocks)
    assert (fsdp.retained_buckets, fsdp.speculate) == (0, "off")
    with pytest.raises(InputError, match="ZeRO-Offload-like"):
        preset_plan("zero-offload", profile)
    assert preset("gh200").name == "gh200"
