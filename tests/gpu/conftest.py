import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def hold_up_streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to hold up the engine's copy streams at random from then on: an order that only held by luck would
    show."""

    def hold_up() -> None:
        from superoffload.engine.device import CudaDevice

        g = torch.Generator().manual_seed(3)

        def slow(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any, *args: Any) -> Any:
                result = method(self, *args)
                with torch.cuda.stream(getattr(self, "_" + method.__name__.split("_")[0])):
                    torch.cuda._sleep(int(torch.randint(0, 2_000_000, (1,), generator=g)))
                return result

            return wrapped

        for name in ("down_waits_for_compute", "up_waits_for_compute", "fetch_waits_for_compute"):
            monkeypatch.setattr(CudaDevice, name, slow(getattr(CudaDevice, name)))

    return hold_up
