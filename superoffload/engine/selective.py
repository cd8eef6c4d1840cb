"""Which results a block keeps under `activations = "selective"`; what is not kept is recomputed in backward.

The question is how many seconds of recompute a kept byte saves. In a 16-bit layer of width 4,096 on an H200 (about 700
TFLOP/s in products, 4.8 TB/s of HBM):

    attention over 8,192 tokens     8,192 FLOPs per byte of its result     17 ps per byte
    a weight product                4,096 FLOPs per byte of its result      6 ps per byte
    norms, rotary, activation, residuals: 5 bytes moved per byte kept       1 ps per byte

So attention and products are kept, and everything else is computed again. Two exceptions:

* A product below the machine's balance (`KEEP_FLOPS_PER_BYTE`) is bound by memory: it costs what an element-wise
  operation costs (the second matrix of a LoRA pair, for one).
* A product that the recompute never reaches is not kept. Recompute stops where the last tensor that backward reads
  exists, and in a pre-norm layer that is before the last product, the MLP's way down. The first recompute of a block
  finds out how far it goes.

Attention with dropout draws random numbers inside its kernel. It is recomputed, so that the random numbers after it are
the same ones again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from superoffload.activation_costs import KEEP_FLOPS_PER_BYTE


def _ops(*names: str) -> frozenset[Any]:
    """Those of these operators that this torch has."""
    found: set[Any] = set()
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(found)


ATTENTION = _ops(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
"""Fused attention. Attention written out in single operations is recomputed: its scores are the large part."""
PRODUCTS = _ops("mm", "addmm", "_scaled_mm", "_grouped_mm")
"""Products with a weight: what `nn.Linear` becomes. Batched products (`bmm`) are attention written out."""


class Selection:
    """What one block keeps. `contexts` is what `torch.utils.checkpoint` wants as `context_fn`.

    Args:
        kept: called with every result that is kept, for a measurement.
    """

    def __init__(self, kept: Callable[[Any], None] | None = None):
        self._kept = kept
        self._reached: int | None = None
        """Products, counted from the first, that recompute has asked for."""

    def contexts(self) -> tuple[Any, Any]:
        seen = [0, 0]  # products so far in forward and, where this torch asks again, in recompute
        # Forward and recompute of one graph must decide alike, also where another graph learns something between them.
        reached, results = self._reached, _Results(self._kept)

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op in ATTENTION and not _draws(op, args, kwargs)
            if op in PRODUCTS:
                index = seen[context.is_recompute]
                seen[context.is_recompute] += 1
                keep = (reached is None or index < reached) and flops_per_byte(op, args) >= KEEP_FLOPS_PER_BYTE
            results.keeps = keep
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        forward, recompute = create_selective_checkpoint_contexts(policy)
        if self._kept is not None:
            forward = _Stacked(forward, results)
        if reached is None:
            # The counter goes on top: the mode below answers what was kept without running it.
            recompute = _Stacked(recompute, _Count(), self._learn)
        return forward, recompute

    def _learn(self, counter: _Count) -> None:
        self._reached = counter.products


class _Count(TorchDispatchMode):
    """Counts products that are asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


class _Results(TorchDispatchMode):
    """Hands over the results that the policy below decides to keep."""

    def __init__(self, kept: Callable[[Any], None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self._kept = False, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keeps = False
        out = func(*args, **(kwargs or {}))
        if self.keeps and self._kept is not None:
            self._kept(out)
        return out


class _Stacked:
    """Two dispatch modes as one context that can be entered again; `done` is told at each end."""

    def __init__(self, below: Any, above: Any, done: Callable[[Any], None] | None = None):
        self._below, self._above, self._done = below, above, done

    def __enter__(self) -> None:
        self._below.__enter__()
        self._above.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._above.__exit__(*error)
        self._below.__exit__(*error)
        if self._done is not None:
            self._done(self._above)


def flops_per_byte(op: Any, args: tuple[Any, ...]) -> float:
    """FLOPs of a product per byte of its result: 2 per element of the inner dimension, in at least 16 bits."""
    left = args[1] if op in _ADDMM else args[0]  # [rows, inner]; addmm has the bias first
    return 2.0 * int(left.shape[-1]) / max(2, int(left.element_size()))


_ADDMM = _ops("addmm")


@functools.cache
def _dropout_at(op: Any) -> int | None:
    names = [a.name for a in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention operator draws random numbers."""
    at = _dropout_at(op)
    if at is None:
        return False
    return float(kwargs.get("dropout_p", args[at] if at < len(args) else 0.0)) > 0.0
