"""CLI commands that do things on this machine: doctor, train, bench, lab, demo."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from superoffload.config import TunedConfig
from superoffload.errors import InputError, MissingDependency, SuperOffloadError
from superoffload.hardware import Hardware

FIRST_NOTEBOOK = "01_quickstart.ipynb"


def doctor(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload doctor``: exit code 1 where something stops the main job."""
    from superoffload import doctor as doc

    checks = doc.report()
    print(doc.as_text(checks))
    body = doc.as_json(checks)
    return {**body, "exit_code": 0 if body["ok"] else 1}


def workshop_check(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload workshop-check``: exit code 1 where a laptop could not take part."""
    from superoffload import doctor as doc
    from superoffload.workshop import readiness

    checks = readiness.report(Path(args.folder), Path(args.wheels) if args.wheels else None)
    print(doc.as_text(checks))
    body = doc.as_json(checks)
    print("ready for the workshop" if body["ok"] else "not ready: see what is marked BAD")
    return {**body, "exit_code": 0 if body["ok"] else 1}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload train``: the full run under a tuned config. Exit code 1 where Ctrl-C ended it early."""
    config = TunedConfig.load(args.config)
    require_torch("training")
    for line in machine_notes(config):
        print(f"note: {line}", file=sys.stderr)
    from superoffload.train import train as run_training

    out = args.out or args.resume or "run"
    body: dict[str, Any] = run_training(config, args.data, args.steps, out, args.resume)
    if body["first_loss"] is not None:
        print(
            f"loss {body['first_loss']:.3f} -> {body['last_loss']:.3f}, {body['tokens_per_s']:,.0f} tokens/s (measured)"
        )
    print(f"{body['state']} at step {body['step']}; results in {body['out']}")
    return {**body, "exit_code": 0 if body["state"] == "finished" else 1}


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload bench adam``: the CPU kernels beside their peers, measured here."""
    require_torch("the benchmark")
    from superoffload.kernels import bench as adam

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    result = adam.bench_adam(params=args.params, threads=args.threads, rounds=args.rounds, progress=say)
    print(adam.as_table(result))
    return result


def machine_notes(config: TunedConfig) -> list[str]:
    """How this machine differs from the one that the plan was made for, as far as an earlier probe of it knows:
    nothing is measured here."""
    from superoffload import probing

    known = probing.cache_path(probing.machine_fingerprint())
    try:
        return config.differences(Hardware.load(known)) if known.is_file() else []
    except InputError:  # written by another version
        return []


def demo(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload demo``: the main job without a browser."""
    require_torch("the demo")
    from superoffload import demo as steps

    return steps.run(args.out, steps=args.steps)


def lab(args: argparse.Namespace) -> dict[str, Any]:
    """``superoffload lab``: JupyterLab on the notebooks, which are copied out of an installed package if need be."""
    missing = [m for m in ("jupyterlab", "ipywidgets", "plotly", "anywidget") if importlib.util.find_spec(m) is None]
    if missing:
        raise MissingDependency(
            f"the notebooks need {', '.join(missing)}, not installed here",
            remedy="pip install 'superoffload[train,lab]'",
        )
    notebooks, copied = prepare_notebooks(Path(args.folder))
    command = lab_command(notebooks, browser=not args.no_browser, port=args.port)
    print(f"notebooks: {notebooks}" + (f" ({len(copied)} copied there)" if copied else ""), flush=True)
    body = {"notebooks": str(notebooks), "copied": copied, "command": command}
    if args.dry_run:
        print("would start: " + " ".join(command))
        return body
    code = _serve(command)
    if code not in (0, -signal.SIGINT, -signal.SIGTERM):
        raise SuperOffloadError(f"JupyterLab ended with exit code {code}", remedy="Its own message is above")
    return body


def lab_command(notebooks: Path, *, browser: bool, port: int | None = None) -> list[str]:
    """The command that serves `notebooks` in JupyterLab."""
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        str(notebooks / FIRST_NOTEBOOK),
        f"--ServerApp.root_dir={notebooks}",
        f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}",
    ]  # the printed address leads to the notebook too
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # containers run as root, and Jupyter refuses that without the flag
    if not browser:
        command.append("--no-browser")
    if port:
        command += [f"--port={port}", "--ServerApp.port_retries=0"]
    return command


def lab_environment() -> dict[str, str]:
    """Environment of the server: a layer of defaults under a person's own settings, with which JupyterLab does not lay
    a question about news over the first figure, and asks no other host. Its terminals find this installation's
    `superoffload`, as in an activated environment."""
    defaults = str(Path(__file__).parent / "lab_settings")
    given = os.environ.get("JUPYTER_CONFIG_PATH")
    return {
        **os.environ,
        "JUPYTER_CONFIG_PATH": os.pathsep.join([*([given] if given else []), defaults]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def _serve(command: list[str]) -> int:
    """Run the server until it ends. Ctrl-C reaches it by itself, and it asks before it stops; SIGTERM is passed on, so
    that no server outlives this process."""
    server = subprocess.Popen(command, env=lab_environment())
    before = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        while True:
            try:
                return server.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def packaged_notebooks() -> Path:
    """Folder of the notebooks that came with this installation. Raises InputError where there are none."""
    spec = importlib.util.find_spec("superoffload.notebooks")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if any(Path(place).glob("*.ipynb")):
            return Path(place)
    raise InputError("this installation holds no notebooks", remedy="Install superoffload again, or work in a checkout")


def prepare_notebooks(folder: Path) -> tuple[Path, list[str]]:
    """Return a writable folder with the notebooks, and the names of those that had to be copied there.

    In a checkout that is its own `notebooks/`. Otherwise it is `folder`/notebooks, which gets those that are absent:
    a notebook that a person has changed is never overwritten.
    """
    packaged = packaged_notebooks()
    if (packaged.parent / "pyproject.toml").is_file():
        return packaged.resolve(), []
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}", remedy="Make it first, or leave --folder out")
    target = folder.resolve() / "notebooks"
    target.mkdir(exist_ok=True)
    copied = []
    for source in sorted(packaged.glob("*.ipynb")):
        if not (target / source.name).exists():
            shutil.copyfile(source, target / source.name)
            copied.append(source.name)
    return target, copied


def require_torch(what: str) -> None:
    """Refuse early, with the remedy, what cannot run without torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            f"{what} needs torch, which is not installed", remedy="pip install 'superoffload[train]'"
        )
