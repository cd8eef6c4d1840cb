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
        from superoffload.engine.device import CopyStream

        g = torch.Generator().manual_seed(3)

        def slow(method: Callable[..., None]) -> Callable[..., None]:
            def wrapped(self: CopyStream, *args: Any) -> None:
                method(self, *args)
                with self.use():
                    torch.cuda._sleep(int(torch.randint(0, 2_000_000, (1,), generator=g)))

            return wrapped

        for name in ("waits_for_compute", "waits"):
            monkeypatch.setattr(CopyStream, name, slow(getattr(CopyStream, name)))

    return hold_up
