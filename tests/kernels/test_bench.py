"""The benchmark's own arithmetic and keys; its figures are for quiet machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload.kernels import bench, peers

PATHS = ("torch_path", "torch_path_grad_scale", "torch_path_unscaled")


def run(tmp_path: Path, deepspeed: str) -> tuple[dict[str, Any], str]:
    """`superoffload bench adam` with a module `deepspeed` of our own."""
    package = tmp_path / "deepspeed"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.0.test'\n")
    (package / "ops/__init__.py").touch()
    (package / "ops/adam.py").write_text(deepspeed)
    command = [sys.executable, "-m", "superoffload", "bench", "adam", "--params", "200000", "--rounds", "2", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    return json.loads(done.stdout), done.stderr


def test_bench_adam_prints_the_promised_keys(tmp_path: Path) -> None:
    """With a DeepSpeed that steps with torch: what is asked of it, and where it appears."""
    stand_in = """
import torch
class DeepSpeedCPUAdam(torch.optim.AdamW):
    def __init__(self, params, adamw_mode, **hyper):
        assert adamw_mode
        super().__init__(params, **hyper)
    def step(self):
        for state in self.state.values():
            state["step"] = torch.as_tensor(float(state["step"]))
        super().step()
"""
    result, _ = run(tmp_path, stand_in)
    assert set(bench.HEADLINE) | {"call_overhead_us", "deepspeed"} <= set(result)
    assert result["status"] == "measured" and result["machine"]["cpu"] and result["deepspeed"] == "0.0.test"
    for row in result["threads"]:
        seconds, found = row["seconds"], row["ratios"]
        assert all(t > 0 for t in seconds.values())
        assert {"ours_undo_redo", *PATHS, "stream", "deepspeed_fp32", "deepspeed_path"} <= set(seconds)
        assert set(seconds) == set(row["bytes_per_param"]) == set(row["gb_per_s"]) == set(row["cores_busy"])
        assert all(value > -1 for value in found.values())
        overhead = row["call_overhead_us"]
        assert overhead["total"] == pytest.approx(overhead["native"] + overhead["pool_asleep"], abs=0.02)
        assert 0 < overhead["native"] < overhead["python"]
        assert row["bytes_per_param"]["ours_path"] == 28 and row["bytes_per_param"]["torch_path_unscaled"] == 40
    top = result["threads"][-1]
    assert result["path_vs_deepspeed"] == top["ratios"]["path_vs_deepspeed"]


def test_a_deepspeed_that_cannot_be_built_is_said(tmp_path: Path) -> None:
    broken = """
class DeepSpeedCPUAdam:
    def __init__(self, *a, **k):
        try:
            raise OSError("first line\\nc++: not found")
        except OSError as e:
            raise RuntimeError("failed to build/load") from e
"""
    result, stderr = run(tmp_path, broken)
    assert result["deepspeed"] == "0.0.test, not built: OSError: c++: not found"
    assert result["vs_deepspeed"] is None and result["path_vs_deepspeed"] is None
    assert "DeepSpeed's CPU Adam: 0.0.test, not built" in stderr, "the table is for people, on stderr beside --json"


def test_a_deepspeed_that_is_absent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    arrays = peers.Arrays(10)
    assert peers.deepspeed_contenders(arrays) == ({}, "not installed")


def test_ratios_are_medians_within_rounds_against_the_best_way_of_a_peer() -> None:
    seconds = {
        "ours_path": [1.0, 2.0, 4.0], "torch_path": [2.0, 4.0, 6.0], "torch_path_grad_scale": [3.0, 3.0, 9.0],
        "ours_record": [1.1, 2.2, 4.4], "ours_undo": [1.0, 2.2, 4.4], "torch_path_unscaled": [1.0, 2.0, 4.0],
    }  # fmt: skip
    found = bench.ratios(seconds)
    assert found["path_vs_torch"] == 1.5, "of 2, 1.5 and 1.5"
    assert found["path_vs_torch_unscaled"] == 1.0
    assert found["undo_overhead"] == 0.1
    assert found["undo_vs_step"] == 1.1 and found["undo_vs_recorded"] == 1.0
    assert found["vs_deepspeed"] is None and found["ceiling_fraction"] is None


@pytest.mark.parametrize("name", ["torch_path", "torch_path_grad_scale"])
def test_every_way_of_torch_takes_the_same_step_as_ours(name: str) -> None:
    """A contender that skips something would be an easy one."""
    ours, theirs = peers.Arrays(5000), peers.Arrays(5000)
    bench._ours(ours, bench.UndoRecord(5000), 1)["ours_path"].run()
    with torch.no_grad():
        peers.torch_contenders(theirs)[name].run()
    torch.testing.assert_close(ours.p, theirs.p, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.m, theirs.m, rtol=1e-6, atol=1e-10)  # sums that cancel
    torch.testing.assert_close(ours.v, theirs.v, rtol=1e-6, atol=0)
    assert not torch.equal(ours.p, peers.Arrays(5000).p)
    torch.testing.assert_close(ours.w16, theirs.w16, rtol=1e-2, atol=0)
