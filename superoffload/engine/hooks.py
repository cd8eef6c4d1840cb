"""Hooks that the engine leaves on a model. A copy of the model (an EMA, say) gets ones that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class BlockHook:
    """Forward pre-hook of a block, before all others: its weights must be the new ones."""

    def __init__(self, ready: Callable[[int], None] | None, block: int):
        self._ready, self._block = ready, block

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._ready is not None:
            self._ready(self._block)

    def __deepcopy__(self, memo: Any) -> BlockHook:
        return BlockHook(None, self._block)

    def __reduce__(self) -> Any:
        return (BlockHook, (None, self._block))


class SyncHook:
    """state_dict and load_state_dict pre-hook: weights on their way must have arrived."""

    def __init__(self, synchronize: Callable[[], None] | None):
        self._synchronize = synchronize

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def __deepcopy__(self, memo: Any) -> SyncHook:
        return SyncHook(None)

    def __reduce__(self) -> Any:
        return (SyncHook, (None,))
