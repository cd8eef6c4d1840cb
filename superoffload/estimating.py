"""Estimates a profile from the model's shape: no GPU, no weights, no torch.

Counted are, for each block, the FLOPs of its weight products and of causal attention and the bytes that eager PyTorch
moves for everything else (norms, rotary positions, activation function, residuals, loss). Seven constants turn these
into seconds; docs/cost_model.md says to which figures of an H200 they were fitted, and how well they meet them. One
more serves layers that are compiled (`Plan.compile_blocks`), see `COMPILED_TRAFFIC`.
"""

from __future__ import annotations

from typing import Any

from superoffload.activation_costs import KEEP_FLOPS_PER_BYTE
from superoffload.errors import InputError
from superoffload.hardware import Hardware, resolve
from superoffload.model import BlockShape, ModelSpec, spec
from superoffload.profiler import BlockProfile, Exchange, Profile
from superoffload.units import DTYPE_BYTES, GB, TERA

MATMUL_SHARE = 0.96
"""Share of `matmul_bf16_tflops` that a model's weight products reach at many tokens."""
HALF_RATE_TOKENS = 250
"""Tokens at which a weight product runs at half that rate: its time is proportional to tokens + 250."""
ATTENTION_SHARE = 0.65
"""Rate of fused causal attention against that of weight products."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward against its forward: scores are computed again (FlashAttention)."""
TRAFFIC_SHARE = 0.51
"""Share of `hbm_gb_per_s`, that of one large copy, that eager PyTorch's kernels between the products reach."""
BACKWARD_TRAFFIC = 2.0
"""Bytes that these move in backward, against those of forward."""
COMPILED_TRAFFIC = 0.35
"""Share of that traffic, forward and backward, that is left once a layer is compiled and its operations are fused."""
LOSS_BYTES_PER_LOGIT = (14, 17)
"""Bytes that float32 cross entropy moves per logit, forward and backward."""
LOGIT_BYTES = 13
"""Bytes held per logit at the peak of a 16-bit model: the logits, their float32 copy, log-probabilities, gradient
(12.9 measured)."""
FP32_RATE = 1 / 15
"""float32 products without tensor cores against bf16 with them (67 of 990 TFLOP/s, published for Hopper)."""


def estimate(
    model: str | ModelSpec,
    *,
    micro_batch: int,
    seq_len: int,
    hardware: str | Hardware,
    dtype: str = "bfloat16",
    sequence_parallel: int = 1,
) -> Profile:
    """Estimate a profile from the model's shape: no GPU, no weights, no torch.

    Args:
        model: A preset's name or a shape.
        micro_batch: Sequences per micro-batch.
        seq_len: Tokens per sequence.
        hardware: A preset's name or a record.
        dtype: Of weights and gradients: bfloat16, float16 or float32.
        sequence_parallel: Chips that share each sequence; the profile is that of one of them.

    Returns:
        A profile with `source="modelled"`; `context` says what was assumed.

    Raises:
        InputError: unknown name or dtype, sizes below 1, more positions than the model has, a sequence or heads that
            cannot be divided.
    """
    shape = spec(model) if isinstance(model, str) else model
    hw = resolve(hardware)
    if dtype not in DTYPE_BYTES:
        raise InputError(f'unknown dtype "{dtype}"', expected="one of " + ", ".join(DTYPE_BYTES))
    for name, value in (("micro_batch", micro_batch), ("seq_len", seq_len), ("sequence_parallel", sequence_parallel)):
        if value < 1:
            raise InputError(f"{name} = {value}", expected="a whole number of at least 1")
    _check_divides(shape, seq_len, sequence_parallel)
    if shape.learned_positions and seq_len > shape.learned_positions:
        raise InputError(
            f"seq_len = {seq_len}",
            expected=f"at most {shape.learned_positions}, the positions that {shape.name} has learned",
        )
    tokens = micro_batch * seq_len // sequence_parallel
    cost = _Cost(shape, tokens, seq_len, hw, dtype, sequence_parallel)
    return Profile(
        source="modelled",
        model=shape.name,
        model_fingerprint=shape.fingerprint(dtype),
        micro_batch=micro_batch,
        seq_len=seq_len,
        sequence_parallel=sequence_parallel,
        blocks=tuple(cost.block(b) for b in shape.blocks()),
        model_flops=shape.training_flops(tokens, seq_len),
        hardware=hw,
        context={
            "method": "analytic: FLOPs and bytes of eager PyTorch with sdpa; constants fitted to H200 measurements "
            "of a 3.14B and an 8B Llama, met within 2.5 %",
            "rate": f"weight products reach {MATMUL_SHARE:.0%} of {hw.gpu.matmul_bf16_tflops:g} TFLOP/s x "
            f"{cost.dtype_rate:.3g} ({dtype}), half of it at {HALF_RATE_TOKENS} tokens; attention "
            f"{ATTENTION_SHARE:.0%} of that; the rest moves its bytes at {TRAFFIC_SHARE:.0%} of "
            f"{hw.gpu.hbm_gb_per_s:g} GB/s, in backward {BACKWARD_TRAFFIC:g} times those of forward",
            "dtype": dtype,
            "spec": shape.to_json(indent=None),
        },
    )


