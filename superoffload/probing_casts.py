"""Measures where casts are best made: one bucket from end to end under each placement, in each direction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from superoffload import kernels
from superoffload.hardware import Casts, CastTimes
from superoffload.plan import CASTS, Cast
from superoffload.probing_link import median_seconds
from superoffload.profiling_state import Clock

BUCKET_PARAMS = 1 << 24
"""A bucket of 64 MiB of fp32, the paper's size."""


class OneBucket:
    """A bucket of a bf16 model with everything that any placement needs, and its way in each direction.

    Without a GPU its part is played by the CPU, as in the engine: nothing is pinned, and a copy is a memory copy.
    """

    def __init__(self, device: torch.device, threads: int):
        n, self.threads = BUCKET_PARAMS, threads
        pinned = device.type == "cuda"

        def host(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype, device="cpu", pin_memory=pinned)

        self.state = [host(torch.float32), *(torch.zeros(n, device="cpu") for _ in range(2))]
        self.near16 = torch.full((n,), 1e-3, dtype=torch.bfloat16, device=device)
        """The gradient as backward leaves it, and the weights as forward reads them."""
        self.near32 = torch.zeros(n, dtype=torch.float32, device=device)
        self.host16, self.host32 = host(torch.bfloat16), host(torch.float32)
        self.cuda = pinned

    def _arrived(self) -> None:
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    def _adam(self, gradient: torch.Tensor, out16: torch.Tensor | None = None) -> None:
        p, m, v = self.state
        kernels.adam_step(p, m, v, gradient, lr=1e-5, step=10, out16=out16, threads=self.threads)

    def down(self, cast: Cast) -> None:
        """The gradient from the GPU into the Adam step."""
        if cast == "gpu":
            self.near32.copy_(self.near16)
            self.host32.copy_(self.near32, non_blocking=True)
            self._arrived()
            return self._adam(self.host32)
        self.host16.copy_(self.near16, non_blocking=True)
        self._arrived()
        if cast == "fused":
            return self._adam(self.host16)
        kernels.cast(self.host16, self.host32, threads=self.threads)
        return self._adam(self.host32)

    def up(self, cast: Cast) -> None:
        """The Adam step and its weights to the GPU."""
        p = self.state[0]
        self._adam(self.host32, self.host16 if cast == "fused" else None)
        if cast == "gpu":
            self.near32.copy_(p, non_blocking=True)
            self.near16.copy_(self.near32)
        else:
            if cast == "cpu":
                kernels.cast(p, self.host16, threads=self.threads)
            self.near16.copy_(self.host16, non_blocking=True)
        self._arrived()


def measure_casts(device: torch.device, threads: int) -> Casts:
    """Time one bucket alone under each placement and in each direction, on `threads` CPU threads."""
    bucket, clock = OneBucket(device, threads), Clock(torch.device("cpu"))  # each way ends on the host

    def times(way: Callable[[Cast], None]) -> CastTimes:
        seconds = {c: median_seconds(partial(way, c), clock) for c in CASTS}
        return CastTimes(**{c: s / BUCKET_PARAMS * 1e9 for c, s in seconds.items()})

    return Casts(down=times(bucket.down), up=times(bucket.up), bucket_params=BUCKET_PARAMS, threads=threads)


__all__ = ["OneBucket", "measure_casts"]
