"""The command line: one JSON object, exit codes, clear refusals, nothing half-written, torch only where needed."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from superoffload import cli
from superoffload.config import TunedConfig
from superoffload.estimating import estimate
from superoffload.hardware import preset
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.tracing import Trace

LLAMA = ["--model", "llama-7b", "--hardware", "gh200", "--micro-batch", "4", "--seq-len", "2048"]
SMALL = ["--model", "smollm2-135m", "--hardware", "gh200", "--seq-len", "128"]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def ok(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json", capsys=capsys)
    assert code == 0, err
    body: dict[str, Any] = json.loads(out)
    return body


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_simulate_has_the_promised_keys_fast_and_without_torch(tmp_path: Path) -> None:
    """The acceptance line: under one second (of CPU time, so that a busy machine does not decide), no torch."""
    code = (
        "import sys; from superoffload.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'plotly', 'ipywidgets'} & set(sys.modules); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", *LLAMA, "--json"], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    body = json.loads(done.stdout)
    promised = {"step_s", "tokens_per_s", "model_tflops", "mfu", "gpu_busy", "stalls", "memory", "plan", "reasons"}
    assert promised <= set(body)
    assert {"gpu_gb", "host_gb", "pinned_gb"} <= set(body["memory"])
    assert body["source"] == "modelled"
    assert body["tokens_per_s"] == pytest.approx(4 * 2048 / body["step_s"])
    assert 0 < body["mfu"] < 1
    assert body["memory"]["gpu_gb"] < 96
    assert body["reasons"]["bucket_mb"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_the_data_flow_through_files(capsys: pytest.CaptureFixture[str]) -> None:
    ok("profile", *SMALL, "--out", "profile.json", capsys=capsys)
    profile = Profile.load("profile.json")
    assert profile == estimate("smollm2-135m", micro_batch=1, seq_len=128, hardware="gh200")
    fixed = ["--profile", "profile.json", "--set", "bucket_mb=16"]
    body = ok("plan", *fixed, "--out", "plan.json", "--config", "tuned.json", capsys=capsys)
    plan = Plan.load("plan.json")
    assert plan.bucket_mb == body["plan"]["bucket_mb"] == 16
    assert "bucket_mb" not in body["reasons"]
    config = TunedConfig.load("tuned.json")
    assert config.plan == plan
    assert config.model.fingerprint == profile.model_fingerprint
    assert config.prediction is not None
    body = ok("simulate", *fixed, "--out", "trace.json", capsys=capsys)
    assert Trace.load("trace.json").step_s == body["step_s"] == config.prediction["step_s"]


def test_text_for_people_goes_to_stdout_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("simulate", *SMALL, capsys=capsys)
    assert (code, err) == (0, "")
    assert "smollm2-135m on gh200 (modelled)" in out
    code, out, err = run("simulate", *SMALL, "--json", capsys=capsys)
    assert "smollm2-135m on gh200 (modelled)" in err
    json.loads(out)


def test_set_takes_every_field_by_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "bucket_mb": "8", "retained_buckets": "2", "flow_blocks": "3,5", "prefetch_blocks": "2", "cast_down": "gpu",
        "cast_up": "cpu", "speculate": "off", "adam_threads": "8", "activations": "none", "accumulation": "2",
        "accumulate_on": "cpu", "undo": "snapshot", "master": "plain", "compile_blocks": "true",
        "activations_by_block": "3:full,4:offload_inputs",
        "undo_buckets": "7", "loss_chunks": "4", "data_parallel": "1", "sequence_parallel": "1",
    }  # fmt: skip
    assert set(settings) == set(Plan.knobs()) - {"micro_batch", "seq_len"}
    arguments = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
    plan = ok("plan", *SMALL, *arguments, capsys=capsys)["plan"]
    assert plan == {
        "bucket_mb": 8.0, "retained_buckets": 2, "flow_blocks": [3, 5], "prefetch_blocks": 2, "cast_down": "gpu",
        "cast_up": "cpu", "speculate": "off", "adam_threads": 8, "activations": "none", "accumulation": 2,
        "accumulate_on": "cpu", "undo": "snapshot", "micro_batch": 1, "seq_len": 128, "master": "plain",
        "activations_by_block": {"3": "full", "4": "offload_inputs"}, "compile_blocks": True, "undo_buckets": 7,
        "loss_chunks": 4, "data_parallel": 1, "sequence_parallel": 1,
    }  # fmt: skip
    assert ok("plan", *SMALL, "--set", "flow_blocks=none", capsys=capsys)["plan"]["flow_blocks"] == []
    assert len(ok("plan", *SMALL, "--set", "flow=4", capsys=capsys)["plan"]["flow_blocks"]) == 4


def test_a_switch_is_set_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for text, value in (("true", True), ("on", True), ("False", False), ("0", False)):
        found = ok("plan", *SMALL, "--set", f"compile_blocks={text}", capsys=capsys)
        assert found["plan"]["compile_blocks"] is value
        assert "compile_blocks" not in found["reasons"]
    code, _, err = run("plan", *SMALL, "--set", "compile_blocks=maybe", capsys=capsys)
    assert code == 2
    assert "true or false" in err
    _, out, _ = run("plan", *SMALL, "--set", "compile_blocks=true", capsys=capsys)
    assert re.search(r"^compile_blocks +on +given$", out, re.MULTILINE)
    from superoffload.cli_planning import plan_lines

    assert any(re.match(r"undo_buckets +all +given$", line) for line in plan_lines(Plan()))
    _, out, _ = run("plan", *SMALL, capsys=capsys)
    assert re.search(r"^compile_blocks +off +compiling changes the bits", out, re.MULTILINE)


def test_gpu_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    free = ok("plan", *LLAMA, capsys=capsys)
    tight = ok("plan", *LLAMA, "--gpu-budget-gb", "23", capsys=capsys)
    assert tight["memory"]["gpu_gb"] <= 23 < free["memory"]["gpu_gb"]
    assert (free["plan"]["activations"], tight["plan"]["activations"]) == ("none", "offload_inputs")


BAD: dict[str, tuple[list[str], list[str]]] = {
    "unknown command": (["simulat"], ['unknown command "simulat"', 'did you mean "simulate"', "profile"]),
    "no command": ([], ["required: COMMAND"]),
    "unknown option": (["simulate", "--modle", "x"], ["--modle", "superoffload --help"]),
    "unknown model": (["simulate", "--model", "llama7b", "--hardware", "gh200"], ['"llama7b"', '"llama-7b"', "one of"]),
    "unknown hardware": (["plan", "--model", "llama-7b", "--hardware", "gh20"], ['"gh20"', '"gh200"', "probe"]),
    "hardware name inside another": (["plan", "--model", "llama-7b", "--hardware", "h200"], ['hardware "h200"']),
    "no hardware": (["plan", "--model", "llama-7b"], ["--hardware", "gh200"]),
    "no model": (["plan", "--hardware", "gh200"], ["--model", "--profile"]),
    "missing hardware file": (["plan", "--model", "llama-7b", "--hardware", "hw.json"], ["no such file: hw.json"]),
    "missing profile": (["simulate", "--profile", "gone.json"], ["no such file: gone.json"]),
    "negative size": (["simulate", *SMALL[:4], "--seq-len", "-5"], ["--seq-len", "'-5'", "at least 1"]),
    "zero batch": (["simulate", *SMALL, "--micro-batch", "0"], ["--micro-batch", "'0'", "at least 1"]),
    "negative bucket": (["simulate", *SMALL, "--set", "bucket_mb=-64"], ["bucket_mb = -64", "greater than 0"]),
    "nan bucket": (["simulate", *SMALL, "--set", "bucket_mb=nan"], ["bucket_mb = nan"]),
    "unknown knob": (["plan", *SMALL, "--set", "bukket_mb=1"], ['"bukket_mb"', 'did you mean "bucket_mb"']),
    "bad word": (["plan", *SMALL, "--set", "cast_down=fuse"], ['cast_down="fuse"', 'did you mean "fused"']),
    "no number": (["plan", *SMALL, "--set", "retained_buckets=few"], ['retained_buckets="few"', "whole number"]),
    "no value": (["plan", *SMALL, "--set", "bucket_mb"], ["bucket_mb", "KEY=VALUE"]),
    "given twice": (["plan", *SMALL, "--set", "cast_up=gpu", "--set", "cast_up=cpu"], ["cast_up is given twice"]),
    "batch as knob": (["plan", *SMALL, "--set", "seq_len=9"], ["--seq-len 9"]),
    "block that is not there": (["plan", *SMALL, "--set", "flow_blocks=999"], ["999"]),
    "negative budget": (["plan", *SMALL, "--gpu-budget-gb", "-1"], ["--gpu-budget-gb", "'-1'"]),
    "budget above the GPU": (["plan", *SMALL, "--gpu-budget-gb", "97"], ["97", "at most 96"]),
    "plan that does not fit": (
        ["plan", "--model", "llama-70b", "--hardware", "gh200"],
        ["llama-70b"],
    ),
    "unknown format": (["export", "--format", "yaml"], ['unknown --format "yaml"', "deepspeed"]),
    "nothing to export": (["export", "--format", "deepspeed"], ["--config"]),
    "no data option": (["train", "--config", "x.json"], ["--data"]),
    "missing config": (["train", "--config", "x.json", "--data", "sample"], ["no such file: x.json"]),
    "zero steps": (["train", "--config", "x.json", "--data", "sample", "--steps", "0"], ["--steps", "at least 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_once_clearly_and_writes_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD[case]
    if case == "hardware name inside another":
        assert "h200" not in cli_hardware_names()
    if arguments and arguments[0] in ("plan", "simulate") and "--modle" not in arguments:
        arguments = [*arguments, "--out", "out.json"]
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 2, err
    assert out == ""
    assert err.startswith("superoffload: error: ")
    assert len(err.splitlines()) == 1, "one message"
    assert "Traceback" not in err
    missing = [w for w in words if w not in err]
    assert not missing, err
    assert os.listdir(tmp_path) == []
    code, out, _ = run(*arguments, "--json", capsys=capsys)
    assert code == 2
    error = json.loads(out)["error"]
    assert error["what"]
    assert os.listdir(tmp_path) == []


def cli_hardware_names() -> tuple[str, ...]:
    from superoffload.hardware import preset_names

    return preset_names()


def test_a_plan_that_does_not_fit_comes_with_its_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("plan", "--model", "llama-70b", "--hardware", "gh200", "--json", capsys=capsys)
    error = json.loads(out)["error"]
    assert code == 2
    assert error["type"] == "DoesNotFit"
    assert error["memory"]["fits"] is False
    assert error["remedy"]


def test_files_of_another_kind_or_version_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Plan().save("plan.json")
    for arguments in (
        ["simulate", "--profile", "plan.json"],
        ["export", "--format", "deepspeed", "--config", "plan.json"],
        ["plan", "--model", "llama-7b", "--hardware", "plan.json"],
        ["train", "--config", "plan.json", "--data", "sample"],
    ):
        code, _, err = run(*arguments, capsys=capsys)
        assert code == 2
        assert 'plan.json holds a "superoffload.plan"' in err


def test_an_unknown_key_in_a_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ok("plan", *SMALL, "--config", "tuned.json", capsys=capsys)
    body = json.loads(Path("tuned.json").read_text())
    body["optimizer"]["weight_decays"] = body["optimizer"].pop("weight_decay")
    Path("tuned.json").write_text(json.dumps(body))
    code, _, err = run("train", "--config", "tuned.json", "--data", "sample", capsys=capsys)
    assert code == 2
    assert 'unknown key "optimizer.weight_decays"; did you mean "weight_decay"' in err
    assert os.listdir() == ["tuned.json"]


def test_a_missing_data_file_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    ok("plan", *SMALL, "--config", "tuned.json", capsys=capsys)
    code, _, err = run("train", "--config", "tuned.json", "--data", "gone.txt", "--out", "run", capsys=capsys)
    assert code == 2
    assert "no such data file: gone.txt" in err
    assert os.listdir() == ["tuned.json"]


def test_profile_and_other_hardware_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    ok("profile", *SMALL, "--out", "profile.json", capsys=capsys)
    ok("plan", "--profile", "profile.json", "--hardware", "gh200", capsys=capsys)
    code, _, err = run("plan", "--profile", "profile.json", "--hardware", "laptop", capsys=capsys)
    assert code == 2
    assert '"laptop"' in err
    code, _, err = run("plan", "--profile", "profile.json", "--model", "llama-7b", capsys=capsys)
    assert code == 2
    assert "--model contradicts --profile" in err


def test_hardware_may_be_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    preset("gh200").replace(name="mine").save("hw.json")
    body = ok("simulate", "--model", "smollm2-135m", "--hardware", "hw.json", "--seq-len", "128", capsys=capsys)
    assert body["hardware"] == "mine"
    assert body["step_s"] == ok("simulate", *SMALL, capsys=capsys)["step_s"]


def test_libraries_that_print_do_not_spoil_the_json(tmp_path: Path) -> None:
    """Python prints, writes to the descriptor (as C code does) and child processes all go to stderr."""
    code = """
