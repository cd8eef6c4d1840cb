"""Notebook 09: its experiments on several Superchips, and that its checks take right answers only."""

from __future__ import annotations

from typing import Any

import pytest

from superoffload.model import spec
from superoffload.simulator import step_seconds
from superoffload.workshop import exchange, long_profile, on_chips, plain_plan
from superoffload.workshop.checks import check


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        (1, 12 * spec("llama-70b").parameters / 8e9, [12 * spec("llama-70b").parameters / 1e9, 14 * 69 / 8, 0]),
        (2, 4 * 4096 * 2 * 2**17 * 7 / 8 / 1e9, [4 * 4096 * 2 * 2**17 / 1e9, 3 * 4096 * 2 * 2**17 * 7 / 8 / 1e9]),
        (3, 2**19, [2**18, 2**20, 500_000, 2**13]),
    ],
)
def test_checks_take_right_answers_only(number: int, right: Any, wrong: list[Any]) -> None:
    def state(answer: Any) -> str:
        return check("09", [answer if n == number else None for n in (1, 2, 3)])[number - 1].state

    assert state(right) == "right"
    assert [state(w) for w in wrong] == ["not yet"] * len(wrong)


def test_the_share_of_the_all_to_alls_rises_and_falls() -> None:
    shares = []
    for k in (13, 15, 20):
        profile = long_profile("gh200-quad-x8", 2**k)
        found = exchange(profile, plain_plan(profile))
        assert found.share == pytest.approx(found.seconds / step_seconds(profile, plain_plan(profile)))
        # A layer recomputes: four tensors in forward, again in recompute, and their gradients in backward.
        assert found.sent_bytes == 65 * 3 * (4 * 4096 * 2 * 2**k // 8) * 7 // 8
        shares.append(found.share)
    assert shares[0] < shares[1] > 5 * shares[2]


def test_few_tokens_do_not_hide_the_network() -> None:
    one, four = (on_chips("llama-7b", "gh200-quad", (1, 4, 8), micro_batch=n, seq_len=2048) for n in (1, 4))
    assert one[4].mfu > one[1].mfu > 1.5 * one[8].mfu
    assert four[8].mfu == pytest.approx(four[1].mfu, rel=0.02)
    assert four[8].memory.total("host") < four[1].memory.total("host") / 5
