"""Measures this machine for the cost model: link, CPU Adam, casts on either side of the
link, matrix product, memory bandwidths.

Takes well under half a minute and is kept in the user's cache with the fingerprint of the machine, so that a changed
processor, driver or library measures anew. Without a GPU the "GPU" is the CPU, its link a memory copy, and both share
one memory; everything else works the same.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from superoffload import kernels, probing_link
from superoffload.errors import InputError
from superoffload.hardware import Cpu, Gpu, Hardware
from superoffload.kernels import available_cores
from superoffload.model_source import cache_dir
from superoffload.probing_casts import measure_casts
from superoffload.probing_link import Progress, measure_contention, measure_link, median_seconds, run_adam
from superoffload.profiling_state import Clock
from superoffload.units import ADAM_STREAM_BYTES, GB, TERA

SUSTAINED_S = 0.3
"""Seconds of Adam steps or of copies in a row: what boost clocks give for 20 ms is not what a training gets."""
CAST_BYTES = 6
"""Bytes per element of a cast from fp32 to 16 bit: read 4, write 2."""

PEAK_BF16_TFLOPS = {
    "NVIDIA GH200 480GB": 990.0,
    "NVIDIA GH200 120GB": 990.0,
    "NVIDIA GH200 144G HBM3e": 990.0,
    "NVIDIA H200": 990.0,
    "NVIDIA H100 80GB HBM3": 990.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
}
"""Vendor's dense bf16 peak by the driver's exact name; another GPU gets no MFU rather than a wrong one."""


def probe_machine(*, refresh: bool = False, progress: Progress | None = None) -> Hardware:
    """Measure this machine, or read what was measured on it before.

    Args:
        refresh: measure again.
        progress: called with one short line before each measurement.
    """
    identity = machine_fingerprint()
    path = cache_path(identity)
    if not refresh and path.is_file():
        with contextlib.suppress(InputError):  # a file of an older version is measured anew
            return Hardware.load(path)
    found = measure(identity, progress or (lambda line: None))
    with contextlib.suppress(OSError):  # a read-only home costs a new measurement each time, nothing else
        found.save(path)
    return found


def cache_path(identity: dict[str, str]) -> Path:
    """File of the machine with this fingerprint in the user's cache."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "hardware" / f"{digest[:16]}.json"


def machine_fingerprint() -> dict[str, str]:
    """What the measured numbers depend on: processors, cores given to us, driver, libraries, kernels."""
    from superoffload import __version__

    found = {
        "cpu": cpu_name(),
        "cores": str(available_cores()),
        "host_memory_gb": f"{host_memory_bytes() / GB:.0f}",
        "torch": torch.__version__,
        "superoffload": __version__,
        "isa": str(kernels.capabilities()["active"]),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gb": f"{properties.total_memory / GB:.0f}",
            "cuda": str(torch.version.cuda or torch.version.hip),
        }
    return found


def measure(identity: dict[str, str], progress: Progress) -> Hardware:
    """Run every measurement. The random state is not used, and nothing stays allocated."""
    cores, memory = available_cores(), host_memory_bytes()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    adam_threads = tuple(sorted({1, cores, *(2**i for i in range(1, int(math.log2(cores)) + 1))}))
    scale = probing_link.scale_for(memory)
    params = scale * probing_link.ADAM_PARAMS
    adam = _measure_adam(adam_threads, params, progress)
    progress("cast on the CPU")
    cast = _measure_cast(params, cores)
    progress("matrix product")
    matmul = _measure_matmul(device)
    progress("device memory copy")
    hbm = _measure_device_copy(device)
    link, link_how = measure_link(device, progress)
    progress("casts on either side")
    casts = measure_casts(device, adam_threads[-1])
    progress("Adam and copies at once")
    dram, write_cost = measure_contention(device, cores, adam[-1], scale)
    if not has_gpu:
        dram = max(dram, hbm)
    if has_gpu:
        torch.cuda.empty_cache()
    name = identity.get("gpu", identity["cpu"])
    total = torch.cuda.get_device_properties(0).total_memory if has_gpu else memory
    measured = "measured by superoffload probe"
    return Hardware(
        name=name if has_gpu else f"{name} (no GPU)",
        source="probed",
        gpu=Gpu(
            name=name if has_gpu else f"{name} as GPU",
            memory_gb=total / GB,
            peak_bf16_tflops=PEAK_BF16_TFLOPS.get(name, 0.0) if has_gpu else 0.0,
            matmul_bf16_tflops=matmul,
            hbm_gb_per_s=hbm,
        ),
        cpu=Cpu(
            name=identity["cpu"],
            cores=cores,
            memory_gb=memory / GB,
            dram_gb_per_s=dram,
            adam_threads=adam_threads,
            adam_gb_per_s=adam,
            cast_gb_per_s=cast,
            dma_write_cost=write_cost,
        ),
        link=link,
        shared_memory=not has_gpu,
        casts=casts,
        sources={
            "gpu.memory_gb": "reported by the driver" if has_gpu else "host memory: there is no GPU",
            "gpu.peak_bf16_tflops": "vendor's dense bf16 peak" if name in PEAK_BF16_TFLOPS else "not known",
            "gpu.matmul_bf16_tflops": f"{measured}: bf16 product of random matrices",
            "gpu.hbm_gb_per_s": f"{measured}: copy within the device, read and write counted",
            "cpu.adam_gb_per_s": f"{measured}: fp32 AdamW, {params / 1e6:.0f}M parameters, 28 B each",
            "cpu.cast_gb_per_s": f"{measured}: fp32 to bf16, 6 bytes per element",
            "casts": f"{measured}: one bucket of {casts.bucket_params / 1e6:.0f}M parameters, alone",
            "cpu.dram_gb_per_s": f"{measured}: Adam beside copies over the link, the highest sum seen",
            "cpu.dma_write_cost": f"{measured}: what downloads take from Adam beyond their bytes",
            "link": f"{measured}: {link_how}",
        },
        fingerprint={**identity, "date": datetime.date.today().isoformat()},
    )


