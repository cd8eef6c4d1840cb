"""What a person gets from pip: a whole wheel, a pure one without a compiler, a planner without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)


def copy_checkout(repository: Path, target: Path) -> None:
    """Copy what belongs to the project, committed or not; what `make lab` and `make demo` leave behind, gigabytes and
    runs beside the notebooks, does not."""
    command = ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:  # no checkout, but an unpacked archive
        junk = shutil.ignore_patterns(".venv", "build", "__pycache__", "*.so", "*_cache", ".ipynb_checkpoints")
        shutil.copytree(repository, target, ignore=junk)
        return
    for name in filter(None, listed.stdout.split("\0")):
        if (repository / name).is_file():  # else deleted and not yet committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, target / name)


def build_wheel(repository: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Build in a copy of the checkout, so that neither its build folder nor its editable install is touched."""
    source = out / "source"
    copy_checkout(repository, source)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SUPEROFFLOAD_")}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(source),
    ]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tools() -> None:
    for module in ("scikit_build_core", "nanobind"):
        pytest.importorskip(module, reason="building a wheel needs the [test] extra")


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory, tools: None) -> Path:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("wheel")
    done = build_wheel(repository, out, SUPEROFFLOAD_REQUIRE_KERNELS="1")
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def pure_wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory, tools: None) -> Path:
    out = tmp_path_factory.mktemp("pure")
    done = build_wheel(repository, out, CXX=str(out / "no-such-compiler"))
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def run_from_wheel(wheel: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an empty folder with the unpacked wheel and this environment's libraries, but not its checkout:
    with -S no .pth file is read, and the editable install is one."""
    site = folder / "site"
    if not site.exists():
        with zipfile.ZipFile(wheel) as z:
            z.extractall(site)
    (folder / "empty").mkdir(exist_ok=True)
    path = os.pathsep.join([str(site), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=folder / "empty", env=env, capture_output=True, text=True, check=False
    )


def test_wheel_imports_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    code = """
import superoffload, importlib.util, sys
from superoffload import kernels
assert "site" in superoffload.__file__, superoffload.__file__
assert kernels.capabilities()["compiled"]
assert superoffload.load_measured("clipped").trace.step_s > 0, "data of the package"
for name in ("superoffload.engine", "superoffload.train", "superoffload.widgets"):
    assert "site" in importlib.util.find_spec(name).origin, name
print("ok")
"""
    done = run_from_wheel(wheel, tmp_path, "-c", code)
    assert done.stdout == "ok\n", done.stderr


def test_wheel_holds_what_it_should(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = wheel.parent / "source"
    for folder, inside in (("superoffload", ""), ("widgets", "superoffload/"), ("notebooks", "superoffload/")):
        paths = [p for p in (source / folder).rglob("*") if p.is_file()]
        assert paths
        for path in paths:
            assert f"{inside}{path.relative_to(source).as_posix()}" in names
    assert "superoffload/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not [n for n in names if n.startswith(("tests", "csrc", "benchmarks")) or "__pycache__" in n]


def test_lab_copies_the_notebooks_and_never_overwrites(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="needs the [lab] extra")
    arguments = ["-m", "superoffload", "lab", "--dry-run", "--json"]
    first = run_from_wheel(wheel, tmp_path, *arguments)
    assert first.returncode == 0, first.stderr
    body = json.loads(first.stdout)
    notebook = Path(body["notebooks"]) / "01_quickstart.ipynb"
    assert notebook.parent == tmp_path / "empty" / "notebooks"
    assert notebook.name in body["copied"]
    assert str(notebook) in body["command"]
    notebook.write_text("mine")
    again = json.loads(run_from_wheel(wheel, tmp_path, *arguments).stdout)
    assert again["copied"] == []
    assert notebook.read_text() == "mine"


def test_without_a_compiler_the_wheel_is_pure_and_adam_is_exact(pure_wheel: Path, tmp_path: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    code = """
import warnings
import numpy as np
from superoffload import kernels
assert not kernels.capabilities()["compiled"]
p, m, v, g = (np.full(100, x, np.float32) for x in (1.0, 0.0, 0.0, 0.5))
step = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for i in range(2):
        kernels.adam_step(p, m, v, g, step=i + 1, **step)
assert len(seen) == 1 and "without a C++ compiler" in str(seen[0].message), seen
assert np.allclose(p, 0.8, atol=1e-6), p[0]
print("ok")
"""
    done = run_from_wheel(pure_wheel, tmp_path, "-c", code)
    assert done.stdout == "ok\n", done.stderr
    doctor = run_from_wheel(pure_wheel, tmp_path, "-m", "superoffload", "doctor", "--json")
    kernels = next(c for c in json.loads(doctor.stdout)["checks"] if c["name"] == "kernels")
    assert kernels["status"] == "warn"
    assert kernels["remedy"]


def test_a_broken_build_is_not_hidden_where_kernels_are_required(repository: Path, tmp_path: Path, tools: None) -> None:
    env = {"CXX": str(tmp_path / "no-such-compiler"), "SUPEROFFLOAD_REQUIRE_KERNELS": "1"}
    assert build_wheel(repository, tmp_path, **env).returncode != 0
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.network
def test_the_planner_installs_and_runs_without_torch(repository: Path, tmp_path: Path) -> None:
    """pip install of the checkout, no extras, into an empty environment; then the command of the README."""
    home = tmp_path / "empty-environment"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    reach = subprocess.run(
        [python, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "reach"), "annotated-types"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if reach.returncode != 0:
        pytest.skip("no package index within reach: the planner's install into an empty environment was not tested")
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "-C", f"build-dir={tmp_path / 'build'}", str(repository)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {
        d["name"].lower() for d in json.loads(subprocess.check_output([python, "-m", "pip", "list", "--format=json"]))
    }
    assert "superoffload" in names
    assert not names & {"torch", "transformers", "jupyterlab", "plotly", "cmake"}
    command = [str(home / "bin" / "superoffload"), "simulate", "--model", "llama-7b", "--hardware", "gh200",
               "--micro-batch", "4", "--seq-len", "2048", "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["step_s"] > 0
    assert body["memory"]["gpu_gb"] > 0
    # What needs more says which extra brings it.
    done = subprocess.run(
        [python, "-m", "superoffload", "lab"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'superoffload[train,lab]'" in done.stderr
