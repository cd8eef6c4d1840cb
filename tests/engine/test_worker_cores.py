"""An engine whose threads are bound steps to the same bits as one whose threads are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from superoffload.engine import OffloadAdamW, arenas
from superoffload.engine.placement import Placement
from superoffload.kernels import available_core_list
from superoffload.topology import parse_cpu_list


def cores_of(name: str) -> list[tuple[int, ...]]:
    """Allowed cores of this process's threads of that name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            rows = (task / "status").read_text().splitlines()
            found.append(parse_cpu_list(next(r for r in rows if r.startswith("Cpus_allowed_list")).split(":")[1]))
    return found


def train(cores: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    monkeypatch.setattr(arenas, "place", lambda device, threads: Placement(cores, None, 0, "a test"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300))
    optimizer = OffloadAdamW(model, lr=1e-2, max_grad_norm=0.1, adam_threads=3, bucket_mb=0.5)
    if cores:
        assert set(cores_of("so-worker")) == {cores} and (cores in cores_of("so-pool"))
    for _ in range(3):
        model(torch.ones(2, 300)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def test_bound_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("affinity is set on Linux only")
    free, bound = train((), monkeypatch), train((available_core_list()[-1],), monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(free, bound, strict=True))
