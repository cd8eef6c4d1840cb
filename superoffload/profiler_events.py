"""What torch's profiler saw, in numbers: each step by what filled it, the dearest operators and kernels, GPU use.

Reads the file that torch's profiler writes (Chrome's trace format, also gzipped), and needs neither torch nor
TensorBoard. How things are counted is how the PyTorch Profiler tab of TensorBoard (torch-tb-profiler) counts them.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from superoffload.errors import InputError
from superoffload.record import Record

SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
"""Of the files in a run's folder."""
STEP = "ProfilerStep#"
SOURCE = "superoffload_source"
"""Key of a file that was made of a Trace: measured or modelled. Other readers pass over it."""
ROLES = ("kernel", "memcpy", "memset", "runtime", "cpu", "other")
"""What a moment of a step is put down to: the first of these that is going on. `runtime` are calls of CUDA on the host,
`cpu` are torch's operators on any thread, `other` is everything else: Python, or nothing at all."""
_ROLE_OF = {"kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset",
            "cuda_runtime": "runtime", "cuda_driver": "runtime", "runtime": "runtime",
            "cpu_op": "cpu", "operator": "cpu"}  # fmt: skip
"""Category of an event, as torch spells it now or did, to its role."""

Spans = list[tuple[float, float]]
"""(start, end) pairs."""


@dataclass(frozen=True, slots=True)
class StepShares:
    """One profiled step. It begins where the host begins it, but not before the last step's work on the GPU has ended,
    and it ends when the host and what it launched in it have ended."""

    step: int
    start_s: float
    """From the first event on."""
    duration_s: float
    kernel_s: float
    memcpy_s: float
    memset_s: float
    runtime_s: float
    cpu_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class OperatorTotal:
    """All calls of one operator of torch, nested ones apart: time inside another operator that it calls is the other's.
    A call whose only child has the same name is one call."""

    name: str
    calls: int
    self_s: float
    """Host seconds in the operator itself, without the operators and the functions of CUDA that it calls."""
    total_s: float
    """With what it calls; nested calls of one name count twice."""
    kernel_s: float
    """GPU seconds of what it launched itself: kernels, copies and fills."""


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All runs of one kernel."""

    name: str
    calls: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Of one GPU, from the beginning of the first step to the end of the last."""

    device: int
    name: str
    utilisation: float
    """Share of time in which at least one kernel ran, 0 to 1: kernels that run at once count once, copies do not
    count."""


class ProfilerSummary(Record):
    """What one process did in the profiled steps."""

    schema_name: ClassVar[str] = "superoffload.profiler_summary"

    source: Literal["measured", "modelled"]
    """Modelled where a simulated Trace was written in the profiler's format."""
    worker: str
    """Host and process, as in the file's name."""
    steps: tuple[StepShares, ...]
    operators: tuple[OperatorTotal, ...]
    """The dearest by their own host time first."""
    kernels: tuple[KernelTotal, ...]
    """The dearest first; empty where no GPU was profiled."""
    gpus: tuple[GpuUse, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return sum(s.duration_s for s in self.steps) / len(self.steps)

    def shares(self) -> dict[str, float]:
        """Mean share of a step by role, 0 to 1, in the order of ROLES."""
        total = sum(s.duration_s for s in self.steps)
        return {role: sum(getattr(s, f"{role}_s") for s in self.steps) / total if total else 0.0 for role in ROLES}

    def _repr_html_(self) -> str:
        from superoffload.html_views import profiler_html

        return profiler_html(self)


def read_profile(source: str | os.PathLike[str]) -> ProfilerSummary:
    """Read a file of torch's profiler, or the newest one of a folder.

    Raises:
        InputError: no such file, or one that holds no profile.
    """
    path = find_trace(source)
    return summarize(read_events(path), worker=worker_of(path))


def find_trace(source: str | os.PathLike[str]) -> Path:
    """The file itself, or the newest profile below a folder.

    Raises:
        InputError: there is none.
    """
    path = Path(source)
    if path.is_file():
        return path
    found = [p for suffix in SUFFIXES for p in path.rglob(f"*{suffix}")] if path.is_dir() else []
    if not found:
        raise InputError(
            f"no profile in {path}",
            expected=f"a file that ends in {' or '.join(SUFFIXES)}",
            remedy="Write one: superoffload.integrations.tensorboard.to_tensorboard(step)",
        )
    return max(found, key=lambda p: p.stat().st_mtime_ns)


def worker_of(path: Path) -> str:
    """``host_4711.1700000000.pt.trace.json.gz`` is of ``host_4711``."""
    name = path.name
    for suffix in SUFFIXES[::-1]:
        name = name.removesuffix(suffix)
    worker, _, span = name.rpartition(".")
    return worker if worker and span.isdigit() else name


def read_events(path: Path) -> dict[str, Any]:
    """The file as it is.

    Raises:
        InputError: it is not JSON with events.
    """
    try:
        raw = path.read_bytes()
        body = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, strict=False)
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f"{path} cannot be read: {e}", expected="JSON that torch's profiler wrote") from None
    if not isinstance(body, dict) or not isinstance(body.get("traceEvents"), list):
        raise InputError(f'{path} has no "traceEvents"', expected="JSON that torch's profiler wrote")
    return body


