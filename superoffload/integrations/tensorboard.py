"""One call from a training step to TensorBoard's PyTorch Profiler tab.

The tab (torch-tb-profiler, which its authors have stopped developing) fetches its charts' code from the internet. Where
there is none, `superoffload.widgets.plot_profile` draws the essentials of the same file.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superoffload.errors import InputError, MissingDependency, SuperOffloadError
from superoffload.profiler_events import SOURCE, ProfilerSummary, read_events, read_profile, summarize
from superoffload.record import write_atomic
from superoffload.tracing import LANE_TITLES, Trace

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler

HEIGHT_PIXELS = 800
_CATEGORIES = {"cuda_runtime": "runtime", "cuda_driver": "runtime", "fwdbwd": "forward_backward"}
"""As torch spells them now, to how the tab reads them: it knows the old names only, and would else put no kernel down
to an operator, and end a step where the host does."""


@dataclass(frozen=True, slots=True)
class TensorBoardRun:
    """What `to_tensorboard` wrote and opened."""

    file: Path
    """Also opens in Perfetto and chrome://tracing."""
    logdir: Path
    url: str | None
    """Where TensorBoard listens; None where it was not launched."""

    @property
    def summary(self) -> ProfilerSummary:
        """Step breakdown, operators, kernels and GPU use, by the reader of this package."""
        return read_profile(self.file)


def to_tensorboard(
    source: Callable[[], Any] | Profiler | Trace | str | os.PathLike[str],
    logdir: str | os.PathLike[str] = "tensorboard",
    *,
    name: str | None = None,
    steps: int = 3,
    warmup: int = 2,
    memory: bool = False,
    launch: bool = True,
) -> TensorBoardRun:
    """Write a run for TensorBoard's PyTorch Profiler tab, and open it.

    Args:
        source: a training step to call and profile, or what has been recorded: a `torch.profiler.profile` that has
            ended, its file, or a Trace of this package, measured or modelled (the run's name says which).
        logdir: folder of all runs; TensorBoard shows every run in it.
        name: of this run, a folder in it; omitted, the time.
        steps: profiled calls of a callable. warmup: calls before them, at least 1.
        memory: record allocations too, for a callable.
        launch: start TensorBoard on `logdir`, or find the one that runs there. In a notebook it is shown below the
            cell.

    Raises:
        MissingDependency: TensorBoard or its profiler tab is not installed; nothing has been run. `launch=False` writes
            all the same.
        InputError: `source` is none of these, or a file without a profile.
    """
    if launch:
        check_installed()
    if steps < 1 or warmup < 1:
        raise InputError(f"steps={steps}, warmup={warmup}", expected="at least 1 each")
    folder = Path(logdir)
    run = folder / (name or time.strftime("run-%Y%m%d-%H%M%S"))
    if isinstance(source, Trace):
        file_name, body = f"{_file_name(source)}.{time.time_ns()}.pt.trace.json", trace_events(source)
    elif isinstance(source, str | os.PathLike):
        file_name, body = Path(source).name, read_events(Path(source))
        if not file_name.removesuffix(".gz").endswith(".pt.trace.json"):
            file_name = f"{file_name.split('.json')[0]}.{time.time_ns()}.pt.trace.json"
    else:
        file_name, body = _profiled(source, steps, warmup, memory)
    summarize(body)  # refuses what holds no profile, before a run appears
    for e in body["traceEvents"]:
        if e.get("cat") in _CATEGORIES:
            e["cat"] = _CATEGORIES[e["cat"]]
    run.mkdir(parents=True, exist_ok=True)
    file = run / f"{file_name.removesuffix('.gz')}.gz"
    write_atomic(file, gzip.compress(json.dumps(body).encode(), compresslevel=6))
    return TensorBoardRun(file, folder, open_tensorboard(folder) if launch else None)


