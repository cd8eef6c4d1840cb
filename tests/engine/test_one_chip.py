"""The engine trains on one chip: a plan for several is refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superoffload import OffloadAdamW
from superoffload.errors import NotSupported
from superoffload.plan import Plan


@pytest.mark.parametrize(
    "how", [{"plan": Plan(data_parallel=2)}, {"sequence_parallel": 4}, {"data_parallel": 2, "sequence_parallel": 2}]
)
def test_a_plan_for_several_chips_is_refused(how: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    with OffloadAdamW(model, lr=0.1) as optimizer:
        with pytest.raises(NotSupported, match=r"for \d Superchips .*trains on one.*Plan again for one chip"):
            OffloadAdamW(model, **how)
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()  # the one that was there is still in charge
        optimizer.synchronize()
        assert any(not torch.equal(v, weights[k]) for k, v in model.state_dict().items())
