"""The optimizer's state in and out: torch's dictionary, and one safetensors file. No pickle.

State is kept by parameter, never by bucket, so that it can be resumed under another plan bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from superoffload.engine.stepper import Engine
from superoffload.errors import EngineError, InputError
from superoffload.record import replacing

if TYPE_CHECKING:
    from superoffload.engine.optimizer import OffloadAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
FORMAT = "superoffload.optimizer"

Snapshot = dict[str, dict[str, Any]]
"""Parameter name -> step, master, exp_avg, exp_avg_sq."""


def snapshot(engine: Engine) -> Snapshot:
    """Copy the state of every parameter; the engine must be synchronised."""
    return {
        p.name: {
            "step": int(engine.steps[p.index]),
            **{kind: engine.weights.gather(p, kind).clone() for kind in ("master", *MOMENTS)},
        }
        for p in engine.params
    }


def restore(engine: Engine, kept: Snapshot) -> None:
    """Put a snapshot into an engine; parameters it does not name keep a fresh state."""
    for p in engine.params:
        if p.name in kept:
            engine.steps[p.index] = kept[p.name]["step"]
            for kind in ("master", *MOMENTS):
                engine.weights.scatter(p, kind, kept[p.name][kind])


def show_steps(optimizer: OffloadAdamW) -> None:
    """Let the optimizer's `state` hold each parameter's step count, live. Tools that look whether an optimizer has
    stepped (torch's distributed checkpoint would otherwise take a step of its own to find out) look there; the moments
    are in `state_dict()`."""
    engine = optimizer.engine
    optimizer.state.clear()
    if engine.sequence or bool(engine.steps.any()):
        for p in optimizer._managed:
            optimizer.state[p.param] = {"step": engine.steps[p.index]}


def _torch_order(optimizer: OffloadAdamW) -> list[Any]:
    """Managed parameters in the order of torch's indices: group by group."""
    by_id = {id(p.param): p for p in optimizer._managed}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]


def state_dict(optimizer: OffloadAdamW) -> dict[str, Any]:
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    engine = optimizer.engine
    engine.synchronize()
    state: dict[int, dict[str, Any]] = {}
    for i, p in enumerate(_torch_order(optimizer)):
        step = int(engine.steps[p.index])
        if step == 0:
            continue
        state[i] = {
            "step": torch.tensor(float(step), device="cpu"),
            **{k: engine.weights.gather(p, k) for k in MOMENTS},
        }
        if p.dtype != "float32":
            state[i]["master"] = engine.weights.gather(p, "master")
    groups, start = [], 0
    for group in optimizer.param_groups:
        n = len(group["params"])
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(range(start, start + n))})
        start += n
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    if optimizer._scaling.rule is not None:
        optimizer.learn_loss_scale()
        result["loss_scale"] = optimizer._scaling.rule.as_dict()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        result = after(optimizer, result) or result
    return result


