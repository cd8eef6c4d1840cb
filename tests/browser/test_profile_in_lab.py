"""torch's profiler in a real JupyterLab: drawn here without a network, and TensorBoard below the cell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

STEP = """import torch
import superoffload as so
from superoffload.widgets import plot_profile
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
x, opt = torch.randn(16, 64), torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()"""


def test_a_profile_is_drawn_without_a_network(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run(
        "profile.ipynb", [STEP, "run = so.to_tensorboard(step, launch=False)\nrun.summary", "plot_profile(run.file)"]
    )
    page.page.wait_for_selector(".js-plotly-plot .bars .point path", timeout=60_000, state="attached")
    text = page.text(".jp-Notebook")
    assert "aten::" in text and "(measured), no GPU" in text  # which operators are the dearest depends on the load
    page.page.evaluate("document.querySelector('.js-plotly-plot').scrollIntoView({block: 'end'})")
    page.page.wait_for_timeout(500)
    page.shot("profile")
    page.check_clean()


def test_tensorboard_opens_below_the_cell(new_page: Callable[..., Any], lab: Any) -> None:
    pytest.importorskip("torch_tb_profiler", reason="the tensorboard extra is not installed")
    from tensorboard import manager

    page = new_page()
    page.run("tensorboard.ipynb", [STEP, "run = so.to_tensorboard(step, 'runs', name='mine')"])
    try:
        page.page.wait_for_selector(".jp-OutputArea iframe[id^=tensorboard-frame]", timeout=90_000)
        frame = page.page.frame_locator(".jp-OutputArea iframe[id^=tensorboard-frame]")
        frame.locator("text=PYTORCH_PROFILER").first.wait_for(timeout=60_000)
        page.page.wait_for_timeout(1000)
        page.shot("tensorboard")
    finally:
        for info in manager.get_all():
            if info.logdir == str(lab.root / "runs"):
                os.kill(info.pid, signal.SIGTERM)
