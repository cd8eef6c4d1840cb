"""Hooks that the engine leaves on a model. A copy of the model (an EMA, say) gets ones that do nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class _AboutBlock:
    """A hook that tells the engine of one block."""

    def __init__(self, tell: Callable[[int], None] | None, block: int):
        self._tell, self._block = tell, block

    def __deepcopy__(self, memo: Any) -> _AboutBlock:
        return type(self)(None, self._block)

    def __reduce__(self) -> Any:
        return (type(self), (None, self._block))


class BlockHook(_AboutBlock):
    """Forward pre-hook of a block, before all others: its weights must be the new ones."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._tell is not None:
            self._tell(self._block)


class BackwardHook(_AboutBlock):
    """Forward hook of a block: announces the backward of the block by the gradient of what it returns.

    A hook on the tensors themselves: a module's own backward hooks would put a view of every output into the graph.
    What is handed through (T5's position bias) announces its maker, and a leaf has no backward. Registered with keyword
    arguments.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._tell is None or not torch.is_grad_enabled():
            return
        tell, block = self._tell, self._block
        given = {id(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and id(tensor) not in given:
                tensor.register_hook(lambda grad: tell(block))


class LeaveHook(_AboutBlock):
    """Forward hook of a flow block's last module, but for recomputations: backward follows those."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tell is not None and torch._C._current_graph_task_id() == -1:
            self._tell(self._block)


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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of what a module returns: nested lists, tuples, dictionaries and dataclasses of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name))
