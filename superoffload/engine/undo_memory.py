"""Host memory by which a speculative step can be taken back, as csrc/step.h wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from superoffload.engine.host_memory import HostMemory
from superoffload.kernels import native
from superoffload.layout import Bucket
from superoffload.plan import Plan


@dataclass(frozen=True, slots=True)
class UndoMemory:
    """Of one bucket: its record, or its snapshot."""

    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """For p, m and v: one byte per element, or copies in fp32."""
    escapes: torch.Tensor | None = None
    """Of a record, by tile."""
    counts: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        tensors = [*self.arrays, *(x for x in (self.escapes, self.counts) if x is not None)]
        return sum(x.numel() * x.element_size() for x in tensors)

    def describe(self, bucket: Any) -> None:
        """Tell the worker's description of the bucket."""
        p, m, v = (x.data_ptr() for x in self.arrays)
        if self.escapes is None or self.counts is None:
            bucket.set_snapshot(p, m, v)
        else:
            bucket.set_undo(p, m, v, self.escapes.data_ptr(), self.counts.data_ptr())


def tiles(layout: Bucket) -> int:
    """Tiles of a bucket's record: every segment has its own."""
    return sum(-(-s.numel // native.UNDO_TILE) for s in layout.segments)


def undo_memory(layouts: Sequence[Bucket], plan: Plan, host: HostMemory) -> dict[int, UndoMemory]:
    """Allocate what `plan` needs to take steps of some buckets back, by bucket index; nothing for those of which it
    takes no step before the verdict."""
    layouts = [b for b in layouts if plan.may_undo(b.index)]
    if not layouts:
        return {}
    total = sum(b.numel for b in layouts)
    dtype = torch.float32 if plan.undo == "snapshot" else torch.uint8
    arrays = [host.zeros(total, dtype) for _ in range(3)]
    escape_bytes = native.UNDO_ESCAPES * native.UNDO_ESCAPE_BYTES
    count = sum(tiles(b) for b in layouts) if plan.undo == "record" else 0
    escapes, counts = host.zeros(count * escape_bytes, torch.uint8), host.zeros(count, torch.int32)
    found: dict[int, UndoMemory] = {}
    start = tile = 0
    for b in layouts:
        p, m, v = (x[start : start + b.numel] for x in arrays)
        start += b.numel
        if plan.undo == "snapshot":
            found[b.index] = UndoMemory((p, m, v))
            continue
        end = tile + tiles(b)
        found[b.index] = UndoMemory((p, m, v), escapes[tile * escape_bytes : end * escape_bytes], counts[tile:end])
        tile = end
    return found


__all__ = ["UndoMemory", "undo_memory"]
