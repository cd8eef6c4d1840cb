"""GPU kernels in Triton, bit for bit equal to the CPU's: the same operations in the same order, square root and
division correctly rounded, products fused into sums only where written (`enable_fp_fusion=False`).

torch's fused AdamW would do for retained buckets, but it rounds in another order and refuses a bf16 gradient beside an
fp32 master: then the number of retained buckets would change the training.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from superoffload.layout import NORM_CHUNK

NORM_LANES: tl.constexpr = tl.constexpr(64)
COMBINE_LANES: tl.constexpr = tl.constexpr(1024)

_BLOCK = 1024
_CHUNKS_PER_PROGRAM = 4
_ROWS_AT_ONCE = 16


@triton.jit
def _adam_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, n, coefficient_ptr, skip_ptr,
    unscale, one_minus_b1, beta2, one_minus_b2, decay, neg_step_size, bc2_sqrt, eps,
    WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < n) & (tl.load(skip_ptr) == 0)
    scale = unscale * tl.load(coefficient_ptr)
    grad = tl.load(g_ptr + i, mask=mask, other=0.0).to(tl.float32) * scale
    m0 = tl.load(m_ptr + i, mask=mask, other=0.0)
    v0 = tl.load(v_ptr + i, mask=mask, other=0.0)
    p0 = tl.load(p_ptr + i, mask=mask, other=0.0)
    m1 = tl.fma(one_minus_b1 + tl.zeros_like(m0), grad - m0, m0)
    v1 = tl.fma(one_minus_b2 * grad, grad, v0 * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v1), bc2_sqrt + tl.zeros_like(v1)) + eps
    p1 = p0 * decay + tl.div_rn(neg_step_size * m1, denominator)
    tl.store(m_ptr + i, m1, mask=mask)
    tl.store(v_ptr + i, v1, mask=mask)
    tl.store(p_ptr + i, p1, mask=mask)
    if WRITE:
        tl.store(w_ptr + i, p1.to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halve(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Lane l plus lane l + LANES/2: a sum of two has no order to choose."""
    return tl.sum(tl.reshape(x, (ROWS, 2, LANES // 2)), axis=1)


@triton.jit
def _norm_kernel(
    x_ptr, start_ptr, count_ptr, index_ptr, out_ptr, chunks,
    CHUNK: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * PER + tl.arange(0, PER)
    live = c < chunks
    start = tl.load(start_ptr + c, mask=live, other=0)
    count = tl.load(count_ptr + c, mask=live, other=0)
    lane = tl.arange(0, 64)
    acc = tl.zeros((PER, 64), dtype=tl.float64)
    for first in range(0, CHUNK // 64, ROWS):
        for k in tl.static_range(ROWS):  # unrolled: the loads of all rows are under way before the first is added
            i = (first + k) * 64 + lane
            mask = i[None, :] < count[:, None]
            x = tl.load(x_ptr + start[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32).to(tl.float64)
            acc += x * x
    acc = _halve(acc, PER, 64)
    acc = _halve(acc, PER, 32)
    acc = _halve(acc, PER, 16)
    acc = _halve(acc, PER, 8)
    acc = _halve(acc, PER, 4)
    acc = _halve(acc, PER, 2)
    tl.store(out_ptr + tl.load(index_ptr + c, mask=live, other=0), tl.reshape(acc, (PER,)), mask=live)


@triton.jit
def _combine_kernel(partial_ptr, out_ptr, n):
    lane = tl.arange(0, 1024)
    acc = tl.zeros((1, 1024), dtype=tl.float64)
    for base in range(0, n, 1024):
        i = base + lane
        acc += tl.load(partial_ptr + i, mask=i < n, other=0.0)[None, :]
    acc = _halve(acc, 1, 1024)
    acc = _halve(acc, 1, 512)
    acc = _halve(acc, 1, 256)
    acc = _halve(acc, 1, 128)
    acc = _halve(acc, 1, 64)
    acc = _halve(acc, 1, 32)
    acc = _halve(acc, 1, 16)
    acc = _halve(acc, 1, 8)
    acc = _halve(acc, 1, 4)
    acc = _halve(acc, 1, 2)
    tl.store(out_ptr + tl.arange(0, 1), tl.reshape(acc, (1,)))


def adam_step(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    coefficient: torch.Tensor,
    skip: torch.Tensor,
    unscale: float,
    scalars: tuple[float, ...],
) -> None:
    """AdamW on flat CUDA tensors, in place, without a host synchronisation.

    Args:
        p, m, v: fp32, length n. g: gradient, any float dtype. w: 16-bit weights to write, or None.
        coefficient: fp32 device scalar, multiplied by `unscale` in fp32 and then into the gradient.
        skip: device scalar; where it is not zero nothing is written.
        scalars: what `superoffload.kernels.adam_scalars` returns (its grad_scale is not used).
    """
    n = p.numel()
    _adam_kernel[(triton.cdiv(n, _BLOCK),)](
        p, m, v, g, p if w is None else w, n, coefficient, skip, unscale, *scalars[1:],
        WRITE=w is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


class ChunkTable:
    """Where the norm chunks of some segments lie in their bucket and among the partial sums; device int64 tensors."""

    def __init__(self, chunks: list[tuple[int, int, int]], device: torch.device):
        table = torch.tensor(chunks, dtype=torch.int64).reshape(-1, 3).t().contiguous().to(device)
        self.start, self.count, self.index = table[0], table[1], table[2]
        self.length = len(chunks)


def norm_partials(x: torch.Tensor, table: ChunkTable, out: torch.Tensor) -> None:
    """Sum of squares of every chunk of `table` in `x`, written to the chunk's place in `out` (float64)."""
    if table.length:
        _norm_kernel[(triton.cdiv(table.length, _CHUNKS_PER_PROGRAM),)](
            x, table.start, table.count, table.index, out, table.length,
            CHUNK=NORM_CHUNK, PER=_CHUNKS_PER_PROGRAM, ROWS=_ROWS_AT_ONCE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


class DeviceVerdict:
    """Clip coefficient and skip flag as device scalars, from the host's partials by the host's formula."""

    def __init__(self, device: torch.device):
        self._total = torch.zeros(1, dtype=torch.float64, device=device)
        self._tiny = torch.full((1,), 1e-6, dtype=torch.float64, device=device)
        self._one = torch.ones(1, dtype=torch.float64, device=device)
        self.coefficient = torch.ones(1, dtype=torch.float32, device=device)
        self.skip = torch.zeros(1, dtype=torch.int32, device=device)

    def judge(self, partials: torch.Tensor, max_norm: float | None, unscale: float) -> None:
        """Enqueue the verdict on the current stream."""
        launch: Any = _combine_kernel[(1,)]
        launch(partials, self._total, partials.numel(), num_warps=8, enable_fp_fusion=False)
        self.skip.copy_(~torch.isfinite(self._total))
        if max_norm is None:
            self.coefficient.fill_(1.0)
            return
        norm = self._total.sqrt() * unscale
        # Tensor by tensor: torch turns `scalar / tensor` into a reciprocal and a product, which rounds twice.
        ratio = torch.div(torch.full_like(norm, max_norm), norm + self._tiny)
        self.coefficient.copy_(torch.where(ratio < 1.0, ratio, self._one))
