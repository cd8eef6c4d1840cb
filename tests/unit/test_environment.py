"""The ways to install agree: pyproject.toml, environment.yml (conda-forge names), constraints.txt, Makefile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import superoffload

CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}
"""Python package -> conda-forge package, where the names differ."""
CONDA_ONLY = {"python", "pip", "cxx-compiler", "make"}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    body: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())
    return body


def requirements(project: dict[str, Any]) -> dict[str, str]:
    """Name -> version specifier of the base and all extras; a name may stand in several with the same version."""
    extras = project["project"]["optional-dependencies"].values()
    found: dict[str, str] = {}
    for text in [*project["project"]["dependencies"], *(r for e in extras for r in e)]:
        m = re.fullmatch(r"([A-Za-z0-9._-]+)(>=[0-9.]+)", text)
        assert m, f"{text}: a lower bound and nothing else, so that environments stay solvable"
        assert found.setdefault(m[1].lower(), m[2]) == m[2], f"{m[1]} has two bounds"
    return found


def test_conda_environment_agrees_with_the_extras(repository: Path, project: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    env = yaml.safe_load((repository / "environment.yml").read_text())
    assert env["channels"] == ["conda-forge"]
    listed = [d for d in env["dependencies"] if isinstance(d, str)]
    listed += [d for section in env["dependencies"] if isinstance(section, dict) for d in section["pip"]]
    conda = {re.split(r"[>=]", d)[0]: d[len(re.split(r"[>=]", d)[0]) :] for d in listed}
    wanted = {CONDA_NAMES.get(name, name): bound for name, bound in requirements(project).items()}
    assert {k: v for k, v in conda.items() if k not in CONDA_ONLY} == wanted
    assert conda["python"] == project["project"]["requires-python"]


def pins(repository: Path) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_direct_dependency_is_pinned_within_its_bound(repository: Path, project: dict[str, Any]) -> None:
    found = pins(repository)

    def numbers(text: str) -> list[int]:
        return [int(x) for x in re.findall(r"\d+", text)]

    for name, bound in requirements(project).items():
        assert name in found, f"{name} has no pin"
        assert numbers(found[name]) >= numbers(bound), f"{name}=={found[name]} is below {bound}"
    assert found["torch"].startswith("2.13")


def test_build_needs_no_torch_and_base_needs_little(project: dict[str, Any]) -> None:
    assert not any("torch" in r for r in project["build-system"]["requires"])
    assert {re.split(r"[>=]", d)[0] for d in project["project"]["dependencies"]} == {"numpy", "pydantic"}


def test_torch_has_no_upper_bound(project: dict[str, Any]) -> None:
    assert requirements(project)["torch"] == ">=2.9"


def test_version_is_the_same_everywhere(repository: Path, project: dict[str, Any]) -> None:
    assert project["project"]["version"] == superoffload.__version__
    assert f"## {superoffload.__version__}" in (repository / "CHANGELOG.md").read_text()


def test_makefile_installs_the_extras_that_exist(repository: Path, project: dict[str, Any]) -> None:
    makefile = (repository / "Makefile").read_text()
    m = re.search(r"^EXTRAS := (.+)$", makefile, re.MULTILINE)
    assert m
    assert set(m[1].split(",")) == set(project["project"]["optional-dependencies"])
    package = re.search(r"^MODEL_PACKAGE := (.+)$", makefile, re.MULTILINE)
    assert package
    assert package[1] in pins(repository)


def test_license_is_apache_2(repository: Path, project: dict[str, Any]) -> None:
    text = (repository / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert project["project"]["license"] == "Apache-2.0"
