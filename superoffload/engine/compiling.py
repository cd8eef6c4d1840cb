"""Layers whose forward goes through `torch.compile` (`Plan.compile_blocks`).

What is compiled is the function of the layers' class, so all alike layers share one graph: it is traced with the first
of them, and the others pass its guards, which look at shapes and not at whose weights they are. Everything of the
engine's stays outside the compiled region: hooks sit on `__call__`, checkpoints and saved-tensor hooks are around the
forward. What backward needs of the weights are the parameters themselves, so it finds them where they are by then, and
autograd's version check holds for them as it does without compiling.

Shapes are taken as constants. A graph with symbolic shapes, once one had been made for an odd batch, would serve the
usual ones from then on: slower, and with other bits than a run that had not met the odd batch. No CUDA graphs: they
would replay the addresses of the slots that weights happened to lie in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # names its config and its exceptions
from torch import nn

from superoffload.engine.blocks import Block
from superoffload.errors import EngineError, InputError
from superoffload.units import format_seconds

BACKEND = "inductor"
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}
"""Of inductor; also where the environment asks for CUDA graphs."""
RECOMPILE_LIMIT = 64
"""Graphs of one layer class before torch runs the rest uncompiled: its own limit, 8, is soon met by layers that differ
in a number or by batches of several lengths."""

Forward = Callable[..., Any]


@dataclass(slots=True)
class _Shared:
    """One compiled function and the layers that run it."""

    name: str
    function: Forward
    layers: int = 0
    begun: bool = False


class LayerCompiler:
    """Compiles forwards and calls them.

    Args:
        tell: called with a line for the person who waits, before the first call of each function and after it.
    """

    def __init__(self, tell: Callable[[str], None] | None = None):
        self._tell = tell or _to_stderr
        self._shared: dict[Any, _Shared] = {}

    def compile(self, forward: Forward, name: str) -> Forward:
        """The compiled form of a function; the same for every layer with this one.

        Args:
            forward: of a layer's class, with the layer as its first argument, or what somebody has put in its place.
            name: of the class.
        """
        found = self._shared.get(forward)
        if found is None:
            options = OPTIONS if BACKEND == "inductor" else None
            function = torch.compile(forward, backend=BACKEND, dynamic=False, options=options)
            found = self._shared[forward] = _Shared(name, function)
        found.layers += 1
        shared = found

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # inside somebody else's region, which takes the function in
                return shared.function(*args, **kwargs)
            if shared.begun:
                return self._call(shared, args, kwargs)
            shared.begun, begin = True, time.perf_counter()
            layers = f"{shared.layers} layer{'s' if shared.layers > 1 else ''}"
            self._tell(f"compiling the forward and backward of {layers} ({shared.name}), once for each shape of input")
            result = self._call(shared, args, kwargs)
            self._tell(f"compiled {shared.name} in {format_seconds(time.perf_counter() - begin)}")
            return result

        return call

    @staticmethod
    def _call(shared: _Shared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config: Any = torch._dynamo.config
        # Written one by one: `config.patch` takes five times as long, which every call would pay.
        # Hooks on a layer's parts are looked at in every call: by default torch passes over those that the traced layer
        # did not have, or had not yet.
        limit, skip = config.recompile_limit, config.skip_nnmodule_hook_guards
        config.recompile_limit, config.skip_nnmodule_hook_guards = max(limit, RECOMPILE_LIMIT), False
        try:
            return shared.function(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as e:
            raise _failed(shared.name, e) from e
        finally:
            config.recompile_limit, config.skip_nnmodule_hook_guards = limit, skip


TOOLS = ("InvalidCxxCompiler", "CppCompileError", "CUDACompileError", "TritonMissing", "GPUTooOldForTriton")
"""Errors of torch that mean that a compiler is missing or does not work."""


def _failed(name: str, error: BaseException) -> EngineError:
    """The compiler's own complaint, without the advice that torch adds."""
    cause = getattr(error, "inner_exception", None) or error
    kind = type(cause).__name__
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "it does not say why")
    needs = "a C++ compiler where the model is on the CPU, Triton and a C compiler where it is on a GPU"
    return EngineError(
        f"the forward of {name} could not be compiled: {kind}: {line}",
        expected=needs if kind in TOOLS else None,
        remedy="Make the optimizer with compile_blocks=False",
    )


def _to_stderr(line: str) -> None:
    line = f"superoffload: {line}"
    if (tqdm := getattr(sys.modules.get("tqdm"), "tqdm", None)) is not None:
        tqdm.write(line, file=sys.stderr)  # between the lines of a progress bar
    else:
        print(line, file=sys.stderr, flush=True)


def check_compilable(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse a model whose layers cannot be compiled, or already are.

    Raises:
        InputError: no layers; or a layer, a part of one or what contains it goes through `torch.compile` already.
    """
    layers = [m for b in blocks if b.kind == "layer" for m in b.modules]
    if not layers:
        raise InputError(
            "compile_blocks = True, and the model has no layers", expected="a model with a list of layers",
            remedy="Pass compile_blocks=False, or compile the model with torch.compile(model) afterwards",
        )  # fmt: skip
    inside = {id(m) for layer in layers for m in layer.modules()}
    mine = {id(layer) for layer in layers}
    for name, module in model.named_modules():
        if not _is_compiled(module):
            continue
        if id(module) in inside or any(id(m) in mine for m in module.modules()):
            what = f"{name} goes" if name else "the model goes"
            raise InputError(
                f"compile_blocks = True, and {what} through torch.compile already", expected="layers that do not",
                remedy="Pass compile_blocks=False, or give the optimizer the model without torch.compile",
            )  # fmt: skip


def _is_compiled(module: nn.Module) -> bool:
    wrapped = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


__all__ = ["LayerCompiler", "check_compilable"]
