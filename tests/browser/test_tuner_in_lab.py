"""The Tuner in a real JupyterLab, used as a person would: sliders by keyboard, figures by mouse, panels by button."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TUNER = """import superoffload as so
from superoffload.widgets import Tuner
profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
t = Tuner(profile)
t"""
RETAINED = ".so-tuner .noUi-handle[aria-label='Retained']"
CARDS = ".so-tuner .so-cards"


def press(page: Any, selector: str, key: str, times: int) -> None:
    page.page.locator(selector).first.focus()
    for _ in range(times):
        page.page.keyboard.press(key)


def value_of(page: Any, selector: str) -> int:
    return int(page.page.get_attribute(selector, "aria-valuetext"))


def wait_for_value(page: Any, selector: str, value: int) -> None:
    page.page.wait_for_function(
        "([s, v]) => document.querySelector(s).getAttribute('aria-valuetext') === v", arg=[selector, str(value)],
        timeout=20_000,
    )  # fmt: skip


def bar_of_block(page: Any, index: int) -> tuple[float, float]:
    """Screen position of a block's bar in the layer map."""
    x, y = page.page.evaluate(
        """i => {
            const map = document.querySelectorAll('.so-tuner .js-plotly-plot')[1];
            const bars = map.querySelector('.subplot.xy .bars .points').querySelectorAll('.point path');
            const b = bars[i].getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2];
        }""",
        index,
    )
    return x, y


