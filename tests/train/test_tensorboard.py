"""Runs for TensorBoard's PyTorch Profiler tab: what is written is what the tab reads, and both count alike."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import signal
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from superoffload import OffloadAdamW, estimate, make_plan, simulate, to_tensorboard  # noqa: E402
from superoffload.errors import InputError, MissingDependency  # noqa: E402
from superoffload.integrations import tensorboard as tb  # noqa: E402
from superoffload.profiler_events import read_events, read_profile  # noqa: E402

NAME = re.compile(r"^(.*?)(\.\d+)\.pt\.trace\.json\.gz$")
"""What the tab takes for a run's file (torch_tb_profiler.consts.WORKER_PATTERN)."""


@pytest.fixture
def step() -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x, opt = torch.randn(16, 64), torch.optim.SGD(model.parameters(), 0.1)

    def one() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    return one


def of_the_tab(file: Path) -> Any:
    """The file as torch-tb-profiler counts it."""
    pytest.importorskip("torch_tb_profiler", reason="the tensorboard extra is not installed")
    from torch_tb_profiler.profiler.data import RunProfileData

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of the libraries that it uses
        return RunProfileData.from_json("worker", None, read_events(file))


def agree(file: Path) -> Any:
    """Our summary, after comparing it with the tab's totals."""
    tab, ours = of_the_tab(file), read_profile(file)
    assert tab.steps_names == [str(s.step) for s in ours.steps]
    for theirs, s in zip(tab.steps_costs, ours.steps, strict=True):
        kernel, memcpy, memset, _, runtime, _, cpu, other, total = (c / 1e6 for c in theirs.costs)
        mine = [s.kernel_s, s.memcpy_s, s.memset_s, s.runtime_s, s.cpu_s, s.other_s, s.duration_s]
        assert mine == pytest.approx([kernel, memcpy, memset, runtime, cpu, other, total], abs=1e-8)
    operators = {o.name: o for o in ours.operators}
    assert len(operators) == len(tab.op_list_groupby_name) > 0
    for o in tab.op_list_groupby_name:
        mine_o = operators[o.name]
        assert mine_o.calls == o.calls, o.name
        got = [mine_o.self_s, mine_o.total_s, mine_o.kernel_s]
        wanted = [o.self_host_duration / 1e6, o.host_duration / 1e6, o.self_device_duration / 1e6]
        assert got == pytest.approx(wanted, abs=1e-8), o.name
    for gpu in ours.gpus:
        assert gpu.utilisation == pytest.approx(tab.gpu_metrics_parser.gpu_utilization[gpu.device])
    return ours


def test_a_step_becomes_a_run_that_the_tab_counts_as_we_do(step: Callable[[], None], tmp_path: Path) -> None:
    run = to_tensorboard(step, tmp_path / "tb", name="first", steps=3, launch=False)
    assert run.url is None and run.file.parent == tmp_path / "tb" / "first" and NAME.match(run.file.name)
    summary = agree(run.file)
    assert summary == run.summary and len(summary.steps) == 3
    calls = {o.name: o.calls for o in summary.operators}
    assert calls["aten::linear"] == 6 and calls["aten::relu"] == 3, "the warm-up is not in it"
    assert summary.gpus == () and all(s.kernel_s == 0 for s in summary.steps)


def test_a_profiler_that_has_ended_and_its_file(step: Callable[[], None], tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        step()
    run = to_tensorboard(profiler, tmp_path / "tb", name="a", launch=False)
    assert {o.name: o.calls for o in agree(run.file).operators}["aten::linear"] == 2
    with pytest.raises(InputError, match="saved before"):
        to_tensorboard(profiler, tmp_path / "tb", launch=False)
    with torch.profiler.profile() as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "mine.json"))
    again = to_tensorboard(tmp_path / "mine.json", tmp_path / "tb", name="b", launch=False)
    assert NAME.match(again.file.name) and agree(again.file).steps != run.summary.steps
    third = to_tensorboard(run.file, tmp_path / "tb", name="c", launch=False)
    assert third.file.name == run.file.name
    assert read_profile(tmp_path / "tb") == run.summary, "the newest of a folder"


def test_an_offloading_step_is_profiled_with_its_waits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x = torch.randn(16, 64)
    with OffloadAdamW(model, bucket_mb=0.01) as opt:

        def step() -> None:
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        run = to_tensorboard(step, tmp_path, launch=False)
    agree(run.file)
    named = {e["name"] for e in read_events(run.file)["traceEvents"]}
    assert "superoffload: step" in named and any(n.startswith("superoffload: wait for bucket") for n in named)


def test_a_simulated_trace_is_a_run_too_and_says_that_it_is_modelled(tmp_path: Path) -> None:
    profile = estimate("paper-1b", micro_batch=1, seq_len=1024, hardware="gh200")
    trace = simulate(profile, make_plan(profile))
    run = to_tensorboard(trace, tmp_path, launch=False)
    assert "modelled" in run.file.name and "modelled" in run.summary.gpus[0].name
    assert run.summary.source == "modelled" and "(modelled)" in run.summary._repr_html_()
    summary = agree(run.file)
    assert summary.gpus[0].utilisation == pytest.approx(trace.busy_s("gpu") / trace.window_s, rel=1e-5)
    adam = sum(e.duration_s for e in trace.events if e.kind == "adam")
    assert {o.name: o.total_s for o in summary.operators}["adam"] == pytest.approx(adam, rel=1e-5)


