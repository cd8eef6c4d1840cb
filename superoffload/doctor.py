"""What this machine has, what is missing, and what to do about it. Changes nothing and measures nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from superoffload.units import GB, format_bytes

Status = Literal["ok", "note", "warn", "bad"]
"""`bad` stops the main job or wastes the machine, `warn` costs speed or a feature, `note` is only worth knowing."""

MARKS: dict[Status, str] = {"ok": "ok  ", "note": "note", "warn": "WARN", "bad": "BAD "}
LAB_MODULES = ("jupyterlab", "ipywidgets", "plotly", "anywidget")
PINNED_GB_WANTED = 8.0
"""Gradients and 16-bit weights are pinned: 4 bytes per parameter, so 8 GB is a 2B model."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def report() -> list[Check]:
    """Look at everything. A look that fails becomes a note, never an exception."""
    found: list[Check] = []
    for look in (_python, _cpu, _memory, _memlock, _numa, _torch, _kernels, _libraries, _lab, _chromium):
        try:
            found.extend(look())
        except Exception as e:  # the report must come out on any machine
            found.append(Check(look.__name__.strip("_"), "note", f"could not be read: {type(e).__name__}: {e}"))
    return found


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The report as one JSON object; `ok` is false where anything is bad."""
    return {"ok": all(c.status != "bad" for c in checks), "checks": [asdict(c) for c in checks]}


def as_text(checks: list[Check]) -> str:
    """The report for people."""
    lines = []
    for c in checks:
        lines.append(f"{MARKS[c.status]}  {c.name:15} {c.value}")
        if c.remedy:
            lines.append(f"{'':23}-> {c.remedy}")
    return "\n".join(lines)


def _python() -> Iterator[Check]:
    from superoffload import __version__

    where = "an environment" if sys.prefix != sys.base_prefix else "the system's Python"
    yield Check("superoffload", "ok", f"{__version__} with Python {platform.python_version()} in {where}")


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    """The processor's own name."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().partition(" ")
        if limit.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def _cpu() -> Iterator[Check]:
    flags, cores = cpu_flags(), usable_cores()
    known = ("avx2", "f16c", "avx512f", "avx512_bf16", "asimd", "sve", "sve2", "bf16")
    have = ", ".join(f for f in known if f in flags) or "no vector flags readable"
    yield Check("CPU", "ok", f"{cpu_name()}, {platform.machine()}: {have}")
    total = os.cpu_count() or cores
    limited = f" (of {total} in the machine)" if total != cores else ""
    if cores < 4:
        yield Check("cores", "note", f"{cores} usable{limited}", "Enough to learn with; Adam on the CPU wants more")
    else:
        yield Check("cores", "ok", f"{cores} usable{limited}")


def memory_bytes() -> tuple[int, int]:
    """Total and available host memory in bytes, the container's limit taken into account; zeros where unknown."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 0, 0
    rows = {k: int(v.split()[0]) * 1024 for k, _, v in (ln.partition(":") for ln in info.read_text().splitlines()) if v}
    total, free = rows.get("MemTotal", 0), rows.get("MemAvailable", 0)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text.isdigit() and int(text) < total:
            total, free = int(text), min(free, int(text) - int(used.read_text()))
    return total, free


def _memory() -> Iterator[Check]:
    total, free = memory_bytes()
    if not total:
        yield Check("host memory", "note", "unknown on this system")
        return
    fits = free / 18 / 1e9  # 12 B master and moments, 2 gradients, 2 upload, 2 weights, per parameter
    yield Check("host memory", "ok", f"{format_bytes(total)}, {format_bytes(free)} available: "
                f"states of about {fits:.2g}B parameters")  # fmt: skip


def _memlock() -> Iterator[Check]:
    try:
        import resource
    except ImportError:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("memlock limit", "ok", "unlimited")
    elif soft < PINNED_GB_WANTED * GB and shutil.which("nvidia-smi"):
        yield Check("memlock limit", "warn", f"{format_bytes(soft)} may be pinned",
                    "Raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1")  # fmt: skip
    else:
        yield Check("memlock limit", "note", f"{format_bytes(soft)} may be pinned (matters with a GPU only)")


def _numa() -> Iterator[Check]:
    from superoffload.topology import read_topology

    topology = read_topology()
    if len(topology.nodes) <= 1:
        yield Check("NUMA", "ok", "one node")
    elif topology.memory_only and len(topology.cpu_nodes) == 1:
        yield Check("NUMA", "ok", f"{topology.describe()}; the optimizer stays on node {topology.cpu_nodes[0].index}")
    else:
        yield Check("NUMA", "note", topology.describe(),
                    "The optimizer binds itself to its GPU's node; for the rest of the process (nvidia-smi topo -m "
                    "names the node): numactl --cpunodebind=N --membind=N")  # fmt: skip


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver reports, with their memory; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _torch() -> Iterator[Check]:
    found = gpus()
    yield Check("GPU", "ok" if found else "note", "; ".join(found) or "no NVIDIA GPU: steps run on the CPU")
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "warn", "not installed: planning works, training and measuring do not",
                    "pip install 'superoffload[train]'")  # fmt: skip
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU-only"
    if found and torch.version.cuda is None:
        yield Check("torch", "bad", f"{torch.__version__} is a CPU-ONLY build BESIDE A GPU: the GPU would not be used",
                    "Install a CUDA build, as the 'Start locally' page of PyTorch says for this system, or use an NGC "
                    "container with make setup REUSE=1")  # fmt: skip
    elif found and not torch.cuda.is_available():
        yield Check("torch", "bad", f"{torch.__version__} ({build}) cannot reach the GPU",
                    "Driver and build must match: compare nvidia-smi's CUDA version with the build's")  # fmt: skip
    else:
        yield Check("torch", "ok", f"{torch.__version__} ({build})")


def _kernels() -> Iterator[Check]:
    spec = importlib.util.find_spec("superoffload._kernels")
    if spec is None:
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        yield Check("kernels", "warn", "not built: CPU Adam uses the slow reference",
                    "Reinstall: make setup, or pip install --force-reinstall --no-deps . in the checkout" if compiler
                    else "Install a C++ compiler (Debian: apt-get install g++), then reinstall")  # fmt: skip
        return
    try:
        from superoffload import kernels

        have = kernels.capabilities()
        yield Check("kernels", "ok", f"built: {_short(have['isas'])}, using {have['active']}")
    except ModuleNotFoundError as e:
        yield Check("kernels", "ok", f"built (their Python side needs {e.name})")


def _short(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _versions(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    have, absent = [], []
    for name in names:
        try:
            have.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            absent.append(name)
    return have, absent


def _extra(title: str, names: tuple[str, ...], extra: str, loss: str) -> Check:
    have, absent = _versions(names)
    if absent:
        remedy = f"pip install 'superoffload[{extra}]'"
        return Check(title, "warn", f"not installed: {', '.join(absent)} ({loss})", remedy)
    return Check(title, "ok", ", ".join(have))


def _libraries() -> Iterator[Check]:
    yield _extra("training stack", ("transformers", "safetensors", "datasets", "gguf"), "train", "superoffload train")


def _lab() -> Iterator[Check]:
    yield _extra("Jupyter stack", LAB_MODULES, "lab", "notebooks and the Tuner")


def _chromium() -> Iterator[Check]:
    found = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if found:
        yield Check("Chromium", "ok", found)
    else:
        yield Check("Chromium", "note", "none: only the browser tests need it", "Debian: apt-get install chromium")