def _profiled(source: Any, steps: int, warmup: int, memory: bool) -> tuple[str, dict[str, Any]]:
    """Name and content of the file that torch's own handler for TensorBoard writes."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        write = torch.profiler.tensorboard_trace_handler(scratch, use_gzip=True)
        if isinstance(source, torch.profiler.profile):
            if source.profiler is None:
                raise InputError("the profiler has recorded nothing", expected="one that has run and ended")
            try:
                write(source)
            except RuntimeError as e:
                if "already saved" not in str(e):
                    raise
                raise InputError(
                    "the profiler's trace was saved before, and torch saves it once", remedy="Give the saved file"
                ) from None
        elif callable(source):
            when = torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1)
            with torch.profiler.profile(
                schedule=when, on_trace_ready=write, record_shapes=True, profile_memory=memory, acc_events=True
            ) as profiler:
                for _ in range(warmup + steps):
                    source()
                    profiler.step()
        else:
            raise InputError(
                f"a {type(source).__name__} cannot be profiled",
                expected="a step to call, a torch.profiler.profile, its file, or a Trace",
            )
        file = next(Path(scratch).iterdir())
        return file.name, read_events(file)


def _microseconds(start_s: float, end_s: float) -> dict[str, float]:
    """Start and duration in units of 1/1024 us, whose sums are exact. Spans end one unit early: the tab drops one that
    begins a rounding error before the one in front of it ends, and miscounts those that touch."""
    start, end = (round(t * 1e6 * 1024) for t in (start_s, end_s))
    return {"ts": start / 1024, "dur": max(0, end - start - 1) / 1024}


def trace_events(trace: Trace) -> dict[str, Any]:
    """A Trace as torch's profiler would have written it: the GPU's spans are kernels, the link's are copies, CPU Adam's
    and the validator's are operators, each lane on a thread of its own."""
    kinds = {"gpu": "kernel", "link_down": "gpu_memcpy", "link_up": "gpu_memcpy", "interconnect": "kernel"}
    lanes = list(LANE_TITLES)
    host, events = 1, []
    for lane, title in LANE_TITLES.items():
        at = {"pid": 0 if lane in kinds else host, "tid": lanes.index(lane)}
        events.append({"ph": "M", "name": "thread_name", "ts": 0, **at, "args": {"name": title}})
    for pid, label in ((0, f"GPU of {trace.hardware}"), (host, f"CPU, {trace.source}")):
        events.append({"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0, "args": {"name": label}})
    count = max(1, round(trace.window_s / trace.step_s)) if trace.step_s else 1
    for i in range(count):
        end = trace.window_s if i == count - 1 else (i + 1) * trace.step_s
        events.append({
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": host, "tid": len(lanes),
            **_microseconds(i * trace.step_s, end), "args": {},
        })  # fmt: skip
    for number, e in enumerate(trace.events, start=1):
        arguments: dict[str, Any] = {"External id": number, "bucket": e.bucket, "block": e.block}
        if e.lane in kinds:
            arguments |= {"device": 0, "stream": lanes.index(e.lane), "bytes": e.bytes, "correlation": number}
        events.append({
            "ph": "X", "cat": kinds.get(e.lane, "cpu_op"), "name": e.kind.replace("_", " "),
            "pid": 0 if e.lane in kinds else host, "tid": lanes.index(e.lane),
            **_microseconds(e.start_s, e.end_s), "args": arguments,
        })  # fmt: skip
    properties = [{"id": 0, "name": f"{trace.hardware} ({trace.source})"}]
    return {"schemaVersion": 1, "deviceProperties": properties, SOURCE: trace.source, "traceEvents": events}


def _file_name(trace: Trace) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", f"{trace.model}-{trace.hardware}-{trace.source}")


def check_installed() -> None:
    """Raises MissingDependency where TensorBoard or its profiler tab is not installed."""
    for module, package in (("tensorboard", "tensorboard"), ("torch_tb_profiler", "torch-tb-profiler")):
        if importlib.util.find_spec(module) is None:
            raise MissingDependency(
                f"TensorBoard's PyTorch Profiler tab needs {package}, which is not installed",
                remedy="Install it: pip install 'superoffload[tensorboard]'; launch=False writes the run without it, "
                "and superoffload.widgets.plot_profile draws it",
            )


def open_tensorboard(logdir: str | os.PathLike[str]) -> str:
    """Start TensorBoard on `logdir` as a process of its own, or find the one that runs on it, and return its address.
    In a notebook it is shown below the cell.

    Raises:
        MissingDependency: it is not installed.
        SuperOffloadError: it did not start; the message ends in what it said.
    """
    check_installed()
    from tensorboard import manager, notebook

    with _own_program():
        started = manager.start([f"--logdir={Path(logdir).resolve()}", "--port=0"])
    if not isinstance(started, manager.StartLaunched | manager.StartReused):
        said = str(getattr(started, "stderr", None) or getattr(started, "os_error", None) or type(started).__name__)
        raise SuperOffloadError(
            f"TensorBoard did not start: {said.strip()[-600:]}",
            remedy=f"Start it by hand: tensorboard --logdir {Path(logdir).resolve()}",
        )
    if _in_notebook():
        notebook.display(port=started.info.port, height=HEIGHT_PIXELS)
    return f"http://localhost:{started.info.port}{started.info.path_prefix or '/'}#pytorch_profiler"


@contextmanager
def _own_program() -> Iterator[None]:
    """TensorBoard looks for its program on the PATH, where another environment's may be found, or none."""
    key, before = "TENSORBOARD_BINARY", os.environ.get("TENSORBOARD_BINARY")
    beside = shutil.which("tensorboard", path=sysconfig.get_path("scripts"))
    if before is None and beside is not None:
        os.environ[key] = beside
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


__all__ = ["TensorBoardRun", "check_installed", "open_tensorboard", "to_tensorboard", "trace_events"]
