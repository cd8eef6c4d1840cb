"""The Tuner's promises about being live, on comm messages as a browser sends and gets them (benchmarks/bench_tuner.py
in a smaller form). Times are processor time: what else the machine does is not the Tuner's."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TWICE = 2.0
"""Aims are for a machine that is left alone; a shared one may take twice as long and no more."""


@pytest.fixture(scope="module")
def bench(repository: Path) -> Iterator[ModuleType]:
    folder = str(repository / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("bench_tuner")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def results(bench: ModuleType) -> dict[str, Any]:
    return {
        size: asyncio.run(bench.measure(size, positions=1, followed=("bucket size", "adam threads")))
        for size in bench.PROFILES
    }


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_every_knob_answers_soon_enough(bench: ModuleType, results: dict[str, Any], size: str) -> None:
    limit = bench.AIMS[size]["figure_s"] * TWICE

    def slow(found: dict[str, Any]) -> dict[str, float]:
        times = {knob: f["cpu_s"]["p50"] for knob, f in found["knobs"].items() if "plans anew" not in knob}
        times["95 of 100 changes"] = found["all_knobs"]["cpu_s"]["p95"]
        return {knob: s for knob, s in times.items() if s > limit}

    found = slow(results[size])
    if found:  # a machine that is busy with something else is slow at other knobs the next time
        again = slow(asyncio.run(bench.measure(size, positions=1, followed=())))
        found = {knob: min(found[knob], again[knob]) for knob in found.keys() & again.keys()}
    assert not found


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_messages_are_small_and_few(bench: ModuleType, results: dict[str, Any], size: str) -> None:
    knobs = results[size]["knobs"]
    assert len(knobs) >= 20, "a knob is not turned any more"
    assert not {k: f["largest_bytes"] for k, f in knobs.items() if f["largest_bytes"] > bench.AIMS["message_bytes"]}
    # A figure is some 20 messages; the exact one of the change before may come between.
    assert not {k: f["messages"] for k, f in knobs.items() if f["messages"] > 45 and "plans anew" not in k}
    assert results[size]["open"]["largest_bytes"] < bench.AIMS["message_bytes"]


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_the_first_display_comes_soon(bench: ModuleType, results: dict[str, Any], size: str) -> None:
    assert results[size]["open"]["cpu_s"] < bench.AIMS["open_s"]


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_a_drag_is_worked_on_now_and_then_and_ends_at_its_last_value(results: dict[str, Any], size: str) -> None:
    for drag in results[size]["drags"]:
        assert drag["messages_in"] == drag["echoes_out"] == 40
        assert 1 <= drag["recomputed"] <= 25
        assert drag["last_value_shown"]


def test_a_large_step_is_drafted_and_then_exact(results: dict[str, Any]) -> None:
    """`measure` itself fails where the figures at rest are not of the plan."""
    assert "drafts" not in results["7b"]["knobs"]["adam threads"]
    for size in results:
        drafts = results[size]["knobs"]["bucket size"]["drafts"]
        assert drafts["of"] >= 1
        assert abs(drafts["step_off_at_most"]) < 0.01
