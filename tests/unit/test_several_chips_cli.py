"""The command line for several Superchips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superoffload import cli
from superoffload.config import TunedConfig
from superoffload.hardware import preset
from superoffload.tracing import Trace

SMALL = ["--model", "paper-1b", "--seq-len", "4096"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ok(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main([*args, "--json"]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def refused(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(list(args)) == 2
    return capsys.readouterr().err


def test_chips_are_named_or_counted(capsys: pytest.CaptureFixture[str]) -> None:
    counted = ok("plan", *SMALL, "--hardware", "gh200-quad", "--chips", "8", "--sequence-parallel", "4", capsys=capsys)
    assert counted["hardware"] == "gh200-quad-x8"
    assert (counted["plan"]["data_parallel"], counted["plan"]["sequence_parallel"]) == (2, 4)
    named = ok("plan", *SMALL, "--hardware", "gh200-quad-x8", "--set", "sequence_parallel=4", capsys=capsys)
    assert named["plan"] == counted["plan"]
    some = ok("plan", *SMALL, "--hardware", "gh200-quad-x8", "--chips", "4", capsys=capsys)
    assert (some["hardware"], some["plan"]["data_parallel"]) == ("gh200-quad-x8", 4)
    preset("gh200-x4").save("mine.json")
    mine = ok("plan", *SMALL, "--hardware", "mine.json", "--chips", "2", capsys=capsys)
    assert (mine["hardware"], mine["plan"]["data_parallel"]) == ("gh200-x4", 2)


def test_a_step_of_several_is_simulated_drawn_and_exported(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, "--hardware", "gh200-quad", "--chips", "4", "--sequence-parallel", "2"]
    body = ok("simulate", *asked, "--out", "trace.json", capsys=capsys)
    assert body["chips"] == 4
    assert body["tokens_per_s"] == pytest.approx(2 * 4096 / body["step_s"])
    assert any(e.lane == "interconnect" for e in Trace.load("trace.json").events)
    ok("plan", *asked, "--config", "tuned.json", capsys=capsys)
    assert TunedConfig.load("tuned.json").plan.chips == 4
    body = ok("export", "--config", "tuned.json", "--format", "deepspeed", capsys=capsys)
    assert any("4 chips are the world size" in note for note in body["notes"])
    assert any("sequence_parallel 2 is left out" in note for note in body["notes"])
    body = ok("export", "--config", "tuned.json", "--format", "chrome-trace", capsys=capsys)
    assert any(e.get("cat") == "all_to_all" for e in body["body"]["traceEvents"])


def test_a_config_for_several_is_written_with_a_word_on_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *SMALL, "--hardware", "gh200-x2", "--config", "tuned.json"]) == 0
    out = capsys.readouterr().out
    assert "superoffload train refuses it: the engine trains on one chip, the plan is for 2" in out
    assert "memory of each chip: GPU" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h200-pcie5", "--chips", "4"], "nothing is known of how several"),
        (["--hardware", "gh200-quad", "--chips", "5"], "chips = 5"),
        (["--hardware", "gh200-quad-x4", "--chips", "8"], "--chips 8, and gh200-quad-x4 has 4"),
        (["--hardware", "gh200-quad", "--chips", "8", "--sequence-parallel", "3"], "with sequence_parallel = 3"),
        (["--hardware", "gh200-quad", "--chips", "8", "--sequence-parallel", "4", "--data-parallel", "4"],
         "sequence_parallel = 4 and data_parallel = 4"),
        (["--hardware", "gh200-quad-x8", "--data-parallel", "2", "--set", "data_parallel=2"], "both given"),
        (["--hardware", "gh200", "--sequence-parallel", "2"], "are 2 chips, and gh200 has 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused("plan", *SMALL, *arguments, capsys=capsys)