def summarize(body: Mapping[str, Any], worker: str = "") -> ProfilerSummary:
    """Count what a profile holds.

    Args:
        body: as torch's profiler writes it: ``traceEvents`` with times in microseconds.

    Raises:
        InputError: nothing in it took any time.
    """
    events = [e for e in body["traceEvents"] if e.get("ph") == "X" and e.get("dur") is not None and "cat" in e]
    spans: dict[str, Spans] = {role: [] for role in ROLES}
    for e in events:
        if role := _ROLE_OF.get(str(e["cat"]).lower()):
            spans[role].append((float(e["ts"]), float(e["ts"]) + float(e["dur"])))
    if not any(spans.values()):
        raise InputError("the profile holds no operator and no kernel", remedy="Profile at least one whole step")
    merged = {role: merge(s) for role, s in spans.items()}
    origin = min(s[0][0] for s in merged.values() if s)
    windows = _steps(events, merged)
    return ProfilerSummary(
        source="modelled" if body.get(SOURCE) == "modelled" else "measured",
        worker=worker,
        steps=tuple(_shares(number, lo, hi, origin, merged) for number, lo, hi in windows),
        operators=tuple(_operators(events)),
        kernels=tuple(_kernels(events)),
        gpus=tuple(_gpus(events, windows[0][1], windows[-1][2], body.get("deviceProperties") or ())),
    )


def _steps(events: Sequence[Mapping[str, Any]], merged: Mapping[str, Spans]) -> list[tuple[int, float, float]]:
    """(number, start, end) of each step in microseconds; all of it is one step where none is marked."""
    marked = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), int(str(e["name"]).removeprefix(STEP)))
        for e in events
        if str(e["name"]).startswith(STEP) and e["cat"] in ("user_annotation", "cpu_op")
    )
    if not marked:
        ends = [edge for s in merged.values() if s for edge in (s[0][0], s[-1][1])]
        return [(0, min(ends), max(ends))]
    launched = {_argument(e, "correlation"): float(e["ts"]) for e in events if _role(e) == "runtime"}
    starts = [start for start, _, _ in marked]
    last = [end for _, end, _ in marked]
    for e in events:
        if _role(e) not in ("kernel", "memcpy", "memset"):
            continue
        at = launched.get(_argument(e, "correlation"))
        i = -1 if at is None else bisect.bisect_right(starts, at) - 1
        if i >= 0 and at is not None and at < marked[i][1]:
            last[i] = max(last[i], float(e["ts"]) + float(e["dur"]))
    found, reached = [], starts[0]
    for (start, _, number), end in zip(marked, last, strict=True):
        begin = max(start, reached)
        reached = max(begin, end)
        found.append((number, begin, reached))
    return found


def _shares(number: int, lo: float, hi: float, origin: float, merged: Mapping[str, Spans]) -> StepShares:
    union: Spans = []
    before, seconds = 0.0, {}
    for role in ROLES[:-1]:
        union = merge(union + clip(merged[role], lo, hi))
        covered = length(union)
        seconds[f"{role}_s"], before = (covered - before) / 1e6, covered
    return StepShares(number, (lo - origin) / 1e6, (hi - lo) / 1e6, **seconds, other_s=(hi - lo - before) / 1e6)