def _measure_adam(threads: tuple[int, ...], params: int, progress: Progress) -> tuple[float, ...]:
    """GB/s of the project's own AdamW at each thread count, made ascending: more threads never hurt the model."""
    state = [torch.zeros(params) for _ in range(4)]
    state[3].fill_(1e-3)
    seconds: dict[int, list[float]] = {n: [] for n in threads}
    progress("CPU Adam")
    for round_ in range(4):  # interleaved, since the memory's speed drifts; the first round warms up
        for n in threads:
            stop = time.perf_counter() + (SUSTAINED_S if round_ else 0.0)
            while True:
                start = time.perf_counter()
                run_adam(state, n)
                end = time.perf_counter()
                if round_:
                    seconds[n].append(end - start)
                if end >= stop:
                    break
    found = [params * ADAM_STREAM_BYTES / statistics.median(seconds[n]) / GB for n in threads]
    return tuple(max(found[: i + 1]) for i in range(len(found)))


def _measure_cast(params: int, threads: int) -> float:
    source, target = torch.zeros(params), torch.zeros(params, dtype=torch.bfloat16)
    seconds = median_seconds(lambda: kernels.cast(source, target, threads=threads), Clock(torch.device("cpu")))
    return params * CAST_BYTES / seconds / GB


def _measure_matmul(device: torch.device) -> float:
    n = 8192 if device.type == "cuda" else 1024
    # Random numbers: a GPU draws less power on equal ones, and multiplies them faster than in any training. And not for
    # long: between products a training moves bytes, after which the next ones run as the first ones here (an H200: 773
    # TFLOP/s, 675 after half a second of nothing else; with equal numbers 893 and 776).
    noise = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device, generator=noise) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * n**3 / median_seconds(lambda: torch.mm(a, b, out=out), Clock(device)) / TERA


def _sustained_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work` called again and again for `SUSTAINED_S`, the first half not counted."""
    clock = Clock(device)
    once = median_seconds(work, clock, repeats=1)
    marks = [clock.now()]
    for _ in range(max(6, math.ceil(SUSTAINED_S / once))):
        work()
        marks.append(clock.now())
    clock.synchronize()
    spans = [clock.seconds(start, stop) for start, stop in itertools.pairwise(marks)]
    return max(statistics.median(spans[len(spans) // 2 :]), 1e-9)


def _measure_device_copy(device: torch.device) -> float:
    """Read and write counted, as a roofline counts them."""
    n = (1 << 30) if device.type == "cuda" else (1 << 27)
    a = torch.zeros(n, dtype=torch.uint8, device=device)
    b = torch.zeros_like(a)
    return 2.0 * n / _sustained_seconds(lambda: b.copy_(a), device) / GB


def host_memory_bytes() -> int:
    """Main memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def cpu_name() -> str:
    """The processor's name as people know it."""
    arm_parts = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}
    with contextlib.suppress(OSError):
        lines: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            lines[key.strip()] = value.strip()
        name = lines.get("model name") or arm_parts.get(lines.get("CPU part", ""))
        if name and name != "unknown":
            return name
    return platform.processor() or platform.machine()
