"""A training run in a real JupyterLab: started, watched and steered by mouse and keyboard, lost sight of and found."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from superoffload.run_control import is_going_on
from tests.train.tiny_model import save_tiny_model

RUN = ".so-run"
MESSAGE = ".so-run .so-msg"


@pytest.fixture(scope="module")
def tuned(lab: Any) -> Iterator[Path]:
    """In the notebooks' folder: a tiny model, a text, and a config whose clipped steps are speculated on."""
    from superoffload import model_source
    from superoffload.config import HardwareRef, OptimizerConfig, TrainingConfig, TunedConfig
    from superoffload.plan import Plan

    folder = save_tiny_model(lab.root / "tiny")
    (lab.root / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    model, _ = model_source.load(str(folder), "float32")
    TunedConfig(
        model=model_source.reference(str(folder), model),
        hardware=HardwareRef(name="here", source="probed"),
        plan=Plan.from_dict({"micro_batch": 2, "seq_len": 32, "bucket_mb": 0.05, "adam_threads": 1, "speculate": "on"}),
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.5),
        training=TrainingConfig.from_dict({"dtype": "float32"}),
    ).save(lab.root / "tuned.json")
    yield lab.root
    for status in lab.root.glob("*/status.json"):  # a test that failed half-way leaves its run behind
        found = json.loads(status.read_text())
        if found["state"] not in ("finished", "interrupted", "failed") and "pid" in found:
            os.kill(found["pid"], 9)


def steps(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines())


def press(page: Any, name: str, key: str) -> None:
    """Reach a button by keyboard from the one before it, and press it."""
    button = page.page.locator(f".so-run button:has-text('{name}')").first
    page.page.keyboard.press("Escape")
    for _ in range(80):
        page.page.keyboard.press("Tab")
        if button.evaluate("b => b === document.activeElement"):
            break
    else:
        raise AssertionError(f"{name} cannot be reached with Tab")
    page.page.keyboard.press(key)


def wait_for_state(page: Any, state: str) -> None:
    page.page.wait_for_function(
        "s => [...document.querySelectorAll('.so-run')].some(e => e.textContent.includes(`· ${s} ·`))", arg=state,
        timeout=60_000,
    )  # fmt: skip


