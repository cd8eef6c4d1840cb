"""Host memory for what goes to the host and comes back: exact sizes, pinned, used again in every step."""

from __future__ import annotations

from typing import Any

import torch

from superoffload.engine.host_memory import HostMemory


class HostBuffer:
    """Host memory for one storage, and the events of its last copies."""

    __slots__ = ("copied", "data", "read")

    def __init__(self, data: torch.Tensor, cuda: bool):
        self.data = data
        self.copied: Any = torch.cuda.Event() if cuda else None
        """The last copy down."""
        self.read: Any = torch.cuda.Event() if cuda else None
        """The last copy up. Waiting for an event that was never recorded is no wait, and none is needed then."""


class BufferPool:
    """Host buffers that are used again and again, made to measure.

    Every step saves the same sizes, so from the second on each finds a buffer of exactly its size. Where sizes change,
    the smallest buffer that is large enough serves; one is made only where none is, and then idle ones, all of them
    too small, are given up for it first. So the pool grows only when all of it is in use.
    """

    def __init__(self, host: HostMemory, *, cuda: bool):
        self._host, self._cuda = host, cuda
        self._idle: dict[int, list[HostBuffer]] = {}
        """By size. A size that was ever made has a list, so that `give` only appends."""
        self.bytes = 0
        """Of all buffers, in use or idle."""
        self.made = 0
        """Buffers made so far."""

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(buffers) for size, buffers in self._idle.items())

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least `nbytes`.

        Raises:
            EngineError: the system has no such memory, or the driver refuses to pin it.
        """
        exact = self._idle.setdefault(nbytes, [])
        if exact:
            return exact.pop()
        sizes = sorted(size for size, buffers in self._idle.items() if buffers)
        for size in sizes:
            if size > nbytes:
                return self._idle[size].pop()
        freed = 0
        for size in sizes:
            while self._idle[size] and freed < nbytes:
                old = self._idle[size].pop()
                freed += size
                if old.copied is not None:
                    old.copied.synchronize()
                    old.read.synchronize()
                self._host.free(old.data)
        self.bytes -= freed
        data = self._host.zeros(nbytes, torch.uint8, pinned=True)
        self.bytes += nbytes
        self.made += 1
        return HostBuffer(data, self._cuda)

    def give(self, buffer: HostBuffer) -> None:
        """Called by whichever thread drops the last saved tensor, garbage collection included: one append, no lock."""
        self._idle[buffer.data.numel()].append(buffer)
