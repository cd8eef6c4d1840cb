"""What a run reads of the machine for its log: how busy the processors are, and how much memory is taken.

Nothing here waits for the GPU. A reading costs microseconds on the thread that trains; what costs more (1.7 ms for the
driver's samples, measured on an H200) is done by a thread of its own, twice a second, outside of Python's lock.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

from superoffload.doctor import memory_bytes, usable_cores

POLL_S = 0.5
"""How often the driver's samples are fetched; it keeps those of the last ten seconds or more."""
STATM = Path("/proc/self/statm")


class Gauges:
    """Readings over the time since the last one.

    The peak of torch's allocator is reset at each reading, so that a reading is of its own steps.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._cores = usable_cores()
        self._sampler = GpuSampler(device) if device.type == "cuda" else None
        self.start_over()

    def facts(self) -> dict[str, Any]:
        """What does not change in a run: the device, what there is of each resource, and how each reading is taken.
        ``gpu_name`` is None where the CPU computes the model."""
        cuda = self._device.type == "cuda"
        return {
            "gpu_name": torch.cuda.get_device_name(self._device) if cuda else None,
            "cores": self._cores,
            "gpu_capacity_bytes": torch.cuda.get_device_properties(self._device).total_memory if cuda else None,
            "host_capacity_bytes": memory_bytes()[0] or None,
            "gpu_busy_source": "no GPU" if self._sampler is None else self._sampler.source,
            "host_bytes_source": "resident set of the process" if STATM.is_file() else "not readable on this system",
        }

    def start_over(self) -> None:
        """Begin a new interval: what was between two steps (a checkpoint, a pause) is not training."""
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()
        if self._sampler is not None:
            self._sampler.take()
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, Any]:
        """Since the last reading: ``cpu_busy`` (this process's CPU seconds over those of all its cores, 0 to 1),
        ``gpu_busy`` (mean of the driver's samples, 0 to 1, None where none came), ``gpu_peak_bytes`` and
        ``gpu_reserved_bytes`` (most that torch had allocated and reserved, None without a GPU), ``host_bytes``
        (resident now; None where the system does not say)."""
        wall_s = time.perf_counter() - self._wall_s
        found: dict[str, Any] = {
            "cpu_busy": min(1.0, (time.process_time() - self._cpu_s) / (wall_s * self._cores)) if wall_s > 0 else None,
            "gpu_busy": None,
            "gpu_peak_bytes": None,
            "gpu_reserved_bytes": None,
            "host_bytes": resident_bytes(),
        }
        if self._sampler is not None:
            samples = self._sampler.take()
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            found["gpu_busy"] = statistics.fmean(samples) if samples else None
            found["gpu_peak_bytes"] = stats["allocated_bytes"]["all"]["peak"]
            found["gpu_reserved_bytes"] = stats["reserved_bytes"]["all"]["peak"]
        self.start_over()
        return found

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()


class GpuSampler:
    """Collects the driver's own samples of the share of time in which a kernel ran (NVML, one sample each fifth of a
    second on an H200), of all processes on the GPU."""

    def __init__(self, device: torch.device):
        self._samples: list[float] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._seen_us = int(time.time() * 1e6)
        self._thread: threading.Thread | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._fetch()
        except ImportError:
            self.source = "not measured: pip install nvidia-ml-py"
        except Exception as e:  # NVML's errors; a slice of a GPU (MIG) has no such samples
            self.source = f"not measured: {type(e).__name__}: {e}"
        else:
            self.source = "NVML's samples of the whole GPU"
            self._thread = threading.Thread(target=self._poll, name="so-gauges", daemon=True)
            self._thread.start()

    def take(self) -> list[float]:
        """Samples that came since the last call, each 0 to 1."""
        with self._lock:
            taken, self._samples = self._samples, []
        return taken

    def _fetch(self) -> None:
        nvml = self._nvml
        try:
            _, found = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us)
        except nvml.NVMLError_NotFound:  # none since then
            return
        new = [s for s in found if s.timeStamp > self._seen_us]
        if new:
            self._seen_us = max(s.timeStamp for s in new)
            with self._lock:
                self._samples += [s.sampleValue.uiVal / 100 for s in new]

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._fetch()
            except Exception:  # the driver is gone: training will say so itself
                return

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * POLL_S)


def resident_bytes() -> int | None:
    """Host memory that this process holds, pinned memory included; None where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


__all__ = ["Gauges", "GpuSampler", "resident_bytes"]