def _operators(events: Iterable[Mapping[str, Any]]) -> list[OperatorTotal]:
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    launched: dict[Any, float] = defaultdict(float)
    called: dict[Any, float] = defaultdict(float)
    """Microseconds of CUDA's functions by what called them."""
    for e in events:
        if _role(e) == "cpu" and not str(e["name"]).startswith(STEP):
            threads[e.get("pid"), e.get("tid")].append(e)
        elif _role(e) in ("kernel", "memcpy", "memset"):
            launched[_argument(e, "External id", "external id")] += float(e["dur"])
        elif _role(e) == "runtime":
            called[_argument(e, "External id", "external id")] += float(e["dur"])
    calls: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    kernel: dict[str, float] = defaultdict(float)
    for ops in threads.values():
        for node in _roots(ops):
            stack = [node]
            while stack:
                op = stack.pop()
                name, inside = str(op.event["name"]), op.children
                ids = [_argument(op.event, "External id", "external id")]
                while len(inside) == 1 and inside[0].event["name"] == name:  # a call that only passes on
                    ids.append(_argument(inside[0].event, "External id", "external id"))
                    inside = inside[0].children
                duration = float(op.event["dur"])
                calls[name] += 1
                total[name] += duration
                ids = [i for i in ids if i]  # 0: of nobody
                own[name] += (
                    duration - sum(float(c.event["dur"]) for c in inside) - sum(called.get(i, 0.0) for i in ids)
                )
                kernel[name] += sum(launched.get(i, 0.0) for i in ids)
                stack.extend(inside)
    rows = [OperatorTotal(n, calls[n], own[n] / 1e6, total[n] / 1e6, kernel[n] / 1e6) for n in calls]
    return sorted(rows, key=lambda r: (-r.self_s, r.name))


class _Node:
    __slots__ = ("children", "end", "event")

    def __init__(self, event: Mapping[str, Any]):
        self.event, self.end = event, float(event["ts"]) + float(event["dur"])
        self.children: list[_Node] = []


def _roots(ops: list[Mapping[str, Any]]) -> list[_Node]:
    """The calls of one thread as trees: what lies within another was called by it."""
    roots: list[_Node] = []
    open_: list[_Node] = []
    for e in sorted(ops, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        node = _Node(e)
        while open_ and (float(e["ts"]) >= open_[-1].end or node.end > open_[-1].end):
            open_.pop()
        (open_[-1].children if open_ else roots).append(node)
        open_.append(node)
    return roots


def _kernels(events: Iterable[Mapping[str, Any]]) -> list[KernelTotal]:
    runs: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if _role(e) == "kernel":
            runs[str(e["name"])].append(float(e["dur"]) / 1e6)
    rows = [KernelTotal(name, len(t), sum(t), max(t)) for name, t in runs.items()]
    return sorted(rows, key=lambda r: (-r.total_s, r.name))


def _gpus(
    events: Iterable[Mapping[str, Any]], lo: float, hi: float, properties: Iterable[Mapping[str, Any]]
) -> list[GpuUse]:
    spans: dict[int, Spans] = defaultdict(list)
    for e in events:
        if _role(e) == "kernel":
            device = _argument(e, "device")
            spans[int(e["pid"] if device is None else device)].append(
                (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
            )
    names = {int(p["id"]): str(p.get("name", "")) for p in properties if "id" in p}
    return [
        GpuUse(device, names.get(device, ""), length(clip(merge(s), lo, hi)) / (hi - lo) if hi > lo else 0.0)
        for device, s in sorted(spans.items())
    ]


def _role(event: Mapping[str, Any]) -> str | None:
    return _ROLE_OF.get(str(event["cat"]).lower())


def _argument(event: Mapping[str, Any], *names: str) -> Any:
    arguments = event.get("args") or {}
    return next((arguments[n] for n in names if n in arguments), None)


def merge(spans: Spans) -> Spans:
    """The union of spans, as spans that do not touch, in order."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def clip(spans: Spans, lo: float, hi: float) -> Spans:
    """What of merged spans lies between `lo` and `hi`."""
    return [(max(a, lo), min(b, hi)) for a, b in spans if b > lo and a < hi]


def length(spans: Spans) -> float:
    """Of merged spans together."""
    return sum(end - start for start, end in spans)


__all__ = ["GpuUse", "KernelTotal", "OperatorTotal", "ProfilerSummary", "StepShares", "find_trace", "read_events",
           "read_profile", "summarize", "worker_of"]  # fmt: skip