def test_a_slider_moved_by_keyboard_changes_the_timeline(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("keyboard.ipynb", [TUNER])
    page.tuner()
    page.shot("tuner_light")
    assert "modelled, gh200" in page.text(CARDS)
    adam, cards, start = page.trace_data(0, "Adam on CPU", "x"), page.text(CARDS), value_of(page, RETAINED)
    press(page, RETAINED, "ArrowLeft", 5)
    wait_for_value(page, RETAINED, start - 5)
    page.until_text(".so-tuner .so-knobs", "set by hand")
    page.page.wait_for_function(
        "([sel, old]) => document.querySelector(sel).textContent !== old", arg=[CARDS, cards], timeout=20_000
    )
    page.page.wait_for_timeout(500)
    after = page.trace_data(0, "Adam on CPU", "x")
    assert sum(after) > sum(adam), "fewer retained buckets must give CPU Adam more to do"
    reach = "document.querySelector('.so-tuner .js-plotly-plot').layout.xaxis.range[1]"
    one = page.page.evaluate(reach)
    press(page, ".so-tuner select[aria-label='Steps drawn']", "ArrowDown", 2)
    page.page.wait_for_function(f"one => {reach} > 2.2 * one", arg=one, timeout=20_000)
    page.page.wait_for_timeout(300)
    page.shot("tuner_three_steps")
    panel = page.page.evaluate(
        "(t => [t.offsetWidth, t.offsetHeight, t.scrollWidth])(document.querySelector('.so-tuner'))"
    )
    assert panel[0] <= 848, f"laid out for 848 px, but {panel[0]} px wide"
    assert panel[1] <= 690, f"not on one screen: {panel[1]} px high"
    assert panel[2] <= panel[0] + 1, "something sticks out sideways"
    page.check_clean()


def pictures_and_report(page: Any, new_page: Callable[..., Any], folder: Path) -> None:
    """From the open export panel: the files are what they say, and the report opens without a network."""
    for text, last in (("PNG", "tuned-memory.png"), ("SVG", "tuned-memory.svg"), ("Trace", "tuned-trace.json"),
                       ("Report", "tuned-report.html")):  # fmt: skip
        page.page.click(f".so-tuner button:text-is('{text}')")
        page.until_text(".so-tuner .so-msg.good", last)
    for name in ("timeline", "memory"):
        png = (folder / f"tuned-{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(png[16:20], "big") == 2200
        svg = (folder / f"tuned-{name}.svg").read_text(encoding="utf-8")
        assert svg.startswith("<svg") and svg.endswith("</svg>")
        assert {"timeline": "per step (modelled, h200-pcie5)", "memory": "in percent of capacity"}[name] in svg
        (page.shots / f"export_{name}.png").write_bytes(png)
    alone = new_page()
    alone.page.context.set_offline(True)
    alone.page.goto(f"file://{folder / 'tuned-report.html'}")
    alone.page.wait_for_selector("#timeline .bars .point path", state="attached", timeout=20_000)
    alone.page.wait_for_selector("#state .bars .point path", state="attached", timeout=20_000)
    assert "h200-pcie5" in alone.text("h1")
    alone.shot("report")
    alone.check_clean()


def test_layer_map_machine_baseline_and_export(new_page: Callable[..., Any], lab: Any) -> None:
    page = new_page()
    page.run("click.ipynb", [TUNER])
    page.tuner()
    p = page.page
    p.click(".so-tuner button:has-text('Pin baseline')")
    page.until_text(CARDS, "±0")
    p.mouse.move(*bar_of_block(page, 20))
    p.wait_for_timeout(200)
    p.mouse.click(*bar_of_block(page, 20))
    p.wait_for_function(
        "() => document.querySelector('.so-tuner input[placeholder^=none]').value === '20'", timeout=20_000
    )
    p.wait_for_timeout(1100)  # quicker than a second it would be the same entry of the undo history
    # The same by keyboard.
    p.fill(".so-tuner input[placeholder^=none]", "1-2, 20")
    p.keyboard.press("Enter")
    p.wait_for_function(
        "() => document.querySelectorAll('.so-tuner .js-plotly-plot')[1]._fullData[0].marker.pattern.shape"
        ".filter(s => s === '/').length === 3",
        timeout=20_000,
    )
    p.fill(".so-tuner input[placeholder^=none]", "0")
    p.keyboard.press("Enter")
    page.until_text(".so-tuner .so-msg.error", "cannot flow")
    page.shot("tuner_error")
    p.click(".so-tuner button:has-text('Undo')")
    p.wait_for_selector(".so-tuner .so-msg.error", state="detached", timeout=20_000)
    p.select_option(".so-tuner select >> nth=0", "h200-pcie5")
    page.until_text(CARDS, "modelled, h200-pcie5")
    assert "%" in page.text(CARDS)
    p.click(".so-tuner button:has-text('Export')")
    p.click(".so-tuner button:has-text('Write config')")
    page.until_text(".so-tuner .so-msg.good", "tuned.json")
    assert "superoffload train --config tuned.json" in page.text(".so-tuner .so-code")
    page.shot("tuner_export")
    written = json.loads((lab.root / "tuned.json").read_text())
    assert written["hardware"]["name"] == "h200-pcie5"
    assert written["plan"]["flow_blocks"] == [20]
    pictures_and_report(page, new_page, lab.root)
    p.click(".so-tuner button:has-text('Measure')")
    page.until_text(".so-tuner .so-msg.warn", "Tuner(model, batch=batch)")
    page.check_clean()


def test_what_if_and_recompute_on_a_large_screen(new_page: Callable[..., Any]) -> None:
    """Figures of the machine typed in, a layer marked to be recomputed by mouse and by keyboard, at 1920 x 1080."""
    page = new_page(1920, 1080)
    page.run("what_if.ipynb", [TUNER])
    page.tuner()
    p = page.page
    page.shot("tuner_1920")
    p.click(".so-tuner button:text-is('Machine')")
    field = p.get_by_label("GPU memory, GB")
    field.fill("40")
    p.keyboard.press("Enter")
    page.until_text(CARDS, "modelled, gh200 edited")
    page.until_text(".so-tuner .so-note", "GPU memory 96 → 40 GB")
    assert p.eval_on_selector(".so-tuner select", "e => [e.value, e.getAttribute('aria-label')]")[1] == "Machine"
    page.shot("what_if_1920")
    p.click(".so-tuner button:text-is('Undo all changes')")
    p.wait_for_function("s => !document.querySelector(s).textContent.includes('edited')", arg=CARDS, timeout=20_000)
    p.click(".so-tuner button:text-is('Machine')")
    box = p.get_by_label("Recomputed layers")
    box.fill("3-5")
    p.keyboard.press("Enter")
    marks = "gd => [...document.querySelectorAll('.so-tuner .js-plotly-plot')][1]._fullData[4].marker.symbol"
    full = f"() => ({marks})().filter(s => s === 'circle').length"
    p.wait_for_function(f"() => ({full})() === 3", timeout=20_000)
    x, y = p.evaluate(
        """() => {
            const map = document.querySelectorAll('.so-tuner .js-plotly-plot')[1];
            const b = map.querySelectorAll('.scatterlayer .point')[7].getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2];
        }"""
    )
    p.mouse.move(x, y)
    p.wait_for_timeout(300)
    p.mouse.click(x, y)
    p.wait_for_function(f"() => ({full})() === 4", timeout=20_000)
    assert box.input_value() == "3-5, 7"
    page.shot("recompute_1920")
    widths = p.evaluate("(t => [t.offsetWidth, t.scrollWidth])(document.querySelector('.so-tuner'))")
    assert widths[1] <= widths[0] + 1, "something sticks out sideways"
    page.check_clean()


def test_a_reopened_notebook_shows_the_changed_state(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("reopen.ipynb", [TUNER])
    page.tuner()
    first = page.trace_data(0, "Adam on CPU", "x")
    start = value_of(page, RETAINED)
    press(page, RETAINED, "ArrowLeft", 8)
    wait_for_value(page, RETAINED, start - 8)
    page.page.wait_for_timeout(800)
    changed, cards = page.trace_data(0, "Adam on CPU", "x"), page.text(CARDS)
    assert sum(changed) != sum(first)
    page.menu("File", "Save Notebook")
    page.page.wait_for_timeout(800)
    again = new_page()  # another browser, the same kernel
    again.open("reopen.ipynb")
    again.tuner()
    assert value_of(again, RETAINED) == start - 8
    assert again.text(CARDS) == cards
    assert again.trace_data(0, "Adam on CPU", "x") == changed
    again.check_clean()


def test_dark_theme_and_run_panel(new_page: Callable[..., Any], lab: Any) -> None:
    run = lab.root / "run"
    run.mkdir()
    rows = [
        {"step": i + 1, "loss": 8 * 0.99**i + 1, "tokens_per_s": 900.0 + i, "verdict": "commit" if i % 9 else "clip"}
        for i in range(120)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 120, "steps": 200}))
    lab.theme("JupyterLab Dark")
    try:
        page = new_page()
        page.run(
            "dark.ipynb", [f"from superoffload.widgets import RunPanel\n{TUNER[:-2]}\ndisplay(RunPanel('run/'), t)"]
        )
        page.tuner()
        page.page.wait_for_timeout(500)
        colour = page.page.evaluate("document.querySelector('.so-tuner .js-plotly-plot').layout.font.color")
        assert colour == "#E6EAF0", "figures did not follow the dark theme"
        page.shot("tuner_dark")
        page.until_text(".so-run", "step 120 of 200")
        with (run / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"step": 121, "loss": 1.5, "tokens_per_s": 1100.0, "verdict": "commit"}) + "\n")
        page.until_text(".so-run", "step 121 of 200")  # it follows by itself
        page.page.evaluate("document.querySelector('.so-run').scrollIntoView({block: 'start'})")
        page.page.wait_for_timeout(500)
        page.shot("run_dark")
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")


