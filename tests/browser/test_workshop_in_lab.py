"""The workshop's widgets in a real JupyterLab: a guess is typed, the link dragged by keyboard, a storm switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CELLS = [
    """import superoffload as so
from superoffload.widgets.workshop import Lesson, LinkKnob, StormSwitch
from superoffload.workshop import StepTimes
lesson = Lesson("02")
guess = lesson.predict("How long is a step?", unit="s", low=0, high=5, default=1.5)
guess""",
    """profile = so.estimate("bench-3b", micro_batch=4, seq_len=2048, hardware="gh200")
knob = LinkKnob(profile, (16.0, 64.0, 450.0))
knob""",
    """storm = StormSwitch(StepTimes(1.0, 1.4, 0.5, 10), steps=60, machine="gh200")
storm""",
]
HANDLE = ".so-link .noUi-handle[aria-label='Link each way']"


def test_guess_link_and_storm_in_the_dark(new_page: Callable[..., Any], lab: Any) -> None:
    """In the dark theme: a figure that stayed light could not be read there."""
    lab.theme("JupyterLab Dark")
    page = new_page(height=1700)
    try:
        page.run("workshop.ipynb", CELLS)
        p = page.page
        p.wait_for_selector(".so-storm .js-plotly-plot .scatterlayer", timeout=60_000, state="attached")
        p.wait_for_selector(HANDLE, timeout=30_000)
        p.fill(".so-guess input[type=number]", "2.5")
        p.keyboard.press("Enter")
        page.until_text(".so-link", "At 16 GB/s")
        p.locator(HANDLE).focus()
        for _ in range(2):
            p.keyboard.press("ArrowRight")
        page.until_text(".so-link", "At 450 GB/s")
        p.wait_for_function(
            "() => document.querySelector('.so-link .js-plotly-plot').layout.shapes[0].x0 === 450", timeout=20_000
        )
        before = page.text(".so-storm")
        p.click(".so-storm input[type=checkbox]")
        p.wait_for_function(
            "old => document.querySelector('.so-storm').textContent !== old", arg=before, timeout=20_000
        )
        p.wait_for_timeout(400)
        page.shot("workshop_dark")
        ink = p.evaluate("getComputedStyle(document.querySelector('.so-link .gtitle')).fill")
        assert sum(map(int, ink[4:-1].split(","))) > 380, f"titles are drawn in {ink}"
        widths = p.evaluate("(e => [e.offsetWidth, e.scrollWidth])(document.querySelector('.so-link'))")
        assert widths[1] <= widths[0] + 1, "something sticks out sideways"
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")
