"""The Tuner in a real JupyterLab, used as a person would: sliders by keyboard, figures by mouse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

TUNER_CELL = """import superoffload as so
from superoffload.widgets import Tuner
profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
t = Tuner(profile)
t"""


def open_tuner(page: object, name: str = "tuner.ipynb") -> None:
    page.lab.notebook(name, [TUNER_CELL])
    page.open(name)
    page.run_all()
    page.page.wait_for_selector(".so-tuner .js-plotly-plot .bars .point path", timeout=90_000, state="attached")
    page.page.wait_for_selector(".so-tuner .noUi-handle[aria-label='Retained']", timeout=20_000)
    page.page.wait_for_timeout(800)


def test_a_slider_moved_by_keyboard_changes_the_timeline(new_page: Callable[..., object]) -> None:
    page = new_page()
    open_tuner(page)
    p = page.page
    page.shot("tuner")
    before = page.trace_data(0, "Adam on CPU", "x")
    cards = p.text_content(".so-tuner .so-cards")
    assert "modelled, gh200" in cards
    handle = p.locator(".so-tuner .noUi-handle[aria-label='Retained']").first
    handle.focus()
    start = int(handle.get_attribute("aria-valuetext"))
    for _ in range(4):
        p.keyboard.press("ArrowRight")
    p.wait_for_function(
        "v => document.querySelector(\".so-tuner .noUi-handle[aria-label='Retained']\").getAttribute('aria-valuetext') === v",
        arg=str(start + 4),
        timeout=20_000,
    )
    p.wait_for_function(
        "n => { const t = document.querySelector('.so-tuner .js-plotly-plot')._fullData.find(t => t.name === 'Adam on CPU');"
        " return Array.from(t.x._inputArray || t.x).length !== n[0] || Array.from(t.x._inputArray || t.x)[0] !== n[1]"
        " || document.querySelector('.so-tuner .so-cards').textContent !== n[2]; }",
        arg=[len(before), before[0], cards],
        timeout=20_000,
    )
    assert p.text_content(".so-tuner .so-cards") != cards
    page.shot("tuner_after_keys")
    page.check_clean()
