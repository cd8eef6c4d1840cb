"""The loss of a Hugging Face causal language model in chunks (`Plan.loss_chunks`).

Such a model computes `logits = head(hidden)` and `loss = loss_function(logits, labels, ...)`. While the engine is open,
in a forward with labels and autograd on, the head's `forward` computes the loss itself and returns it in place of the
logits, and `loss_function` hands it on. Hooks sit on the head's `__call__` and surround this use of its weight as any
other: the engine waits there for new weights, flow fetches them, and what the head returns announces its backward.

Whether anything else happens to the logits is not guessed from the model's name. What stands in for them refuses every
operation, and `loss_function` looks whether it got just that, with the labels and settings that the head has used: a
model that caps or scales its logits raises in its first forward. What can be known without running the model is refused
when the engine is built (`find_head`).

In all other forwards (autograd off, no labels, generation) head and loss are the model's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superoffload.engine.activations import BlockForward, Forward, own_forward
from superoffload.engine.loss import IGNORE_INDEX, chunked_cross_entropy
from superoffload.errors import InputError, NotSupported

REMEDY = "Make the optimizer with loss_chunks=1, or compute the loss with superoffload.chunked_cross_entropy"


class InsteadOfLogits(Tensor):
    """The loss, where the model expects logits. Only what changes no value may be done to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", name)  # of an attribute
        raise _unfit(f"something is done to the logits on their way to the loss ({name})")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<no logits: the head has computed the loss in chunks>"


_HARMLESS = {
    Tensor.float, Tensor.contiguous, Tensor.to, Tensor.register_hook, Tensor.view_as,
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "device", "dtype", "is_leaf")),
}  # fmt: skip


class Head(NamedTuple):
    """Where a model's loss is made."""

    model: nn.Module
    """Calls the head and `loss_function`; the model itself, or one inside it."""
    linear: nn.Linear


@dataclasses.dataclass(eq=False)
class _Call:
    """One forward of the model, with the arguments that its loss depends on."""

    labels: Tensor
    shift_labels: Tensor | None
    num_items_in_batch: Any
    ignore_index: int
    rows: int
    """Of the head's weight."""
    address: int | None = None
    """Of the loss that the head has made."""
    reached: Any = None
    """What `loss_function` was given."""

    def targets(self) -> Tensor:
        """Labels of the tokens whose logits predict them, as transformers' loss for causal models takes them."""
        if self.shift_labels is not None:
            return self.shift_labels
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]


