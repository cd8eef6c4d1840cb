"""Cross-entropy of a linear head in chunks of tokens: only one chunk's logits exist at a time.

The gradients of hidden states and weight are computed in forward, while a chunk's logits are there; backward multiplies
them by the gradient of the loss. No product is computed twice, and neither logits nor hidden states are kept.

torch 2.13 has `torch.nn.functional.linear_cross_entropy`, which works alike when it is given options. It is not used:
the oldest torch that this package runs on does not have it, a plan must not change its bits with torch's version, its
`sum` leaves no place for a number of tokens that the caller knows (dividing afterwards rounds 16-bit gradients once
more), and it cannot be told of a loss scale, without which float16 gradients vanish before backward could scale them.
Where torch has it, a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from superoffload.errors import InputError, NotSupported
from superoffload.units import MIB

IGNORE_INDEX = -100
"""Label of a token without loss, as in torch."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    denominator: float | Tensor | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of ``linear(hidden, weight, bias)`` with `labels`, the logits of one chunk of tokens at a time.

    It is what ``cross_entropy(linear(...).float(), labels)`` is, within rounding: each token's loss and its gradient by
    the logits are torch's float32 ones, and the latter is rounded to the dtype of the product. The weight's gradient
    adds up chunk by chunk in that dtype, so that 16-bit weights round once for each chunk, as gradient accumulation
    over as many micro-batches does. Labels are not shifted.

    Args:
        hidden: [..., width].
        weight: [classes, width], of the same dtype, but under autocast, which acts as on a linear layer.
        labels: [...], whole numbers in [0, classes), or `ignore_index`.
        chunks: at least 1; the tokens are divided evenly, and no chunk is empty.
        bias: [classes].
        ignore_index: label of tokens without loss and gradient.
        denominator: what the sum of the tokens' losses is divided by: 1 for the sum. None: the number of tokens that
            are not ignored, the mean; with none it is nan, as torch's, and the gradients are 0.
        loss_scale: what the loss will be multiplied by before backward. Gradients are held multiplied by it, so that
            float16 ones do not vanish; another factor is right too, only less exact.

    Returns:
        A scalar, float32 (float64 of float64). With autograd off, or if nothing requires a gradient, none is computed.

    Raises:
        InputError: shapes, dtypes or numbers that do not go together.
        NotSupported: in backward, for second derivatives.
    """
    _check(hidden, weight, labels, chunks, bias, denominator, loss_scale)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        # The casts are autograd's, so gradients come back in the dtypes of what was given.
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = _cast(hidden, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise InputError(f"{name} is {t.dtype} and hidden {hidden.dtype}", expected="one dtype")
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    settings = (chunks, ignore_index, denominator, float(loss_scale))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return _ChunkedCrossEntropy.apply(rows, weight, bias, targets, settings)  # type: ignore[no-any-return,no-untyped-call]
    with torch.no_grad():
        return _in_chunks(rows, weight, bias, targets, settings, (False, False, False))[0]


Settings = tuple[int, int, "float | Tensor | None", float]
"""chunks, ignore_index, denominator, loss_scale."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Settings
    ) -> Tensor:
        loss, gradients = _in_chunks(hidden, weight, bias, targets, settings, ctx.needs_input_grad[:3])
        ctx.loss_scale = settings[-1]
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotSupported(
                "second derivatives (create_graph=True) of a cross-entropy in chunks",
                expected="first derivatives: they are computed in forward, and nothing is left to differentiate",
                remedy="Use torch's cross_entropy, or loss_chunks=1 where the optimizer applies it",
            )
        # One element, not none: a tensor without dimensions would be rounded to the gradients' dtype first.
        factor = (outer[0] / ctx.loss_scale).reshape(1)
        kept = torch._C._autograd._get_current_graph_task_keep_graph()  # then backward may come again
        return (*(None if g is None else _scaled(g, factor, torch.empty_like(g) if kept else g)
                  for g in ctx.saved_tensors), None, None)  # fmt: skip


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: Settings,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the `wanted` gradients of hidden [tokens, width], weight and bias."""
    chunks, ignore_index, denominator, loss_scale = settings
    precise = torch.promote_types(hidden.dtype, torch.float32)
    counts = targets != ignore_index
    if denominator is None:
        denominator = counts.sum().to(precise)
    else:  # as a tensor, so that none at all gives what torch's own division gives
        denominator = torch.as_tensor(denominator, dtype=precise, device=hidden.device).detach().reshape(())
    total = torch.zeros((), dtype=precise, device=hidden.device)
    share = torch.zeros(len(targets), 1, dtype=precise, device=hidden.device)
    share.masked_fill_(counts[:, None], loss_scale / denominator)
    targets = targets.masked_fill(~counts, 0)[:, None]

    new = torch.empty if len(targets) else torch.zeros
    gradients = [new(t.shape, dtype=t.dtype, device=t.device) if w and t is not None else None
                 for t, w in zip((hidden, weight, bias), wanted, strict=True)]  # fmt: skip
    by_hidden, by_weight, by_bias = gradients
    bias_sum = None if by_bias is None else torch.zeros(by_bias.shape, dtype=precise, device=by_bias.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for first, end in chunk_bounds(len(targets), chunks):
            part, target = hidden[first:end], targets[first:end]
            logits = F.linear(part, weight, bias).to(precise)
            p = torch.log_softmax(logits, dim=-1)
            del logits
            total -= p.gather(1, target).masked_fill_(~counts[first:end, None], 0).sum()
            if not any(wanted):
                del p  # not beside the next chunk's
                continue
            p.exp_().mul_(share[first:end])
            p.scatter_(1, target, p.gather(1, target) - share[first:end])
            by_logits = p.to(hidden.dtype)
            del p
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[first:end])
            if by_weight is not None:
                by_weight.addmm_(by_logits.t(), part, beta=1 if first else 0)
            if bias_sum is not None:
                bias_sum += by_logits.sum(0, dtype=precise)
            del by_logits
    if by_bias is not None and bias_sum is not None:
        by_bias.copy_(bias_sum)
    return total / denominator, gradients


def chunk_bounds(tokens: int, chunks: int) -> Iterator[tuple[int, int]]:
    """First and end token of each chunk: as even as can be, larger ones first, so that their memory serves the others;
    no more than there are tokens."""
    each, more = divmod(tokens, chunks)
    first = 0
    for i in range(min(chunks, tokens)):
        end = first + each + (i < more)
        yield first, end
        first = end


def _scaled(gradient: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """`gradient` times `factor`, multiplied in the factor's dtype. On a CPU that takes a copy in it: by parts."""
    parts = 1 if gradient.is_cuda else -(-gradient.numel() // (4 * MIB))
    for source, target in zip(gradient.chunk(max(1, parts)), out.chunk(max(1, parts)), strict=True):
        torch.mul(source, factor, out=target)
    return out


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == torch.float64 else t.to(dtype)  # as autocast


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: int,
    bias: Tensor | None,
    denominator: float | Tensor | None,
    loss_scale: float,
) -> None:
    def shape(t: Tensor) -> list[int]:
        return list(t.shape)

    if not isinstance(chunks, int) or chunks < 1:
        raise InputError(f"chunks = {chunks!r}", expected="a whole number of at least 1")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(f"hidden is {shape(hidden)} and weight {shape(weight)}",
                         expected="[..., width] and [classes, width]")  # fmt: skip
    if labels.shape != hidden.shape[:-1]:
        raise InputError(f"labels are {shape(labels)} and hidden {shape(hidden)}",
                         expected=f"a label for each token, {shape(hidden)[:-1]}")  # fmt: skip
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels are {labels.dtype}", expected="whole numbers, the index of each token's class")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias is {shape(bias)} and weight {shape(weight)}", expected="[classes] and [classes, width]")
    if isinstance(denominator, Tensor) and (denominator.numel() != 1 or denominator.requires_grad):
        raise InputError(
            "denominator is a tensor of many elements, or requires a gradient", expected="a number without a gradient"
        )
    if not loss_scale > 0:
        raise InputError(f"loss_scale = {loss_scale}", expected="more than 0")


__all__ = ["chunk_bounds", "chunked_cross_entropy"]
