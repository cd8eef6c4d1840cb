"""Hooks that the engine leaves on a model. A copy of the model (an EMA, say) gets ones that do nothing."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from superoffload.engine.buckets import ManagedParam
    from superoffload.engine.stepper import Engine

Collects = Callable[["ManagedParam"], bool | None]
"""Asked in every gradient hook whether the gradient is taken now, and if so whether by the last backward before the
step; None leaves it in `p.grad`."""


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


def install(engine: Engine, model: nn.Module, collects: Collects, handles: list[Any]) -> None:
    """Let the blocks' forward and backward, the gradients and the model's `state_dict` tell the engine.

    They hold it weakly, and the method `collects` too: a model must not keep alive an optimizer that everybody else has
    dropped.

    Args:
        handles: by which the hooks are removed; added to.
    """
    this, wanted = weakref.ref(engine), weakref.WeakMethod(collects)

    def ready(block: int) -> None:
        if (engine := this()) is not None:
            engine.ready(block)

    def take(p: ManagedParam) -> None:
        engine, collects = this(), wanted()
        if engine is not None:
            engine.flow.check(p)
        last = collects(p) if engine is not None and collects is not None else None
        if engine is not None and last is not None:
            engine.take(p, last)

    def backward_comes(block: int) -> None:
        if (engine := this()) is not None:
            engine.backward_comes(block)

    def left(block: int) -> None:
        if (engine := this()) is not None:
            engine.flow.left(block)

    def synchronize() -> None:
        if (engine := this()) is not None:
            engine.synchronize()

    untraced: Callable[[int], None] = torch.compiler.disable(ready)  # a host wait cannot be traced
    for index, block in enumerate(engine.blocks):
        for module in block.modules:
            # Before any other pre-hook, which may read the weights (torch's weight_norm does).
            handles.append(module.register_forward_pre_hook(BlockHook(untraced, index), prepend=True))
            if engine.plan.flow_blocks:
                handles.append(module.register_forward_hook(BackwardHook(backward_comes, index), with_kwargs=True))
        if index in engine.plan.flow_blocks:
            handles.append(block.modules[-1].register_forward_hook(LeaveHook(left, index)))
    for p in engine.params:
        handles.append(p.param.register_post_accumulate_grad_hook(lambda _, p=p: take(p)))
    for module in model.modules():
        handles.append(module.register_state_dict_pre_hook(SyncHook(synchronize)))
        handles.append(module.register_load_state_dict_pre_hook(SyncHook(synchronize)))