def test_a_run_is_started_steered_and_found_again(new_page: Callable[..., Any], tuned: Path) -> None:
    page, run = new_page(), tuned / "started"
    start = 'RunPanel.start("tuned.json", "text.txt", "started", steps=10**6)'
    page.run("start_run.ipynb", [f"from superoffload.widgets import RunPanel\npanel = {start}\npanel"])
    p = page.page
    p.wait_for_selector(f"{MESSAGE}:has-text('Started as process')", timeout=60_000)
    wait_for_state(page, "running")
    p.wait_for_selector(f"{RUN} .js-plotly-plot .scatterlayer .trace path.js-line", timeout=20_000, state="attached")
    pid = json.loads((run / "status.json").read_text())["pid"]

    # With the mouse.
    p.click(f"{RUN} button:has-text('Pause')")
    page.until_text(MESSAGE, "Asked the run to pause")
    wait_for_state(page, "paused")
    page.until_text(MESSAGE, "Paused after step")
    before = steps(run)
    assert p.is_disabled(f"{RUN} button:has-text('Pause')")
    assert "no GPU" in page.text(f"{RUN} .so-cards") and "%" in page.text(f"{RUN} .so-cards")
    assert "steps whose speculation was undone" in page.text(f"{RUN} .so-rollbacks caption")
    time.sleep(1)
    assert steps(run) == before
    page.shot("run_paused")
    # With the keyboard.
    press(page, "Go on", "Enter")
    wait_for_state(page, "running")
    press(page, "Checkpoint", "Space")
    page.until_text(MESSAGE, "Saved started/checkpoints/step-")
    assert steps(run) > before
    page.menu("File", "Save Notebook")
    p.wait_for_timeout(800)

    # The tab is closed, and opened again.
    p.context.close()
    again = new_page()
    again.open("start_run.ipynb")
    wait_for_state(again, "running")
    seen = steps(run)
    again.page.wait_for_function(
        "n => Number(document.querySelector('.so-run').textContent.match(/step ([\\d,]+) of/)[1].replace(',', '')) > n",
        arg=seen, timeout=20_000,
    )  # fmt: skip
    # The kernel that started it is restarted; another notebook finds the run.
    again.menu("Kernel", "Restart Kernel…")
    again.page.click(".jp-Dialog button:has-text('Restart')")
    again.page.wait_for_timeout(3000)
    os.kill(pid, 0)
    other = new_page()
    other.run("other.ipynb", ['from superoffload.widgets import RunPanel\nRunPanel("started")'])
    wait_for_state(other, "running")
    press(other, "Stop", "Enter")
    wait_for_state(other, "interrupted")
    other.until_text(MESSAGE, "Stopped after step")
    assert all(
        other.page.is_disabled(f"{RUN} button:has-text('{b}')") for b in ("Pause", "Go on", "Checkpoint", "Stop")
    )
    deadline = time.monotonic() + 20
    while is_going_on({"pid": pid, "host": platform.node()}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_going_on({"pid": pid, "host": platform.node()}), "the process ends when it has said so"
    for one in (again, other):
        one.check_clean()


TUNED_HERE = """import torch
from superoffload import model_source
from superoffload.widgets import Tuner
model, _ = model_source.load("tiny", "float32")
batch = {"input_ids": torch.randint(0, 96, (2, 32))}
batch["labels"] = batch["input_ids"]
Tuner(model, batch=batch, model_source="tiny", autosave=False)"""


@pytest.mark.parametrize("dark", [False, True])
def test_a_run_is_started_from_the_tuner(new_page: Callable[..., Any], lab: Any, tuned: Path, dark: bool) -> None:
    lab.theme("JupyterLab Dark" if dark else "JupyterLab Light")
    name = "from_tuner_dark" if dark else "from_tuner"
    try:
        page = new_page()
        page.run(f"{name}.ipynb", [TUNED_HERE])
        page.tuner()
        p = page.page
        p.click(".so-tuner button:has-text('Export')")
        p.click(".so-tuner button:has-text('Train')")  # nothing says what on
        p.wait_for_selector(".so-tuner .so-msg.error:has-text('no text to train on')", timeout=60_000)
        page.shot(f"{name}_refused")
        for label, value in (
            ("Data", "text.txt"),
            ("Run folder", name),
            ("File", f"{name}.json"),
            ("Steps", "1000000"),
        ):
            field = p.locator(f".so-tuner .widget-text:has(label:text-is('{label}')) input").first
            field.fill(value)
            field.press("Tab")
        shown = f"superoffload train --config {name}.json --data text.txt --out {name}"
        p.wait_for_selector(f".so-tuner .so-code:text-is('{shown}')", timeout=20_000)
        p.locator(".so-tuner button:has-text('Train')").focus()
        p.keyboard.press("Enter")
        p.wait_for_selector(f".so-tuner {MESSAGE}:has-text('Started as process')", timeout=60_000)
        wait_for_state(page, "running")
        p.wait_for_selector(".so-tuner .so-run .js-plotly-plot .scatterlayer path", timeout=60_000, state="attached")
        p.evaluate("document.querySelector('.so-run').scrollIntoView({block: 'end'})")
        p.wait_for_timeout(1500)
        page.shot(name)
        panel = p.evaluate("(t => [t.offsetWidth, t.scrollWidth])(document.querySelector('.so-tuner'))")
        assert panel[1] <= panel[0] + 1, "something sticks out sideways"
        p.click(".so-run button:has-text('Stop')")
        wait_for_state(page, "interrupted")
        assert steps(tuned / name) >= 1
        assert json.loads((tuned / f"{name}.json").read_text())["training"]["steps"] == 1_000_000
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")


def storm(folder: Path, **status: Any) -> Path:
    """A long run on a GPU, as its folder: the loss falls, now and then a step is undone."""
    folder.mkdir(exist_ok=True)
    rows = []
    for i in range(1, 4001):
        undone = i < 40 or i % 397 == 0
        verdict = "skip" if i % 1191 == 0 else "clip" if undone or i < 60 else "commit"
        loss = None if verdict == "skip" else 2 + 8 / (1 + i / 200) + 0.3 * ((i * 7919 % 101) / 101 - 0.5)
        rows.append({
            "step": i, "loss": loss, "verdict": verdict,
            "grad_norm": None if verdict == "skip" else 1.7 if undone else 0.4,
            "clip_coefficient": 0.5882 if verdict == "clip" else 1.0, "speculated": 94, "undone": 94 * undone,
            "speculated_s": 0.31, "undo_s": 0.35 * undone, "after_verdict_s": 0.02 + 0.35 * undone,
            "waited_s": 0.03 + 0.22 * undone, "tokens_per_s": 17_000.0 - 5800 * undone + i % 13 * 20,
            "step_s": 0.48 + 0.25 * undone, "cpu_busy": 0.62, "gpu_busy": 0.97 - 0.3 * undone,
            "gpu_peak_bytes": int(33.1e9), "gpu_reserved_bytes": int(36e9), "host_bytes": int(63.4e9),
        })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    facts = {
        "state": "finished", "steps": 4000, "gpu_name": "NVIDIA H200", "cores": 16, "adam_threads": 14,
        "gpu_capacity_bytes": int(150.1e9), "host_capacity_bytes": int(134e9),
        "gpu_busy_source": "NVML's samples of the whole GPU", "host_bytes_source": "resident set of the process",
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(facts | status))
    return folder


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080)])
def test_the_panel_fits_its_place(
    new_page: Callable[..., Any], lab: Any, faults: Callable[..., list[str]], size: tuple[int, int], dark: bool
) -> None:
    storm(lab.root / "storm")
    lab.theme("JupyterLab Dark" if dark else "JupyterLab Light")
    name = f"run_{size[0]}_{'dark' if dark else 'light'}"
    try:
        page = new_page(*size)
        page.run(f"{name}.ipynb", ['from superoffload.widgets import RunPanel\nRunPanel("storm")'])
        p = page.page
        p.wait_for_selector(f"{RUN} .js-plotly-plot .scatterlayer path.js-line", timeout=60_000, state="attached")
        p.wait_for_timeout(1000)
        p.evaluate("document.querySelector('.so-run').scrollIntoView({block: 'start'})")
        page.shot(name)
        width, scroll, figure = p.evaluate(
            "(e => [e.clientWidth, e.scrollWidth, e.querySelector('.main-svg').clientWidth])"
            "(document.querySelector('.so-run'))"
        )
        assert scroll <= width + 1 and abs(figure - width) <= 4
        cut = p.evaluate(
            "[...document.querySelectorAll('.so-run .so-card div')].filter(e => e.scrollWidth > e.clientWidth + 1)"
            ".map(e => e.textContent)"
        )
        assert not cut, f"cards whose text is cut: {cut}"
        p.click(f"{RUN} summary")
        assert faults(page, RUN) == []
        page.check_clean()
    finally:
        lab.theme("JupyterLab Light")
