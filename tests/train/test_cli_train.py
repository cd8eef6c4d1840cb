"""From a model's folder to a trained checkpoint with nothing but commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superoffload import cli
from superoffload.cli_running import machine_notes
from superoffload.config import TunedConfig
from superoffload.hardware import preset
from superoffload.profiler import Profile
from superoffload.search_result import SearchResult

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset("laptop").replace(source="probed", name="here").save("hw.json")
    Path("text.txt").write_text(TEXT)


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = cli.main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    body: dict[str, Any] = json.loads(out)
    return body


def make_config(model: Path, *settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    command("profile", "--model", str(model), "--hardware", "hw.json", "--micro-batch", "2", "--seq-len", "32",
            "--dtype", "float32", "--out", "profile.json", capsys=capsys)  # fmt: skip
    command("plan", "--profile", "profile.json", "--config", "tuned.json", *settings, capsys=capsys)


def test_profile_plan_train_resume(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config(tiny_model, "--set", "buckets=3", capsys=capsys)
    profile, config = Profile.load("profile.json"), TunedConfig.load("tuned.json")
    assert profile.source == "measured"
    assert config.model.source == str(tiny_model)
    assert config.model.init == "pretrained"
    assert config.training.dtype == "float32"
    config.replace(optimizer=config.optimizer.replace(lr=1e-2)).save("tuned.json")
    body = command(
        "train", "--config", "tuned.json", "--data", "text.txt", "--steps", "8", "--out", "run", capsys=capsys
    )
    assert (body["state"], body["step"], body["out"]) == ("finished", 8, "run")
    assert body["last_loss"] < body["first_loss"] - 0.5
    assert TunedConfig.load("run/tuned.json").plan == config.plan
    body = command("train", "--config", "tuned.json", "--data", "text.txt", "--steps", "12", "--resume", "run",
                   capsys=capsys)  # fmt: skip
    assert body["step"] == 12
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 12
    code = cli.main(["train", "--config", "tuned.json", "--data", "text.txt", "--out", "run"])
    assert code == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_config_for_another_model_trains_nothing(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config(tiny_model, capsys=capsys)
    config = TunedConfig.load("tuned.json")
    config.replace(model=config.model.replace(name="other", fingerprint="0" * 64)).save("tuned.json")
    assert cli.main(["train", "--config", "tuned.json", "--data", "text.txt", "--out", "run"]) == 2
    assert 'tuned for the model "other"' in capsys.readouterr().err
    assert not Path("run").exists()


def test_flow_trains_to_the_same_losses(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for out, settings in (("stay", ()), ("flow", ("--set", "flow=2", "--set", "prefetch_blocks=1"))):
        make_config(tiny_model, *settings, capsys=capsys)
        command("train", "--config", "tuned.json", "--data", "text.txt", "--steps", "3", "--out", out, capsys=capsys)
        losses.append([json.loads(line)["loss"] for line in Path(out, "metrics.jsonl").read_text().splitlines()])
    assert TunedConfig.load("flow/tuned.json").plan.flow_blocks
    assert losses[0] == losses[1]


def test_a_preset_is_no_machine_to_measure_on(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--model", str(tiny_model), "--hardware", "gh200", "--out", "p.json"]) == 2
    assert "cannot be made for the preset" in capsys.readouterr().err
    assert not Path("p.json").exists()


def test_a_folder_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert cli.main(["profile", "--model", "empty", "--hardware", "hw.json", "--out", "p.json"]) == 2
    assert "empty holds no model" in capsys.readouterr().err


def test_the_planner_knows_the_small_model_by_its_name() -> None:
    """The planning half cannot ask model_source, which imports torch."""
    from superoffload import cli_profiles, model_source

    assert cli_profiles.SMALL == model_source.SMALL


def test_a_plan_of_another_machine_is_named_before_training(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config(tiny_model, capsys=capsys)
    config = TunedConfig.load("tuned.json")
    known = Path("known.json")
    monkeypatch.setattr("superoffload.probing.cache_path", lambda identity: known)
    assert machine_notes(config) == [], "this machine was never probed"
    preset("laptop").replace(source="probed", name="here").save(known)
    assert machine_notes(config) == []
    preset("gh200").save(known)
    assert "this machine has 72" in " ".join(machine_notes(config))


def test_search_measures_the_best_plans_here_and_exports_the_fastest(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from superoffload.measuring import measure_best

    model = ["--model", str(tiny_model), "--hardware", "hw.json", "--seq-len", "32", "--dtype", "float32"]
    body = command("search", *model, "--tokens", "128", "--trials", "40", "--measure", "2", "--out", "found.json",
                   "--config", "tuned.json", capsys=capsys)  # fmt: skip
    found = SearchResult.load("found.json")
    assert len(body["measured"]) == len(found.measured) == 2
    for m in found.measured:
        trial = found.trials[m.number]
        assert m.predicted_s == trial.step_s
        assert m.measured_s and m.measured_s > 0 and not m.failure
        assert m.tokens_per_s == pytest.approx(128 / m.measured_s)
    fastest = max(found.measured, key=lambda m: m.tokens_per_s)
    assert found.winner == found.trials[fastest.number]
    config = TunedConfig.load("tuned.json")
    assert config.plan == found.winner.plan
    assert config.plan.tokens_per_step == 128
    assert config.measurement is not None and config.prediction is not None
    assert config.measurement["source"] == "measured"
    assert config.measurement["step_s"] == fastest.measured_s
    assert config.prediction["step_s"] == pytest.approx(fastest.predicted_s)
    done = command("train", "--config", "tuned.json", "--data", "text.txt", "--steps", "2", capsys=capsys)
    assert done["state"] == "finished"
    broken = found.trials[fastest.number]
    broken = broken.model_copy(update={"plan": broken.plan.replace(retained_buckets=10**6)})
    noted = measure_best(found.model_copy(update={"trials": (broken,), "measured": ()}), 1).measured
    assert noted[0].measured_s is None and "retained_buckets = 1000000" in noted[0].failure
    code = cli.main(["search", "--model", str(tiny_model), "--hardware", "gh200", "--measure", "1"])
    assert code == 2
    assert "this machine" in capsys.readouterr().err
