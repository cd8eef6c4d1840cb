"""The reader of torch's profiler on events that can be counted on one's fingers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from superoffload.errors import InputError
from superoffload.profiler_events import ProfilerSummary, find_trace, merge, read_profile, summarize, worker_of


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, pid: int = 100, **args: Any) -> dict[str, Any]:
    """`ts` and `dur` in milliseconds."""
    named = {k.replace("_", " "): v for k, v in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": 5e12 + ts * 1e3, "dur": dur * 1e3, "pid": pid, "tid": tid,
            "args": named}  # fmt: skip


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def body(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"traceEvents": list(events), **more}


def test_a_cpu_step_is_operators_and_the_rest() -> None:
    """Two threads at work at once are one stretch of time: 2 to 6 and 5 to 8."""
    s = summarize(body(step(3, 0, 10), event("cpu_op", "a", 2, 4), event("cpu_op", "b", 5, 3, tid=2)), "host_1")
    only = s.steps[0]
    assert (only.step, only.duration_s) == (3, pytest.approx(10e-3))
    assert (only.cpu_s, only.other_s) == (pytest.approx(6e-3), pytest.approx(4e-3))
    assert s.gpus == () and s.kernels == () and only.kernel_s == 0
    assert s.shares()["cpu"] == pytest.approx(0.6) and sum(s.shares().values()) == pytest.approx(1)
    assert s.step_s == pytest.approx(10e-3)


def test_nested_operators_are_told_apart() -> None:
    """linear 0-10 calls t 1-3 and addmm 4-9; addmm calls copy_ 5-6; then t once more."""
    s = summarize(body(
        event("cpu_op", "copy_", 5, 1), event("cpu_op", "linear", 0, 10), event("cpu_op", "t", 1, 2),
        event("cpu_op", "addmm", 4, 5), event("cpu_op", "t", 12, 1),
    ))  # fmt: skip
    found = {o.name: (o.calls, round(o.self_s * 1e3, 9), round(o.total_s * 1e3, 9)) for o in s.operators}
    assert found == {"linear": (1, 3, 10), "addmm": (1, 4, 5), "t": (2, 3, 3), "copy_": (1, 1, 1)}
    assert [o.name for o in s.operators][:2] == ["addmm", "linear"], "the dearest by its own time first"


def test_a_call_that_only_passes_on_is_one_call() -> None:
    s = summarize(body(
        event("cpu_op", "add", 0, 10), event("cpu_op", "add", 1, 8), event("cpu_op", "fill", 2, 3),
        event("cpu_op", "mul", 20, 10), event("cpu_op", "mul", 21, 2), event("cpu_op", "mul", 25, 2),
    ))  # fmt: skip
    found = {o.name: (o.calls, round(o.self_s * 1e3, 9)) for o in s.operators}
    assert found == {"add": (1, 7), "fill": (1, 3), "mul": (3, 10)}


def test_the_same_time_on_other_threads_is_no_nesting() -> None:
    s = summarize(body(event("cpu_op", "a", 0, 10), event("cpu_op", "b", 2, 3, tid=2)))
    assert {o.name: round(o.self_s * 1e3, 9) for o in s.operators} == {"a": 10, "b": 3}


GPU = (
    step(0, 0, 10),
    event("cpu_op", "aten::mm", 1, 2, External_id=7),
    event("cuda_runtime", "cudaLaunchKernel", 1.5, 1, correlation=1, External_id=7),
    event("cuda_runtime", "cudaLaunchKernel", 6, 1, correlation=2, External_id=8),
    event("cuda_runtime", "cudaMemcpyAsync", 7.5, 0.5, correlation=3, External_id=9),
    # Two streams: 3 to 7 and 5 to 9 are six milliseconds of a busy GPU. The second step's kernel runs 11 to 14.
    event("kernel", "gemm", 3, 4, pid=0, tid=7, device=0, correlation=1, External_id=7),
    event("kernel", "gemm", 5, 4, pid=0, tid=8, device=0, correlation=2, External_id=8),
    # Half under a kernel, half after it, and past the end of the step on the host.
    event("gpu_memcpy", "Memcpy HtoD", 8, 4, pid=0, tid=9, device=0, correlation=3, External_id=9),
    step(1, 10, 4),
    event("cuda_runtime", "cudaLaunchKernel", 10.5, 0.25, correlation=4, External_id=10),
    event("kernel", "add", 12, 3, pid=0, tid=7, device=0, correlation=4, External_id=10),
)


def test_a_gpu_step_goes_on_until_what_it_launched_has_ended() -> None:
    s = summarize(body(*GPU, deviceProperties=[{"id": 0, "name": "NVIDIA H200"}]))
    first, second = s.steps
    assert (first.duration_s, second.duration_s) == (pytest.approx(12e-3), pytest.approx(3e-3))
    assert first.start_s == pytest.approx(-1e-3) and second.start_s == pytest.approx(11e-3), (
        "from the first operator on"
    )
    # 3 to 9 kernels; 9 to 12 the copy; 1.5 to 2.5 a CUDA call; 1 to 1.5 and 2.5 to 3 the operator; 0 to 1 nothing.
    got = [first.kernel_s, first.memcpy_s, first.runtime_s, first.cpu_s, first.other_s]
    assert got == pytest.approx([6e-3, 3e-3, 1e-3, 1e-3, 1e-3])
    assert second.kernel_s == pytest.approx(3e-3) and second.other_s == pytest.approx(0)
    assert s.gpus[0].name == "NVIDIA H200"
    assert s.gpus[0].utilisation == pytest.approx(9 / 15), "overlapping kernels count once, copies do not"


def test_kernels_are_put_down_to_what_launched_them() -> None:
    s = summarize(body(*GPU))
    assert [(k.name, k.calls, round(k.total_s * 1e3, 9), round(k.longest_s * 1e3, 9)) for k in s.kernels] == [
        ("gemm", 2, 8, 4),
        ("add", 1, 3, 3),
    ]
    assert s.operators[0].name == "aten::mm" and s.operators[0].kernel_s == pytest.approx(4e-3)
    assert s.operators[0].self_s == pytest.approx(1e-3), "of its two milliseconds one is CUDA's"


def test_without_marked_steps_all_of_it_is_one(tmp_path: Path) -> None:
    s = summarize(body(event("cpu_op", "a", 2, 4), event("cpu_op", "b", 8, 2)))
    assert len(s.steps) == 1 and s.steps[0].duration_s == pytest.approx(8e-3)
    assert s.steps[0].other_s == pytest.approx(2e-3)


def test_files_folders_and_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no profile in"):
        read_profile(tmp_path)
    old, new = tmp_path / "run-1" / "host_7.123.pt.trace.json", tmp_path / "run-2" / "host_8.124.pt.trace.json.gz"
    for path in (old, new):
        path.parent.mkdir()
    old.write_text(json.dumps(body(step(0, 0, 1), event("cpu_op", "old", 0, 1))))
    new.write_bytes(gzip.compress(json.dumps(body(step(0, 0, 1), event("cpu_op", "new", 0, 1))).encode()))
    assert find_trace(tmp_path) == new
    assert [o.name for o in read_profile(tmp_path).operators] == ["new"]
    assert (read_profile(old).worker, worker_of(new), worker_of(Path("x.json"))) == ("host_7", "host_8", "x.json")
    (tmp_path / "no.json").write_text("[1]")
    with pytest.raises(InputError, match="traceEvents"):
        read_profile(tmp_path / "no.json")
    (tmp_path / "no.gz").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(tmp_path / "no.gz")
    with pytest.raises(InputError, match="no operator and no kernel"):
        summarize(body(step(0, 0, 1)))


def test_a_summary_is_a_record_and_shows_itself() -> None:
    s = summarize(body(*GPU), "host_1")
    assert ProfilerSummary.from_json(s.to_json()) == s
    text = s._repr_html_()
    assert "aten::mm" in text and "gemm" in text and "busy 60%" in text and "(measured)" in text


def test_spans_that_touch_are_one() -> None:
    assert merge([(4, 6), (0, 2), (2, 3), (5, 5.5)]) == [(0, 3), (4, 6)]
