"""Records show themselves in a notebook: escaped, complete, without a widget library."""

from __future__ import annotations

import html
import re

from superoffload import estimating, planner, simulator


def cells(text: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", text)


def test_profile_groups_equal_layers_and_adds_up() -> None:
    profile = estimating.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    text = profile._repr_html_()
    assert "4 × 2048 tokens in bfloat16" in text
    assert "modelled" in text
    assert text.count("<tr>") == 1 + 3 + 1, "header, embedding, layers, head, sum"
    assert "(each of 32)" in text
    assert "6.74B" in cells(text)


def test_names_are_escaped() -> None:
    profile = estimating.estimate("llama-7b", micro_batch=1, seq_len=128, hardware="gh200").replace(model="<script>")
    assert "<script>" not in profile._repr_html_()


def test_plan_shows_every_knob_with_its_reason_and_trace_its_headline() -> None:
    profile = estimating.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    plan = planner.make_plan(profile)
    shown = cells(plan._repr_html_())
    assert shown[::3] == list(plan.knobs())
    assert html.unescape(shown[2]) == plan.reasons[plan.knobs()[0]]
    trace = simulator.simulate(profile, plan)
    text = trace._repr_html_()
    assert f"{trace.tokens_per_s:,.0f}" in text
    assert "(modelled)" in text
