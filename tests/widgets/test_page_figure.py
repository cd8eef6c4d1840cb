"""Figures that stand alone: white wherever they are saved, dark where a notebook's page is dark."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import plotly.io as pio
import pytest

from superoffload.tracing import Trace
from superoffload.widgets import page_figure, plot_memory, plot_timeline
from superoffload.widgets.page_figure import MARK, dark_rules, page_style
from superoffload.widgets.theme import DARK, LIGHT, PAPER, rgb


def rule_for(sheet: str, paint: str, colour: str) -> str:
    """The colour that a sheet gives to what is painted in `colour`."""
    found = re.search(rf'{paint}: {re.escape(rgb(colour))}"\][^{{]*\{{ {paint}: ([^!]+) !important', sheet)
    assert found, f"no rule for {paint} {colour}"
    return found.group(1)


def test_every_colour_of_a_dress_has_its_fellow() -> None:
    sheet = dark_rules(".x")
    own = [f.name for f in dataclasses.fields(LIGHT) if f.name not in ("name", "paper")]
    for field in own:
        for paint in ("fill", "stroke"):
            assert rule_for(sheet, paint, getattr(PAPER, field)) == rgb(getattr(DARK, field))
    assert len({rgb(getattr(LIGHT, f)) for f in own}) == len(own), "two parts of one colour cannot be told apart"


def test_rules_reach_only_the_figure_after_the_mark() -> None:
    for line in page_style().removeprefix(f'<style class="{MARK}">').removesuffix("</style>").splitlines():
        assert f".jp-OutputArea-child:has(.{MARK})" in line
        assert "display: none" in line or '[data-jp-theme-light="false"]' in line


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is put out below a cell, mark and figure alike."""
    out: list[dict[str, Any]] = []
    monkeypatch.setattr(page_figure, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(page_figure, "display", lambda bundle, raw: out.append(bundle))
    monkeypatch.setattr("plotly.io._renderers.ipython_display.display", lambda bundle, raw: out.append(bundle))
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    monkeypatch.setattr(pio.renderers, "render_on_display", True)
    return out


def test_a_kernel_puts_the_mark_out_first(shown: list[dict[str, Any]], trace: Trace) -> None:
    plot_timeline(trace)._ipython_display_()
    plot_memory(trace.memory).show()
    kinds = ["mark" if MARK in o.get("text/html", "") else "figure" for o in shown]
    assert kinds == ["mark", "figure"] * 2
    assert shown[1]["application/vnd.plotly.v1+json"]["layout"]["paper_bgcolor"] == "#FFFFFF"


def test_a_terminal_gets_no_mark(shown: list[dict[str, Any]], trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_figure, "get_ipython", lambda: None)
    plot_timeline(trace)._ipython_display_()
    assert len(shown) == 1 and "application/vnd.plotly.v1+json" in shown[0]


def test_what_is_saved_is_readable_on_white(trace: Trace) -> None:
    page = plot_timeline(trace).to_html(include_plotlyjs=False)
    assert MARK not in page and '"paper_bgcolor":"#FFFFFF"' in page and LIGHT.text in page and DARK.text not in page
