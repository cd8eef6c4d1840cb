"""``superoffload workshop-check``: whether this laptop can take part, told the evening before, with what to do.

It goes further than `doctor`, which only looks: notebooks are imported from, a kernel and a server are started and
stopped again, a plan is simulated. All of it stays on this machine.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from superoffload import cli_running, doctor
from superoffload.doctor import Check
from superoffload.errors import SuperOffloadError
from superoffload.units import GB, format_bytes, format_seconds

SERVER_S = 120.0
"""A first start of JupyterLab on a slow disk."""
SLOW_PLAN_S = 5.0
FREE_GB = 0.5
INSTALL = "pip install 'superoffload[lab]'"
NEEDS_TORCH = ("01_quickstart.ipynb",)


def report(folder: Path, wheels: Path | None = None) -> list[Check]:
    """Check everything in the order in which things would fail. A check that itself fails is reported as bad.

    Args:
        folder: where the notebooks are, or are copied to.
        wheels: a folder of wheels that is to install all of it without internet; None leaves that out.
    """
    found: list[Check] = []
    looks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("Python", doctor._python),
        ("packages", _packages),
        ("torch", _torch),
        ("notebooks", lambda: _notebooks(folder)),
        ("writing", lambda: _writing(folder)),
        ("a plan", _plan),
        ("kernel", _kernel),
        ("port", _port),
        ("JupyterLab", lambda: _server(folder)),
        ("browser", _browser),
    ]
    if wheels is not None:
        looks.append(("wheel folder", lambda: _wheels(wheels)))
    for name, look in looks:
        try:
            found.extend(look())
        except SuperOffloadError as e:
            found.append(Check(name, "bad", e.what, e.remedy or ""))
        except Exception as e:  # the report must come out on any machine
            found.append(Check(name, "bad", f"{type(e).__name__}: {e}", "Send this line to the instructor"))
    return found


def _packages() -> Iterator[Check]:
    """What this package asks for, without torch, at the versions that it asks for."""
    have, absent = doctor._versions(doctor.LAB_MODULES)
    if absent:
        yield Check("packages", "bad", f"not installed: {', '.join(absent)}", INSTALL)
        return
    from packaging.requirements import Requirement

    old = []
    for text in metadata.requires("superoffload") or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": "lab"}):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            old.append(f"{wanted.name} (missing)")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            old.append(f"{wanted.name} {version} ({wanted.specifier} needed)")
    if old:
        yield Check("packages", "bad", ", ".join(old), f"{INSTALL} --upgrade")
    else:
        yield Check("packages", "ok", ", ".join(have))


def _torch() -> Iterator[Check]:
    have, _ = doctor._versions(("torch",))
    if have:
        yield Check("torch", "ok", have[0])
    else:
        yield Check("torch", "note", "not installed: notebook 01 and one cell of 05 are skipped, the rest needs none",
                    "pip install 'superoffload[train]'")  # fmt: skip


def imports_of(notebook: Path) -> list[tuple[str, str]]:
    """Module and name of every import in a notebook's code cells; the name is empty for a plain import."""
    wanted = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = [line for line in "".join(cell["source"]).split("\n") if not line.lstrip().startswith(("!", "%"))]
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Import):
                wanted += [(a.name, "") for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                wanted += [(node.module or "", a.name) for a in node.names]
    return wanted


def _notebooks(folder: Path) -> Iterator[Check]:
    place, copied = cli_running.prepare_notebooks(folder)
    names, broken = [], []
    for notebook in sorted(place.glob("[0-9][0-9]_*.ipynb")):
        names.append(notebook.name[:2])
        for module, name in imports_of(notebook):
            try:
                found = importlib.import_module(module)
                if name and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as e:
                broken.append((notebook.name, e.name or str(e)))
                break
    blocking = [f"{n} ({why})" for n, why in broken if n not in NEEDS_TORCH]
    if blocking:
        yield Check("notebooks", "bad", f"imports fail: {', '.join(blocking)}", INSTALL)
    else:
        skipped = f"; without torch: {', '.join(n for n, _ in broken)}" if broken else ""
        new = f" ({len(copied)} copied)" if copied else ""
        yield Check("notebooks", "ok", f"{', '.join(names)} in {place}{new}{skipped}")


def _writing(folder: Path) -> Iterator[Check]:
    place, _ = cli_running.prepare_notebooks(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, suffix=".tmp"):
            pass
    except OSError as e:
        yield Check("writing", "bad", f"cannot write in {place}: {e.strerror}", "Give another one: --folder")
        return
    free = shutil.disk_usage(place).free
    if free < FREE_GB * GB:
        yield Check("writing", "warn", f"{format_bytes(free)} free on that disk", f"Free {FREE_GB:g} GB")
    else:
        yield Check("writing", "ok", f"{format_bytes(free)} free")


def _plan() -> Iterator[Check]:
    from superoffload.estimating import estimate
    from superoffload.planner import make_plan
    from superoffload.simulator import simulate

    begun = time.perf_counter()
    profile = estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    plan = make_plan(profile)
    planned = time.perf_counter()
    simulate(profile, plan)
    now = time.perf_counter()
    planning, simulating = format_seconds(planned - begun), format_seconds(now - planned)
    text = f"{planning} to plan a 7B model, {simulating} to simulate it (measured)"
    if now - begun > SLOW_PLAN_S:
        yield Check("a plan", "warn", text, "Plug the laptop in, and close what is busy: knobs will lag")
    else:
        yield Check("a plan", "ok", text)


def _kernel() -> Iterator[Check]:
    """Start the kernel that notebooks use and import the widgets in it: it may be another Python than this one."""
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        yield Check("kernel", "bad", "jupyter_client is not installed", INSTALL)
        return
    said: list[str] = []

    def listen(message: dict[str, object]) -> None:
        content = message["content"]
        if isinstance(content, dict) and "text" in content:
            said.append(str(content["text"]))

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        reply = client.execute_interactive(
            "import sys, superoffload.widgets; print(sys.executable)", timeout=90, output_hook=listen
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    content = reply["content"]
    if content["status"] != "ok":
        why = f"{content.get('ename')}: {content.get('evalue')}"
        yield Check("kernel", "bad", f"the kernel python3 cannot import the widgets ({why})",
                    f"{sys.executable} -m ipykernel install --sys-prefix")  # fmt: skip
    else:
        yield Check("kernel", "ok", "".join(said).strip())


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _port() -> Iterator[Check]:
    with socket.socket() as s:
        taken = s.connect_ex(("127.0.0.1", 8888)) == 0
    if taken:
        yield Check("port", "note", "8888 is in use: JupyterLab takes the next free one and prints it")
    else:
        yield Check("port", "ok", "8888 is free")


def _server(folder: Path) -> Iterator[Check]:
    """Serve the notebooks for a moment, with settings of its own, and ask for the first one."""
    place, _ = cli_running.prepare_notebooks(folder)
    port, token = free_port(), "workshop-check"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        own = {f"JUPYTER_{k}_DIR": str(Path(scratch) / k.lower()) for k in ("CONFIG", "RUNTIME")}
        log = Path(scratch) / "log"
        begun = time.perf_counter()
        with log.open("wb") as out:
            server = subprocess.Popen(
                cli_running.lab_command(place, browser=False, port=port), stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env={**os.environ, **own, "JUPYTER_TOKEN": token},
            )  # fmt: skip
            try:
                problem = _wait(server, f"http://127.0.0.1:{port}/api/contents/{cli_running.FIRST_NOTEBOOK}", token)
            finally:
                server.terminate()
                try:
                    server.wait(20)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()
        if problem:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
            yield Check("JupyterLab", "bad", f"{problem}; its last words: {last[0]}",
                        f"Read what {sys.executable} -m jupyterlab --no-browser says; {INSTALL}")  # fmt: skip
        else:
            took = format_seconds(time.perf_counter() - begun)
            yield Check("JupyterLab", "ok", f"serves the notebooks on 127.0.0.1 after {took} (measured)")


def _wait(server: subprocess.Popen[bytes], url: str, token: str) -> str:
    """Wait until `url` answers; returns what went wrong, empty if nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a company's proxy knows no 127.0.0.1
    request = urllib.request.Request(f"{url}?content=0", headers={"Authorization": f"token {token}"})
    deadline = time.monotonic() + SERVER_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"the server ended with exit code {server.returncode}"
        try:
            with opener.open(request, timeout=5) as answer:
                return "" if json.load(answer).get("type") == "notebook" else "the server does not list the notebooks"
        except urllib.error.HTTPError as e:
            return f"the server answers with status {e.code}"
        except OSError:
            time.sleep(0.2)
    return f"the server does not answer within {SERVER_S:.0f} s"


def _browser() -> Iterator[Check]:
    try:
        name = getattr(webbrowser.get(), "name", "") or "the system's"
    except webbrowser.Error:
        yield Check(
            "browser", "note", "none found from here", "Open the printed address by hand: superoffload lab --no-browser"
        )
        return
    yield Check("browser", "ok", str(name))


def _wheels(folder: Path) -> Iterator[Check]:
    """Follow the requirements of superoffload[lab] through the wheels in `folder`."""
    from superoffload.workshop.wheels import missing

    if not folder.is_dir():
        yield Check("wheel folder", "bad", f"no such folder: {folder}", "docs/workshop.md says how one is made")
        return
    absent, used = missing(folder, "superoffload[lab]")
    if absent:
        yield Check("wheel folder", "bad", f"nothing for this machine: {'; '.join(absent)}",
                    "Add them: pip download --only-binary=:all: --dest FOLDER NAME")  # fmt: skip
    else:
        yield Check("wheel folder", "ok", f"{len(used)} wheels of {folder} install superoffload[lab] here, offline")
