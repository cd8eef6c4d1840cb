"""``superoffload lab`` serves the notebooks, and its server ends with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fetch(url)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, "the server ended by itself"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)


def test_lab_serves_the_notebooks_and_stops_with_its_command(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "superoffload", "lab", "--no-browser", f"--port={port}"]
    env = {**os.environ, "JUPYTER_TOKEN": "only-for-this-test", "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
           "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "JUPYTER_DATA_DIR": str(tmp_path / "data")}  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT)
    base, key = f"http://127.0.0.1:{port}/api", "token=only-for-this-test"
    try:
        wait_for(f"{base}?{key}", process)
        names = {item["name"] for item in fetch(f"{base}/contents?{key}")["content"]}
        assert "01_quickstart.ipynb" in names
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    assert code == 0, (tmp_path / "log").read_text()
    with pytest.raises(urllib.error.URLError):
        fetch(f"{base}?{key}")
    assert "notebooks: " in (tmp_path / "log").read_text()
