"""The workshop's storm on the real engine: steps are taken back, and the bits are those of waiting."""

from __future__ import annotations

import torch

from superoffload.workshop.exact import train_through_storm


def test_a_storm_is_undone_and_leaves_the_bits_of_waiting() -> None:
    before = torch.random.get_rng_state()
    waited, speculated = train_through_storm("off"), train_through_storm("on")
    assert torch.equal(torch.random.get_rng_state(), before), "a notebook's own random numbers are not touched"
    assert waited.verdicts == speculated.verdicts == ("commit",) * 4 + ("clip",) * 4 + ("commit",) * 4
    assert waited.undone_steps == 0 < speculated.undone_steps
    assert speculated.same_bits(waited)
    assert speculated.losses[-1] < speculated.losses[0]


def test_other_trainings_have_other_bits() -> None:
    storm, calm = train_through_storm("on", steps=6), train_through_storm("on", steps=6, storm=(0, 0))
    assert set(calm.verdicts) == {"commit"}
    assert not storm.same_bits(calm)
