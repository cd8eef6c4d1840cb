"""Host memory of the engine: exact sizes, page-locked where a copy engine reads or writes it.

A caching pinned allocator rounds up to powers of two; here memory is allocated as it is needed and registered with the
driver, so that 2 bytes per parameter cost 2 bytes per parameter.
"""

from __future__ import annotations

import torch

from superoffload.errors import EngineError
from superoffload.units import format_bytes


class HostMemory:
    """Allocates host tensors and knows how many bytes of them are pinned."""

    def __init__(self, *, can_pin: bool):
        self._can_pin = can_pin
        self._registered: list[torch.Tensor] = []
        self.pinned_bytes = 0
        self.pageable_bytes = 0

    def zeros(self, n: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        """A zeroed one-dimensional tensor of `n` elements.

        Raises:
            EngineError: the driver refuses to pin it, with the size and the limits to look at.
        """
        tensor = torch.zeros(n, dtype=dtype, device="cpu")
        size = tensor.numel() * tensor.element_size()
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

    def release(self) -> None:
        """Unpin everything; the tensors live on as ordinary memory for as long as somebody holds them."""
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()
        self.pinned_bytes = self.pageable_bytes = 0
