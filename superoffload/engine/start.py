"""Model start: weights of a model on the meta device, or on the host, go straight to where the engine keeps them.

A model that is larger than the GPU's memory, or than half of the host's, can be held nowhere as a whole beside its
optimizer. So it is built without weights, and every weight is written once, from a safetensors file or at random, into
the arena it will be trained in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from superoffload.errors import InputError
from superoffload.units import MIB

CHUNK_ELEMENTS = 16 * MIB
"""Random weights are made in pieces of this size on the device, wherever they go."""


class WeightSource(Protocol):
    """Where weights come from."""

    def check(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Raise InputError unless every name has weights of that shape. Nothing has been changed yet."""

    def fill(self, name: str, target: torch.Tensor, device: torch.device) -> None:
        """Write the weights of `name` into `target`, which may lie on the host; `device` is the one that computes."""


class RandomWeights:
    """Normal weights, as most language models are initialised; one-dimensional ones (norms) become 1.

    The values depend on the seed and the parameter's name, on the kind of device that makes them, and on nothing else:
    not on the plan.

    Args:
        std: standard deviation.
        seed: of all of them.
    """

    def __init__(self, std: float = 0.02, seed: int = 0):
        self._std, self._seed = std, seed

    def check(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Any name and shape will do."""

    def fill(self, name: str, target: torch.Tensor, device: torch.device) -> None:
        if target.dim() < 2:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        flat = target.view(-1)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            part = flat[start : start + CHUNK_ELEMENTS]
            made = torch.empty(part.numel(), dtype=torch.float32, device=device)
            part.copy_(made.normal_(0.0, self._std, generator=generator))


class SafetensorsWeights:
    """Weights of safetensors files, one tensor in memory at a time.

    Args:
        path: a file, or a folder with one or more; where it holds an index (``*.safetensors.index.json``) the files
            that it names.

    Raises:
        InputError: no such file, a file that is not safetensors, or a name in two files.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            with _opened(file) as f:
                for name in f.keys():  # noqa: SIM118 -- not a dictionary
                    if name in self._file_of:
                        raise InputError(
                            f"{name} is in {self._file_of[name].name} and in {file.name}",
                            expected="each tensor in one file",
                            remedy="Keep one checkpoint in a folder, or name its file",
                        )
                    self._file_of[name] = file

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        index = sorted(self._path.glob("*.safetensors.index.json"))
        if index:
            names = json.loads(index[0].read_text(encoding="utf-8")).get("weight_map", {}).values()
            return [self._path / name for name in sorted(set(names))]
        found = sorted(self._path.glob("*.safetensors"))
        if not found:
            raise InputError(f"{self._path} holds no .safetensors file", expected="a file, or a folder of them")
        return found

    def check(self, wanted: dict[str, tuple[int, ...]]) -> None:
        missing = sorted(n for n in wanted if n not in self._file_of)
        if missing:
            raise InputError(
                f"{self._path} has no weights for {len(missing)} of {len(wanted)} parameters: {', '.join(missing[:3])}"
                f"{' ...' if missing[3:] else ''}",
                expected="a checkpoint of this model",
            )
        for name, shape in wanted.items():
            with _opened(self._file_of[name]) as f:
                found = tuple(f.get_slice(name).get_shape())
            if found != shape:
                raise InputError(f"{self._path}: {name} has shape {found}", expected=str(shape))

    def fill(self, name: str, target: torch.Tensor, device: torch.device) -> None:
        with _opened(self._file_of[name]) as f:
            target.copy_(f.get_tensor(name))


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise InputError(f"{file} cannot be read: {e}", expected="a safetensors file") from None


def check_start(model: nn.Module, weights: WeightSource | None) -> None:
    """Refuse a model that cannot be started, before anything changes.

    Raises:
        InputError: weights or buffers on the meta device that nobody has values for.
    """
    empty = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_meta}
    if empty and weights is None:
        raise InputError(
            f"{len(empty)} parameters are on the meta device, without values ({next(iter(empty))} ...)",
            expected="weights=RandomWeights() or weights=SafetensorsWeights(PATH) beside such a model",
        )
    if empty and weights is not None:
        weights.check(empty)
    buffers = [name for name, b in model.named_buffers() if b.is_meta]
    if buffers:
        raise InputError(
            f"the buffer {buffers[0]} is on the meta device, and a checkpoint has no values for it",
            expected="parameters alone on the meta device",
            remedy="Build the model inside accelerate.init_empty_weights(), which leaves buffers real",
        )


def become(p: nn.Parameter, real: torch.Tensor) -> None:
    """Let a meta parameter be `real`. The object stays the same: parameter groups and modules know it."""
    # `.data`: a parameter of its own version, not of the arena's that it is a view of.
    torch.utils.swap_tensors(p, nn.Parameter(real.data, requires_grad=p.requires_grad))


def move_rest(model: nn.Module, device: torch.device, weights: WeightSource | None, managed: Iterable[int]) -> None:
    """Move what the engine does not keep, buffers and frozen parameters, to the device.

    Args:
        managed: ids of the parameters that the engine keeps.
    """
    mine = set(managed)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)
    for name, p in model.named_parameters():
        if id(p) in mine:
            continue
        if p.is_meta and weights is not None:
            real = torch.empty(p.shape, dtype=p.dtype, device=device)
            weights.fill(name, real, device)
            become(p, real)
        elif p.device != device:
            p.data = p.data.to(device)


class Start:
    """How the weights of a starting engine get to their places.

    Args:
        device: the one that computes.
        weights: of parameters on the meta device.
        progress: show a bar over the bytes, on a terminal or in a notebook.
    """

    def __init__(self, device: torch.device, weights: WeightSource | None = None, *, progress: bool = False):
        self.device, self._weights = device, weights
        self._progress = progress
        self._bar: Any = None

    def place(self, name: str, p: nn.Parameter, target: torch.Tensor) -> None:
        """Write the values of `p` into `target`, of its shape."""
        if p.is_meta and self._weights is not None:
            self._weights.fill(name, target, self.device)
        else:
            target.copy_(p.data)
        if self._bar is not None:
            self._bar.update(target.nbytes)

    @contextlib.contextmanager
    def showing(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Show how far `params` have come, while the body places them."""
        if not self._progress:
            yield
            return
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        total = sum(p.numel() * p.element_size() for p in params)
        with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None) as self._bar:
            yield
        self._bar = None


__all__ = ["RandomWeights", "SafetensorsWeights", "Start", "WeightSource", "become", "check_start", "move_rest"]
