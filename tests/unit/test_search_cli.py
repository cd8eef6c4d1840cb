"""``superoffload search`` without a GPU and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superoffload import cli
from superoffload.config import TunedConfig
from superoffload.search_result import SearchResult

SMALL = [
    "search",
    "--model",
    "smollm2-135m",
    "--hardware",
    "gh200",
    "--seq-len",
    "512",
    "--tokens",
    "4096",
    "--trials",
    "40",
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_result_is_written_and_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        *SMALL, "--gpu-gb", "4", "--set", "speculate=off", "--out", "found.json", "--config", "tuned.json", "--json",
        capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    body: dict[str, Any] = json.loads(out)
    found, config = SearchResult.load("found.json"), TunedConfig.load("tuned.json")
    assert found.best is not None
    assert body["best"]["number"] == found.best.number
    assert body["trials"] == len(found.trials) <= 40
    assert body["counts"] == found.counts
    assert body["pareto"][0]["tokens_per_s"] == found.pareto[0].tokens_per_s
    assert body["source"] == "modelled" and body["measured"] == []
    assert found.settings.knobs == {"speculate": "off"}
    assert {t.plan.speculate for t in found.trials} == {"off"}
    assert all(t.gpu_bytes <= 4e9 for t in found.pareto)
    assert config.plan == found.best.plan
    assert config.hardware.fingerprint["gpu_memory_gb"] == "96", "a budget is no other machine"
    assert config.prediction is not None
    assert config.prediction["step_s"] == found.best.step_s


def test_people_get_a_table_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*SMALL, capsys=capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("smollm2-135m on gh200 (modelled): ")
    assert "1 best" in lines[0]
    starred = [line for line in lines if line.startswith("* #")]
    assert len(starred) == 1
    number = starred[0].split()[1]
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{number}, the best: "))
    assert lines[at + 1].startswith("bucket_mb")
    assert any(line.startswith("rejected, for example #") for line in lines)


def test_given_batches_stay(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*SMALL, "--micro-batch", "2", "--json", capsys=capsys)
    assert code == 0
    best = json.loads(out)["best"]["plan"]
    assert (best["micro_batch"], best["accumulation"]) == (2, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "speed"], 'unknown --objective "speed"'),
        (["--tokens", "lots"], "neither a whole number"),
        (["--tokens", "100"], "a multiple of seq_len = 512"),
        (["--gpu-gb", "200"], "at most 96"),
        (["--objective", "gpu_memory"], "tokens_per_s with gpu_memory"),
        (["--set", "flw=2"], 'unknown plan field "flw"'),
    ],
)
def test_bad_input_is_refused(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*SMALL, *more, capsys=capsys)
    assert code == 2
    assert message in err


def test_where_nothing_fits_the_file_is_written_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*SMALL, "--gpu-gb", "1.01", "--out", "found.json", "--json", capsys=capsys)
    assert code == 2
    assert "meets the budgets; the nearest, #" in err
    assert "lacks" in json.loads(out)["error"]["what"]
    assert SearchResult.load("found.json").best is None


SEVERAL = ["search", "--model", "paper-1b", "--hardware", "gh200-quad", "--micro-batch", "1", "--seq-len", "4096",
           "--trials", "20"]  # fmt: skip


def test_several_chips_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*SEVERAL, "--chips", "8", "--tokens", "65536", "--out", "found.json", "--json", capsys=capsys)
    assert code == 0, err
    body, found = json.loads(out), SearchResult.load("found.json")
    assert found.settings.chips == 8 and found.candidates["sequence_parallel"] == 4
    assert {t.plan.chips for t in found.trials} == {8} and {t.plan.tokens_per_step for t in found.trials} == {65536}
    assert body["best"]["plan"]["data_parallel"] * body["best"]["plan"]["sequence_parallel"] == 8
    code, out, err = run(*SEVERAL, "--chips", "4", "--sequence-parallel", "2", capsys=capsys)
    assert code == 0, err
    assert "data_parallel  sequence_parallel" in out and "train refuses it: the engine trains on one chip" in out
    best = next(line for line in out.splitlines() if line.startswith("* #"))
    assert best.split()[6:8] == ["2", "2"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--chips", "4", "--sequence-parallel", "3"], "chips = 4 with sequence_parallel = 3"),
        (["--chips", "2", "--set", "data_parallel=2", "--data-parallel", "2"], "are both given"),
    ],
)
def test_chips_that_cannot_be_are_refused(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*SEVERAL, *more, capsys=capsys)
    assert code == 2 and message in err
