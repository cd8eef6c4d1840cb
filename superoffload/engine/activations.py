"""Activation policies: what each layer's forward leaves for its backward (`Plan.activations`).

A policy wraps the layer's `forward`, not its `__call__`. Hooks sit on `__call__`, so those of the engine (waiting for
new weights, recording) and of everybody else stay outside and run once for each forward of a step. What backward
recomputes runs `forward` alone: it can neither be taken for the forward of the next step nor wait for its weights. It
needs no wait of its own: a block's weights change only once all its gradients exist, and recompute comes before them.
A `forward` that is itself run inside backward (the caller checkpoints a larger part of the model) passes through
`__call__` again; the engine sees it there, as it does without a policy.

The policies nest with what the caller does: with autograd off a wrapped forward is the plain one, and so it is for a
call that brings a cache of keys and values, which a recompute would extend a second time.

With `compile_blocks` it is the compiled forward that a policy wraps and repeats (`engine/compiling.py`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from superoffload.activation_costs import OFFLOAD_MIN_BYTES, check_policies
from superoffload.engine.activation_store import ActivationStore
from superoffload.engine.blocks import Block
from superoffload.engine.selective import Selection
from superoffload.plan import Activations, Plan

if TYPE_CHECKING:
    from superoffload.engine.compiling import LayerCompiler

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")
"""Names under which layers of transformers get what they remember between calls."""

Forward = Callable[..., Any]


class Recomputes(Protocol):
    """Told when a block's forward is repeated inside backward."""

    def __call__(self, block: int, *, begins: bool) -> None: ...


class BlockForward:
    """A layer's forward under its policy; stands in the module's `forward` attribute.

    A copy of the model, or one that is pickled, gets its plain forward back: it has no engine.

    Args:
        run: called with the forward, its arguments and its keyword arguments.
        compiler: compiles the forward that `run` is given.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any],
        compiler: LayerCompiler | None = None,
    ):
        self._module = weakref.ref(module)  # the module holds this
        self._had = module.__dict__.get("forward")
        self._own = own_forward(module)
        """What the module itself had there (a tool's wrapper); its class's forward where there is nothing."""
        self._run: Callable[..., Any] | None = run
        self._compiled: Forward | None = None
        if compiler is not None:
            self._compiled = compiler.compile(self._traced() or type(module).forward, type(module).__name__)
        self.__doc__ = type(module).forward.__doc__
        with contextlib.suppress(TypeError, ValueError):  # what tools ask for the arguments' names
            self.__signature__ = inspect.signature(module.forward)

    def inner(self) -> Forward:
        if self._own is not None:
            return self._own
        module = self._module()
        assert module is not None
        return types.MethodType(type(module).forward, module)

    def _traced(self) -> Forward | None:
        """What is compiled where the module has a forward of its own; None where it is its class's. An engine's policy,
        which whoever measures the model has lifted, is not part of it."""
        own = self._own
        while isinstance(own, BlockForward):
            own = own._own
        return own

    def _for_policy(self, inner: Forward) -> Forward:
        if self._compiled is None:
            return inner
        return self._compiled if self._traced() is not None else types.MethodType(self._compiled, self._module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner()
        if self._run is None or not torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in CACHES):
            return inner(*args, **kwargs)
        return self._run(self._for_policy(inner), args, kwargs)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Run the body with the plain forward."""
        run, self._run = self._run, None
        try:
            yield
        finally:
            self._run = run

    def remove(self) -> None:
        """Give the module back what it had. Where somebody has wrapped this, it stays, and does nothing."""
        self._run = None
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._had is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._had

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner(), memo)

    def __reduce__(self) -> Any:
        if self._own is not None:
            return (_same, (self._own,))
        return (getattr, (self._module(), "forward"))  # of a module that has no attributes yet: its class's


def own_forward(module: nn.Module) -> Forward | None:
    """The forward that the module itself has; None where it is its class's, which a copy of a model that an engine runs
    has as an attribute."""
    own = module.__dict__.get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward:
        return None
    return own


def _same(x: Any) -> Any:
    return x


