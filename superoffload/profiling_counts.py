"""What the profiler books while one pass runs: when the work went from block to block, and what each block kept.

Bytes are those of storages, each counted once and for the block that made or first kept it; weights and buffers are
never counted. Live bytes are followed by a dispatch mode, so that they are known on a CPU as on a GPU.
"""

from __future__ import annotations

import statistics
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from superoffload.profiling_state import Clock

Phase = Literal["forward", "backward"]


@dataclass
class Counts:
    """What the counting pass found, one entry per block."""

    flops: list[float]
    input_bytes: list[int]
    kept_bytes: list[int]
    working_bytes: list[int]


@dataclass
class RecomputeCounts:
    """What the layers keep and repeat under the policy `selective` or `full`; empty where that failed."""

    kept: dict[int, int] = field(default_factory=dict)
    """Bytes of the results that each layer keeps."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Of each layer's recompute."""
    failure: str = ""

    def add(self, results: dict[int, list[Any]], passes: list[dict[int, float]]) -> None:
        for block in passes[-1]:
            storages = {_key(t): t.untyped_storage() for t in tree_leaves(results.get(block, [])) if _counts(t)}
            self.kept[block] = sum(s.nbytes() for s in storages.values())
            self.seconds[block] = statistics.median(p[block] for p in passes)

    def bytes(self, inputs: list[int], block: int) -> int | None:
        """Kept bytes of a block, its input included."""
        return inputs[block] + self.kept[block] if block in self.kept else None


@dataclass
class CompiledCounts:
    """What compiled layers keep and how long they take; empty where nobody looked."""

    kept: list[int] = field(default_factory=list)
    """Bytes by block."""
    seconds: dict[tuple[Phase, int], float] = field(default_factory=dict)

    def fields(self, block: int) -> dict[str, Any]:
        """Those of the block's profile."""
        if not self.kept:
            return {}
        return {
            "compiled_forward_s": self.seconds["forward", block],
            "compiled_backward_s": self.seconds["backward", block],
            "compiled_bytes": self.kept[block],
        }


@dataclass
class Marks:
    """Where the work passed from block to block in one pass."""

    clock: Clock
    phase: Phase = "forward"
    block: int = 0
    entries: list[tuple[Phase, int, Any]] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    """Blocks whose forward has begun, to tell a block's first module from its further ones."""

    def to(self, block: int, phase: Phase | None = None) -> None:
        """From here on `block` is at work."""
        self.phase, self.block = phase or self.phase, block
        if not self.entries or (self.phase, block) != self.entries[-1][:2]:
            self.entries.append((self.phase, block, self.clock.now()))

    def seconds(self, end: Any, n: int) -> dict[tuple[Phase, int], float]:
        """Sum the spans between marks by phase and block."""
        total: dict[tuple[Phase, int], float] = {(p, i): 0.0 for p in ("forward", "backward") for i in range(n)}
        stops = [*(stamp for _, _, stamp in self.entries[1:]), end]
        for (phase, block, start), stop in zip(self.entries, stops, strict=True):
            total[phase, block] += self.clock.seconds(start, stop)
        return total


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores and weighted sum of every query with every key: q [batch, heads, queries, dim], v [.., keys, dim]. Key
    and value may have fewer heads than the query."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[-2] * (width + v[-1]))


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores again, and the gradients of weights, scores, query, key and value: five products, three of them of
    the query's width and two of the value's."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[-2] * (3 * width + 2 * v[-1]))


_ATEN = torch.ops.aten
MORE_FLOPS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_flash_attention: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_efficient_attention: _attention_flops,
    _ATEN._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    _ATEN._scaled_dot_product_cudnn_attention: _attention_flops,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
}
"""Attention for FlopCounterMode, which knows none on a CPU, and before torch 2.12 only that of as many key as query
heads."""


class Counter(Marks):
    """Marks that also book FLOPs and bytes on the block at work."""

    def __init__(self, model: nn.Module, n: int, device: torch.device) -> None:
        super().__init__(Clock(device))
        self.flops: list[float] = [0.0] * n
        self.input_bytes, self.kept_bytes, self.working_bytes = [0] * n, [0] * n, [0] * n
        self.watch = Watch(model)
        self.read_flops: Any = lambda: 0
        self._seen_flops = 0
        self._weights = {_key(t) for t in (*model.parameters(), *model.buffers()) if t.numel()}
        self._kept: dict[int, torch.UntypedStorage] = {}  # storages held, so that no address is used twice
        self._live = 0

    def to(self, block: int, phase: Phase | None = None) -> None:
        self._book()
        super().to(block, phase)

    def close(self) -> None:
        self._book()
        self._kept.clear()

    def _book(self) -> None:
        total = int(self.read_flops())
        peak, live = self.watch.reset()
        if self.phase == "forward":
            self.flops[self.block] += total - self._seen_flops
            transient = peak - live
        else:
            transient = peak - self._live
        if self.entries:
            self.working_bytes[self.block] = max(self.working_bytes[self.block], transient)
        self._seen_flops, self._live = total, live

    def count_input(self, block: int, leaves: list[Any]) -> None:
        """The block's input: tensors that carry gradients, or the first tensor where none does (token ids)."""
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        carried = list({_key(t): t for t in tensors if t.requires_grad}.values()) or tensors[:1]
        self.input_bytes[block] = sum(t.numel() * t.element_size() for t in carried)
        for t in carried:
            self.keep(t)

    def keep(self, t: Tensor) -> Tensor:
        """Count the storage behind a saved tensor once, weights and buffers never."""
        if t.numel() and t.device.type != "meta":
            key, storage = _key(t), t.untyped_storage()
            if key not in self._weights and key not in self._kept:
                self._kept[key] = storage
                self.kept_bytes[self.block] += storage.nbytes()
        return t


class Watch(TorchDispatchMode):
    """Follows the bytes of live tensors and their peak, on any device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()
        for t in (*model.parameters(), *model.buffers()):
            self._known[t.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = True
                    n = storage.nbytes()
                    self.live += n
                    weakref.finalize(storage, self._gone, n)
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, n: int) -> None:
        self.live -= n

    def reset(self) -> tuple[int, int]:
        """Peak since the last call, and bytes live now."""
        result = self.peak, self.live
        self.peak = self.live
        return result


def _counts(t: Any) -> bool:
    return isinstance(t, Tensor) and t.numel() > 0 and t.device.type != "meta"


def _key(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
