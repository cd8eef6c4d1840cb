"""Figures that stand alone in a notebook: they follow a dark page, and what is saved of them stays on white."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
Image = pytest.importorskip("PIL.Image")

STEP = """import superoffload as so
from superoffload.widgets import plot_loss, plot_memory, plot_run, plot_timeline
profile = so.estimate("llama-7b", micro_batch=16, seq_len=4096, hardware="gh200")
plan = so.make_plan(profile, activations="none", check=False)  # does not fit: its line is a warning
trace = so.simulate(profile, plan)
plot_timeline(trace)"""
CELLS = [STEP, "plot_memory(trace.memory)", 'plot_loss("stood/").show()', 'plot_run("stood/")']
FIGURES = len(CELLS)
SEEN = """() => [...document.querySelectorAll('.jp-OutputArea .js-plotly-plot')].map(plot => {
    const paper = getComputedStyle(plot.querySelector('.main-svg')).backgroundColor;
    const texts = [...plot.querySelectorAll('text')].filter(t => t.textContent.trim() && !t.closest('.hoverlayer')
        && !(t.classList.contains('bartext') && !t.closest('.trace')?.querySelector('[style*="url"]')));
    return {paper, page: getComputedStyle(plot.closest('.jp-Notebook')).backgroundColor,
            inks: texts.map(t => [getComputedStyle(t).fill, t.textContent])};
})"""
"""Of every figure its paper, the page behind it and the inks of its texts, but for those on a coloured bar."""


def contrast(a: str, b: str) -> float:
    """WCAG 2's contrast of two colours as a browser says them."""

    def luminance(colour: str) -> float:
        parts = [float(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def figures(page: Any) -> list[dict[str, Any]]:
    """What the page shows, once all figures are drawn."""
    page.page.wait_for_function(
        "n => document.querySelectorAll('.jp-OutputArea .js-plotly-plot .main-svg text').length && "
        "document.querySelectorAll('.jp-OutputArea .js-plotly-plot').length === n", arg=FIGURES, timeout=150_000,
    )  # fmt: skip
    page.page.wait_for_timeout(300)
    found: list[dict[str, Any]] = page.page.evaluate(SEEN)
    return found


@pytest.mark.parametrize(("theme", "dark"), [("JupyterLab Dark", True), ("JupyterLab Light", False)])
def test_figures_follow_the_page(new_page: Callable[..., Any], lab: Any, theme: str, dark: bool) -> None:
    run = lab.root / "stood"
    run.mkdir(exist_ok=True)
    rows = [{"step": i + 1, "loss": 8 * 0.99**i + 1, "tokens_per_s": 900.0 + i, "verdict": "commit", "gpu_busy": 0.7,
             "cpu_busy": 0.5, "adam_busy": 0.6} for i in range(60)]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 60, "steps": 60}))
    lab.theme(theme)
    try:
        page = new_page(1280, 1900)
        page.run("stood.ipynb", CELLS)
        seen = figures(page)
        page.shot("figures_dark" if dark else "figures_light")
        for figure in seen:
            assert (figure["paper"] == "rgba(0, 0, 0, 0)") == dark, figure["paper"]
            on = figure["page"] if dark else figure["paper"]
            assert len(figure["inks"]) >= 8
            assert not [(ink, text) for ink, text in figure["inks"] if contrast(ink, on) < 4.5]
        # The mark takes no room, and the picture that the page saves is on white in either theme.
        assert page.page.evaluate("[...document.querySelectorAll('.so-page')].every(e => e.closest("
                                  "'.jp-OutputArea-child').clientHeight === 0)")  # fmt: skip
        first = page.page.locator(".js-plotly-plot").first
        first.hover()
        with page.page.expect_download() as saved:
            first.locator(".modebar-btn[data-title*='png' i]").click()
        picture = Image.open(Path(saved.value.path())).convert("RGB")
        assert picture.getpixel((2, 2)) == (255, 255, 255)
        ink = min(picture.crop((0, 0, picture.width, 40)).get_flattened_data(), key=sum)
        assert max(ink) < 70, "the title is dark"
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")


def test_a_change_of_the_theme_needs_no_kernel(new_page: Callable[..., Any], lab: Any) -> None:
    page = new_page(1280, 1900)
    page.run("stood_changes.ipynb", CELLS[:2])
    page.page.wait_for_selector(".js-plotly-plot .bars .point path", timeout=60_000, state="attached")
    page.menu("Kernel", "Shut Down Kernel")
    page.menu("Settings", "Theme")
    page.page.click(".lm-Menu-item:has-text('JupyterLab Dark')")
    page.page.wait_for_selector("body[data-jp-theme-light=false]", timeout=20_000, state="attached")
    page.page.wait_for_timeout(300)
    try:
        papers = [figure["paper"] for figure in page.page.evaluate(SEEN)]
        page.shot("figures_changed")
        assert papers == ["rgba(0, 0, 0, 0)"] * 2
    finally:
        lab.theme("JupyterLab Light")
