"""Every model is divided into blocks that own each trainable parameter exactly once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from superoffload.engine.blocks import Block, find_blocks
from superoffload.errors import InputError


def names(block: Block) -> list[str]:
    return [name for name, _ in block.parameters]


def assert_partition(model: nn.Module, blocks: list[Block]) -> None:
    owned = [id(p) for b in blocks for _, p in b.parameters]
    assert len(owned) == len(set(owned)), "a parameter is in two blocks"
    assert set(owned) == {id(p) for p in model.parameters() if p.requires_grad}
    by_name = dict(model.named_parameters())
    assert all(by_name[name] is p for b in blocks for name, p in b.parameters)


def llama(**changes: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes}))


def test_llama_is_embedding_layers_norm_and_head() -> None:
    model = llama()
    blocks = find_blocks(model)
    assert [b.kind for b in blocks] == ["embedding", "layer", "layer", "layer", "head"]
    assert [b.name for b in blocks] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head",
    ]  # fmt: skip
    assert blocks[2].modules == (model.get_submodule("model.layers.1"),)
    assert names(blocks[-1]) == ["model.norm.weight", "lm_head.weight"]
    assert names(blocks[1])[0] == "model.layers.0.self_attn.q_proj.weight"
    assert_partition(model, blocks)


def test_tied_head_belongs_to_the_embedding_but_is_still_hooked() -> None:
    model = llama(tie_word_embeddings=True)
    blocks = find_blocks(model)
    assert names(blocks[0]) == ["model.embed_tokens.weight"]
    assert names(blocks[-1]) == ["model.norm.weight"]
    assert model.get_submodule("lm_head") in blocks[-1].modules
    assert_partition(model, blocks)


def test_gpt2_has_both_embeddings_in_one_block() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
    )
    blocks = find_blocks(model)
    assert [b.kind for b in blocks] == ["embedding", "layer", "layer", "head"]
    assert names(blocks[0]) == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert names(blocks[-1]) == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert_partition(model, blocks)


def test_qwen3_and_its_mixture_of_experts_are_divided_by_layers() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for model in (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)),
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts)),
    ):
        blocks = find_blocks(model)
        assert [b.kind for b in blocks] == ["embedding", "layer", "layer", "head"]
        assert_partition(model, blocks)


def test_plain_sequential_is_divided_into_its_children() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 9))
    blocks = find_blocks(model)
    assert [(b.kind, b.name) for b in blocks] == [
        ("embedding", "0"), ("layer", "1"), ("layer", "3"), ("layer", "4"),
    ]  # fmt: skip
    assert_partition(model, blocks)


def test_single_module_and_wrapper_are_divided_too() -> None:
    linear = nn.Linear(3, 2)
    [block] = find_blocks(linear)
    assert (block.name, names(block)) == ("Linear", ["weight", "bias"])
    wrapped = nn.Sequential(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    assert [b.name for b in find_blocks(wrapped)] == ["0.0", "0.1"]


def test_encoder_and_decoder_layers_are_both_layers() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(8, 4)
            self.encoder = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.bridge = nn.Linear(4, 4)
            self.decoder = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.head = nn.Linear(4, 8)

    model = Both()
    kinds = [b.kind for b in find_blocks(model)]
    assert kinds == ["embedding", "layer", "layer", "other", "layer", "layer", "layer", "head"]
    assert_partition(model, find_blocks(model))


def test_parameters_beside_the_layers_and_in_small_containers_are_owned() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls = nn.Parameter(torch.zeros(4))
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
            self.heads = nn.ModuleList([nn.Linear(1, 1)])  # too small to count as layers

    model = Odd()
    blocks = find_blocks(model)
    assert [b.kind for b in blocks] == ["embedding", "layer", "layer", "head"]
    assert names(blocks[0]) == ["cls", "scales.0", "scales.1"]
    assert blocks[0].modules == (model,)
    assert names(blocks[-1]) == ["heads.0.weight", "heads.0.bias"]
    assert_partition(model, blocks)


def test_frozen_parameters_are_in_no_block() -> None:
    model = llama()
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)
    blocks = find_blocks(model)
    assert [b.numel for b in blocks] == [0, 256, 256, 256, 0]
    assert_partition(model, blocks)


def test_blocks_by_name_replace_the_automatic_ones() -> None:
    model = llama()
    wanted = ["model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1", "model.layers.2"]
    blocks = find_blocks(model, wanted)
    assert [b.name for b in blocks if b.kind == "layer"] == wanted
    assert_partition(model, blocks)
    assert [b.name for b in find_blocks(model, ["model.layers"])] == [b.name for b in find_blocks(model)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model.layer"], 'did you mean "model.layers"'),
        (["model.layers.0", "model.layers.0.mlp"], "contains another block"),
        (["model.layers.0", "model.layers.0"], "twice"),
        ([], "empty"),
    ],
)
def test_wrong_names_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_blocks(llama(), given)