class LossFunction:
    """Stands in the model's `loss_function`. A copy of the model gets the plain one back."""

    def __init__(self, inner: Callable[..., Any], run: Callable[[Callable[..., Any], Any, Any], Any]):
        self.inner = inner
        self.run: Callable[[Callable[..., Any], Any, Any], Any] | None = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self.run is None else self.run(self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.inner

    def __reduce__(self) -> Any:
        return (_same, (self.inner,))


def _same(x: Any) -> Any:
    return x


class ChunkedHead:
    """Loss in chunks for `model`, from now until `remove`.

    Args:
        chunks: `Plan.loss_chunks`.
        loss_scale: asked in each forward what the loss will be multiplied by.

    Raises:
        NotSupported: the model does not make its loss in a way that is known here.
    """

    def __init__(self, model: nn.Module, chunks: int, loss_scale: Callable[[], float] = lambda: 1.0):
        head = find_head(model)
        self._chunks, self._loss_scale = chunks, loss_scale
        self._linear = weakref.ref(head.linear)
        self._model = weakref.ref(head.model)
        self._call: _Call | None = None
        # These read addresses and cannot be traced; the model around them can.
        self._make, in_loss = torch.compiler.disable(self._make_loss), torch.compiler.disable(self._in_loss)
        self._forwards = [BlockForward(head.model, self._in_model), BlockForward(head.linear, self._in_head)]
        for module, forward in zip(head, self._forwards, strict=True):
            module.__dict__["forward"] = forward
        self._before = {k: v for k, v in head.model.__dict__.items() if k == "_loss_function"}
        self._loss = LossFunction(head.model.loss_function, in_loss)  # type: ignore[arg-type]
        head.model.loss_function = self._loss  # type: ignore[assignment]

    def remove(self) -> None:
        """Restore the model exactly. Where somebody has wrapped what is ours, it stays, and does nothing."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self._loss.run = None
        model = self._model()
        if model is not None and model.__dict__.get("_loss_function") is self._loss:
            del model.__dict__["_loss_function"]
            model.__dict__.update(self._before)

    def _in_model(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._call = self._call, self._describe(inner, args, kwargs)
        call = self._call
        try:
            output = inner(*args, **kwargs)
        finally:
            self._call = outer
        if call is None or call.address is None:
            return output
        if call.reached is None:
            raise _unfit("what the head returned did not reach the model's loss_function")
        return _without(output, call.reached)

    def _describe(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        linear = self._linear()
        assert linear is not None
        try:
            given = _by_name(inner, args, kwargs)
        except TypeError:
            return None  # which the call itself says better
        labels = given.get("labels")
        if not isinstance(labels, Tensor):
            return None
        return _Call(labels, given.get("shift_labels"), given.get("num_items_in_batch"),
                     given.get("ignore_index", IGNORE_INDEX), len(linear.weight))  # fmt: skip

    def _in_head(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._make(inner, args, kwargs, traced=torch.compiler.is_compiling())

    def _make_loss(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool) -> Any:
        call, linear = self._call, self._linear()
        assert linear is not None
        if call is None or call.address is not None or kwargs or len(args) != 1:
            return inner(*args, **kwargs)
        hidden, targets = args[0].reshape(-1, args[0].shape[-1]), call.targets().reshape(-1)
        if len(hidden) != len(targets):
            raise InputError(
                f"the head got {len(hidden)} tokens, and the loss {len(targets)} labels",
                expected="a label for each token whose logits are asked for",
                remedy="With logits_to_keep, pass shift_labels of the tokens that are kept",
            )
        loss = chunked_cross_entropy(
            hidden, linear.weight, targets.to(hidden.device), bias=linear.bias, chunks=self._chunks,
            ignore_index=call.ignore_index, denominator=call.num_items_in_batch, loss_scale=self._loss_scale(),
        )  # fmt: skip
        call.address = loss.data_ptr()
        # The compiler looks at whatever a graph is given, so there the loss itself goes on.
        return loss if traced else loss.as_subclass(InsteadOfLogits)

    def _in_loss(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call
        if call is None or call.address is None:
            return inner(*args, **kwargs)
        given = _by_name(inner, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            logits = given.get("logits")
            # Not `is`: the hook of a tool on the head's backward puts a view in its place.
            if not isinstance(logits, Tensor) or logits.ndim or logits.data_ptr() != call.address:
                raise _unfit("what reaches loss_function is not what the head has returned")
            for name in ("labels", "shift_labels", "num_items_in_batch", "ignore_index"):
                default = IGNORE_INDEX if name == "ignore_index" else None
                if not _equal(given.get(name, default), getattr(call, name)):
                    raise _unfit(f"loss_function gets another {name} than the model was given")
            if given.get("vocab_size") != call.rows:
                raise _unfit(f"loss_function counts {given.get('vocab_size')} classes, and the head has {call.rows}")
            call.reached = logits
            return logits.as_subclass(Tensor)


def find_head(model: nn.Module) -> Head:
    """Where `model` makes its loss.

    Raises:
        NotSupported: it is no Hugging Face causal language model, its loss is not transformers' own, or its head no
            plain linear layer; the message says which.
    """
    found = [m for m in model.modules()
             if callable(getattr(m, "get_output_embeddings", None)) and hasattr(type(m), "loss_function")]  # fmt: skip
    heads = [(m, h) for m in found if (h := m.get_output_embeddings()) is not None]  # type: ignore[operator]
    if not heads:
        raise _unfit(f"{type(model).__name__} is no Hugging Face causal language model")
    if len(heads) > 1:
        raise _unfit(f"{type(model).__name__} has {len(heads)} parts with a head of their own")
    inside, linear = heads[0]
    own = own_forward(linear)
    if type(linear) is not nn.Linear or not (own is None or isinstance(own, BlockForward)):
        what = "a linear layer whose forward is wrapped" if type(linear) is nn.Linear else f"a {type(linear).__name__}"
        raise _unfit(f"the head of {type(inside).__name__} is {what}, no plain nn.Linear")
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: Any = inside.loss_function
    while isinstance(loss, LossFunction):  # of an optimizer that is about to be replaced
        loss = loss.inner
    if loss is not ForCausalLMLoss:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise _unfit(f"the loss of {type(inside).__name__} is {name}, not transformers' ForCausalLMLoss")
    return Head(inside, linear)


def _unfit(what: str) -> NotSupported:
    return NotSupported(f"loss_chunks: {what}", expected="a causal language model of transformers whose logits go from "
                        "a linear head to ForCausalLMLoss as they are", remedy=REMEDY)  # fmt: skip


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names, those of `**kwargs` too."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments are the same; tensors that were moved are compared."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b.to(a.device))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)


def _without(output: Any, reached: Any) -> Any:
    """The model's output, None where its logits would be."""

    def stands_in(value: Any) -> bool:
        return value is reached or isinstance(value, InsteadOfLogits)

    if isinstance(output, tuple):
        return tuple(None if stands_in(v) else v for v in output)
    if isinstance(output, dict) and any(stands_in(v) for v in output.values()):
        return type(output)(**{k: v for k, v in output.items() if not stands_in(v)})
    return output


__all__ = ["ChunkedHead", "Head", "find_head"]
