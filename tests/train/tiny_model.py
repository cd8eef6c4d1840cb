"""The model that runs of a few seconds train, here and in a browser."""

from __future__ import annotations

from pathlib import Path


def save_tiny_model(folder: Path) -> Path:
    """A two-layer Llama with random weights and a tokenizer of single characters, in one folder."""
    import tokenizers
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    characters = {chr(32 + i): i for i in range(96)} | {"<unk>": 96}
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(characters, [], unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>").save_pretrained(folder)
    return folder