def load_state_dict(optimizer: OffloadAdamW, given: dict[str, Any]) -> None:
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = before(optimizer, given) or given
    engine = optimizer.engine
    engine.synchronize()
    groups = given["param_groups"]
    ours = [len(g["params"]) for g in optimizer.param_groups]
    theirs = [len(g["params"]) for g in groups]
    if ours != theirs:
        raise InputError(f"the state has parameter groups of {theirs} parameters", expected=f"{ours}, as here")
    ordered = _torch_order(optimizer)
    index_of = {old: i for i, old in enumerate(i for g in groups for i in g["params"])}
    loads: list[tuple[Any, dict[str, Any]]] = []
    for key, values in given["state"].items():
        p = ordered[index_of[key]]
        for kind in ("master", *MOMENTS):
            if kind in values and tuple(values[kind].shape) != tuple(p.param.shape):
                raise InputError(
                    f"{kind} of {p.name} has shape {tuple(values[kind].shape)}", expected=f"{tuple(p.param.shape)}"
                )
        loads.append((p, values))
    # All is checked: from here on nothing can fail half-way.
    engine.collector.discard()
    engine.steps.zero_()
    loaded = {p.index for p, _ in loads}
    for p in engine.params:
        if p.index not in loaded:
            for kind in MOMENTS:
                engine.weights.scatter(p, kind, torch.zeros(p.numel, device="cpu"))
    for p, values in loads:
        engine.steps[p.index] = int(values["step"])
        for kind in ("master", *MOMENTS):
            if kind in values:
                engine.weights.scatter(p, kind, values[kind])
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
    if optimizer._scaling.rule is not None and "loss_scale" in given:
        optimizer._scaling.rule.load(given["loss_scale"])
    show_steps(optimizer)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def save(optimizer: OffloadAdamW, path: str | os.PathLike[str]) -> None:
    from safetensors.torch import save_file

    engine = optimizer.engine
    engine.synchronize()  # raises what the worker failed with: half a step is never written
    if engine.collector.collected:
        raise EngineError(
            "the optimizer was saved between backward and step", remedy="Call step() or zero_grad() first"
        )
    tensors: dict[str, torch.Tensor] = {}
    for p in engine.params:
        for kind in ("master", *MOMENTS):
            tensors[f"{kind}/{p.name}"] = engine.weights.gather(p, kind).contiguous()
    names = {id(p.param): p.name for p in engine.params}
    groups = [
        {**{k: group[k] for k in group if k != "params" and _is_plain(group[k])},
         "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip
    metadata = {
        "format": FORMAT,
        "version": "1",
        "steps": json.dumps({p.name: int(engine.steps[p.index]) for p in engine.params}),
        "param_groups": json.dumps(groups),
    }
    if optimizer._scaling.rule is not None:
        optimizer.learn_loss_scale()
        metadata["loss_scale"] = json.dumps(optimizer._scaling.rule.as_dict())
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def load(optimizer: OffloadAdamW, path: str | os.PathLike[str]) -> None:
    from safetensors import SafetensorError, safe_open

    engine = optimizer.engine
    engine.synchronize()
    if not Path(path).is_file():
        raise InputError(f"no such file: {path}", expected="a file that OffloadAdamW.save wrote")
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(
                    f"{path} is not an optimizer checkpoint", expected="a file that OffloadAdamW.save wrote"
                )
            steps: dict[str, int] = json.loads(metadata["steps"])
            _check_names(engine, steps, f.get_slice, str(path))
            engine.collector.discard()
            for p in engine.params:
                engine.steps[p.index] = steps[p.name]
                for kind in ("master", *MOMENTS):
                    engine.weights.scatter(p, kind, f.get_tensor(f"{kind}/{p.name}"))
            if optimizer._scaling.rule is not None and "loss_scale" in metadata:
                optimizer._scaling.rule.load(json.loads(metadata["loss_scale"]))
            show_steps(optimizer)
            _load_groups(optimizer, json.loads(metadata["param_groups"]))
    except SafetensorError as e:
        raise InputError(f"{path} cannot be read: {e}", expected="a file that OffloadAdamW.save wrote") from None


def _check_names(engine: Engine, steps: dict[str, int], shape_of: Callable[[str], Any], path: str) -> None:
    ours = {p.name for p in engine.params}
    if ours != set(steps):
        missing, extra = sorted(ours - set(steps)), sorted(set(steps) - ours)
        raise InputError(
            f"{path} is of another model: {len(missing)} parameters are missing {missing[:3]}, "
            f"{len(extra)} are unknown {extra[:3]}",
            expected="the parameters that this optimizer trains",
        )
    for p in engine.params:
        shape = tuple(shape_of(f"master/{p.name}").get_shape())
        if shape != tuple(p.param.shape):
            raise InputError(f"{path}: {p.name} has shape {shape}", expected=f"{tuple(p.param.shape)}")


def _load_groups(optimizer: OffloadAdamW, saved: list[dict[str, Any]]) -> None:
    """Hyperparameters come back where the grouping is the same; another grouping keeps the ones given now."""
    names = {id(p.param): p.name for p in optimizer._managed}
    for group in optimizer.param_groups:
        mine = [names[id(p)] for p in group["params"]]
        for old in saved:
            if old["params"] == mine:
                group.update({k: tuple(v) if k == "betas" else v for k, v in old.items() if k != "params"})


__all__ = ["load", "load_state_dict", "restore", "save", "show_steps", "snapshot", "state_dict"]
