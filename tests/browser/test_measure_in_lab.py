"""Measuring and calibrating in a real JupyterLab: the steps run, the table comes, the prediction changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MEASURE = """import torch
import superoffload as so
from transformers import LlamaConfig, LlamaForCausalLM
from superoffload.hardware import preset
from superoffload.widgets import Tuner
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, num_hidden_layers=3, intermediate_size=128, num_attention_heads=4, vocab_size=500,
                     max_position_embeddings=64, use_cache=False)
model = LlamaForCausalLM(config)
batch = torch.randint(0, 500, (2, 32))
profile = so.profile(model, batch, hardware=preset("laptop"), repeats=1)
t = Tuner(profile, model=model, batch=batch, autosave=False)
t"""


def test_measure_calibrate_and_back(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("measure.ipynb", [MEASURE])
    page.tuner()
    p = page.page
    p.click(".so-tuner button:has-text('Measure'):not(:has-text('steps'))")
    p.wait_for_selector(".so-tuner button:has-text('Measure steps')", timeout=20_000)
    assert p.is_disabled(".so-tuner button:has-text('Calibrate')")
    p.click(".so-tuner button:has-text('Measure steps')")
    p.wait_for_function("() => document.querySelector('.so-tuner').textContent.includes('Measured ')", timeout=90_000)
    before = page.text(".so-tuner .so-cards")
    p.click(".so-tuner button:has-text('Calibrate')")
    p.wait_for_function(
        "() => document.querySelector('.so-tuner').textContent.includes('Busy in a step')", timeout=20_000
    )
    page.page.wait_for_timeout(500)
    page.shot("measure_calibrated")
    assert page.text(".so-tuner .so-cards") != before
    p.click(".so-tuner button:has-text('Undo calibration')")
    page.until_text(".so-tuner .so-cards", before)
    page.check_clean()


RECORDED = """import superoffload as so
from superoffload.widgets import Tuner, plot_measured
t = Tuner(so.load_measured("clipped"), autosave=False)
t"""


def test_a_recorded_step_opens_under_its_prediction(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("recorded.ipynb", [RECORDED, "plot_measured(so.load_measured('clipped'))"])
    page.tuner()
    p = page.page
    assert len(page.trace_data(0, "Undo", "x")) > 50, "only the measured step has any"
    page.shot("recorded_step")
    p.click(".so-tuner button:has-text('Measure'):not(:has-text('steps'))")
    page.until_text(".so-tuner", "undone and redone with the clipped gradient")
    p.wait_for_timeout(500)
    page.shot("recorded_step_measure")
    p.click(".so-tuner button:has-text('Remove overlay')")
    p.wait_for_function("() => !document.querySelector('.so-tuner').textContent.includes('measured below')")
    p.click(".so-tuner button:has-text('Recorded step')")
    page.until_text(".so-tuner", "predicted above, measured below")
    p.evaluate("document.querySelectorAll('.js-plotly-plot')[2].scrollIntoView({block: 'center'})")
    p.wait_for_timeout(500)
    page.shot("recorded_step_figure")
    page.check_clean()
