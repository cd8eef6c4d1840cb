"""Compare and Autotune in a real JupyterLab, as a person uses them: in the Tuner and alone, by mouse and keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TUNER = """import superoffload as so
from superoffload.widgets import Autotune, Compare, Tuner
profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
t = Tuner(profile, autosave=False)
t"""
COMPARE = """from superoffload.plan_presets import preset_plan
c = Compare({n: preset_plan(n, profile) for n in ("ZeRO-Offload-like", "planner's own", "all on the GPU")}, profile)
c"""
AUTOTUNE = """a = Autotune(profile)
a"""


def see(page: Any, selector: str) -> None:
    """Scroll an element to the top and let it settle."""
    page.page.evaluate("s => document.querySelector(s).scrollIntoView({block: 'start'})", selector)
    page.page.wait_for_timeout(600)


def fits(page: Any, selector: str, height: int = 690) -> None:
    """On one screen of 1280 x 800 with the file browser open, nothing sticking out."""
    width, tall, inside = page.page.evaluate(
        "s => (e => [e.offsetWidth, e.offsetHeight, e.scrollWidth])(document.querySelector(s))", selector
    )
    assert width <= 848, f"laid out for 848 px, but {width} px wide"
    assert inside <= width + 1, "something sticks out sideways"
    assert tall <= height, f"not on one screen: {tall} px high"


def unnamed(page: Any, selector: str) -> list[str]:
    """Controls within an element that a screen reader could not name."""
    found: list[str] = page.page.evaluate(
        """s => [...document.querySelectorAll(`${s} input, ${s} select, ${s} button`)].filter(e => e.offsetParent
            && !(e.textContent.trim() && e.tagName === 'BUTTON') && !e.title && !e.getAttribute('aria-label')
            && !(e.id && document.querySelector(`label[for="${e.id}"]`)) && !e.closest('label'))
            .map(e => e.outerHTML.slice(0, 120))""",
        selector,
    )
    return found


def test_compare_from_the_tuner(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("compare_tuner.ipynb", [TUNER])
    page.tuner()
    p = page.page
    p.click(".so-tuner button:has-text('Pin baseline')")
    page.until_text(".so-tuner .so-cards", "±0")
    p.locator(".so-tuner .noUi-handle[aria-label='Retained']").first.focus()
    for _ in range(10):
        p.keyboard.press("ArrowLeft")
    page.until_text(".so-tuner .so-knobs", "set by hand")
    p.click(".so-tuner button:has-text('Compare')")
    page.until_text(".so-compare .so-table", "pinned baseline")
    assert "Retained buckets" in page.text(".so-compare .so-table")
    assert page.text(".so-compare .so-table").count("modelled, gh200") == 2
    p.locator(".so-ticks label:has-text('ZeRO-Offload-like') input").focus()
    p.keyboard.press("Space")
    page.until_text(".so-compare .so-table", "ZeRO-Offload-like")
    p.locator(".so-ticks label:has-text('all on the GPU') input").check()
    page.until_text(".so-compare .so-table", "does not fit")
    see(page, ".so-tuner")
    page.shot("compare_tuner_light")
    fits(page, ".so-ticks")
    p.locator(".so-tuner .noUi-handle[aria-label='Retained']").first.focus()
    before = page.text(".so-compare .so-table")
    p.keyboard.press("ArrowRight")
    p.wait_for_function(
        "old => document.querySelector('.so-compare .so-table').textContent !== old", arg=before, timeout=20_000
    )
    p.click(".so-compare button:has-text('What if')")
    page.until_text(".so-compare", "Framed: the plan itself")
    see(page, ".so-tuner")
    page.shot("whatif_tuner_light")
    # A cell loads its plan by mouse, and by keyboard from the menus.
    cell = """([column, row]) => {
        const gd = document.querySelector('.so-compare .js-plotly-plot'), box = gd.getBoundingClientRect();
        const {xaxis: x, yaxis: y} = gd._fullLayout;
        return [box.x + x._offset + x.c2p(column), box.y + y._offset + y.c2p(row)];
    }"""
    p.mouse.click(*p.evaluate(cell, [0, 1]))
    page.until_text(".so-compare .so-msg.good", "in the Tuner")
    page.until_text(".so-compare .so-msg.good", "bucket size, MiB")
    p.mouse.move(10, 10)
    p.wait_for_timeout(500)
    page.shot("whatif_loaded_light")
    page.until_text(".so-compare", "Framed: the plan itself")
    menu = p.locator(".so-compare select >> nth=4")
    menu.focus()
    p.keyboard.press("ArrowDown")
    p.locator(".so-compare button:has-text('Load this point')").focus()
    p.keyboard.press("Enter")
    page.until_text(".so-compare .so-msg.good", "Undo there takes it back")
    # The figure of the other page was not there meanwhile, and has the last plan when it is again.
    p.click(".so-compare button:has-text('Side by side')")
    p.wait_for_selector(".so-compare .js-plotly-plot .bars .point path", state="attached", timeout=20_000)
    p.locator(".so-tuner .noUi-handle[aria-label='Retained']").first.focus()
    drawn = """() => document.querySelector('.so-compare .js-plotly-plot')._fullData.map(
        t => Array.from((t.x || {})._inputArray || t.x || []).reduce((a, b) => a + b, 0)).join()"""
    before = p.evaluate(drawn)
    for _ in range(6):
        p.keyboard.press("ArrowRight")
    p.wait_for_function(f"old => ({drawn})() !== old", arg=before, timeout=20_000)
    assert not unnamed(page, ".so-compare"), unnamed(page, ".so-compare")
    page.check_clean()


def test_compare_alone_in_the_dark(new_page: Callable[..., Any], lab: Any) -> None:
    lab.theme("JupyterLab Dark")
    try:
        page = new_page()
        page.run("compare_dark.ipynb", [TUNER.removesuffix("\nt"), COMPARE])
        p = page.page
        p.wait_for_selector(".so-compare .js-plotly-plot .bars", timeout=60_000, state="attached")
        see(page, ".so-compare")
        page.shot("compare_dark")
        fits(page, ".so-compare")
        p.click(".so-compare button:has-text('What if')")
        page.until_text(".so-compare", "Framed: the plan itself")
        p.select_option(".so-compare select >> nth=0", "planner's own")
        page.until_text(".so-compare", "everything else as in planner's own")
        p.click(".so-compare button:has-text('Batch')")
        page.until_text(".so-compare .so-table caption", "planner's own")
        p.wait_for_function(
            "() => document.querySelector('.so-compare .js-plotly-plot').layout.xaxis.title.text"
            " === 'micro-batch, sequences'",
            timeout=30_000,
        )
        see(page, ".so-compare")
        unfit = p.evaluate(
            """() => {
                const gd = document.querySelector('.so-compare .js-plotly-plot');
                const z = gd._fullData[1].z, row = z.findIndex(r => Array.from(r).includes(1));
                const column = Array.from(z[row]).indexOf(1), box = gd.getBoundingClientRect();
                const {xaxis: x, yaxis: y} = gd._fullLayout;
                return [box.x + x._offset + x.c2p(column), box.y + y._offset + y.c2p(row)];
            }"""
        )
        p.mouse.move(*unfit)
        page.until_text(".so-compare .hoverlayer", "does not fit")
        page.shot("whatif_dark")
        fits(page, ".so-compare")
        p.click(".so-compare button:has-text('Link')")
        page.until_text(".so-compare", "alike both ways")
        p.mouse.move(10, 10)
        p.wait_for_timeout(400)
        page.shot("whatif_link_dark")
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")


def test_autotune_from_the_tuner(new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.run("autotune.ipynb", [TUNER, "t.plan.reasons.get('bucket_mb', 'by hand')"])
    page.tuner()
    p = page.page
    p.locator(".so-tuner .noUi-handle[aria-label='Retained']").first.focus()
    for _ in range(12):
        p.keyboard.press("ArrowLeft")
    page.until_text(".so-tuner .so-knobs", "set by hand")
    p.click(".so-tuner button:has-text('Autotune')")
    p.wait_for_selector(".so-autotune button:has-text('Search')")
    p.fill(".so-autotune input[placeholder^='all 96']", "48")
    p.keyboard.press("Tab")
    p.fill(".so-autotune input[type=number]", "100000")
    p.keyboard.press("Tab")
    p.click(".so-autotune button:has-text('Search')")
    page.until_text(".so-autotune", "best so far")
    p.click(".so-autotune button:has-text('Search')")
    page.until_text(".so-autotune .so-msg.error", "a search is running")
    drawn = "() => document.querySelectorAll('.so-autotune .js-plotly-plot .points path').length"
    p.wait_for_function(f"{drawn} && ({drawn})() >= 10", timeout=30_000)
    first = p.evaluate(drawn)
    p.wait_for_function(f"n => ({drawn})() > n", arg=first, timeout=30_000)  # it grows
    see(page, ".so-tuner")
    page.shot("autotune_running_light")
    # A point of the growing picture loads its plan.
    x, y = p.evaluate(
        """() => {
            const gd = document.querySelector('.so-autotune .js-plotly-plot'), box = gd.getBoundingClientRect();
            const best = gd._fullData.find(t => t.name === 'best'), {xaxis: x, yaxis: y} = gd._fullLayout;
            return [box.x + x._offset + x.c2p(best.x[0]), box.y + y._offset + y.c2p(best.y[0])];
        }"""
    )
    p.mouse.click(x, y)
    page.until_text(".so-autotune .so-msg.good", "is in the Tuner")
    p.mouse.move(10, 10)
    # The kernel answers while it searches: the second cell runs.
    p.click(".jp-CodeCell >> nth=1")
    p.keyboard.press("Control+Enter")
    p.wait_for_function(
        "() => /\\[[2-9]\\d*\\]/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[1].textContent)",
        timeout=20_000,
    )
    p.click(".so-autotune button:has-text('Cancel')")
    page.until_text(".so-autotune .so-msg.good", "stopped early")
    p.wait_for_selector(".so-autotune .js-plotly-plot .points path", state="attached", timeout=30_000)
    see(page, ".so-tuner")
    page.shot("autotune_light")
    # By keyboard: the list, then the button.
    p.locator(".so-autotune select[size]").focus()
    p.keyboard.press("ArrowDown")
    p.keyboard.press("ArrowDown")
    p.locator(".so-autotune button:has-text('Load this plan')").focus()
    p.keyboard.press("Enter")
    page.until_text(".so-autotune .so-msg.good", "is in the Tuner")
    page.until_text(".so-tuner .so-knobs", "found by the search")
    # By mouse: the kept plan that needs least memory stands alone.
    x, y, told = p.evaluate(
        """() => {
            const gd = document.querySelector('.so-autotune .js-plotly-plot'), box = gd.getBoundingClientRect();
            const kept = gd._fullData.find(t => t.name.startsWith('kept')), {xaxis: x, yaxis: y} = gd._fullLayout;
            const gb = Array.from(kept.x), i = gb.indexOf(Math.min(...gb));
            return [box.x + x._offset + x.c2p(gb[i]), box.y + y._offset + y.c2p(kept.y[i]), kept.hovertext[i]];
        }"""
    )
    p.mouse.move(x, y)
    page.until_text(".so-autotune .hoverlayer", told.split(":")[0])
    page.shot("autotune_hover_light")
    p.mouse.click(x, y)
    page.until_text(".so-autotune .so-msg.good", f"{told.split(':')[0]} is in the Tuner")
    page.until_text(".so-autotune", "The same as the Tuner's plan")
    assert not unnamed(page, ".so-autotune"), unnamed(page, ".so-autotune")
    fits(page, ".so-autotune")
    page.check_clean()


def test_autotune_alone_in_the_dark(new_page: Callable[..., Any], lab: Any) -> None:
    lab.theme("JupyterLab Dark")
    try:
        page = new_page()
        page.run("autotune_dark.ipynb", [TUNER.removesuffix("\nt"), AUTOTUNE])
        p = page.page
        p.wait_for_selector(".so-autotune button:has-text('Search')", timeout=60_000)
        p.select_option(".so-autotune select >> nth=0", "least GPU memory")
        p.click(".so-autotune button:has-text('Search')")
        page.until_text(".so-autotune .so-msg.error", "Fill in Tokens/s")
        p.fill(".so-autotune input[placeholder^='all 96']", "48")
        p.fill(".so-autotune input[placeholder=needed]", "9,000")
        p.keyboard.press("Tab")
        p.click(".so-autotune button:has-text('Search')")
        p.wait_for_selector(".so-autotune .so-msg.good", timeout=90_000)
        p.wait_for_selector(".so-autotune .js-plotly-plot .points path", state="attached", timeout=30_000)
        p.locator(".so-autotune select[size]").focus()
        p.keyboard.press("End")
        page.until_text(".so-autotune", "Does not fit")
        see(page, ".so-autotune")
        page.shot("autotune_dark")
        fits(page, ".so-autotune")
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")


def test_a_reopened_notebook_shows_both_panels(new_page: Callable[..., Any]) -> None:
    page = new_page(1920, 1080)
    page.run("reopen_panels.ipynb", [TUNER])
    page.tuner()
    p = page.page
    p.click(".so-tuner button:has-text('Compare')")
    page.until_text(".so-compare .so-table", "ZeRO-Offload-like")
    p.click(".so-tuner button:has-text('Autotune')")
    p.fill(".so-autotune input[type=number]", "40")
    p.keyboard.press("Tab")
    p.click(".so-autotune button:has-text('Search')")
    p.wait_for_selector(".so-autotune .so-msg.good", timeout=60_000)
    see(page, ".so-tuner")
    page.shot("panels_1920")
    table, found = page.text(".so-compare .so-table"), page.text(".so-autotune .so-msg.good")
    page.menu("File", "Save Notebook")
    p.wait_for_timeout(800)
    page.check_clean()
    again = new_page()  # another browser, the same kernel
    again.open("reopen_panels.ipynb")
    again.page.wait_for_selector(".so-compare .js-plotly-plot .bars .point path", timeout=60_000, state="attached")
    again.page.wait_for_selector(".so-autotune .js-plotly-plot .points path", timeout=60_000, state="attached")
    assert again.text(".so-compare .so-table") == table
    assert again.text(".so-autotune .so-msg.good") == found
    assert again.page.evaluate("document.querySelector('.so-autotune select[size]').options.length") == 40
    again.check_clean()


EARLY = """from superoffload.widgets.live import LiveFigure
def spec(n, title):
    return {"data": [{"type": "bar", "name": "early", "x": [1, 2], "y": [n, n]}], "layout": {"title": {"text": title}}}
f = LiveFigure(spec(1, "one"))
f.show_spec(spec(7, "seven"))
f"""


SLOW = """const codes = new Map(), set = codes.set.bind(codes);
codes.set = (version, code) => set(version, new Promise((go) => setTimeout(() => go(code), 3000)));
globalThis.superoffloadFigureCode = codes;"""


def test_a_change_before_plotly_is_loaded_is_not_lost(new_page: Callable[..., Any]) -> None:
    """On a slow machine: anywidget gives up on a widget that is not ready after two seconds."""
    page = new_page()
    page.page.add_init_script(SLOW)
    page.run("early.ipynb", [EARLY])
    page.page.wait_for_selector(".js-plotly-plot .bars .point path", timeout=60_000, state="attached")
    page.page.wait_for_function(
        """() => {
            const gd = document.querySelector('.js-plotly-plot'), y = gd._fullData[0].y;
            return Array.from(y._inputArray || y)[0] === 7 && gd.layout.title.text === 'seven';
        }""",
        timeout=10_000,
    )
    page.check_clean()
