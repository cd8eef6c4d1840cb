"""A JupyterLab server and a Chromium page that records every request to another host and every console error."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import TimeoutError

from superoffload.cli_running import lab_environment

CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
HARMLESS = ("favicon", "ResizeObserver loop")
TOKEN = "tests"
SERIOUS = ("serious", "critical")
"""Faults that axe finds and no panel may have."""


class Lab:
    """One JupyterLab server on a free port, with all its settings in a temporary folder."""

    alive = "/api/status"

    def __init__(self, folder: Path):
        self.root = folder / "work"
        self.root.mkdir(parents=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        env = dict(lab_environment(), HOME=str(folder), MPLCONFIGDIR=str(folder / "mpl"), OMP_NUM_THREADS="1")
        for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
            env[f"JUPYTER_{name}"] = str(folder / name)
        env |= {"IPYTHONDIR": str(folder / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
                "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}  # fmt: skip
        self.settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        self.settings.mkdir(parents=True)
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command()], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=self.root
            )

    def command(self) -> list[str]:
        """What is run, after `python -m`."""
        return ["jupyterlab", *self.common()]

    def common(self) -> list[str]:
        return ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.root}"]  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.alive}?token={TOKEN}", timeout=2).close()
            except OSError:
                time.sleep(0.3)
            else:
                return
        raise RuntimeError("the server did not start:\n" + self.log.read_text()[-3000:])

    def notebook(self, name: str, cells: list[str]) -> None:
        """Write a notebook of code cells."""
        body = {
            "nbformat": 4, "nbformat_minor": 5,
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
            "cells": [{"id": f"c{i}", "cell_type": "code", "metadata": {}, "source": c, "outputs": [],
                       "execution_count": None} for i, c in enumerate(cells)],
        }  # fmt: skip
        (self.root / name).write_text(json.dumps(body))

    def theme(self, name: str) -> None:
        """Choose JupyterLab's theme for pages opened from now on."""
        (self.settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": name}))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={TOKEN}&reset"

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class Page:
    """A playwright page with the habits of a person: open a notebook, run it, look."""

    def __init__(self, page: Any, lab: Lab, shots: Path):
        self.page, self.lab, self.shots = page, lab, shots
        self.outside: list[str] = []
        self.errors: list[str] = []
        page.on("request", self._request)
        page.on("console", self._console)
        page.on("pageerror", lambda e: self.errors.append(f"page error: {e}"[:300]))

    def _request(self, request: Any) -> None:
        if urlparse(request.url).hostname not in ("127.0.0.1", None):
            self.outside.append(request.url)

    def _console(self, message: Any) -> None:
        if message.type == "error" and not any(h in message.text for h in HARMLESS):
            self.errors.append(f"{message.text[:300]} ({message.location.get('url', '')[:200]})")

    def open(self, name: str) -> None:
        self.page.goto(self.lab.url(name), wait_until="load")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-CodeCell", timeout=60_000)
        self.page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=60_000, state="attached"
        )

    def menu(self, top: str, entry: str) -> None:
        self.page.click(f".lm-MenuBar-item:has-text('{top}')")
        self.page.click(f".lm-Menu-item:has-text('{entry}')")

    def run_all(self) -> None:
        """Run every cell; JupyterLab now and then loses a menu click just after it has opened a notebook."""
        for _ in range(3):
            self.menu("Run", "Run All Cells")
            try:
                self.page.wait_for_function(
                    "() => /\\[(\\*|\\d+)\\]/.test(document.querySelector('.jp-CodeCell .jp-InputPrompt').textContent)",
                    timeout=10_000,
                )
            except TimeoutError:
                self.page.keyboard.press("Escape")
            else:
                return
        raise AssertionError(f"the notebook does not run, see {self.shot('does_not_run')}")

    def run(self, name: str, cells: list[str]) -> None:
        """Write a notebook, open it and run its cells."""
        self.lab.notebook(name, cells)
        self.open(name)
        self.run_all()

    def tuner(self) -> None:
        """Wait until a Tuner is drawn, named and of its final size, and bring it into view."""
        figure = ".so-tuner .js-plotly-plot .bars .point path"
        try:
            self.page.wait_for_selector(figure, timeout=60_000, state="attached")
        except TimeoutError:
            seen = self.page.evaluate(
                "Array.from(document.querySelectorAll('.jp-Cell'), e => e.innerText.slice(0, 600))"
            )
            raise AssertionError(
                f"no Tuner, see {self.shot('no_tuner')}; cells: {seen}; errors: {self.errors}"
            ) from None
        self.page.wait_for_selector(".so-tuner .noUi-handle[aria-label='Retained']", timeout=30_000)
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.so-tuner .js-plotly-plot')].every("
            "p => Math.abs(p.querySelector('.main-svg').clientWidth - p.clientWidth) <= 1)",
            timeout=20_000,
        )
        self.page.evaluate("document.querySelector('.so-tuner').scrollIntoView({block: 'start'})")
        self.page.wait_for_timeout(300)

    def text(self, selector: str) -> str:
        return self.page.text_content(selector) or ""

    def until_text(self, selector: str, part: str) -> None:
        """Wait until an element's text contains `part`."""
        self.page.wait_for_function(
            "([s, part]) => (document.querySelector(s)?.textContent ?? '').includes(part)", arg=[selector, part],
            timeout=20_000,
        )  # fmt: skip

    def shot(self, name: str) -> Path:
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path

    def trace_data(self, figure: int, name: str, column: str) -> list[float]:
        """A column of a trace as the browser draws it."""
        column_values: list[float] = self.page.evaluate(
            """([i, name, column]) => {
                const gd = document.querySelectorAll('.so-tuner .js-plotly-plot')[i];
                const trace = gd._fullData.find(t => t.name === name);
                const v = trace ? trace[column] : [];
                return Array.from(v._inputArray || v);
            }""",
            [figure, name, column],
        )
        return column_values

    def check_clean(self) -> None:
        """Nothing left the machine, nothing went wrong in the browser, and JupyterLab laid no question of its own over
        the figures."""
        assert not self.outside, f"requests to other hosts: {sorted(set(self.outside))}"
        assert not self.errors, f"console errors: {self.errors}"
        asked = self.page.locator(".Toastify__toast").all_inner_texts()
        assert not asked, f"JupyterLab asks: {asked}"


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for screenshots: SUPEROFFLOAD_SCREENSHOTS, or a temporary one."""
    given = os.environ.get("SUPEROFFLOAD_SCREENSHOTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Any, lab: Lab, shots: Path) -> Iterator[Callable[..., Page]]:
    """Call it to get a page of a fresh browser profile."""
    contexts = []
    shutil.rmtree(lab.root / ".superoffload", ignore_errors=True)  # edits that another test's Tuner has left

    def make(width: int = 1280, height: int = 800) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        return Page(context.new_page(), lab, shots)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def faults() -> Callable[[Page, str], list[str]]:
    """Call it with a page and a selector: the serious faults below it that axe finds, each with its first element."""
    script = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

    def find(page: Page, selector: str) -> list[str]:
        page.page.evaluate(script)
        result = page.page.evaluate("s => axe.run(document.querySelector(s), {resultTypes: ['violations']})", selector)
        return [
            f"{v['id']} ({v['impact']}, {len(v['nodes'])}): {v['help']}: {v['nodes'][0]['html'][:200]} "
            f"[{(v['nodes'][0].get('any') or [{}])[0].get('message', '')[:200]}]"
            for v in result["violations"]
            if v["impact"] in SERIOUS
        ]

    return find