def test_a_dark_page_is_readable_while_the_kernel_is_busy(new_page: Callable[..., Any], lab: Any) -> None:
    """As under Run All: the kernel learns of the theme only when all cells have run."""
    lab.theme("JupyterLab Dark")
    try:
        page = new_page()
        page.run("busy_dark.ipynb", [TUNER, "import time; time.sleep(15)"])
        page.tuner()
        colours = page.page.evaluate(
            """() => {
                const plot = document.querySelector('.so-tuner .js-plotly-plot');
                const colour = (at, what) => getComputedStyle(plot.querySelector(at))[what];
                return [document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status,
                        colour('.gridlayer path', 'stroke'),
                        ...[...document.querySelectorAll('.so-tuner .js-plotly-plot :is(.xtick text, .ytick text, '
                            + '.y2tick text, .y3tick text, .annotation-text)')].map(e => getComputedStyle(e).fill)];
            }"""
        )
        page.shot("tuner_dark_busy")
        assert colours[0] == "busy", "the test must look before the cells have run"
        assert all(int(c) < 128 for c in colours[1].strip("rgb()").split(",")), f"a bright grid: {colours[1]}"
        assert len(colours) > 15 and set(colours[2:]) == {"rgb(167, 176, 188)", "rgb(230, 234, 240)"}
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")
