"""Transformer shapes and their exact parameter and FLOP counts, without torch.

Names, shapes and order of the tensors are those of the transformers library (version 5), so that the fingerprint of
an estimated profile equals that of the loaded model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from superoffload.errors import InputError, NotSupported, unknown_name
from superoffload.record import Record

Family = Literal["llama", "gpt2", "gpt_neox", "gpt_oss", "mixtral"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Tensors of one block in order of definition."""

    name: str
    kind: Literal["embedding", "layer", "head"]
    tensors: tuple[tuple[str, Shape], ...]
    """(name within the model, shape)"""

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for _, shape in self.tensors)


class ModelSpec(Record):
    """Shape of a decoder-only transformer."""

    schema_name: ClassVar[str] = "superoffload.model"

    name: str
    family: Family = "llama"
    """Naming and order of the tensors in transformers: `llama` serves Mistral and Qwen too, `mixtral` Qwen-MoE."""
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    mlp: int = Field(ge=1)
    """Inner width of one MLP (of one expert in a mixture of experts)."""
    vocab: int = Field(ge=1)
    tied: bool = False
    """The output head shares the embedding's weight."""
    gated_mlp: bool = True
    """Three MLP matrices (SwiGLU) instead of two."""
    bias: bool = False
    """Linear layers carry biases (GPT-2)."""
    attention_bias: bool = False
    """Query, key and value projections carry biases although other layers do not (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm weights of one head dimension for queries and keys (Qwen3)."""
    learned_positions: int = Field(default=0, ge=0)
    """Rows of a learned position embedding; 0 for rotary positions."""
    norm_bias: bool = False
    """LayerNorm with bias instead of RMSNorm."""
    experts: int = Field(default=0, ge=0)
    """0 for a dense MLP."""
    experts_per_token: int = Field(default=0, ge=0)
    sliding_window: int = Field(default=0, ge=0)
    """Tokens that a sliding-window layer attends to; 0 where no layer has a window."""
    sliding_layers: int = Field(default=0, ge=0)
    """How many layers have the window."""
    source: str = ""
    """Where the shape is published."""

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    def blocks(self) -> list[BlockShape]:
        """Blocks in forward order: embedding, layers, final norm with head (a tied head has no weight of its own)."""
        prefix, embed, layer, norm, head = _NAMES[self.family]
        embedding = [(f"{prefix}.{embed}.weight", (self.vocab, self.hidden))]
        if self.learned_positions:
            embedding.append((f"{prefix}.wpe.weight", (self.learned_positions, self.hidden)))
        out = [BlockShape("embedding", "embedding", tuple(embedding))]
        local = list(self._layer_tensors())
        for i in range(self.layers):
            path = f"{prefix}.{layer}.{i}"
            out.append(BlockShape(f"layer {i}", "layer", tuple((f"{path}.{n}", shape) for n, shape in local)))
        last = [(f"{prefix}.{n}", shape) for n, shape in self._norm(norm)]
        if not self.tied:
            last.append((f"{head}.weight", (self.vocab, self.hidden)))
        out.append(BlockShape("head", "head", tuple(last)))
        return out

    def tensor_shapes(self) -> dict[str, Shape]:
        """Shape of every parameter by its name in transformers, in order of definition."""
        return {name: shape for block in self.blocks() for name, shape in block.tensors}

    @property
    def parameters(self) -> int:
        """Number of parameters, a shared weight counted once."""
        return sum(n for block in self.blocks() for n in block.numels)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all of a dense model, the chosen experts only of a mixture."""
        if not self.experts:
            return self.parameters
        per_expert = sum(math.prod(s[1:]) for n, s in self._layer_tensors() if "experts" in n)
        return self.parameters - self.layers * per_expert * (self.experts - self.experts_per_token)

    def attended_tokens(self, seq_len: int) -> float:
        """Tokens that one token attends to under a causal mask, mean over positions and layers: seq_len / 2 without
        windows."""
        full = seq_len / 2
        if not self.sliding_window or self.sliding_window >= seq_len:
            return full
        w = self.sliding_window
        windowed = w - w * w / (2 * seq_len)
        return (full * (self.layers - self.sliding_layers) + windowed * self.sliding_layers) / self.layers

    def layer_matmul_flops(self, tokens: int) -> float:
        """Forward FLOPs of one layer's weight products (2 per multiply-add), active experts only."""
        active = 0
        for name, shape in self._layer_tensors():
            if len(shape) >= 2 and "bias" not in name:
                n = math.prod(shape)
                active += n * self.experts_per_token // self.experts if "experts" in name else n
        return 2.0 * active * tokens

    def layer_attention_flops(self, tokens: int, seq_len: int) -> float:
        """Forward FLOPs of one layer's causal attention: scores and weighted sum."""
        return 4.0 * self.q_dim * self.attended_tokens(seq_len) * tokens

    def head_flops(self, tokens: int) -> float:
        """Forward FLOPs of the output head."""
        return 2.0 * self.hidden * self.vocab * tokens

    def training_flops(self, tokens: int, seq_len: int) -> float:
        """6·N·tokens plus causal attention three times its forward; nothing that is recomputed counts."""
        attention = self.layers * self.layer_attention_flops(tokens, seq_len)
        return 6.0 * self.active_parameters * tokens + 3.0 * attention

    def fingerprint(self, dtype: str) -> str:
        """Fingerprint of the model with all weights in `dtype`, see `fingerprint_of`."""
        return fingerprint_of((name, shape, dtype) for name, shape in self.tensor_shapes().items())

    def _norm(self, name: str) -> list[tuple[str, Shape]]:
        weight: list[tuple[str, Shape]] = [(f"{name}.weight", (self.hidden,))]
        return weight + ([(f"{name}.bias", (self.hidden,))] if self.norm_bias else [])

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> list[tuple[str, Shape]]:
        weight: list[tuple[str, Shape]] = [(f"{name}.weight", (rows, columns))]
        return weight + ([(f"{name}.bias", (rows,))] if bias else [])

    def _layer_tensors(self) -> list[tuple[str, Shape]]:
        if self.family == "gpt2":
            return self._gpt2_layer()
        if self.family == "gpt_neox":
            return self._gpt_neox_layer()
        h, q, kv, qkv_bias = self.hidden, self.q_dim, self.kv_dim, self.bias or self.attention_bias
        out: list[tuple[str, Shape]] = [("self_attn.sinks", (self.heads,))] if self.family == "gpt_oss" else []
        out += self._linear("self_attn.q_proj", q, h, qkv_bias)
        out += self._linear("self_attn.k_proj", kv, h, qkv_bias)
        out += self._linear("self_attn.v_proj", kv, h, qkv_bias)
        out += self._linear("self_attn.o_proj", h, q, self.bias)
        if self.qk_norm:
            out += [("self_attn.q_norm.weight", (self.head_dim,)), ("self_attn.k_norm.weight", (self.head_dim,))]
        e, m = self.experts, self.mlp
        if self.family == "gpt_oss":
            out += [
                ("mlp.router.weight", (e, h)), ("mlp.router.bias", (e,)),
                ("mlp.experts.gate_up_proj", (e, h, 2 * m)), ("mlp.experts.gate_up_proj_bias", (e, 2 * m)),
                ("mlp.experts.down_proj", (e, m, h)), ("mlp.experts.down_proj_bias", (e, h)),
            ]  # fmt: skip
        elif self.family == "mixtral":
            experts: list[tuple[str, Shape]] = [
                ("mlp.experts.gate_up_proj", (e, 2 * m, h)),
                ("mlp.experts.down_proj", (e, h, m)),
            ]
            gate: list[tuple[str, Shape]] = [("mlp.gate.weight", (e, h))]
            out += experts + gate if self.qk_norm else gate + experts  # Qwen3-MoE defines its experts first
        else:
            out += self._linear("mlp.gate_proj", m, h, self.bias) if self.gated_mlp else []
            out += self._linear("mlp.up_proj", m, h, self.bias) + self._linear("mlp.down_proj", h, m, self.bias)
        return out + self._norm("input_layernorm") + self._norm("post_attention_layernorm")

    def _gpt2_layer(self) -> list[tuple[str, Shape]]:
        h, m = self.hidden, self.mlp

        def conv1d(name: str, rows: int, columns: int) -> list[tuple[str, Shape]]:
            return [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (columns,))]

        attention = conv1d("attn.c_attn", h, 3 * h) + conv1d("attn.c_proj", h, h)
        mlp = conv1d("mlp.c_fc", h, m) + conv1d("mlp.c_proj", m, h)
        return self._norm("ln_1") + attention + self._norm("ln_2") + mlp

    def _gpt_neox_layer(self) -> list[tuple[str, Shape]]:
        h, m = self.hidden, self.mlp
        attention = self._linear("attention.query_key_value", 3 * h, h, True)
        attention += self._linear("attention.dense", h, h, True)
        mlp = self._linear("mlp.dense_h_to_4h", m, h, True) + self._linear("mlp.dense_4h_to_h", h, m, True)
        return self._norm("input_layernorm") + self._norm("post_attention_layernorm") + attention + mlp


