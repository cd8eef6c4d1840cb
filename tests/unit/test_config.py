"""The tuned config: exact on disk, refused for another model, honest about another machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superoffload import __version__
from superoffload.config import ModelRef, OptimizerConfig, TrainingConfig, TunedConfig
from superoffload.errors import InputError
from superoffload.hardware import preset
from superoffload.memory import Ledger
from superoffload.plan import Plan
from superoffload.profiler import BlockProfile, Profile
from superoffload.tracing import Trace


def profile(hardware: str = "gh200", model: str = "toy", dtype: str = "bfloat16") -> Profile:
    blocks = tuple(
        BlockProfile(name=n, kind="layer", tensor_numels=(10, k), dtype=d, forward_s=0.1, backward_s=0.2,
                     forward_flops=1.0, input_bytes=1, activation_bytes=1)
        for n, k, d in (("a", 5, dtype), ("b", 2, "float32"))
    )  # fmt: skip
    return Profile(source="modelled", model=model, model_fingerprint="abc123" * 10, micro_batch=2, seq_len=16,
                   blocks=blocks, model_flops=1.0, hardware=preset(hardware))  # fmt: skip


def trace(source: Any = "modelled") -> Trace:
    return Trace(source=source, step_s=0.5, tokens_per_step=32, model_flops_per_step=1e13, peak_bf16_tflops=100.0,
                 hardware="gh200", model="toy", plan=Plan(), memory=Ledger())  # fmt: skip


def test_create_binds_model_machine_plan_and_numbers() -> None:
    cfg = TunedConfig.create(profile(), Plan(bucket_mb=32), trace=trace(), measured=trace("measured"))
    assert (cfg.model.name, cfg.model.parameters, cfg.model.fingerprint) == ("toy", 27, "abc123" * 10)
    assert cfg.plan.bucket_mb == 32
    assert cfg.hardware.name == "gh200"
    assert cfg.prediction is not None
    assert cfg.measurement is not None
    assert cfg.prediction["source"] == "modelled"
    assert cfg.measurement["source"] == "measured"
    assert cfg.prediction["model_tflops"] == 20.0
    assert cfg.prediction["mfu"] == 0.2
    assert cfg.versions["superoffload"] == __version__
    assert {"python", "numpy", "pydantic"} <= set(cfg.versions)


def test_round_trip_on_disk_is_exact(tmp_path: Path) -> None:
    cfg = TunedConfig.create(profile(), Plan(flow_blocks=(1, 2)), optimizer={"lr": 1 / 3, "max_grad_norm": None},
                             training={"steps": 7, "schedule": "cosine"}, trace=trace())  # fmt: skip
    loaded = TunedConfig.load(cfg.save(tmp_path / "tuned.json"))
    assert loaded == cfg
    assert loaded.optimizer.betas == (0.9, 0.999)
    body = json.loads((tmp_path / "tuned.json").read_text())
    assert (body["schema"], body["schema_version"]) == ("superoffload.tuned_config", 1)


@given(
    st.builds(
        OptimizerConfig,
        lr=st.floats(0, 1e3),
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
        eps=st.floats(0, 1, exclude_min=True),
        weight_decay=st.floats(0, 1e3),
        max_grad_norm=st.none() | st.floats(0, exclude_min=True),
    )
)
def test_any_optimizer_config_survives_json(cfg: OptimizerConfig) -> None:
    assert OptimizerConfig.from_json(cfg.to_json()) == cfg


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("optimizer", {"learning_rate": 1}, 'unknown key "learning_rate"'),
        ("optimizer", {"weight_decays": 1}, 'did you mean "weight_decay"'),
        ("optimizer", {"betas": (0.9, 1.0)}, "betas.1 = 1.0"),
        ("optimizer", {"lr": -1e-3}, "lr = -0.001"),
        ("optimizer", {"lr": math.inf}, "lr = inf"),
        ("optimizer", {"max_grad_norm": 0}, "max_grad_norm = 0"),
        ("training", {"steps": 0}, "steps = 0"),
        ("training", {"dtype": "bf16"}, "dtype = 'bf16'"),
        ("training", {"warmup": 5}, 'did you mean "warmup_steps"'),
    ],
)
def test_bad_values_are_refused_by_name(part: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as e:
        TunedConfig.create(profile(), Plan(), **{part: changes})
    assert words in str(e.value)
    assert str(e.value).startswith(part)


def test_traces_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match="Pass it as measured="):
        TunedConfig.create(profile(), Plan(), trace=trace("measured"))
    with pytest.raises(InputError, match="Pass it as trace="):
        TunedConfig.create(profile(), Plan(), measured=trace())


def test_another_model_is_refused_by_name() -> None:
    cfg = TunedConfig.create(profile(), Plan())
    cfg.check_model("abc123" * 10)
    with pytest.raises(InputError, match=r'tuned for the model "toy".*and "gpt2" has other parameters.*export a new'):
        cfg.check_model("0" * 60, "gpt2")
    cfg.replace(model=cfg.model.replace(fingerprint="")).check_model("0" * 60)  # empty accepts any


def test_presets_start_from_random_weights_and_everything_else_is_pretrained() -> None:
    assert TunedConfig.create(profile(model="llama-7b"), Plan()).model.init == "random"
    assert TunedConfig.create(profile(), Plan(), model_source="owner/name").model.init == "pretrained"
    ref = ModelRef(name="x", fingerprint="", parameters=27, source="folder", gguf_file="w.gguf", init="random")
    model = TunedConfig.create(profile(), Plan(), model_source=ref).model
    assert (model.name, model.source, model.gguf_file, model.init) == ("toy", "folder", "w.gguf", "random")
    assert model.fingerprint == "abc123" * 10


def test_dtype_follows_the_weights_unless_given() -> None:
    assert TunedConfig.create(profile(), Plan()).training.dtype == "bfloat16"
    assert TunedConfig.create(profile(dtype="float32"), Plan()).training.dtype == "float32"
    assert TunedConfig.create(profile(), Plan(), training={"dtype": "float16"}).training.dtype == "float16"
    run = TrainingConfig(steps=3, dtype="float32")
    assert TunedConfig.create(profile(), Plan(), training=run).training == run


def test_the_same_machine_has_no_differences() -> None:
    assert TunedConfig.create(profile(), Plan(adam_threads=64)).differences(preset("gh200")) == []


def test_another_machine_is_described_with_a_remedy() -> None:
    cfg = TunedConfig.create(profile(), Plan(adam_threads=64))
    found = cfg.differences(preset("laptop"))
    text = " ".join(found)
    assert preset("laptop").gpu.name in text
    assert preset("gh200").gpu.name in text
    assert "set adam_threads lower" in text
    assert "superoffload probe" in found[-1]
    assert all(s.endswith(".") for s in found)


def test_a_plan_file_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'holds a "superoffload\.plan"'):
        TunedConfig.load(Plan().save(tmp_path / "plan.json"))
