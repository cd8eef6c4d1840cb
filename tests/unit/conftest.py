"""Fixtures of the unit tier."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module `tiny.py` beside this file (test modules are imported by path and cannot import each other)."""
    found = importlib.util.spec_from_file_location("superoffload_tests_tiny", Path(__file__).with_name("tiny.py"))
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
