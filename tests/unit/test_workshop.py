"""What the workshop's notebooks compute: one thing changed at a time, storms through the gate, checks, score codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superoffload import measured
from superoffload.errors import DoesNotFit, InputError
from superoffload.estimating import estimate
from superoffload.gate import Gate
from superoffload.hardware import preset
from superoffload.measured_step import load_measured
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import retarget
from superoffload.profiler import Profile
from superoffload.simulator import simulate
from superoffload.workshop import (
    Challenge,
    StepTimes,
    adam_gb_per_s,
    break_even_clip_rate,
    cast_steps,
    flow_cost,
    flow_efficiency,
    leaderboard,
    link_at,
    link_sweep,
    pcie_era_plan,
    retained_steps,
    run_storm,
    step_times,
    storm_verdicts,
)
from superoffload.workshop.checks import CHECKS, check
from superoffload.workshop.storm import REDO_VS_STEP


@pytest.fixture(scope="module")
def small() -> Profile:
    return estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200")


@pytest.fixture(scope="module")
def challenge() -> Challenge:
    return Challenge(model="bench-3b", hardware="h100-pcie5", micro_batch=4, seq_len=1024)


# -- experiments -------------------------------------------------------------------------------------------------------


def test_another_link_changes_the_link_alone() -> None:
    gh200 = preset("gh200")
    other = link_at("gh200", 64)
    assert other.link.down.peak == other.link.up.peak == 64
    assert other.link.both_gb_per_s == 128
    assert other.link.up.gb_per_s[0] / 64 == pytest.approx(gh200.link.up.gb_per_s[0] / gh200.link.up.peak)
    same = {"name", "link", "sources"}
    assert other.model_dump(exclude=same) == gh200.model_dump(exclude=same)
    assert other.sources["link.up"].startswith("assumed: 64 GB/s")
    with pytest.raises(InputError, match="above 0"):
        link_at("gh200", 0)


def test_the_pcie_era_plan_waits_and_casts_on_the_cpu(small: Profile) -> None:
    plan = pcie_era_plan(small)
    assert (plan.speculate, plan.cast_down, plan.cast_up, plan.activations) == ("off", "cpu", "cpu", "full")
    assert plan.retained_buckets == 0 and not plan.flow_blocks
    assert pcie_era_plan(small, flow=3, speculate="on").speculate == "on"
    assert len(pcie_era_plan(small, flow=3).flow_blocks) == 3


def test_a_faster_link_does_not_help_the_old_plan_and_the_best_plan_flips() -> None:
    """What notebook 02 shows."""
    profile = estimate("paper-13b", micro_batch=4, seq_len=2048, hardware="gh200")
    slow, middle, fast = link_sweep(profile, (16.0, 64.0, 450.0))
    assert abs(fast.era.step_s / middle.era.step_s - 1) < 0.05
    assert fast.best.step_s < 0.6 * fast.era.step_s
    assert slow.best.plan.retained_buckets > 100 and not slow.best.plan.flow_blocks
    assert fast.best.plan.flow_blocks and fast.best.plan.retained_buckets < slow.best.plan.retained_buckets
    assert slow.best.plan.activations == "full" and fast.best.plan.activations == "none", "nothing is computed again"
    assert all(p.best.step_s <= p.era.step_s and p.best.memory.fits for p in (slow, middle, fast))
    for point in (slow, fast):
        at = retarget(profile, link_at("gh200", point.gb_per_s))
        assert point.best.step_s <= simulate(at, make_plan(at)).step_s, (
            "never worse than the planner's choice for this link"
        )


def test_flow_is_hidden_where_the_formula_says() -> None:
    assert flow_efficiency(2200, 450, 990) == 1.0  # 2,200 tokens, the paper's figures
    assert flow_efficiency(1024, 450, 990, overlapped=False) == pytest.approx(0.32, abs=0.005)  # the paper's 32 %
    assert flow_efficiency(8192, 450, 990, overlapped=False) == pytest.approx(0.79, abs=0.005)
    assert flow_cost("gh200", 2048, "bench-3b") < 0.02 < flow_cost("h100-pcie5", 2048, "bench-3b")
    with pytest.raises(InputError, match="multiple of 2,048"):
        flow_cost("gh200", 3000)


def test_casts_and_retained_shares_are_those_of_the_simulator(small: Profile) -> None:
    steps = cast_steps(small)
    assert len(steps) == 9
    plan = pcie_era_plan(small, cast_down="gpu", cast_up="fused")
    assert steps["gpu", "fused"] == pytest.approx(simulate(small, plan).step_s)
    assert steps["cpu", "cpu"] > steps["gpu", "gpu"] > steps["fused", "fused"]
    retained = retained_steps(small, (0.0, 0.5, 1.0))
    assert list(retained) == [0.0, 0.5, 1.0]
    half = pcie_era_plan(small, cast_down="fused", cast_up="fused", speculate="on", retained_buckets=94)
    assert retained[0.5] == pytest.approx(simulate(small, half).step_s, rel=1e-3)


def test_adam_bandwidth_counts_28_bytes() -> None:
    assert adam_gb_per_s(8e9, 0.608) == pytest.approx(368.4, abs=0.1)


# -- the storm ---------------------------------------------------------------------------------------------------------


def test_modelled_step_times_meet_the_measured_ones() -> None:
    """From one probe and one profile of the H200 machine: waiting, committing, redoing, half of the buckets there."""
    commit, wait, clip = (load_measured(name) for name in ("committed", "waited", "clipped"))
    times = step_times(clip.profile, clip.plan)
    assert times.commit_s == pytest.approx(commit.trace.step_s, rel=0.06)
    assert times.wait_s == pytest.approx(wait.trace.step_s, rel=0.08)
    assert times.clip_s == pytest.approx(clip.trace.step_s, rel=0.06)
    assert times.commit_s < times.wait_s < times.clip_s


def test_break_even_is_where_both_take_the_same() -> None:
    times = StepTimes(commit_s=1.0, wait_s=1.4, adam_s=0.5, buckets=10)
    p = break_even_clip_rate(times)
    assert times.commit_s * (1 - p) + times.clip_s * p == pytest.approx(times.wait_s)
    assert times.clip_s == pytest.approx(1.4 + (REDO_VS_STEP - 1) * 0.5)
    assert break_even_clip_rate(StepTimes(1.0, 1.0, 0.5, 10)) == 0.0


def test_a_storm_is_clipped_and_the_rest_by_chance() -> None:
    verdicts = storm_verdicts(1000, storm=(200, 50), rate=0.0)
    assert [i for i, v in enumerate(verdicts) if v == "clip"] == list(range(200, 250))
    rare = storm_verdicts(20_000, rate=0.05, seed=1).count("clip")
    assert 800 < rare < 1200
    assert storm_verdicts(500, rate=0.3, seed=2) == storm_verdicts(500, rate=0.3, seed=2)
    for bad in ({"rate": 1.5}, {"storm": (990, 20)}, {"storm": (-1, 5)}):
        with pytest.raises(InputError):
            storm_verdicts(1000, **bad)  # type: ignore[arg-type]


def test_the_run_is_the_gates(small: Profile) -> None:
    times = step_times(small, pcie_era_plan(small))
    verdicts = storm_verdicts(300, storm=(100, 80), rate=0.02)
    on, off, auto = (run_storm(times, verdicts, mode) for mode in ("on", "off", "auto"))
    assert {s.step_s for s in off} == {times.wait_s}
    assert {s.step_s for s in on} == {times.commit_s, times.clip_s}
    assert all(s.speculated for s in on) and not any(s.speculated for s in off)
    assert all((s.undone > 0) == (s.verdict == "clip") for s in on)
    assert not auto[0].speculated, "with clipping the gate starts closed"
    assert not auto[179].speculated, "and closes in a storm"
    assert sum(s.step_s for s in auto) < sum(s.step_s for s in off)
    gate = Gate("auto", clips=True)
    for step in auto:
        assert gate.open == (step.speculated > 0)
        gate.observe(step)


# -- measured and published --------------------------------------------------------------------------------------------


def test_measured_numbers_are_those_of_the_benchmark_files(repository: Path) -> None:
    def load(name: str) -> dict[str, object]:
        body: dict[str, object] = json.loads(
            (repository / "benchmarks" / "results" / f"{name}_2026-11-30.json").read_text()
        )
        return body

    rows = {r["mode"]: r for r in load("step_ablation_h200")["rows"]}  # type: ignore[attr-defined]
    limit = next(r for r in load("step_ablation_h200")["rows"] if r["mode"] == "limit")  # type: ignore[attr-defined]
    modes = (
        "offload", "engine:0:speculate=off:cast_up=cpu:cast_down=cpu:loss=0.05", "engine:0:speculate=off:loss=0.05",
        "engine:0:speculate=on:loss=0.05", "engine:50:speculate=on:loss=0.05",
    )  # fmt: skip
    assert list(measured.H200_STEP_S.values()) == [limit["step_s"], *(rows[m]["step_s"] for m in modes)]
    casts = load("probe_casts_nvidia-h200")["casts"]
    assert {way: casts[way] for way in ("down", "up")} == measured.H200_CAST_NS  # type: ignore[index]
    undo = load("undo_h200")["rows"]
    row = next(r for r in undo if r["huge_pages"] and r["pinned"] and r["threads"] == 14)  # type: ignore[attr-defined]
    assert row["undo_redo_vs_step"] == REDO_VS_STEP
    for name, machine in (("adam_h200", "16 Xeon cores"), ("adam_epyc-2core", "2 EPYC cores")):
        rates = load(name)["threads"][-1]["gb_per_s"]  # type: ignore[index]
        keys = {
            "PyTorch, fused": "torch_fused_fp32",
            "DeepSpeed CPU-Adam": "deepspeed_fp32",
            "SuperOffload": "ours_fp32",
        }
        assert measured.ADAM_GB_PER_S[machine] == {who: rates[key] for who, key in keys.items()}


def test_the_paper_seconds_are_below_its_bandwidth() -> None:
    for seconds in measured.PAPER_ADAM_S.values():
        assert all(adam_gb_per_s(n, s) < measured.PAPER_GRACE_GB_PER_S for n, s in seconds.items())


# -- checks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", sorted(CHECKS))
def test_no_answer_and_nonsense_are_told_apart(lesson: str) -> None:
    assert [v.state for v in check(lesson, [])] == ["open"] * 3
    for nonsense in ("forty-two", object()):
        assert {v.state for v in check(lesson, [nonsense] * 3)} == {"not yet"}


def test_a_wrong_answer_gets_a_hint_and_not_the_answer() -> None:
    low, high = (check("06", [gb])[0] for gb in (13.0, 60.0))
    assert low.state == high.state == "not yet"
    assert "too little" in low.message and "too much" in high.message
    assert "27" not in low.message + high.message
    assert check("06", [27.0])[0].state == "right"


def test_unknown_lessons_and_too_many_answers_are_refused() -> None:
    with pytest.raises(InputError, match="no exercises"):
        check("11", [])
    with pytest.raises(InputError, match="4 answers"):
        check("06", [1, 2, 3, 4])


def test_a_plan_that_does_not_fit_is_told_with_its_own_message() -> None:
    verdict = check("08", [{"activations": "none", "retained_buckets": 400}])[0]
    assert verdict.state == "not yet" and "does not fit" in verdict.message


# -- scores ------------------------------------------------------------------------------------------------------------


def test_nothing_set_scores_nothing(challenge: Challenge) -> None:
    score = challenge.score(name="ada")
    assert score.percent == 0.0 and score.name == "ADA" and not score.knobs
    assert challenge.autotuner == simulate(challenge.profile, make_plan(challenge.profile))
    assert "modelled" in str(score) and score.code in str(score)


KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "bucket_mb": st.sampled_from([4.0, 64.0, 1024.0]),
        "retained_buckets": st.integers(0, 180),
        "cast_down": st.sampled_from(["gpu", "cpu", "fused"]),
        "activations": st.sampled_from(["none", "selective", "full"]),
        "speculate": st.sampled_from(["auto", "on", "off"]),
        "adam_threads": st.integers(1, 16),
        "micro_batch": st.sampled_from([1, 2, 4]),
        "flow_blocks": st.sets(st.integers(1, 26)).map(lambda s: tuple(sorted(s))),
    },
)


@settings(max_examples=25, deadline=None)
@given(knobs=KNOBS, name=st.from_regex(r"[A-Z0-9]{1,8}", fullmatch=True))
def test_a_code_carries_the_plan(challenge: Challenge, knobs: dict[str, object], name: str) -> None:
    try:
        score = challenge.score(name=name, **knobs)
    except InputError:  # more buckets retained than there are, or a plan that does not fit
        return
    read = challenge.read(score.code.lower())
    assert (read.name, read.knobs, read.trace, read.code) == (score.name, score.knobs, score.trace, score.code)
    assert score.knobs == knobs
    assert score.trace.tokens_per_step == 4 * 1024
    assert len(score.code) <= len(name) + 25


def test_a_code_with_a_typing_error_is_refused(challenge: Challenge) -> None:
    code = challenge.score(name="ADA", retained_buckets=20).code
    wrong = 0
    for i in range(4, len(code)):
        if code[i] != "-":
            other = code[:i] + ("7" if code[i] != "7" else "8") + code[i + 1 :]
            with pytest.raises(InputError, match=r"does not belong|not a score code"):
                challenge.read(other)
            wrong += 1
    assert wrong >= 5
    for nonsense in ("", "ADA", "ADA-", "ADA-???", "-00000"):
        with pytest.raises(InputError, match="not a score code"):
            challenge.read(nonsense)
    with pytest.raises(InputError, match="does not belong"):
        Challenge(model="bench-3b", hardware="gh200", seq_len=1024).read(code)


def test_what_cannot_be_scored_is_named(challenge: Challenge) -> None:
    for knobs, words in (
        ({"bucket_mb": 5.0}, "bucket_mb = 5"),
        ({"accumulation": 3}, "tokens per step"),
        ({"retained": 3}, '"retained" is not scored'),
        ({"flow_blocks": (0,)}, "flow_blocks"),
    ):
        with pytest.raises(InputError, match=words):
            challenge.score(**knobs)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="1 to 8 letters"):
        challenge.score(name="no spaces")
    with pytest.raises(DoesNotFit):
        Challenge(model="paper-25b").score(activations="none", retained_buckets=1000)


def test_a_plan_is_scored_as_it_is(challenge: Challenge) -> None:
    """As the Tuner has them: one knob is turned, the others stay where they were chosen for another value of it."""
    own = make_plan(challenge.profile)
    assert challenge.score(own).knobs == {} and challenge.score(own).percent == 0
    turned = own.replace(activations="full", bucket_mb=2.0, retained_buckets=own.retained_buckets + 7)
    score = challenge.score(turned)
    assert score.trace.step_s == simulate(challenge.profile, turned).step_s
    assert score.trace != challenge.score(activations="full", bucket_mb=2.0).trace, "others would be chosen anew"
    assert challenge.read(score.code).trace == score.trace
    halves = own.replace(micro_batch=2, accumulation=2, accumulate_on="cpu", activations="full")
    assert challenge.score(halves).trace.plan.accumulate_on == "cpu"
    assert set(challenge._options) <= set(Plan.knobs())
    by_block = own.replace(activations_by_block={1: "full", 2: "none"})
    with pytest.raises(InputError, match='"activations_by_block" is not scored'):
        challenge.score(by_block)
    with pytest.raises(InputError, match="tokens per step"):
        challenge.score(own.replace(accumulation=2))
    with pytest.raises(InputError, match="beside it"):
        challenge.score(own, activations="full")


def test_the_leaderboard_computes_every_score_and_keeps_the_best(challenge: Challenge) -> None:
    codes = [
        challenge.score(name="ADA", speculate="off").code,
        challenge.score(name="BOB", activations="full").code,
        "  ",
        challenge.score(name="ADA").code,
    ]
    board = leaderboard(codes, challenge)
    assert [s.name for s in board] == ["ADA", "BOB"]
    assert board[0].percent == 0.0 > board[1].percent
    with pytest.raises(InputError):
        leaderboard([*codes, "EVE-AAAAA"], challenge)
