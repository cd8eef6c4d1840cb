"""Test tiers: a test belongs to the tier that its folder names, and a tier says what it needs.

A tier whose needs are not met on this machine is skipped as a whole, and the summary names it with the reason and the
remedy. Each tier runs alone: ``pytest tests/unit`` or ``pytest -m engine``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
REPOSITORY = ROOT.parent

# Set before any test module is imported: no test reaches for a model hub, and tokenizers fork no threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")


def _modules(*names: str, extra: str) -> Callable[[], str]:
    def missing() -> str:
        absent = [n for n in names if importlib.util.find_spec(n) is None]
        return f"not installed: {', '.join(absent)} (pip install 'superoffload[{extra}]')" if absent else ""

    return missing


def _cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed: torch (pip install 'superoffload[train]')"
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return "this torch is a CPU-only build beside a GPU (superoffload doctor says what to do)"
    return "no CUDA GPU"


def _browser() -> str:
    missing = _modules("playwright", "axe_playwright_python", "jupyterlab", "ipywidgets", "plotly", extra="lab,test")()
    if missing:
        return missing
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "no Chromium (Debian: apt-get install chromium)"
    return ""


def _distributed() -> str:
    missing = _modules("torch", extra="train")()
    if missing:
        return missing
    import torch.distributed

    return "" if torch.distributed.is_available() else "this torch has no torch.distributed"


TIERS: dict[str, Callable[[], str]] = {
    "unit": lambda: "",
    "kernels": _modules("torch", extra="train"),
    "engine": _modules("torch", "safetensors", extra="train"),
    "train": _modules("torch", "transformers", "gguf", extra="train"),
    "widgets": _modules("ipywidgets", "plotly", "anywidget", extra="lab"),
    "notebooks": _modules("torch", "transformers", "nbclient", "ipykernel", "ipywidgets", extra="train,lab,test"),
    "browser": _browser,
    "distributed": _distributed,
    "gpu": _cuda,
}
"""Tier -> function that says why it cannot run here, in the order in which tiers run."""

_REASONS: dict[str, str] = {}
_RESULTS: dict[str, Counter[str]] = {}
_SECONDS: Counter[str] = Counter()


def _reason(tier: str) -> str:
    if tier not in _REASONS:
        _REASONS[tier] = TIERS[tier]()
    return _REASONS[tier]


def _tier(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return parts[0] if parts and parts[0] in TIERS else None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave a tier alone whose libraries are missing: its modules could not even be imported."""
    tier = _tier(collection_path)
    return True if tier and _reason(tier).startswith("not installed") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = list(TIERS)
    for item in items:
        tier = _tier(item.path)
        if tier is None:
            raise pytest.UsageError(f"{item.path}: tests live in a folder of tests/ named after a tier: {order}")
        item.add_marker(tier)
        if _reason(tier):
            item.add_marker(pytest.mark.skip(reason=f"tier {tier}: {_reason(tier)}"))
    items.sort(key=lambda i: order.index(_tier(i.path) or order[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = time.perf_counter()
    result = yield
    _SECONDS[_tier(item.path) or ""] += time.perf_counter() - start
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tier = _tier(REPOSITORY / report.location[0]) or ""
    if report.when == "call" or report.outcome != "passed":
        outcome = "errors" if report.failed and report.when != "call" else report.outcome
        _RESULTS.setdefault(tier, Counter())[outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("tiers")
    for tier in TIERS:
        counts = _RESULTS.get(tier, Counter())
        ran = counts["passed"] + counts["failed"] + counts["errors"]
        if _reason(tier):
            write(f"{tier:12} SKIPPED: {_reason(tier)}", yellow=True)
        elif ran or counts["skipped"]:
            bad = counts["failed"] + counts["errors"]
            text = f"{tier:12} {counts['passed']} passed, {bad} failed, {counts['skipped']} skipped"
            write(f"{text} in {_SECONDS[tier]:.1f} s", red=bool(bad), green=not bad)
        elif not (ROOT / tier).is_dir() or not any((ROOT / tier).glob("test_*.py")):
            write(f"{tier:12} has no tests yet")
        else:
            write(f"{tier:12} not selected")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of the person who runs the tests (probed hardware) out of them, and the tests out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY
