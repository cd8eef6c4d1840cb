"""The demo's own logic on a model small enough for a test: it trains from the file that it exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superoffload import demo, model_source
from superoffload.config import TunedConfig
from superoffload.errors import InputError
from superoffload.hardware import preset
from superoffload.profiler import Profile
from superoffload.tracing import Trace


@pytest.fixture
def small(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama in a folder takes the place of the pretrained model, and a preset that of this machine."""
    monkeypatch.setattr(model_source, "SMALL", str(tiny_model))
    monkeypatch.setattr(model_source, "has_pretrained_small", lambda: True)
    monkeypatch.setattr(demo, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(demo.hw, "probe", lambda: preset("laptop"))
    return tiny_model


def test_demo_leaves_every_record_and_the_loss_falls(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    body: dict[str, Any] = demo.run(out, steps=12)
    assert body["exit_code"] == 0
    assert body["last_loss"] < body["first_loss"]
    printed = capsys.readouterr().out
    assert "it fell" in printed
    assert str(out.resolve()) in printed
    profile, config = Profile.load(out / "profile.json"), TunedConfig.load(out / "tuned.json")
    assert profile.source == "measured"
    assert Trace.load(out / "trace.json").source == "modelled"
    assert (config.training.steps, config.model.source) == (12, str(small))
    assert config.model.fingerprint == profile.model_fingerprint
    assert len((out / "run" / "metrics.jsonl").read_text().splitlines()) == 12
    assert json.loads((out / "demo.json").read_text())["steps"] == 12
    assert TunedConfig.load(out / "run" / "tuned.json") == config  # what was trained is what was exported
    for path in body["results"].values():
        assert Path(path).exists()
    with pytest.raises(InputError, match="already holds a demo run"):
        demo.run(out)