def _check_divides(shape: ModelSpec, seq_len: int, n: int) -> None:
    """Refuse to divide a sequence, or attention's heads, over `n` chips where they are no multiple of it. Keys and
    values of fewer heads are repeated, as DeepSpeed-Ulysses repeats them."""
    if seq_len % n:
        raise InputError(f"seq_len = {seq_len} with sequence_parallel = {n}", expected=f"a multiple of {n}")
    if shape.heads % n or (shape.kv_heads % n and n % shape.kv_heads):
        fit = [m for m in range(1, shape.heads + 1)
               if not shape.heads % m and (not shape.kv_heads % m or not m % shape.kv_heads)]  # fmt: skip
        raise InputError(
            f"sequence_parallel = {n}, and {shape.name} has {shape.heads} attention heads, {shape.kv_heads} of keys "
            "and values, which cannot be divided alike",
            expected="one of " + ", ".join(map(str, fit)),
        )


class _Cost:
    """Seconds and bytes of one micro-batch's blocks.

    Args:
        tokens: that this chip has. In attention it has all tokens of 1 / `group` of the heads instead, as much work.
        seq_len: of whole sequences.
        group: chips that share a sequence.
    """

    def __init__(self, shape: ModelSpec, tokens: int, seq_len: int, hw: Hardware, dtype: str, group: int = 1):
        self.shape, self.tokens, self.seq_len, self.dtype, self.group = shape, tokens, seq_len, dtype, group
        self.item = DTYPE_BYTES[dtype]
        # A CPU has no tensor cores to lose, so float32 costs it what bf16 costs.
        self.dtype_rate = FP32_RATE if dtype == "float32" and hw.gpu.peak_bf16_tflops else 1.0
        self.rate = hw.gpu.matmul_bf16_tflops * TERA * MATMUL_SHARE * self.dtype_rate
        self.hbm = hw.gpu.hbm_gb_per_s * GB
        self.traffic = self.hbm * TRAFFIC_SHARE
        """Bytes per second between products."""
        self.products = (tokens + HALF_RATE_TOKENS) / tokens / self.rate
        """Seconds per FLOP of a weight product."""

    def block(self, b: BlockShape) -> BlockProfile:
        s, t = self.shape, self.tokens
        more: dict[str, Any] = {}
        row = t * s.hidden * self.item
        if b.kind == "embedding":
            table = sum(b.numels) * self.item
            times, flops = (2 * row / self.hbm, (2 * table + 2 * row) / self.hbm), 0.0
            kept, working, entry = 8 * t, 0, 8 * t
        elif b.kind == "layer":
            times, flops = self._layer()
            more = self._selective() | self._compiled() | self._full(times[0])
            if self.group > 1:
                more["exchange"] = self._exchange(*times)
            kept, working, entry = (
                t * self.item * self._kept_per_token(),
                t * self.item * self._working_per_token(),
                row,
            )
        else:
            flops, logits = s.head_flops(t), t * s.vocab
            loss = [n * logits / self.traffic for n in LOSS_BYTES_PER_LOGIT]
            times = (flops * self.products + loss[0], 2 * flops * self.products + loss[1])
            kept, entry = 4 * row, row
            working = logits * (LOGIT_BYTES if self.item == 2 else 12)
            # With chunks the gradient of the head's input is kept in place of the input, which is there until then.
            more = {"logits": logits, "chunked_activation_bytes": kept, "chunked_working_bytes": row}
        return BlockProfile(
            name=b.name, kind=b.kind, tensor_numels=b.numels, dtype=self.dtype, forward_s=times[0],
            backward_s=times[1], forward_flops=flops, input_bytes=entry, activation_bytes=kept, working_bytes=working,
            **more,
        )  # fmt: skip

    def _layer(self, share: float = 1.0) -> tuple[tuple[float, float], float]:
        """Seconds forward and backward with `share` of the traffic, and forward FLOPs."""
        s, t = self.shape, self.tokens
        products, attention = s.layer_matmul_flops(t), s.layer_attention_flops(t, self.seq_len)
        seconds_attention = attention / (self.rate * ATTENTION_SHARE)
        traffic = share * t * self._traffic_per_token() * (self.item / 2) / self.traffic
        forward = products * self.products + seconds_attention + traffic
        backward = 2 * products * self.products + ATTENTION_BACKWARD * seconds_attention + BACKWARD_TRAFFIC * traffic
        return (forward, backward), products + attention

    def _exchange(self, forward_s: float, backward_s: float) -> Exchange:
        """What Ulysses sends, and when: between the projections to query, key and value and attention, and between
        attention and its way out."""
        s, t = self.shape, self.tokens
        projections = 2.0 * t * s.hidden * (s.q_dim + 2 * s.kv_dim) * self.products
        traffic = t * self._entry_traffic_per_token() * (self.item / 2) / self.traffic
        attention = s.layer_attention_flops(t, self.seq_len) / (self.rate * ATTENTION_SHARE)
        entry = projections + traffic
        entry_back, attention_back = 2 * projections + BACKWARD_TRAFFIC * traffic, ATTENTION_BACKWARD * attention
        return Exchange(
            before_bytes=t * self.item * (s.q_dim + 2 * s.kv_dim * self._repeated()),
            after_bytes=t * self.item * s.q_dim,
            forward=(entry / forward_s, (entry + attention) / forward_s),
            backward=(1 - (entry_back + attention_back) / backward_s, 1 - entry_back / backward_s),
        )

    def _repeated(self) -> int:
        """How often a key head is sent, so that each chip of the group has one."""
        return self.group // self.shape.kv_heads if self.shape.kv_heads % self.group else 1

    def _exchange_kept_per_token(self) -> int:
        """Elements that a layer keeps beyond those of one chip alone: attention's result once as attention left it and
        once as its way out reads it, and repeated keys and values."""
        s = self.shape
        return s.q_dim + 2 * s.kv_dim * (self._repeated() - 1) if self.group > 1 else 0

    def _entry_traffic_per_token(self) -> int:
        """The part of `_traffic_per_token` before attention: a norm, rotary positions, norms of heads."""
        s = self.shape
        rotary = 0 if s.family == "gpt2" else 20 * (s.q_dim + s.kv_dim)
        return (4 if s.norm_bias else 32) * s.hidden + rotary + (32 * (s.q_dim + s.kv_dim) if s.qk_norm else 0)

    def _compiled(self) -> dict[str, Any]:
        """Seconds and bytes kept under `compile_blocks` (docs/cost_model.md)."""
        times, _ = self._layer(COMPILED_TRAFFIC)
        return {
            "compiled_forward_s": times[0],
            "compiled_backward_s": times[1],
            "compiled_bytes": self.tokens * self.item * self._compiled_kept_per_token(),
            "compiled_working_bytes": self.tokens * self.item * self._width(),
        }

    def _full(self, forward_s: float) -> dict[str, Any]:
        """Seconds repeated under `activations = full`: the forward without the MLP's last product, of whose result
        backward needs nothing."""
        last = 2.0 * self.tokens * self.shape.hidden * self._width()
        return {"full_recompute_s": forward_s - last * self.products}

    def _selective(self) -> dict[str, Any]:
        """Bytes kept and seconds repeated under `activations = selective` (docs/cost_model.md): the layer's input, the
        result of attention with its float32 log-sum-exp, and each product whose inner dimension is wide enough, but not
        the last, which recompute does not reach."""
        s, t = self.shape, self.tokens
        width = self._width()
        products = (  # (inner dimension, outer dimension)
            (s.hidden, s.q_dim + 2 * s.kv_dim), (s.q_dim, s.hidden), (s.hidden, (2 if s.gated_mlp else 1) * width),
        )  # fmt: skip
        kept, again = float(s.hidden + s.q_dim), 0.0
        for inner, outer in products:
            if 2 * inner / max(2, self.item) >= KEEP_FLOPS_PER_BYTE:
                kept += outer
            else:
                again += 2.0 * t * inner * outer * self.products
        traffic = t * self._traffic_per_token() * (self.item / 2) / self.traffic
        return {
            "selective_bytes": round(t * (kept * self.item + 4 * s.heads)),
            "selective_recompute_s": traffic + again,
        }

    def _traffic_per_token(self) -> int:
        """Bytes per token that a 16-bit layer's forward moves outside products and attention, kernel by kernel."""
        s = self.shape
        norm = 4 if s.norm_bias else 32  # one fused LayerNorm kernel; RMSNorm in six, through float32
        rotary = 0 if s.family == "gpt2" else 20 * (s.q_dim + s.kv_dim)
        heads = 32 * (s.q_dim + s.kv_dim) if s.qk_norm else 0
        width = self._width()
        gather = 12 * s.hidden * s.experts_per_token  # tokens are sorted by expert and added back
        return 2 * norm * s.hidden + 12 * s.hidden + rotary + heads + (10 if s.gated_mlp else 4) * width + gather

    def _kept_per_token(self) -> int:
        """Elements of weight dtype per token that a layer keeps for backward; the 3.14B Llama's measured 22.4·hidden
        are 22.7 here."""
        s = self.shape
        norms = 4 * s.hidden if s.norm_bias else (8 if self.item == 2 else 6) * s.hidden
        attention = 2 * s.q_dim + 2 * s.kv_dim + (4 * (s.q_dim + s.kv_dim) if s.qk_norm else 0)
        attention += self._exchange_kept_per_token()
        width = self._width()
        return norms + attention + (4 if s.gated_mlp else 2) * width + 2 * s.hidden * s.experts_per_token

    def _working_per_token(self) -> int:
        """Elements of weight dtype per token that a layer's backward needs in passing, beside what is kept: gradients
        in the MLP and float32 ones in the norms. Three Llama shapes took 10.0, 10.0 and 11.5 times hidden, which is
        10.0, 9.8 and 11.5 here; a compiled 8B layer took one gradient of the MLP's width."""
        return (2 if self.shape.gated_mlp else 1) * self._width() + 9 * self.shape.hidden // 2

    def _width(self) -> int:
        """Of the MLP, for a token."""
        return self.shape.mlp * max(1, self.shape.experts_per_token)

    def _compiled_kept_per_token(self) -> int:
        """Elements of weight dtype per token that a compiled layer keeps: input and result of each norm, attention's
        four tensors, inputs and result of the activation function; float32 copies and the like are computed again. With
        what the rest of the model takes, 31 and 66 GB are 30.8 and 66.5 here (3.14B and Llama-3-8B, see
        `COMPILED_TRAFFIC`)."""
        s = self.shape
        attention = 2 * s.q_dim + 2 * s.kv_dim + (2 * (s.q_dim + s.kv_dim) if s.qk_norm else 0)
        attention += self._exchange_kept_per_token()
        width = self._width()
        return 4 * s.hidden + attention + (3 if s.gated_mlp else 2) * width + 2 * s.hidden * s.experts_per_token