import os, subprocess, sys
from superoffload import cli, cli_planning
def noisy(args):
    print("python")
    os.write(1, b"c code\\n")
    subprocess.run([sys.executable, "-c", "print('child')"])
    return {"fine": True}
cli_planning.simulate = noisy
sys.exit(cli.main(["simulate", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"fine": True}
    assert {"python", "c code", "child"} <= set(done.stderr.splitlines())


def test_a_bug_is_reported_with_traceback_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> dict[str, Any]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("superoffload.cli_planning.simulate", broken)
    code, out, err = run("simulate", "--json", capsys=capsys)
    assert code == 1
    assert json.loads(out)["error"] == {"type": "ZeroDivisionError", "what": "a bug"}
    assert "Traceback" in err


def test_a_number_that_is_not_finite_is_null_in_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training whose loss is nan has an answer too."""
    body = {"last_loss": float("nan"), "rows": [{"speed": float("inf")}, 1.5]}
    monkeypatch.setattr("superoffload.cli_planning.simulate", lambda args: dict(body))
    code, out, _ = run("simulate", "--json", capsys=capsys)
    assert code == 0 and json.loads(out) == {"last_loss": None, "rows": [{"speed": None}, 1.5]}


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m superoffload simulate {' '.join(SMALL)} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(done.stdout) == 10
    assert "Error" not in done.stderr


def test_doctor_reports_everything_and_never_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("doctor", "--json", capsys=capsys)
    body = json.loads(out)
    assert code == (0 if body["ok"] else 1)
    names = {c["name"] for c in body["checks"]}
    assert {"superoffload", "CPU", "cores", "host memory", "GPU", "torch", "kernels", "Jupyter stack"} <= names
    for check in body["checks"]:
        assert check["status"] in ("ok", "note", "warn", "bad")
        assert check["remedy"] or check["status"] in ("ok", "note"), check


def test_doctor_shouts_about_a_cpu_torch_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("superoffload.doctor.gpus", lambda: ["NVIDIA GH200 480GB, 97871 MiB, 575.57"])
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 1
    line = next(x for x in out.splitlines() if " torch " in x)
    assert line.startswith("BAD")
    assert "CPU-ONLY" in line


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["simulate", "--help"]):
        with pytest.raises(SystemExit) as e:
            cli.main(arguments)
        assert e.value.code == 0
    assert "simulate" in capsys.readouterr().out
