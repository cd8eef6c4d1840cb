"""``superoffload workshop-check``: what it finds on this machine, what it says of a broken one, folders of wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab")

from superoffload import cli, cli_running, doctor
from superoffload.workshop import readiness, wheels


def names(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {c.name: c for c in checks}


def test_this_machine_is_ready_and_the_server_is_gone_afterwards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def keep(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = popen(command, **more)  # type: ignore[call-overload]
        if "jupyterlab" in command:
            started.append(process)
        return process

    monkeypatch.setattr(readiness.subprocess, "Popen", keep)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    code = cli.main(["workshop-check", "--json"])
    body = json.loads(capsys.readouterr().out)
    found = {c["name"]: c for c in body["checks"]}
    assert code == 0 and body["ok"], found
    assert set(found) >= {"packages", "notebooks", "writing", "a plan", "kernel", "port", "JupyterLab", "browser"}
    assert found["notebooks"]["value"].startswith("01, 02, 03")
    assert found["kernel"]["value"] == sys.executable
    assert "measured" in found["a plan"]["value"]
    assert len(started) == 1 and started[0].poll() is not None


def test_a_server_that_dies_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such port'); sys.exit(3)"]
    monkeypatch.setattr(cli_running, "lab_command", lambda *_, **__: command)
    (check,) = readiness._server(tmp_path)
    assert check.status == "bad" and "exit code 3" in check.value and "no such port" in check.value
    assert check.remedy


def test_a_server_that_never_answers_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        cli_running, "lab_command", lambda *_, **__: [sys.executable, "-c", "import time; time.sleep(99)"]
    )
    monkeypatch.setattr(readiness, "SERVER_S", 0.5)
    begun = time.monotonic()
    (check,) = readiness._server(tmp_path)
    assert check.status == "bad" and "does not answer" in check.value
    assert time.monotonic() - begun < 30


def test_a_notebook_whose_imports_fail_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(name: str, *lines: str) -> None:
        cell = {"cell_type": "code", "source": [f"{line}\n" for line in lines]}
        (tmp_path / name).write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, cell]}))

    write("01_quickstart.ipynb", "import superoffload_not_there")
    write("02_x.ipynb", "!ls", "import json as j", "from superoffload.workshop import link_at")
    monkeypatch.setattr(cli_running, "prepare_notebooks", lambda folder: (folder, []))
    (check,) = readiness._notebooks(tmp_path)
    assert check.status == "ok" and "without torch: 01_quickstart.ipynb" in check.value
    assert readiness.imports_of(tmp_path / "02_x.ipynb") == [("json", ""), ("superoffload.workshop", "link_at")]
    write("03_y.ipynb", "from superoffload.workshop import no_such_name")
    (check,) = readiness._notebooks(tmp_path)
    assert check.status == "bad" and "03_y.ipynb (superoffload.workshop.no_such_name)" in check.value


def test_a_check_that_fails_itself_is_bad_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of all things")

    for name in ("_kernel", "_server", "_notebooks", "_writing"):
        monkeypatch.setattr(readiness, name, broken)
    found = names(readiness.report(tmp_path))
    assert found["kernel"].status == "bad" and "of all things" in found["kernel"].value
    assert found["a plan"].status == "ok"
    assert not doctor.as_json(list(found.values()))["ok"]


def test_too_old_packages_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=2", "plotly>=900; extra == 'lab'", "torch>=900; extra == 'train'", "not-there-at-all>=1"]
    monkeypatch.setattr(readiness.metadata, "requires", lambda name: needs)
    (check,) = readiness._packages()
    assert check.status == "bad"
    assert "plotly" in check.value and ">=900" in check.value and "not-there-at-all (missing)" in check.value
    assert "numpy" not in check.value and "torch" not in check.value


# -- wheels ------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    needs = [f"Requires-Dist: {r}" for r in requires]
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *needs]
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as z:
        z.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")


def test_requirements_are_followed_through_the_wheels(tmp_path: Path) -> None:
    wheel(tmp_path, "app", "1.0", "base>=2", "extra-thing; extra == 'lab'", "never; extra == 'train'",
          "other-system; sys_platform == 'no-such-system'")  # fmt: skip
    wheel(tmp_path, "base", "1.0")
    wheel(tmp_path, "base", "2.5", "deep[fast]<3")
    wheel(tmp_path, "deep", "2.0", "quick; extra == 'fast'")
    wheel(tmp_path, "deep", "3.0")
    (tmp_path / "notes.whl").write_text("not a wheel")
    absent, used = wheels.missing(tmp_path, "app[lab]")
    assert absent == ["extra-thing (for app)", "quick (for deep)"]
    wheel(tmp_path, "extra-thing", "1")
    wheel(tmp_path, "quick", "1", tag="cp27-none-win32")  # another Python's
    assert wheels.missing(tmp_path, "app[lab]")[0] == ["quick (for deep)"]
    wheel(tmp_path, "quick", "1")
    absent, used = wheels.missing(tmp_path, "app[lab]")
    assert not absent
    assert {u.split("-")[0] + "-" + u.split("-")[1] for u in used} == {
        "app-1.0", "base-2.5", "deep-2.0", "extra_thing-1", "quick-1",
    }  # fmt: skip
    assert wheels.missing(tmp_path, "app")[0] == []


def test_requirements_that_disagree_are_named(tmp_path: Path) -> None:
    wheel(tmp_path, "app", "1.0", "a", "b")
    wheel(tmp_path, "a", "1.0", "c")
    wheel(tmp_path, "b", "1.0", "c<2")
    wheel(tmp_path, "c", "1.0")
    wheel(tmp_path, "c", "2.0")
    assert wheels.missing(tmp_path, "app")[0] == ["c<2 (for b), but 2.0 was taken"]


def test_a_wheel_folder_that_lacks_something_makes_the_check_fail(tmp_path: Path) -> None:
    (check,) = readiness._wheels(tmp_path)
    assert check.status == "bad" and "superoffload" in check.value
    wheel(tmp_path, "superoffload", "0.1.0", "numpy>=2", "plotly; extra == 'lab'")
    wheel(tmp_path, "numpy", "2.5")
    (check,) = readiness._wheels(tmp_path)
    assert check.status == "bad" and "plotly (for superoffload)" in check.value
    wheel(tmp_path, "plotly", "6.1")
    (check,) = readiness._wheels(tmp_path)
    assert check.status == "ok" and check.value.startswith("3 wheels")
    (check,) = readiness._wheels(tmp_path / "absent")
    assert check.status == "bad" and "no such folder" in check.value


def test_the_servers_defaults_come_after_a_persons_own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    alone = cli_running.lab_environment()["JUPYTER_CONFIG_PATH"]
    settings = json.loads((Path(alone) / "labconfig" / "default_setting_overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "mine")
    assert cli_running.lab_environment()["JUPYTER_CONFIG_PATH"] == os.pathsep.join(["mine", alone])
