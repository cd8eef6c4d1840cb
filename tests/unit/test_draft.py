"""Drafts: a large step with few buckets, close to the exact one and honest about it; and what makes planning quick."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from superoffload import graph
from superoffload.draft import DRAFT_OPERATORS, KEY, WORTH_DRAFTING, draft, drafted, operators
from superoffload.estimating import estimate
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.quickly import remembered, without_collecting
from superoffload.simulator import Stopped, resolve_speculation, simulate

LARGE: list[dict[str, Any]] = [
    {"bucket_mb": 4.0},
    {"bucket_mb": 8.0, "retained_buckets": 500, "speculate": "off"},
    {"accumulation": 16, "accumulate_on": "cpu", "retained_buckets": 0},
    {"bucket_mb": 8.0, "activations": "offload_inputs", "flow_blocks": (3, 17)},
]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return make_plan(profile)


@pytest.mark.parametrize("change", LARGE)
def test_a_draft_is_close_and_says_what_it_is(profile: Profile, plan: Plan, change: dict[str, Any]) -> None:
    changed = plan.model_copy(update=change)
    quick, exact = draft(profile, changed), simulate(profile, changed)
    assert quick is not None
    assert quick.step_s == pytest.approx(exact.step_s, rel=0.01)
    assert quick.plan == exact.plan and quick.memory == exact.memory
    assert "in place of" in quick.context[KEY] and KEY not in exact.context
    coarse = drafted(profile, changed)
    assert coarse is not None
    few = len(graph.build(profile, resolve_speculation(coarse)).ops)
    many = len(graph.build(profile, resolve_speculation(changed)).ops)
    assert few < WORTH_DRAFTING * many and few < 3 * DRAFT_OPERATORS


@pytest.mark.parametrize("change", LARGE)
def test_the_number_of_operators_is_known_before_they_are_written_down(
    profile: Profile, plan: Plan, change: dict[str, Any]
) -> None:
    changed = plan.model_copy(update=change)
    buckets = len(graph.buckets_of(profile, changed.bucket_mb, changed.flow_blocks))
    written = len(graph.build(profile, resolve_speculation(changed)).ops)
    assert operators(profile, changed, buckets) == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"data_parallel": 8, "retained_buckets": 200},
        {"data_parallel": 4, "sequence_parallel": 2, "activations": "offload_saved"},
        {"sequence_parallel": 8, "flow_blocks": tuple(range(1, 20)), "activations": "full", "retained_buckets": 100},
        {"data_parallel": 2, "flow_blocks": (3, 4), "accumulation": 3, "accumulate_on": "cpu"},
    ],
)
def test_the_number_of_operators_is_known_for_several_chips_too(change: dict[str, Any]) -> None:
    profile = estimate("llama-7b", micro_batch=1, seq_len=2048, hardware="gh200-quad-x8")
    plan = Plan(**{"bucket_mb": 64.0, "micro_batch": 1, "seq_len": 2048, **change})
    buckets = len(graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks))
    written = len(graph.build(profile, resolve_speculation(plan)).ops)
    assert operators(profile, plan, buckets) == pytest.approx(written, rel=0.05)


def test_buckets_of_a_draft_have_the_numbers_of_the_plan(profile: Profile, plan: Plan) -> None:
    changed = plan.model_copy(update={"bucket_mb": 4.0, "retained_buckets": 300})
    count = len(graph.buckets_of(profile, 4.0))
    quick = draft(profile, changed)
    assert quick is not None
    adams = [e for e in quick.events if e.kind == "adam"]
    assert max(e.bucket for e in adams) == pytest.approx(count - 300, abs=8)
    assert all(e.name == f"Adam of bucket {e.bucket}" for e in adams)
    assert any(e.name == "GPU Adam of 300 retained buckets" for e in quick.events)


def test_a_step_that_is_quick_is_not_drafted(profile: Profile, plan: Plan) -> None:
    assert draft(profile, plan) is None
    assert draft(profile, plan.model_copy(update={"bucket_mb": 4.0}), above=10**6) is None


def test_a_simulation_can_be_stopped(profile: Profile, plan: Plan) -> None:
    stop = threading.Event()
    changed = plan.model_copy(update={"bucket_mb": 8.0})
    assert simulate(profile, changed, stop=stop) == simulate(profile, changed)
    stop.set()
    with pytest.raises(Stopped):
        simulate(profile, changed, stop=stop)


@pytest.mark.parametrize("hardware", ["gh200", "h100-pcie5", "gh200-quad-x8"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"accumulation": 3, "accumulate_on": "cpu", "cast_down": "gpu"},
        {"activations": "full", "retained_buckets": 40, "flow_blocks": (4, 9)},
        {"activations": "offload_saved", "compile_blocks": True},
    ],
)
def test_the_gpus_own_time_is_that_of_its_operators(hardware: str, change: dict[str, Any]) -> None:
    profile = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware=hardware)
    plan = make_plan(profile, check=False).model_copy(update=change)
    operators_s = graph.build(profile, resolve_speculation(plan)).load("gpu")
    assert graph.gpu_seconds(profile, plan) == pytest.approx(operators_s, rel=1e-12)


def test_answers_are_remembered_by_identity() -> None:
    asked: list[tuple[object, int]] = []

    @remembered(2)
    def add(of: tuple[int, ...], n: int) -> int:
        asked.append((of, n))
        return sum(of) + n

    one, other = tuple(range(1, 3)), tuple(range(1, 3))
    assert [add(one, 1), add(one, 1), add(other, 1), add(one, 2), add(one, 1)] == [4, 4, 4, 5, 4]
    assert len(asked) == 4, "the third answer found no room, and the first was asked for again"


def test_the_collector_is_back_after_an_error() -> None:
    assert gc.isenabled()
    seen: list[bool] = []

    @without_collecting()
    def fails() -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        with without_collecting():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
