"""Models known by name.

The paper's shapes are those of the authors' artifact (layers × hidden, 32 heads). It does not say vocabulary, head
or positions; assumed here: GPT-2's 50,257 words, a tied head, no learned positions, MLP four times the hidden size.
"""

from __future__ import annotations

from superoffload.model import ModelSpec

_PAPER = {
    "1b": (20, 2048), "2b": (40, 2048), "3b": (60, 2048), "4b": (64, 2304), "5b": (44, 3072), "6b": (53, 3072),
    "7b": (62, 3072), "8b": (72, 3072), "10b": (50, 4096), "13b": (65, 4096), "15b": (18, 8192), "20b": (25, 8192),
    "25b": (30, 8192), "30b": (36, 8192), "50b": (60, 8192), "70b": (20, 16384),
}  # fmt: skip


def _paper(label: str, layers: int, hidden: int) -> ModelSpec:
    return ModelSpec(
        name=f"paper-{label}", family="gpt_neox", layers=layers, hidden=hidden, heads=32, kv_heads=32,
        head_dim=hidden // 32, mlp=4 * hidden, vocab=50257, tied=True, gated_mlp=False, bias=True, norm_bias=True,
        source="published: layers, hidden size and 32 heads in the artifact of SuperOffload (arXiv 2509.21271); "
        "assumed: vocabulary 50,257, tied head, no learned positions",
    )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, source: str,
           **more: bool | int) -> ModelSpec:  # fmt: skip
    values = {"head_dim": hidden // heads, **more}
    return ModelSpec.model_validate(
        {
            "name": name, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp,
            "vocab": vocab, "source": source, **values,
        }
    )  # fmt: skip


_META = "published: config.json of Meta's release"

SPECS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        *(_paper(label, *shape) for label, shape in _PAPER.items()),
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, _META),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, _META),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, _META),
        _llama("llama-70b", 80, 8192, 64, 8, 28672, 32000, _META + " (Llama 2)"),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, _META),
        _llama(
            "qwen3-14b", 40, 5120, 40, 8, 17408, 151936, "published: config.json of Qwen3-14B", head_dim=128,
            qk_norm=True,
        ),
        ModelSpec(
            name="gpt-oss-20b", family="gpt_oss", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, mlp=2880,
            vocab=201088, bias=True, experts=32, experts_per_token=4, sliding_window=128, sliding_layers=12,
            source="published: config.json of gpt-oss-20b",
        ),
        _llama(
            "smollm2-135m", 30, 576, 9, 3, 1536, 49152, "published: config.json of SmolLM2-135M", tied=True
        ),
        _llama("bench-3b", 26, 3072, 24, 24, 8192, 32000, "shape of the measured 3.14B benchmark model"),
    )
}  # fmt: skip
