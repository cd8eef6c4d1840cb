"""The documentation is tested: its commands parse, its planning examples run, its files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from superoffload import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
BLOCK = re.compile(r"(?:<!--(?P<note>[^>]*)-->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)


def blocks(path: Path, language: str) -> Iterator[tuple[str, str]]:
    """Note in the comment before the block, and its text."""
    for m in BLOCK.finditer(path.read_text()):
        if m["language"] == language:
            yield (m["note"] or "").strip(), m["body"]


def commands(body: str) -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in body.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "superoffload"]


def test_every_command_in_the_documents_parses(repository: Path) -> None:
    parser = cli.build_parser()
    seen = 0
    for name in DOCUMENTS:
        for _, body in blocks(repository / name, "bash"):
            for words in commands(body):
                parser.parse_args(words)
                seen += 1
    assert seen >= 10


def test_the_readme_commands_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []
    for note, body in blocks(repository / "README.md", "bash"):
        if note.startswith("executed"):
            for words in commands(body):
                code = cli.main(words)
                assert code == 0 or words[0] == "doctor", capsys.readouterr().err
                ran.append(words[0])
    assert {"doctor", "profile", "plan", "simulate", "export"} <= set(ran)
    assert {"profile.json", "tuned.json", "trace.json", "ds_config.json", "chrome_trace.json"} == {
        p.name for p in tmp_path.iterdir()
    }


def test_the_readme_python_runs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = [body for note, body in blocks(repository / "README.md", "python") if not note.startswith("not executed")]
    assert ran
    for body in ran:
        exec(compile(body, "README.md", "exec"), {})
    assert "s per step" in capsys.readouterr().out
    assert (tmp_path / "tuned.json").exists()


def test_every_command_is_documented(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    actions = cli.build_parser()._subparsers._group_actions[0]  # type: ignore[union-attr]
    for name in actions.choices or ():
        assert f"superoffload {name}" in readme, name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(repository: Path, name: str) -> None:
    path = repository / name
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_make_targets_of_the_documents_exist(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    for name in DOCUMENTS:
        text = (repository / name).read_text()
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
            assert target in targets, f"{name}: make {target}"
