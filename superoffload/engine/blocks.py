"""How a model is divided into blocks. The engine hooks these modules and the profiler times them, so that block 7 of a
measured profile, of a plan and of a running engine is one and the same.

A block is a set of weights that move together: everything before the layers (the embedding), each layer, and
everything after them (final norm and head). The layers are the items of the model's largest ModuleList; a model without
one is divided into its direct children. Names can be given instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from superoffload.errors import InputError, did_you_mean

BlockKind = Literal["embedding", "layer", "head", "other"]

SECOND_LIST_SHARE = 0.25
"""Another list of layers (an encoder's, beside the decoder's) counts from this share of the largest one's weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block; `modules` are what hooks are set on, in forward order."""

    name: str
    """The module's name; of several modules, the last one's (``lm_head`` for final norm and head)."""
    kind: BlockKind
    modules: tuple[nn.Module, ...]
    """A module that holds a parameter directly *beside* the layers is listed here itself, so a module may contain
    those of other blocks."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Trainable parameters in order of definition, by their name in ``model.named_parameters()``. A tied parameter
    belongs to the first block that uses it; frozen ones to none. May be empty (a head tied to the embedding)."""
    shared: tuple[nn.Parameter, ...] = ()
    """Trainable parameters of earlier blocks that this one uses too."""

    @property
    def numel(self) -> int:
        """Trainable elements."""
        return sum(p.numel() for _, p in self.parameters)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> list[Block]:
    """Divide `model` into blocks in forward order; every trainable parameter is in exactly one.

    Args:
        model: any module; definition order is taken as forward order outside the layers.
        blocks: names of the modules that are to be layers, in forward order (a ModuleList's name stands for its
            items). Omitted: the largest ModuleList, or ModuleDict or Sequential of one repeated class.

    Returns:
        The embedding block if anything comes before the layers, the layers, the head block if anything comes after.

    Raises:
        InputError: a name that the model does not have, or one module inside another.
    """
    layers = _named_layers(model, blocks) if blocks is not None else _automatic_layers(model)
    names = {id(m): name for name, m in model.named_modules()}
    parts = list(_walk(model, {id(m) for m in layers}))
    positions = [i for i, (_, is_layer) in enumerate(parts) if is_layer]
    first, last = (positions[0], positions[-1]) if positions else (0, -1)

    groups: list[tuple[BlockKind, list[nn.Module]]] = []
    before: list[nn.Module] = []
    for i, (module, is_layer) in enumerate(parts):
        if is_layer:
            groups.append(("layer", [module]))
        elif i < first or isinstance(module, nn.Embedding):
            before.append(module)
        else:
            kind: BlockKind = "head" if i > last else "other"
            if groups and groups[-1][0] == kind:
                groups[-1][1].append(module)
            else:
                groups.append((kind, [module]))
    if before:
        groups.insert(0, ("embedding", before))
    if blocks is not None:
        groups = _in_given_order(groups, layers)
    return _own(model, groups, names)


def _own(model: nn.Module, groups: Iterable[tuple[BlockKind, list[nn.Module]]], names: dict[int, str]) -> list[Block]:
    """Give every trainable parameter to the first group that uses it."""
    canonical = {id(p): name for name, p in model.named_parameters()}
    order = {key: i for i, key in enumerate(canonical)}
    inside = {id(m): group for group in (modules for _, modules in groups) for m in group}
    taken: set[int] = set()
    result: list[Block] = []
    for kind, modules in groups:
        mine: dict[int, nn.Parameter] = {}
        shared: dict[int, nn.Parameter] = {}
        for module in modules:
            contains_others = any(id(m) in inside and m is not module for m in module.modules())
            for p in _direct_parameters(module) if contains_others else module.parameters():
                if p.requires_grad:
                    (shared if id(p) in taken else mine)[id(p)] = p
        taken.update(mine)
        parameters = tuple((canonical[k], mine[k]) for k in sorted(mine, key=order.__getitem__))
        name = names[id(modules[-1])] or type(modules[-1]).__name__
        result.append(Block(name, kind, tuple(modules), parameters, tuple(shared.values())))
    return result


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that no child module's forward stands for."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


def _walk(module: nn.Module, layers: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (module, is a layer) in definition order, never going deeper than the layers' surroundings need.

    A module without layers inside is one part; one with layers inside is opened, and stands for itself only where it
    holds parameters directly. Containers are opened always: their own forward is never called.
    """
    if id(module) in layers:
        yield module, True
        return
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if not container and not any(id(m) in layers for m in module.modules()):
        if next(module.parameters(), None) is not None:
            yield module, False
        return
    if next(_direct_parameters(module), None) is not None:
        yield module, False
    for child in module.children():
        if not isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from _walk(child, layers)


def _automatic_layers(model: nn.Module) -> list[nn.Module]:
    lists = list(_outermost_lists(model))
    if lists:
        sizes = [_size(x) for x in lists]
        return [m for x, n in zip(lists, sizes, strict=True) if n >= SECOND_LIST_SHARE * max(sizes) for m in x]
    root = model
    while True:  # a mere wrapper is not a block
        children = [m for m in root.children() if next(m.parameters(), None) is not None]
        if len(children) != 1 or next(_direct_parameters(root), None) is not None:
            break
        root = children[0]
    return [m for m in children if not isinstance(m, nn.Embedding | nn.ParameterList | nn.ParameterDict)]


def _outermost_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Lists of layers that are not inside another one (a list of experts is inside a layer)."""
    for child in module.children():
        items = [m for m in child.children() if next(m.parameters(), None) is not None]
        one_class = len(items) > 1 and len({type(m) for m in items}) == 1
        if items and (
            isinstance(child, nn.ModuleList) or (isinstance(child, nn.ModuleDict | nn.Sequential) and one_class)
        ):
            yield items
        else:
            yield from _outermost_lists(child)


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())


def _named_layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    known = dict(model.named_modules())
    layers: list[nn.Module] = []
    for name in names:
        if not name or name not in known:
            raise InputError(
                f'the model has no module "{name}"{did_you_mean(name, known)}',
                expected="module names as in model.named_modules()",
            )
        module = known[name]
        layers.extend(module.children() if isinstance(module, nn.ModuleList | nn.ModuleDict) else [module])
    chosen = {id(m) for m in layers}
    if not layers or len(chosen) != len(layers):
        raise InputError("the list of blocks is empty or names a module twice", expected="one name for each block")
    for module in layers:
        if any(id(m) in chosen for m in module.modules() if m is not module):
            inner = next(n for n, m in known.items() if m is module)
            raise InputError(f'block "{inner}" contains another block of the list', expected="modules side by side")
    return layers


def _in_given_order(
    groups: list[tuple[BlockKind, list[nn.Module]]], layers: list[nn.Module]
) -> list[tuple[BlockKind, list[nn.Module]]]:
    """Put the layers into the caller's order, which may differ from the order of definition."""
    wanted = iter(layers)
    return [(kind, [next(wanted)]) if kind == "layer" else (kind, modules) for kind, modules in groups]
