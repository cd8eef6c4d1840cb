"""Who may import what: the planner runs without torch, the package never reaches for the widgets."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "ipywidgets", "plotly", "anywidget", "IPython", "pandas", "networkx")
NEEDS_TORCH = frozenset(
    {
        "profiling",
        "profiling_counts",
        "profiling_state",
        "probing",
        "probing_casts",
        "probing_link",
        "model_source",
        "demo",
        "measuring",
    }
)
"""Top-level modules that measure or train; every other one is lean, a new one too."""
NO_IMPORT = frozenset({"__main__"})
PACKAGE = Path(__file__).resolve().parents[2] / "superoffload"
LEAN = (
    "superoffload",
    *sorted({p.stem for p in PACKAGE.glob("*.py")} - NEEDS_TORCH - NO_IMPORT - {"__init__"}),
    *sorted(f"workshop.{p.stem}" for p in PACKAGE.glob("workshop/*.py")),
)


def sources(repository: Path, folder: str = "superoffload") -> list[Path]:
    return sorted((repository / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Imported names with whether they run when the module is imported (not in a function, not for typing)."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((a.name, top) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from ((f"{child.module or ''}.{a.name}", top) for a in child.names)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, top and not inside and not typing_only)

    yield from walk(ast.parse(path.read_text()), True)


def test_the_package_never_imports_the_widgets(repository: Path) -> None:
    wrong = [
        f"{path.relative_to(repository)}: {name}"
        for path in sources(repository)
        for name, _ in imports(path)
        if name.split(".")[0] in ("ipywidgets", "plotly", "anywidget", "IPython")
        or name.startswith("superoffload.widgets")
    ]
    assert not wrong


def test_only_kernels_touch_the_native_module(repository: Path) -> None:
    wrong = [
        str(path.relative_to(repository))
        for path in sources(repository)
        if any("_kernels" in name for name, _ in imports(path)) and path.parent.name not in ("kernels", "engine")
    ]
    assert not wrong


def test_only_the_engine_and_the_measurements_touch_cuda_streams(repository: Path) -> None:
    """probing_link.py may: what it measures is both directions of the link at once."""
    wrong = [
        str(path.relative_to(repository))
        for path in sources(repository)
        if path.parent.name != "engine"
        and path.stem not in ("probing", "probing_link")
        and any(f"cuda.{word}" in path.read_text() for word in ("Stream(", "stream("))
    ]
    assert not wrong


@pytest.mark.parametrize("name", LEAN)
def test_lean_modules_import_nothing_heavy_at_module_level(repository: Path, name: str) -> None:
    path = repository / "superoffload" / ("__init__.py" if name == "superoffload" else f"{name.replace('.', '/')}.py")
    assert not [n for n, top in imports(path) if top and n.split(".")[0] in HEAVY]


def test_importing_every_lean_module_loads_nothing_heavy(tmp_path: Path) -> None:
    modules = [n if n == "superoffload" else f"superoffload.{n}" for n in LEAN]
    code = (
        f"import sys, importlib, json\n[importlib.import_module(m) for m in {modules}]\n"
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_importing_the_package_loads_only_itself(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import superoffload; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not [m for m in ast.literal_eval(done.stdout) if m.split(".")[0] in (*HEAVY, "numpy", "pydantic")]
    assert "superoffload.hardware" not in done.stdout


def test_planning_in_python_needs_no_torch(tmp_path: Path) -> None:
    """With torch made unimportable, the whole planning half still works."""
    code = """
import sys
for name in ("torch", "transformers", "plotly", "ipywidgets"):
    sys.modules[name] = None  # import raises ModuleNotFoundError
import superoffload as so
profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
plan = so.make_plan(profile)
trace = so.simulate(profile, plan)
so.TunedConfig.create(profile, plan, trace=trace).save("tuned.json")
print(trace.step_s > 0)
try:
    so.OffloadAdamW
except so.MissingDependency as e:
    print(e)
"""
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "True"
    assert "pip install 'superoffload[train]'" in done.stdout


def test_modules_stay_readable(repository: Path) -> None:
    """Above 500 lines a module is two modules."""
    long = {
        str(p.relative_to(repository)): n
        for folder in ("superoffload", "widgets")
        for p in sources(repository, folder)
        if (n := len(p.read_text().splitlines())) > 500
    }
    assert not long


def test_no_pickle_anywhere(repository: Path) -> None:
    """Records are JSON and checkpoints safetensors: nothing that runs code when it is loaded."""
    wrong = [
        str(path.relative_to(repository))
        for folder in ("superoffload", "widgets")
        for path in sources(repository, folder)
        if any(n.split(".")[0] in ("pickle", "dill", "cloudpickle") for n, _ in imports(path))
        or "torch.load(" in path.read_text()
        or "torch.save(" in path.read_text()
    ]
    assert not wrong
