"""Policies by layer and several Superchips as axes of the search: what holds at every point, and what it gains."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superoffload import graph, simulator
from superoffload.autotune import search
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.fitting import evenly
from superoffload.memory import ledger
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.search_result import SearchResult
from superoffload.search_space import AXES, NO_MIX, Space


@pytest.fixture(scope="module")
def one() -> Profile:
    return estimate("paper-1b", micro_batch=4, seq_len=1024, hardware="h200-pcie5")


@pytest.fixture(scope="module")
def several() -> Profile:
    return estimate("paper-1b", micro_batch=1, seq_len=8192, hardware="gh200-quad-x8")


def of(profile: Profile, plan: Plan) -> Profile:
    return rescale(profile, micro_batch=plan.micro_batch, sequence_parallel=plan.sequence_parallel)


def drawn(space: Space, rng: random.Random) -> Plan:
    return space.plan(tuple(rng.randrange(len(v)) for v in space.values.values()))


# -- one chip: some layers under another policy ------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.sampled_from([8192, 16384, 65536]), policy=st.sampled_from([None, "full"]))
def test_every_point_is_a_plan_with_evenly_mixed_layers(one: Profile, seed: int, tokens: int, policy: Any) -> None:
    start = make_plan(one, accumulation=tokens // one.tokens, **({"activations": policy} if policy else {}))
    space = Space(one, start, frozenset({"activations"} if policy else ()), tokens // one.seq_len)
    assert ("activations_by_block" in space.values) == (policy is None), "whoever gives a policy means all layers"
    assert space.plan(space.start) == start.replace(reasons={})
    plan = drawn(space, random.Random(seed))
    graph.check_plan(of(one, plan), plan)
    mixed = plan.activations_by_block
    layers = [i for i, b in enumerate(one.blocks) if b.kind == "layer"]
    assert not mixed or tuple(mixed) == tuple(evenly(layers, len(mixed)))
    assert len(set(mixed.values())) <= 1 and plan.activations not in mixed.values()
    assert not (plan.activations == "none" and mixed), "nothing is faster than keeping everything"
    axis = AXES["activations_by_block"]
    if policy is None and mixed:
        again = axis.place(
            space.task, plan, "activations_by_block", axis.read(space.task, plan, "activations_by_block")
        )
        assert again == plan, "read and place are each other's inverse"


def test_more_layers_that_keep_more_are_never_slower_on_the_gpu_and_never_smaller(one: Profile) -> None:
    start = make_plan(one, activations="full", micro_batch=8, accumulation=2)
    space = Space(rescale(one, micro_batch=8), start, frozenset(), 16)
    place = AXES["activations_by_block"].place
    plans = [
        place(space.task, start, "activations_by_block", ("selective", n) if n else NO_MIX) for n in (0, 5, 10, 15)
    ]
    assert [len(p.activations_by_block) for p in plans] == [0, 5, 10, 15]
    loads = [graph.build(of(one, p), simulator.resolve_speculation(p)).load("gpu") for p in plans]
    assert loads == sorted(loads, reverse=True) and len(set(loads)) == 4
    sizes = [ledger(of(one, p), p).total("gpu") for p in plans]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4


def test_compiled_layers_are_never_mixed_with_selective(one: Profile) -> None:
    start = make_plan(one, compile_blocks=True)
    space = Space(one, start, frozenset({"compile_blocks"}), 4)
    assert {p for p, _ in space.values["activations_by_block"]} == {"", "none"}


def test_mixing_is_worth_it_where_no_policy_fits_for_all_layers() -> None:
    """25B parameters in one GH200: neither the planner's plan nor any with all layers alike is as fast."""
    profile = estimate("paper-25b", micro_batch=16, seq_len=2048, hardware="gh200")
    free, alike = (search(profile, trials=150, **more) for more in ({}, {"activations_by_block": {}}))
    assert free.best is not None and alike.best is not None
    assert not any(t.plan.activations_by_block for t in alike.trials)
    assert sum(bool(t.plan.activations_by_block) for t in free.trials) > 20
    assert free.best.tokens_per_s > 1.05 * alike.best.tokens_per_s
    assert free.best.step_s == simulator.step_seconds(of(profile, free.best.plan), free.best.plan)
    assert set(free.best.plan.reasons) == set(Plan.knobs())
    assert SearchResult.from_json(free.to_json()) == free


