"""A model folder small enough that a whole run takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