class AppliedPolicies:
    """The policies of a model's layers, from now until `remove`.

    Args:
        model: its own checkpointing is switched off meanwhile, unless every layer is to be recomputed and already is.
        blocks: of the model.
        policies: by block; only layers are looked at. None leaves what the model itself does.
        store: where tensors go; needed by the policies that offload.
        recomputes: told of every recompute.
        kept: called with (block, result) for what `selective` keeps.
        compiler: compiles the layers' forwards, under whatever policy but `selective`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        policies: Sequence[Activations] | None,
        *,
        store: ActivationStore | None = None,
        recomputes: Recomputes | None = None,
        kept: Callable[[int, Any], None] | None = None,
        compiler: LayerCompiler | None = None,
    ):
        self._forwards: list[BlockForward] = []
        self._switched: list[tuple[Any, str, Any]] = []
        self.store, self._recomputes = store, recomputes
        self._pack: Callable[..., Any] | None = None if store is None else store.pack
        if store is not None and compiler is not None:
            # Where a layer's code breaks the graph, it is called between the pieces, and would be traced like them.
            self._pack = torch.compiler.disable(store.pack)
        layers = [(i, b) for i, b in enumerate(blocks) if b.kind == "layer"]
        wanted: list[Activations] = ["none" if policies is None else policies[i] for i, _ in layers]
        own = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        if own and all(policy == "full" for policy in wanted):  # the model does it, in the way its owner has chosen
            policies, wanted = None, ["none"] * len(layers)
        if policies is not None and layers:
            for m in own:
                self._switch(m, "gradient_checkpointing", False)
            config = getattr(model, "config", None)
            recomputed = any(policy not in ("none", "offload_saved") for policy in wanted)
            if recomputed and getattr(config, "use_cache", False):
                self._switch(config, "use_cache", False)  # as the model's own checkpointing does
        for (index, block), policy in zip(layers, wanted, strict=True):
            if policy == "none" and compiler is None:
                continue
            assert policy != "selective" or compiler is None
            watch = None if kept is None else (lambda result, i=index: kept(i, result))
            for module in block.modules:
                forward = BlockForward(module, self._runner(index, policy, watch, module), compiler)
                module.__dict__["forward"] = forward
                self._forwards.append(forward)

    def remove(self) -> None:
        """Restore the model exactly."""
        for forward in self._forwards:
            forward.remove()
        for owner, name, value in self._switched:
            setattr(owner, name, value)
        self._forwards.clear()
        self._switched.clear()

    def _switch(self, owner: Any, name: str, value: Any) -> None:
        self._switched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _runner(
        self, block: int, policy: Activations, kept: Callable[[Any], None] | None, module: nn.Module
    ) -> Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]:
        if policy == "none":
            return lambda inner, args, kwargs: inner(*args, **kwargs)
        store, pack, recomputes, found = self.store, self._pack, self._recomputes, weakref.ref(module)
        contexts = Selection(kept).contexts if policy == "selective" else noop_context_fn

        def recomputed(inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Tensors go in one by one: the checkpoint looks at them for the devices whose random state it keeps, checks
            # that nobody writes them in place, and lets hooks around it pack them.
            leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda x: type(x) not in (tuple, list, dict))
            again = False

            def call(*leaves: Any) -> Any:
                nonlocal again
                a, k = tree_unflatten(leaves, spec)
                if not again:
                    again = True
                    return inner(*a, **k)
                if recomputes is None:
                    return inner(*a, **k)
                recomputes(block, begins=True)
                try:
                    return inner(*a, **k)
                finally:  # it usually ends by an exception: when the last tensor that backward reads exists
                    recomputes(block, begins=False)

            return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)

        def offloaded(inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            module = found()
            assert store is not None and pack is not None
            assert module is not None
            store.enter(block, module)
            with saved_tensors_hooks(pack, store.unpack):
                # Around a checkpoint these hooks see its inputs only: what is saved inside is the checkpoint's.
                return recomputed(inner, args, kwargs) if policy == "offload_inputs" else inner(*args, **kwargs)

        return offloaded if policy.startswith("offload") else recomputed


def apply_plan(
    model: nn.Module,
    blocks: Sequence[Block],
    plan: Plan,
    make_store: Callable[[int], ActivationStore],
    recomputes: Recomputes | None = None,
    *,
    activations: bool = True,
) -> AppliedPolicies:
    """Apply a plan's policies, to layers compiled where the plan says so.

    Args:
        activations: whether the policies are; else the model is left to do what it does, and only compiled.
        make_store: called with the size from which tensors are moved, if any policy moves some.

    Raises:
        InputError: an override names a block that is no layer.
    """
    check_policies([b.kind for b in blocks], plan)
    compiler = None
    if plan.compile_blocks:
        from superoffload.engine.compiling import LayerCompiler  # with all of torch's compiler

        compiler = LayerCompiler()
    policies = [plan.activations_of(i) for i in range(len(blocks))] if activations else None
    moves = any(p.startswith("offload") and b.kind == "layer" for p, b in zip(policies or (), blocks, strict=False))
    store = make_store(OFFLOAD_MIN_BYTES) if moves else None
    return AppliedPolicies(model, blocks, policies, store=store, recomputes=recomputes, compiler=compiler)


@contextlib.contextmanager
def plain_forwards(model: nn.Module) -> Iterator[None]:
    """Run the body without the policies that an engine has applied to `model`."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, BlockForward):
                stack.enter_context(forward.lifted())
        yield


def model_recomputes(model: nn.Module) -> bool:
    """Whether the model's own checkpointing is on."""
    return any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules())


__all__ = ["AppliedPolicies", "BlockForward", "apply_plan", "model_recomputes", "own_forward", "plain_forwards"]
