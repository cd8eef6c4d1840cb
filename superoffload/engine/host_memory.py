"""Host memory of the engine: exact sizes, page-locked where a copy engine reads or writes it, near the GPU.

A caching pinned allocator rounds up to powers of two; here memory is mapped as it is needed and registered with the
driver, so that 2 bytes per parameter cost 2 bytes per parameter. Large tensors lie on huge pages, bound to the
placement's NUMA node before anything touches them, and are touched by many threads: one thread zeroes a few GB/s.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from superoffload.engine.placement import Placement, bind_pages
from superoffload.errors import EngineError
from superoffload.kernels import native
from superoffload.units import MIB, format_bytes

MAPPED_BYTES = 2 * MIB
"""Tensors from a huge page on are mapped; smaller ones come from torch's allocator, wherever that puts them."""
TOUCH_BYTES = 1024 * MIB
"""Touched at a time, so that a bar can move."""
SHOWN_FROM_BYTES = 8 * TOUCH_BYTES
"""Below it nobody waits long enough to ask. A virtual machine whose memory grows as it is touched takes seconds for as
much as that."""


class HostMemory:
    """Allocates host tensors and knows how many bytes of them are pinned, and how many bound to a NUMA node."""

    def __init__(self, *, can_pin: bool, placement: Placement | None = None, threads: int = 1):
        self._can_pin = can_pin
        self.placement = placement or Placement(reason="no placement given")
        self._threads = threads
        self._registered: list[torch.Tensor] = []
        self._bound: set[int] = set()
        """Addresses of tensors whose pages are bound to the node."""
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self.bound_bytes = 0
        self.unbound_reason = ""
        """Why the last large tensor is not bound to a node; empty when all are."""
        self._bar: Any = None

    @contextlib.contextmanager
    def showing(self, total: int) -> Iterator[None]:
        """Show how much of `total` bytes the body has touched, on a terminal or in a notebook."""
        if total < SHOWN_FROM_BYTES:
            yield
            return
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        try:
            with tqdm(total=total, unit="B", unit_scale=True, desc="host memory", disable=None) as self._bar:
                yield
        finally:
            self._bar = None

    def zeros(self, n: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        """A zeroed one-dimensional tensor of `n` elements.

        Raises:
            EngineError: the system has no memory of that size, or the driver refuses to pin it, with the size and the
                limits to look at.
        """
        size = n * dtype.itemsize
        if size >= MAPPED_BYTES:
            tensor = self._mapped(size, dtype)
        else:
            tensor = torch.zeros(n, dtype=dtype, device="cpu")
        if not (pinned and self._can_pin and size):
            self.pageable_bytes += size
            return tensor
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
        if code != 0:
            raise EngineError(
                f"cannot pin {format_bytes(size)} of host memory (CUDA error {code}; {format_bytes(self.pinned_bytes)} "
                "are pinned already)",
                remedy="Raise the memlock limit (ulimit -l), or lower what is pinned: retain more buckets on the GPU",
            )
        self._registered.append(tensor)
        self.pinned_bytes += size
        return tensor

    def _mapped(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Fresh pages: bound, then made by the pool's kind of threads. The tensor keeps the mapping alive."""
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise EngineError(
                f"cannot map {format_bytes(size)} of host memory: {e.strerror}",
                remedy="Retain more buckets on the GPU, or raise the limit (ulimit -v, the container's memory)",
            ) from e
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=dtype)
        address = tensor.data_ptr()
        reason = bind_pages(address, size, self.placement, self.bound_bytes)
        if reason:
            self.unbound_reason = reason
        else:
            self.bound_bytes += size
            self._bound.add(address)
        code = 0
        for start in range(0, size, TOUCH_BYTES):
            part = min(TOUCH_BYTES, size - start)
            code = native.first_touch(address + start, part, self._threads, list(self.placement.cores)) or code
            if self._bar is not None:
                self._bar.update(part)
        if code:
            self.unbound_reason = f"threads cannot be bound to cores {self.placement.cores}: {os.strerror(code)}"
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Unpin one tensor that `zeros` gave, which nothing reads or writes any more, and stop counting it."""
        size = tensor.numel() * tensor.element_size()
        if tensor.data_ptr() in self._bound:
            self._bound.remove(tensor.data_ptr())
            self.bound_bytes -= size
        at = next((i for i, t in enumerate(self._registered) if t is tensor), None)
        if at is None:
            self.pageable_bytes -= size
            return
        _unpin(tensor.data_ptr())
        del self._registered[at]
        self.pinned_bytes -= size

    def lend(self, tensor: torch.Tensor) -> Callable[[], None]:
        """What unpins a tensor that `zeros` gave, to be called when the device no longer refers to it: until then it
        stays pinned, also after `release`."""
        self._registered = [t for t in self._registered if t is not tensor]
        return functools.partial(_unpin, tensor.data_ptr())

    def release(self) -> None:
        """Unpin everything but what is lent; the tensors live on as ordinary memory for as long as somebody holds
        them."""
        for tensor in self._registered:
            _unpin(tensor.data_ptr())
        self._registered.clear()
        self._bound.clear()
        self.pinned_bytes = self.pageable_bytes = self.bound_bytes = 0


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
