"""The real engine through a clipping storm, on whatever is at hand: the only part of the workshop that needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import superoffload
from superoffload.plan import Speculate

CLIP = 0.12
"""Gradients of the small network have a norm of 0.06 to 0.07."""


@dataclass(frozen=True, slots=True)
class StormRun:
    """What a run left behind; two of them are compared bit for bit by `same_bits`."""

    verdicts: tuple[str, ...]
    """`commit`, `clip` or `skip`, step by step."""
    undone_steps: int
    """Steps in which at least one bucket was taken back and done again."""
    losses: tuple[float, ...]
    weights: tuple[Any, ...]
    """Tensors on the CPU, in the model's order."""

    def same_bits(self, other: StormRun) -> bool:
        """Whether losses and weights are equal bit for bit."""
        import torch

        pairs = zip(self.weights, other.weights, strict=True)
        return self.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def train_through_storm(
    speculate: Speculate, *, steps: int = 12, storm: tuple[int, int] = (4, 4), device: str = "cpu"
) -> StormRun:
    """Train a small network with the real engine; in the storm the loss is doubled, which clips every step.

    The limit lies just below the norm of a doubled gradient: only the last buckets tell that a step will be clipped,
    and by then the others have been updated. A much larger gradient is told by its first bucket, and nothing is undone.

    Args:
        speculate: as in Plan.
        steps: optimizer steps.
        storm: first step (from 0) and length.
        device: `cuda` or `cpu`.

    Raises:
        MissingDependency: torch is not installed.
    """
    optimizer_class = superoffload.OffloadAdamW  # raises with the remedy where torch is missing
    import torch
    from torch import nn

    first, length = storm
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6))).to(device)
    losses = []
    with optimizer_class(model, lr=1e-3, max_grad_norm=CLIP, bucket_mb=0.05, speculate=speculate) as optimizer:
        for step in range(steps):
            x = torch.randn(32, 128, generator=generator).to(device)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            losses.append(float(loss.detach()))
            (loss * (2.0 if first <= step < first + length else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        ledger = list(optimizer.ledger)
        weights = tuple(p.detach().cpu().clone() for p in model.parameters())
    return StormRun(
        tuple(r.verdict for r in ledger), sum(r.undone > 0 for r in ledger), tuple(losses), weights
    )  # fmt: skip
