"""How an optimizer gets its engine: what is refused before, what it replaces, what is kept when it is rebuilt."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from superoffload.activation_costs import check_policies
from superoffload.engine import checkpoint, report
from superoffload.engine.activations import model_recomputes
from superoffload.engine.blocks import Block, find_blocks
from superoffload.engine.buckets import DTYPES, ManagedParam, plan_layout
from superoffload.engine.chunked_head import find_head
from superoffload.engine.fit import check_fit
from superoffload.engine.flow import check_flow_blocks
from superoffload.engine.loss_scale import LossScale
from superoffload.engine.start import Start, check_start, move_rest
from superoffload.engine.stepper import Engine
from superoffload.errors import InputError
from superoffload.layout import Bucket
from superoffload.plan import Activations

if TYPE_CHECKING:
    from superoffload.engine.optimizer import OffloadAdamW

open_optimizers: weakref.WeakSet[OffloadAdamW] = weakref.WeakSet()
"""Optimizers that are not closed. A parameter has at most one."""


def optimizer_of(model: nn.Module) -> OffloadAdamW | None:
    """The open OffloadAdamW that trains parameters of `model`, if there is one."""
    mine = {id(p) for p in model.parameters()}
    return next((o for o in list(open_optimizers) if any(id(p.param) in mine for p in o._managed)), None)


def build(optimizer: OffloadAdamW) -> None:
    """Make the engine of an optimizer that has none."""
    o = optimizer
    blocks, managed, layouts = _layout(o)
    _close_previous(o)
    if not o._applies_activations:  # the plan says what the model does
        own: Activations = "full" if model_recomputes(o.model) else "none"
        o.plan = o.plan.model_copy(update={"activations": own})
    start = None if o._device is None else Start(o._device, o._weights, progress=True)
    if o._device is not None:
        move_rest(o.model, o._device, o._weights, (id(p.param) for p in managed))
    o._engine = Engine(
        o.model, blocks, managed, layouts, o.plan, trace=o._record_trace, collects=o._micro_batches.collects,
        arguments=o._arguments, log=o._log, start=start, activations=o._applies_activations,
        loss_scale=o._loss_scale_now,
    )  # fmt: skip
    o._managed = managed
    if o._scaling.rule is None and any(p.dtype == "float16" for p in managed):
        o._scaling.rule = LossScale()
    mine = {id(p.param) for p in managed}
    o._unmanaged = [p for group in o.param_groups for p in group["params"] if id(p) not in mine]


def rebuild(optimizer: OffloadAdamW) -> None:
    """Make the engine anew around the parameter groups as they are now; state and gradients are kept."""
    engine = optimizer.engine
    _layout(optimizer)  # refused while the engine still is as it was
    engine.synchronize()
    optimizer.learn_loss_scale()
    engine.collector.give_back()
    kept = checkpoint.snapshot(engine)
    optimizer._log.steps_before += engine.sequence
    optimizer._skips_before += engine.worker.verdict()[4]
    if optimizer.plan.flow_blocks:  # what does not fit the GPU all at once is left on the host
        optimizer._device = engine.device.device
    engine.close()
    del engine
    optimizer._engine = None  # its memory goes before the new engine's comes
    build(optimizer)
    checkpoint.restore(optimizer.engine, kept)
    checkpoint.show_steps(optimizer)


def check_group(optimizer: OffloadAdamW, param_group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group to be added, with its parameters as a list.

    Raises:
        InputError: one of them is not the model's.
    """
    given = param_group.get("params")
    params = [given] if isinstance(given, torch.Tensor) else list(given or ())
    for p in params:
        if id(p[1] if isinstance(p, tuple) else p) not in optimizer._model_params:
            raise InputError(
                "a parameter in `params` does not belong to the model",
                expected="parameters of the model that was passed",
                remedy="Build the groups from model.named_parameters()",
            )
    return {**param_group, "params": params}


def _layout(o: OffloadAdamW) -> tuple[list[Block], list[ManagedParam], list[Bucket]]:
    """Blocks, parameters and buckets of the engine to be made. Everything that can be refused is refused here: nothing
    has changed yet."""
    group_of = {id(p): g for g, group in enumerate(o.param_groups) for p in group["params"]}
    blocks = find_blocks(o.model)
    check_flow_blocks(blocks, o.plan.flow_blocks)
    block_of = {id(p): i for i, block in enumerate(blocks) for _, p in block.parameters}
    managed: list[ManagedParam] = []
    partials = 0
    for name, p in o.model.named_parameters():
        if id(p) not in group_of or id(p) not in block_of:  # a frozen one has no block
            continue
        dtype = str(p.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise InputError(f"{name} has dtype {dtype}", expected="float32, bfloat16 or float16")
        managed.append(ManagedParam(len(managed), name, p, block_of[id(p)], dtype, group_of[id(p)], partials))
        partials += managed[-1].chunks
    layouts = plan_layout(managed, len(blocks), o.plan)
    check_policies([b.kind for b in blocks], o.plan)
    if o.plan.loss_chunks > 1:
        find_head(o.model)
    if o.plan.compile_blocks:
        from superoffload.engine.compiling import check_compilable  # with all of torch's compiler

        check_compilable(o.model, blocks)
    check_start(o.model, o._weights)
    previous = optimizer_of(o.model)
    freed = report.memory(previous.engine) if previous is not None and previous._engine is not None else None
    computes = o._device or next((p.param.device for p in managed), torch.device("cpu"))
    check_fit(layouts, managed, o.plan, computes, freed=freed)
    return blocks, managed, layouts


def _close_previous(optimizer: OffloadAdamW) -> None:
    previous = optimizer_of(optimizer.model)
    if previous is None or previous is optimizer:
        return
    warnings.warn(
        "the model already had an OffloadAdamW, which is closed now. Its moments are not carried over: to keep "
        "them, pass old.state_dict() to load_state_dict of the new one",
        UserWarning,
        stacklevel=4,
    )
    previous.close()


__all__ = ["build", "check_group", "open_optimizers", "optimizer_of", "rebuild"]