def gpu_events() -> dict[str, Any]:
    """Two steps with two streams and a copy, spelled as torch 2.11 does on an H200. Times are microseconds."""

    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        gpu = cat in ("kernel", "gpu_memcpy")
        named = {k.replace("_", " "): v for k, v in args.items()} | ({"device": 0} if gpu else {})
        at = {"pid": 0, "tid": args.get("stream", 7)} if gpu else {"pid": 100, "tid": 100}
        return {"ph": "X", "cat": cat, "name": name, "ts": 5e9 + ts, "dur": dur, **at, "args": named}

    def launched(number: int, name: str, at: float, kernel: str, ts: float, dur: float, stream: int = 7) -> list[Any]:
        ids = {"correlation": number, "External_id": number}
        cat = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
        return [
            event("cpu_op", name, at, 40, External_id=number),
            event("cuda_runtime", "cudaLaunchKernel", at + 10, 20, **ids),
            event(cat, kernel, ts, dur, stream=stream, **ids),
        ]

    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}],
        "traceEvents": [
            event("user_annotation", "ProfilerStep#2", 0, 1000, External_id=101),
            *launched(1, "aten::mm", 100, "gemm", 200, 500),
            *launched(2, "aten::add", 300, "add", 600, 200, stream=8),
            *launched(3, "aten::copy_", 500, "Memcpy HtoD (Pinned -> Device)", 750, 450, stream=9),
            event("user_annotation", "ProfilerStep#3", 1010, 500, External_id=102),
            *launched(4, "aten::mm", 1100, "gemm", 1250, 400),
            *launched(5, "aten::add", 1200, "add", 1650, 30),
            *launched(6, "aten::add", 1250, "add", 1680, 30),
        ],
    }


def test_a_profile_of_a_gpu_is_rewritten_for_the_tab(tmp_path: Path) -> None:
    """Read as it is, the tab puts no kernel down to an operator, and ends steps where the host does."""
    given = tmp_path / "gpu_1.1.pt.trace.json"
    given.write_text(json.dumps(gpu_events()))
    before = of_the_tab(given)
    assert not before.has_runtime and before.steps_costs[0].costs[-1] == 1000, "then it needs no help any more"
    run = to_tensorboard(given, tmp_path / "tb", launch=False)
    ours = agree(run.file)
    assert ours == read_profile(given), "to our own reader it is the same"
    assert [s.duration_s for s in ours.steps] == pytest.approx([1.2e-3, 0.51e-3])
    # 200 to 800 are kernels, 800 to 1200 is the copy, and the second step begins when that has ended.
    assert (ours.steps[0].kernel_s, ours.steps[0].memcpy_s) == (pytest.approx(0.6e-3), pytest.approx(0.4e-3))
    assert {o.name: o.kernel_s for o in ours.operators} == pytest.approx(
        {"aten::mm": 0.9e-3, "aten::add": 0.26e-3, "aten::copy_": 0.45e-3}
    )
    assert ours.gpus[0].utilisation == pytest.approx((600 + 460) / 1710)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int cannot be profiled"):
        to_tensorboard(3, tmp_path / "tb", launch=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="recorded nothing"):
        to_tensorboard(torch.profiler.profile(), tmp_path / "tb", launch=False)
    with pytest.raises(InputError, match="steps=0"):
        to_tensorboard(lambda: None, tmp_path / "tb", steps=0, launch=False)
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(InputError, match="no operator"):
        to_tensorboard(tmp_path / "x.json", tmp_path / "tb", launch=False)
    assert not (tmp_path / "tb").exists()


def test_without_the_extra_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_tb_profiler" else find(name))
    ran: list[int] = []
    with pytest.raises(MissingDependency, match=r"torch-tb-profiler.*superoffload\[tensorboard\].*launch=False"):
        to_tensorboard(lambda: ran.append(1), tmp_path / "tb")
    assert not ran and not (tmp_path / "tb").exists()


def test_tensorboard_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_tb_profiler", reason="the tensorboard extra is not installed")
    monkeypatch.setenv("TENSORBOARD_BINARY", str(tmp_path / "none"))
    with pytest.raises(Exception, match=r"TensorBoard did not start.*none"):
        tb.open_tensorboard(tmp_path)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is meant to outlive us
def test_tensorboard_serves_the_run(step: Callable[[], None], tmp_path: Path) -> None:
    pytest.importorskip("torch_tb_profiler", reason="the tensorboard extra is not installed")
    from tensorboard import manager

    run = to_tensorboard(step, tmp_path / "tb", name="mine")
    assert run.url is not None
    info = next(i for i in manager.get_all() if i.logdir == str((tmp_path / "tb").resolve()))
    try:
        assert tb.open_tensorboard(tmp_path / "tb") == run.url, "the same one is found again"
        found: dict[str, Any] = {}
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not found.get("runs"):
            with urllib.request.urlopen(f"{run.url.split('#')[0]}data/plugin/pytorch_profiler/runs") as answer:
                raw = answer.read()
            found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            time.sleep(0.5)
        assert found["runs"] == ["mine"]
    finally:
        os.kill(info.pid, signal.SIGTERM)
