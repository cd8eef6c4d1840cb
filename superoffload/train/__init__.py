"""The full training loop behind ``superoffload train``."""

from __future__ import annotations

from typing import Any

__all__ = ["TokenBlocks", "load_blocks", "sample_text", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from superoffload.train.loop import train

        return train
    if name in __all__:
        from superoffload.train import data

        return getattr(data, name)
    raise AttributeError(f'module "{__name__}" has no attribute "{name}"')
