"""What the engine trains, and in which portions: parameters, the buckets they are cut into, and a bucket's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from superoffload.engine.start import become
from superoffload.engine.undo_memory import UndoMemory
from superoffload.errors import InputError
from superoffload.kernels.split import join, split
from superoffload.layout import NORM_CHUNK, Bucket, Segment, TensorRef, cut_buckets
from superoffload.plan import Plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, eq=False)
class ManagedParam:
    """A parameter in the engine's care."""

    index: int
    name: str
    param: nn.Parameter
    block: int
    dtype: str
    group: int
    first_partial: int
    """Index of its first partial sum; partials follow the order of the model's parameters, not of the buckets."""
    places: list[tuple[int, Segment]] = field(default_factory=list)
    """(bucket, segment) in order of offset."""
    address: int = 0
    """Where its weights are: in the arena, or of a flow block at home or in the slot."""
    home: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Of a flow block: its weights on the host, in its shape."""
    home_on_device: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The same memory as the device reads it."""

    def point_to(self, weights: torch.Tensor) -> None:
        """Let the parameter be `weights`, which hold its values. Its version stays: these are not new ones."""
        if self.param.is_meta:
            become(self.param, weights)
        else:
            self.param.data = weights
        self.address = int(weights.data_ptr())

    @property
    def numel(self) -> int:
        return int(self.param.numel())

    @property
    def chunks(self) -> int:
        return -(-self.numel // NORM_CHUNK)


@dataclass(slots=True, eq=False)
class BucketState:
    """Tensors and bookkeeping of one bucket; all flat, `layout.numel` elements."""

    layout: Bucket
    retained: bool
    weights: torch.Tensor
    """Device weights, a slice of the arena; of a flow bucket their home on the host."""
    master: torch.Tensor
    """fp32. The weights themselves where these are fp32 and on the same side; empty where it is split."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    """Where the master is split, its signs are not those of numbers: read it with `read`."""
    grad: torch.Tensor
    """Held until the verdict: on the host, or on the device for a retained bucket."""
    table: Any
    """Norm chunks of the whole bucket, as the device wants them."""
    out: torch.Tensor | None = None
    """Host copy of the 16-bit weights: goes up the link, or is the home of a flow bucket."""
    remainder: torch.Tensor | None = None
    """Of a split master: the lower halves; the upper ones are `out`."""
    done: tuple[Any, Any] = (None, None)
    """Recorded after the upload of a step, by the parity of its sequence."""
    upload_start: tuple[Any, Any] = (None, None)
    """Recorded before it; only when a trace is wanted."""
    undo: UndoMemory | None = None
    """What takes the bucket's last speculative step back; None where every step waits for its verdict."""
    sequence: int = 0
    """Last step that updates this bucket."""

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def flow(self) -> bool:
        return self.layout.flow

    def read(self, kind: str, span: slice) -> torch.Tensor:
        """`master`, `exp_avg` or `exp_avg_sq` of some elements, fp32: a view where it lies as such, else a copy."""
        if self.remainder is None or kind == "exp_avg":
            found: torch.Tensor = getattr(self, kind)[span]
            return found
        master, exp_avg_sq = self._joined(span)
        return master if kind == "master" else exp_avg_sq

    def write(self, kind: str, span: slice, value: torch.Tensor) -> None:
        """Set one of them. A split master takes `out` along."""
        if self.remainder is None or kind == "exp_avg":
            getattr(self, kind)[span].copy_(value)
            return
        assert self.out is not None
        master, exp_avg_sq = self._joined(span)
        (master if kind == "master" else exp_avg_sq).copy_(value)
        self.exp_avg_sq[span].copy_(exp_avg_sq)
        split(master, self.out[span], self.remainder[span], self.exp_avg_sq[span])

    def _joined(self, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of master and second moment."""
        assert self.out is not None and self.remainder is not None
        parts = (self.out[span], self.remainder[span], self.exp_avg_sq[span])
        master, exp_avg_sq = (torch.empty_like(parts[2]) for _ in range(2))
        join(*parts, master, exp_avg_sq)
        return master, exp_avg_sq


def backward_order(blocks: Sequence[Sequence[ManagedParam]]) -> list[ManagedParam]:
    """Parameters in the order in which backward is expected to complete them."""
    return [p for block in reversed(blocks) for p in reversed(block)]


def plan_layout(params: Sequence[ManagedParam], blocks: int, plan: Plan) -> list[Bucket]:
    """Cut the parameters into the plan's buckets.

    Raises:
        InputError: the plan retains more buckets than there are.
    """
    by_block: list[list[ManagedParam]] = [[] for _ in range(blocks)]
    for p in params:
        by_block[p.block].append(p)
    refs = [
        TensorRef(p.index, p.block, p.numel, p.dtype, p.block in plan.flow_blocks) for p in backward_order(by_block)
    ]
    layouts = cut_buckets(refs, plan.bucket_mb)
    if plan.retained_buckets > len(layouts):
        raise InputError(
            f"retained_buckets = {plan.retained_buckets}",
            expected=f"at most {len(layouts)}, the number of buckets at bucket_mb = {plan.bucket_mb:g}",
        )
    return layouts


__all__ = ["DTYPES", "BucketState", "ManagedParam", "backward_order", "plan_layout"]