_NAMES: dict[str, tuple[str, str, str, str, str]] = {
    # family: prefix, embedding, list of layers, final norm, head
    "llama": ("model", "embed_tokens", "layers", "norm", "lm_head"),
    "mixtral": ("model", "embed_tokens", "layers", "norm", "lm_head"),
    "gpt_oss": ("model", "embed_tokens", "layers", "norm", "lm_head"),
    "gpt2": ("transformer", "wte", "h", "ln_f", "lm_head"),
    "gpt_neox": ("gpt_neox", "embed_in", "layers", "final_layer_norm", "lm_head"),
}


def fingerprint_of(tensors: Iterable[tuple[str, Iterable[int], str]]) -> str:
    """Hash of (name, shape, dtype) of all trainable parameters: sha256 in hex, independent of their order."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))} {dtype}" for name, shape, dtype in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def spec_names() -> tuple[str, ...]:
    """Names that `spec` accepts."""
    from superoffload.model_presets import SPECS

    return tuple(SPECS)


def spec(name: str) -> ModelSpec:
    """Return the shape of a known model.

    Raises:
        InputError: no such name; the message lists the known ones.
    """
    from superoffload.model_presets import SPECS

    if name not in SPECS:
        raise unknown_name("model preset", name, SPECS, "Give one of these names, or a folder with a config.json")
    return SPECS[name]


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTRAL_LIKE = ("mixtral", "qwen3_moe")
_KNOWN = (*_LLAMA_LIKE, *_MIXTRAL_LIKE, "gpt2", "gpt_neox", "gpt_oss")


def from_transformers(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """Read a transformers `config.json` (as a dictionary).

    Args:
        config: The file's content; `model_type` decides how it is read.
        name: Name of the model in profiles; its model type where empty.

    Raises:
        NotSupported: a model type whose layout is not known here.
        InputError: a needed key is missing.
    """
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise NotSupported(
            f'model type "{kind}" has no known layout',
            expected="one of " + ", ".join(_KNOWN),
            remedy="Profile the module itself with superoffload.profile(model, batch): that works for any module",
        )
    get = config.get
    try:
        if kind == "gpt2":
            h = config["n_embd"]
            return ModelSpec(
                name=name or kind, family="gpt2", layers=config["n_layer"], hidden=h, heads=config["n_head"],
                kv_heads=config["n_head"], head_dim=h // config["n_head"], mlp=get("n_inner") or 4 * h,
                vocab=config["vocab_size"], tied=get("tie_word_embeddings", True), gated_mlp=False, bias=True,
                learned_positions=config["n_positions"], norm_bias=True, source="config.json",
            )  # fmt: skip
        h, heads = config["hidden_size"], config["num_attention_heads"]
        moe = kind in _MIXTRAL_LIKE or kind == "gpt_oss"
        layers = config["num_hidden_layers"]
        if kind == "llama" and get("mlp_bias", False) != get("attention_bias", False):
            raise NotSupported("a Llama with biases in only one of attention and MLP has no known layout")
        window = get("sliding_window") or 0
        if kind in ("qwen2", "qwen3", "qwen3_moe") and not get("use_sliding_window", False):
            window = 0
        types = get("layer_types")
        return ModelSpec(
            name=name or kind,
            family="mixtral" if kind in _MIXTRAL_LIKE else kind if kind in ("gpt_oss", "gpt_neox") else "llama",
            layers=layers,
            hidden=h,
            heads=heads,
            kv_heads=heads if kind == "gpt_neox" else (get("num_key_value_heads") or heads),
            head_dim=h // heads if kind == "gpt_neox" else (get("head_dim") or h // heads),
            mlp=config["moe_intermediate_size"] if kind == "qwen3_moe" else config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=get("tie_word_embeddings", False),
            gated_mlp=kind != "gpt_neox",
            bias=kind in ("gpt_neox", "gpt_oss") or (kind == "llama" and get("attention_bias", False)),
            attention_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            norm_bias=kind == "gpt_neox",
            experts=(get("num_local_experts") or config.get("num_experts") or 0) if moe else 0,
            experts_per_token=(get("num_experts_per_tok") or get("experts_per_token") or 0) if moe else 0,
            sliding_window=window,
            sliding_layers=0 if not window else types.count("sliding_attention") if types else layers,
            source="config.json",
        )
    except KeyError as e:
        raise InputError(f"the {kind} config lacks the key {e}", remedy="Give the model's whole config.json") from None