# -- several chips -----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), sequences=st.sampled_from([8, 16, 64]))
def test_every_point_uses_all_chips_and_keeps_the_tokens(several: Profile, seed: int, sequences: int) -> None:
    start = make_plan(several, accumulation=sequences // 8)
    assert start.chips == 8
    space = Space(several, start, frozenset(), sequences)
    assert space.values["sequence_parallel"] == (1, 2, 4, 8)
    assert space.plan(space.start) == start.replace(reasons={})
    plan = drawn(space, random.Random(seed))
    assert plan.chips == 8 and plan.tokens_per_step == sequences * 8192
    assert space.task.of(plan).sequence_parallel == plan.sequence_parallel
    graph.check_plan(of(several, plan), plan)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), fixed=st.sampled_from([{"micro_batch": 2}, {"accumulation": 2}]))
def test_a_given_batch_stays_however_the_chips_share(several: Profile, seed: int, fixed: dict[str, int]) -> None:
    start = make_plan(several, micro_batch=2, accumulation=2)
    names = set(fixed) | ({"micro_batch"} if "accumulation" in fixed else set())
    space = Space(rescale(several, micro_batch=2), start, frozenset(names), 32)
    plan = drawn(space, random.Random(seed))
    assert {k: getattr(plan, k) for k in fixed} == fixed
    assert plan.chips == 8 and plan.tokens_per_step == 32 * 8192


def test_sharing_a_sequence_is_found_where_the_chips_would_lack_memory() -> None:
    """A sequence that does not fit one chip with its activations: the planner's own plan, which shares none, fails."""
    profile = estimate("paper-13b", micro_batch=1, seq_len=131072, hardware="gh200-quad-x8")
    found = search(profile, tokens=8 * 131072, trials=60)
    assert found.trials[0].plan.sequence_parallel == 1
    assert {t.plan.sequence_parallel for t in found.trials} > {1}
    assert found.best is not None and found.best.plan.chips == 8
    own = found.trials[0]
    assert not own.ran or found.best.tokens_per_s >= own.tokens_per_s
    reasons = found.best.plan.reasons
    assert reasons["data_parallel"].startswith(f"{found.best.plan.data_parallel}: 8 chips, of which")
    assert found.repeat() == found


def test_the_chips_that_are_asked_for(several: Profile, one: Profile) -> None:
    four = search(several, chips=4, trials=12)
    assert {t.plan.chips for t in four.trials} == {4} and four.settings.chips == 4
    assert four.best is not None and set(four.best.plan.reasons) == set(Plan.knobs())
    alone = search(several, chips=1, trials=6)
    assert {t.plan.chips for t in alone.trials} == {1}
    given = search(several, chips=8, sequence_parallel=2, trials=6)
    assert {(t.plan.data_parallel, t.plan.sequence_parallel) for t in given.trials} == {(4, 2)}
    assert "sequence_parallel" not in given.candidates
    as_before = search(several, sequence_parallel=2, data_parallel=2, trials=4)
    assert {(t.plan.data_parallel, t.plan.sequence_parallel) for t in as_before.trials} == {(2, 2)}
    assert "sequence_parallel" not in search(one, trials=4).candidates


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chips": 9}, "chips = 9. Expected 1 to 8"),
        ({"chips": 0}, "chips = 0"),
        ({"chips": 4, "sequence_parallel": 3}, "chips = 4 with sequence_parallel = 3"),
        ({"chips": 4, "data_parallel": 2, "sequence_parallel": 4}, "chips = 4 with"),
    ],
)
def test_chips_that_cannot_be_are_refused(several: Profile, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(several, trials=4, **arguments)


def test_one_chip_has_no_others(one: Profile) -> None:
    with pytest.raises(InputError, match="chips = 2"):
        search(one, chips=2)
    assert search(one, chips=1, trials=4).best is not None
