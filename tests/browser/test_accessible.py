"""axe looks at every panel: no serious fault, in the light theme and in the dark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PANELS = """import superoffload as so
from superoffload.widgets import Tuner
profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
t = Tuner(profile)
t"""


@pytest.mark.parametrize("dark", [False, True])
def test_no_panel_has_a_serious_fault(
    new_page: Callable[..., Any], lab: Any, faults: Callable[..., list[str]], dark: bool
) -> None:
    lab.theme("JupyterLab Dark" if dark else "JupyterLab Light")
    try:
        page = new_page()
        page.run(f"axe_{'dark' if dark else 'light'}.ipynb", [PANELS])
        page.tuner()
        found = {"Tuner": faults(page, ".so-tuner")}
        for drawer in ("Machine", "Compare", "Autotune", "Measure", "Export"):
            page.page.click(f".so-tuner button:has-text('{drawer}')")
            page.page.wait_for_timeout(1500)
            found[drawer] = faults(page, ".so-tuner")
            page.page.click(f".so-tuner button:has-text('{drawer}')")
    finally:
        lab.theme("JupyterLab Light")
    assert not any(found.values()), "\n".join(sorted({f for v in found.values() for f in v}))
