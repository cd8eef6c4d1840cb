"""What a run reads of a GPU while it works, and while it does not."""

from __future__ import annotations

import time

import pytest
import torch

from superoffload.train.gauges import Gauges


def busy(gauges: Gauges, x: torch.Tensor, *, idle_s: float) -> float:
    gauges.start_over()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
        time.sleep(idle_s)
    share = gauges.read()["gpu_busy"]
    assert share is not None
    return float(share)


def test_gauges_follow_what_the_gpu_does() -> None:
    device = torch.device("cuda")
    gauges = Gauges(device)
    try:
        said = gauges.facts()
        if said["gpu_busy_source"].startswith("not measured"):
            pytest.skip(said["gpu_busy_source"])
        x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)  # one product takes 1.5 ms on an H200
        at_work, resting = busy(gauges, x, idle_s=0.0), busy(gauges, x, idle_s=0.02)
        assert at_work > 0.6 and resting < at_work - 0.2
        torch.empty(1 << 30, dtype=torch.uint8, device=device)  # given back at once: a peak is seen all the same
        read = gauges.read()
        assert read["gpu_peak_bytes"] >= (1 << 30) + x.nbytes
        assert read["gpu_peak_bytes"] <= read["gpu_reserved_bytes"] <= said["gpu_capacity_bytes"]
        assert gauges.read()["gpu_peak_bytes"] < 1 << 30, "each reading is of its own time"
    finally:
        gauges.close()
