"""What the engine asks of a device. On a CPU-only machine the "GPU" is the CPU and a copy is a memory copy, so that
the same engine runs, and is tested, anywhere. Only this file and its callers in `engine/` touch CUDA streams.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from superoffload.errors import NotSupported
from superoffload.kernels import available_cores, native
from superoffload.kernels import norm_partials as norm_on_host
from superoffload.kernels.cast_ptx import CAST_PTX
from superoffload.layout import NORM_CHUNK

Stream = Literal["compute", "down", "fetch", "held"]
Chunk = tuple[int, int, int]
"""First element in the bucket, elements, index among the partial sums."""


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source, non_blocking=True)` for one that is called in every gradient's hook.

    Beside a thread that runs Python it waits once for Python's lock, where `copy_` waits four times: torch (2.11) takes
    the lock back for each reference that it counts to a tensor Python knows, and counts fewer for a list of them.
    """
    torch._foreach_copy_([target], [source], non_blocking=True)


class NoStream:
    """In a copy stream's place on the CPU, where all is done when the call returns."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def waits_for_compute(self) -> None: ...

    def waits(self, event: Any) -> None: ...

    def record(self, event: Any) -> None: ...


class CopyStream:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._fork = torch.cuda.Event()

    def use(self) -> AbstractContextManager[Any]:
        """What is enqueued inside goes to this stream."""
        return torch.cuda.stream(self.stream)

    def waits_for_compute(self) -> None:
        """Wait for all that has been enqueued where the caller computes."""
        self._fork.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._fork)

    def waits(self, event: Any) -> None:
        self.stream.wait_event(event)

    def record(self, event: Any) -> None:
        event.record(self.stream)


class HostDevice:
    """The CPU in the GPU's place. Streams do not exist: work is done when the call returns."""

    is_cuda = False

    def __init__(self, device: torch.device):
        self.device = device
        self.down = self.up = self.fetch = self.held = NoStream()
        self.cuda_api = native.CudaApi()
        self._norm_threads = available_cores()

    def alias(self, host: torch.Tensor, *, then: Callable[[], None] | None = None) -> torch.Tensor:
        """Host memory as the device's kernels see it: the same tensor, so that there is no last use to tell of."""
        return host

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream_id(self) -> int:
        return 0

    def continue_from(self, last: Any) -> Any:
        return None

    def new_event(self, *, timed: bool = False) -> Any:
        return None

    def event_handle(self, event: Any) -> int:
        return 0

    def record(self, event: Any) -> None: ...

    def compute_waits(self, event: Any) -> None: ...

    def host_waits(self, event: Any) -> None: ...

    def synchronize_compute(self) -> None: ...

    def chunk_table(self, chunks: Sequence[Chunk]) -> Any:
        return chunks

    def norm_partials(self, x: torch.Tensor, table: Any, out: torch.Tensor) -> None:
        """Partial sums of squares of the chunks of `table` in `x`, each at its place in `out`."""
        i = 0
        while i < len(table):  # chunks that follow one another in both arrays go in one call
            j, (start, count, index) = i + 1, table[i]
            while (
                j < len(table)
                and count % NORM_CHUNK == 0
                and table[j][0] == start + count
                and table[j][2] == index + (j - i)
            ):
                count += table[j][1]
                j += 1
            norm_on_host(x[start : start + count], out[index : index + (j - i)], threads=self._norm_threads)
            i = j

    def now(self, *, on: Stream = "compute") -> float:
        """A mark: the time itself."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        return float(mark)

    def anchor(self) -> None: ...

    def close(self) -> None: ...


class CudaDevice:
    """Persistent copy streams beside whatever stream computes. Streams and events are made once: fresh ones would
    make a new allocator pool each step."""

    is_cuda = True

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.down = CopyStream(device)
            """Gradients to the host, with their partial sums and tickets."""
            self.up = CopyStream(device)
            """New weights to the device; the worker enqueues them."""
            self.fetch = CopyStream(device)
            """Weights of flow blocks to the device."""
            self.held = CopyStream(device)
            """Held gradients back to the device, to be added to."""
            self._fork = torch.cuda.Event()
            self.cuda_api = self._driver_api()
        self._anchor_event = torch.cuda.Event(enable_timing=True)
        self._anchor_host = 0.0
        self.anchor()

    def _driver_api(self) -> Any:
        # The driver library is always in the process once torch has a CUDA context; nothing is linked against it.
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        torch.zeros(1, device=self.device)  # makes torch's primary context current
        if code := driver.cuCtxGetCurrent(ctypes.byref(context)):
            raise RuntimeError(f"cuCtxGetCurrent failed with CUDA driver error {code}")

        def address(name: str) -> int:
            return int(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0)

        api = native.CudaApi()
        api.ctx_set_current = address("cuCtxSetCurrent")
        api.memcpy_htod_async = address("cuMemcpyHtoDAsync_v2")
        api.event_record = address("cuEventRecord")
        api.get_error_string = address("cuGetErrorString")
        api.context = int(context.value or 0)
        api.upload_stream = int(self.up.stream.cuda_stream)
        api.stream_query = address("cuStreamQuery")
        api.download_stream = int(self.down.stream.cuda_stream)
        api.launch_kernel = address("cuLaunchKernel")
        module = ctypes.c_void_p()
        if code := driver.cuModuleLoadData(ctypes.byref(module), CAST_PTX.encode() + b"\0"):
            raise RuntimeError(f"cuModuleLoadData failed with CUDA driver error {code}")
        for name in ("cast_bf16", "cast_f16"):
            function = ctypes.c_void_p()
            if code := driver.cuModuleGetFunction(ctypes.byref(function), module, f"superoffload_{name}".encode()):
                raise RuntimeError(f"cuModuleGetFunction failed with CUDA driver error {code}")
            setattr(api, name, int(function.value or 0))
        return api

    @property
    def compute(self) -> torch.cuda.Stream:
        """The stream the caller computes on: in an autograd hook, the stream of that backward node."""
        return torch.cuda.current_stream(self.device)

    def alias(self, host: torch.Tensor, *, then: Callable[[], None] | None = None) -> torch.Tensor:
        """Pinned host memory as a tensor of this device: kernels read and write it across the link, slowly but
        rightly. Registered memory has the same address on both sides; what is not registered, torch refuses.

        Args:
            then: called when the last tensor that refers to the alias has gone, and the device is done with it.
        """
        memory = _Registered(host)
        if then is not None:
            # Not at exit: the process takes the memory along, and tensors may still be there.
            weakref.finalize(memory, _when_idle, self.device, os.getpid(), then).atexit = False
        found = torch.as_tensor(memory, device=self.device).view(host.dtype)
        if found.data_ptr() != host.data_ptr():
            raise RuntimeError(f"the device reads host memory at another address than {host.data_ptr():#x}")
        return found

    def guard(self) -> AbstractContextManager[Any]:
        """Makes this the current device: kernels launched by Triton go to the current one."""
        return torch.cuda.device(self.device)

    def stream_id(self) -> int:
        return int(self.compute.cuda_stream)

    def continue_from(self, last: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """Order the current stream after `last`, the one that was current before, and return it."""
        current = self.compute
        if last is not None and last != current:
            self._fork.record(last)
            current.wait_event(self._fork)
        return current

    def new_event(self, *, timed: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.up.stream)  # torch creates the CUDA event at its first record; the worker needs its handle
        return event

    def event_handle(self, event: Any) -> int:
        return int(event.cuda_event) if event is not None else 0

    def record(self, event: Any) -> None:
        event.record(self.compute)

    def compute_waits(self, event: Any) -> None:
        self.compute.wait_event(event)

    def host_waits(self, event: Any) -> None:
        event.synchronize()

    def synchronize_compute(self) -> None:
        self.compute.synchronize()

    def chunk_table(self, chunks: Sequence[Chunk]) -> Any:
        from superoffload.kernels import gpu

        return gpu.ChunkTable(list(chunks), self.device)

    def norm_partials(self, x: torch.Tensor, table: Any, out: torch.Tensor) -> None:
        from superoffload.kernels import gpu

        gpu.norm_partials(x, table, out)

    def now(self, *, on: Stream = "compute") -> Any:
        """A mark on a stream: a timed event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute if on == "compute" else getattr(self, on).stream)
        return event

    def seconds(self, mark: Any) -> float:
        """Time of a mark on the clock of `time.perf_counter`; waits for it."""
        mark.synchronize()
        return self._anchor_host + float(self._anchor_event.elapsed_time(mark)) / 1e3

    def anchor(self) -> None:
        """Tie CUDA's event clock to the host's, at a moment when the device is idle."""
        torch.cuda.synchronize(self.device)
        self._anchor_event.record(self.down.stream)
        self._anchor_event.synchronize()
        self._anchor_host = time.perf_counter()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)


class _Registered:
    """Bytes of pinned memory for torch's array interface. The tensor made from it keeps them alive."""

    def __init__(self, host: torch.Tensor):
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),), "typestr": "|u1", "data": (host.data_ptr(), False),
            "strides": None, "version": 3,
        }  # fmt: skip


def _when_idle(device: torch.device, process: int, then: Callable[[], None]) -> None:
    if os.getpid() != process:  # a forked child has no device
        return
    torch.cuda.synchronize(device)
    then()


Device = HostDevice | CudaDevice


def device_for(device: torch.device) -> Device:
    """The engine's view of `device`.

    Raises:
        NotSupported: neither a CUDA GPU nor the CPU.
    """
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return HostDevice(device)
    raise NotSupported(
        f"the model is on {device}", expected="a CUDA GPU or the CPU", remedy='Move it first: model.to("cpu")'
    )


def with_index(device: torch.device) -> torch.device:
    """`cuda` as the current CUDA device, `cuda:N`, as tensors name it."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


__all__ = ["Chunk", "CopyStream", "CudaDevice", "Device", "HostDevice", "copy", "device_for", "with_index"]
