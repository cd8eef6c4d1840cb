from __future__ import annotations

import pytest

from superoffload import model
from superoffload.errors import InputError, NotSupported

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": {},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "gpt_neox": {},
    "gpt_neox tied": {"model_type": "gpt_neox", "tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 1,
    },
}  # fmt: skip


def build_on_meta(config: object) -> dict[str, tuple[int, ...]]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    return {n: tuple(p.shape) for n, p in built.named_parameters()}


@pytest.mark.parametrize("label", CONFIGS)
def test_names_shapes_and_order_are_those_of_transformers(label: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = dict(CONFIGS[label])
    kind = str(values.pop("model_type", label))
    base = {} if kind == "gpt2" else dict(SMALL)
    config = transformers.AutoConfig.for_model(kind, **base, **values)
    spec = model.from_transformers(config.to_dict(), name=label)
    built = build_on_meta(config)
    assert spec.tensor_shapes() == built
    assert list(spec.tensor_shapes()) == list(built)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b", 6_738_415_616), ("llama-13b", 13_015_864_320), ("llama-3-8b", 8_030_261_248),
        ("llama-70b", 68_976_648_192), ("llama-3-70b", 70_553_706_496), ("qwen3-14b", 14_768_307_200),
        ("gpt-oss-20b", 20_914_757_184), ("smollm2-135m", 134_515_008), ("bench-3b", 3_141_172_224),
    ],
)  # fmt: skip
def test_known_models_have_their_published_size(name: str, parameters: int) -> None:
    assert model.spec(name).parameters == parameters


def test_paper_labels_are_about_their_size() -> None:
    names = [n for n in model.spec_names() if n.startswith("paper-")]
    assert len(names) == 16
    for name in names:
        billions = float(name.removeprefix("paper-").removesuffix("b"))
        assert model.spec(name).parameters / 1e9 == pytest.approx(billions, rel=0.13)
        assert model.spec(name).heads == 32


def test_the_30b_paper_model_is_what_transformers_builds() -> None:
    transformers = pytest.importorskip("transformers")
    spec = model.spec("paper-30b")
    config = transformers.GPTNeoXConfig(
        hidden_size=8192, num_hidden_layers=36, num_attention_heads=32, intermediate_size=32768, vocab_size=50257,
        tie_word_embeddings=True,
    )  # fmt: skip
    assert spec.tensor_shapes() == build_on_meta(config)


def test_flops_are_six_n_tokens_plus_causal_attention() -> None:
    spec = model.spec("bench-3b")
    expected = 6 * 3_141_172_224 * 8192 + 12 * 26 * 3072 * 2048 * 8192 / 2
    assert spec.training_flops(8192, 2048) == expected


def test_a_mixture_counts_the_experts_a_token_uses() -> None:
    spec = model.spec("gpt-oss-20b")
    per_expert = (2880 * 2 * 2880 + 2 * 2880) + (2880 * 2880 + 2880)
    assert spec.active_parameters == spec.parameters - 24 * 28 * per_expert


def test_windows_shorten_attention_only_where_they_are() -> None:
    spec = model.spec("gpt-oss-20b")
    assert spec.attended_tokens(128) == 64
    assert spec.attended_tokens(4096) == pytest.approx((2048 + (128 - 128**2 / 8192)) / 2)


def test_fingerprint_ignores_order_and_sees_names_shapes_and_dtypes() -> None:
    a, b = ("w", (2, 3), "bfloat16"), ("b", (3,), "bfloat16")
    assert model.fingerprint_of([a, b]) == model.fingerprint_of([b, a])
    others = [[a], [a, ("b", (4,), "bfloat16")], [a, ("c", (3,), "bfloat16")], [a, ("b", (3,), "float32")]]
    assert len({model.fingerprint_of(x) for x in [[a, b], *others]}) == 5


def test_unknown_names_types_and_broken_configs_are_refused() -> None:
    with pytest.raises(InputError, match='did you mean "llama-7b"'):
        model.spec("lama-7b")
    with pytest.raises(NotSupported, match=r'model type "bert".*superoffload.profile'):
        model.from_transformers({"model_type": "bert"})
    with pytest.raises(InputError, match="hidden_size"):
        model.from_transformers({"model_type": "llama"})
