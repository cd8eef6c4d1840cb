"""The measured profile: seconds, FLOPs and bytes of every block of a real model, on the device where it lives.

One micro-batch is run forward and backward a few times. Marks are set where the work passes from one block to the next
(a block's first forward, the arrival of a gradient at its output), so the blocks' times add up to the whole, with
nothing between them unaccounted. One extra pass counts FLOPs, kept tensors and transients. With `compile_blocks` the
same is done once more with compiled layers, after they have been compiled. Afterwards the model is
bit for bit what it was: weights, gradients, buffers, random state, modes (`_untouched`), also after an exception.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from superoffload.config import ModelRef
from superoffload.engine.activations import AppliedPolicies
from superoffload.engine.blocks import Block, find_blocks
from superoffload.engine.chunked_head import ChunkedHead, find_head
from superoffload.errors import DoesNotFit, InputError, NotSupported
from superoffload.hardware import Hardware
from superoffload.host_load import HostWatch
from superoffload.loss_costs import CHUNK_LOGIT_BYTES
from superoffload.model import from_transformers
from superoffload.model_source import fingerprint, load, reference
from superoffload.profiler import BlockProfile, Profile
from superoffload.profiling_counts import (
    MORE_FLOPS,
    CompiledCounts,
    Counter,
    Counts,
    Marks,
    Phase,
    RecomputeCounts,
)
from superoffload.profiling_state import Clock, untouched
from superoffload.units import format_bytes

Batch = Mapping[str, Tensor] | Tensor
COUNTED_CHUNKS = 4
"""Chunks of the loss in the pass that counts their bytes."""


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    hardware: Hardware | None = None,
    repeats: int = 3,
    blocks: Sequence[str] | None = None,
    name: str | None = None,
    compile_blocks: bool = False,
) -> Profile:
    """Measure one micro-batch of `model` block by block.

    Args:
        model: on the device and in the dtype in which it will train. It is run in training mode, without activation
            checkpointing, and left bit-identical, also after an exception.
        batch: keyword arguments of one forward, or the one positional tensor; first dimension sequences, second
            tokens. Where a Hugging Face model gets no `labels`, `input_ids` serve as labels.
        hardware: what to plan for; omitted, this machine is probed (cached).
        repeats: timed passes after the warm-up; the median of each block counts.
        blocks: module names of the layers, as in `find_blocks`.
        name: name written into the profile; omitted, the model's own.
        compile_blocks: measure the layers compiled too, so that plans with `compile_blocks` can be simulated. Off by
            default because the compiler takes a while; that time is not part of the result.

    Raises:
        InputError: nothing trainable, an empty batch, or an output no gradient can be taken of; with `compile_blocks`,
            layers that go through `torch.compile` already.
        EngineError: the layers could not be compiled.
        DoesNotFit: the device ran out of memory with this micro-batch.
    """
    if repeats < 1:
        raise InputError(f"repeats = {repeats}", expected="at least 1")
    parts = find_blocks(model, blocks)
    if not any(b.parameters for b in parts):
        raise InputError("the model has no trainable parameter", remedy="Set requires_grad on what shall train")
    if compile_blocks:
        from superoffload.engine.compiling import check_compilable  # with all of torch's compiler

        check_compilable(model, parts)
    device = next(p.device for b in parts for _, p in b.parameters)
    args, kwargs = batch_arguments(model, batch, device)
    micro_batch, seq_len = _shape(args, kwargs)
    if hardware is None:
        from superoffload.hardware import probe

        hardware = probe()
    runner, watch = _Runner(model, parts, args, kwargs, device), HostWatch()
    try:
        with untouched(model, device):
            runner.passes(1)  # warm-up: allocations, library handles, autotuning
            counted = runner.counted()
            chunked = runner.chunked(micro_batch * seq_len)
            passes = runner.passes(repeats)
            selective = runner.recomputed("selective", repeats)
            full = runner.recomputed("full", (repeats + 1) // 2)
            beside = watch.noted("the profile")  # a compiler's own processes are no strangers
            compiled = runner.compiled(repeats) if compile_blocks else CompiledCounts()
    except torch.OutOfMemoryError:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise DoesNotFit(
            f"{micro_batch} x {seq_len} tokens do not fit on {device} when every activation is kept",
            remedy="Profile with a smaller micro-batch or shorter sequences, or use so.estimate()",
        ) from None
    seconds = _medians(passes)
    first_dtype = next(p.dtype for b in parts for _, p in b.parameters)
    profiles = tuple(
        BlockProfile(
            name=b.name,
            kind=b.kind,
            tensor_numels=tuple(p.numel() for _, p in b.parameters),
            dtype=str(b.parameters[0][1].dtype if b.parameters else first_dtype).removeprefix("torch."),
            forward_s=seconds["forward", i],
            backward_s=seconds["backward", i],
            forward_flops=counted.flops[i],
            input_bytes=counted.input_bytes[i],
            activation_bytes=counted.kept_bytes[i],
            working_bytes=counted.working_bytes[i],
            selective_bytes=selective.bytes(counted.input_bytes, i),
            selective_recompute_s=selective.seconds.get(i),
            full_recompute_s=full.seconds.get(i),
            **chunked.get(i, {}),
            **(compiled.fields(i) if b.kind == "layer" else {}),
        )
        for i, b in enumerate(parts)
    )
    return Profile(
        source="measured",
        model=name or model_name(model),
        model_fingerprint=fingerprint(model),
        micro_batch=micro_batch,
        seq_len=seq_len,
        blocks=profiles,
        model_flops=_model_flops(model, profiles, micro_batch, seq_len),
        hardware=hardware,
        buffers_bytes=_resident_bytes(model),
        context={
            "method": f"median of {repeats} passes one after another after a warm-up, marks at block boundaries",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            "autocast": str(torch.is_autocast_enabled(device.type)),
            "kept": format_bytes(sum(counted.kept_bytes)),
            **beside,
            **({"selective": selective.failure} if selective.failure else {}),
            **({"compiled": "layers, by torch.compile (inductor)"} if compile_blocks else {}),
        },
    )


def profile_source(
    source: str,
    *,
    micro_batch: int,
    seq_len: int,
    hardware: Hardware | None = None,
    dtype: str | None = None,
    gguf_file: str | None = None,
    compile_blocks: bool = False,
) -> Profile:
    """Load a model by name (see `model_source.load`) onto this machine's GPU, or its CPU, and profile random tokens.

    Args:
        source: preset, Hugging Face id or folder.
        dtype: name of the weights' dtype, bfloat16 if omitted.
        gguf_file: name of the GGUF file in the folder, where it holds several.
        compile_blocks: measure the layers compiled too.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ref: ModelRef | str = source
    if gguf_file is not None:
        ref = ModelRef(name=source, fingerprint="", parameters=0, source=source, gguf_file=gguf_file)
    model, words = load(ref, dtype or "bfloat16", device)
    ids = torch.randint(len(words), (micro_batch, seq_len), generator=torch.Generator().manual_seed(0))
    called = reference(source, model).name
    return profile(model, ids, hardware=hardware, name=called, compile_blocks=compile_blocks)


def model_name(model: nn.Module) -> str:
    """Name of a model as people know it: the configuration's, else the class."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_name_or_path", "") or type(model).__name__)


class _Runner:
    """Runs forward and backward with marks."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.model, self.blocks, self.args, self.kwargs = model, blocks, args, kwargs
        self.device = device

    def passes(self, count: int) -> list[dict[tuple[Phase, int], float]]:
        """Passes one after another, as in training: seconds by phase and block of each.

        The host is not waited for between them. On a GPU that is at rest when a pass begins, the first block would take
        as long as the host takes to come to it; one pass more is run there first, which nobody counts. The clocks of a
        GPU that works without a pause are those of training, too.
        """
        clock = Clock(self.device)
        done: list[tuple[Marks, Any]] = []
        for _ in range(count + clock.cuda):
            marks = Marks(clock)
            with self._hooked(marks):
                done.append((marks, self._pass(marks)))
        clock.synchronize()
        return [marks.seconds(end, len(self.blocks)) for marks, end in done[-count:]]

    def counted(self) -> Counts:
        """One untimed pass that counts FLOPs, kept tensors and transients."""
        counter = Counter(self.model, len(self.blocks), self.device)
        with self._hooked(counter), FlopCounterMode(display=False, custom_mapping=MORE_FLOPS) as flops, counter.watch:
            counter.read_flops = flops.get_total_flops
            with saved_tensors_hooks(counter.keep, lambda t: t):
                loss = self._forward(counter)
            self._backward(counter, loss)
            counter.close()
        return Counts(counter.flops, counter.input_bytes, counter.kept_bytes, counter.working_bytes)

    def chunked(self, tokens: int) -> dict[int, dict[str, int]]:
        """A pass that counts the head's bytes with the loss in chunks: fields of `BlockProfile` by block. Empty where
        the engine would refuse that."""
        try:
            head = find_head(self.model)
            applied = ChunkedHead(self.model, COUNTED_CHUNKS)
            try:
                counted = self.counted()
            finally:
                applied.remove()
        except NotSupported:
            return {}
        weight = head.linear.weight
        block = next((i for i, b in enumerate(self.blocks) if any(m is head.linear for m in b.modules)), None)
        if block is None or "labels" not in self.kwargs:
            return {}
        kind, item = self.device.type, weight.element_size()
        if torch.is_autocast_enabled(kind):
            item = torch.get_autocast_dtype(kind).itemsize
        logits = tokens * len(weight)
        gradients = sum(p.numel() * item for p in (weight, head.linear.bias) if p is not None and p.requires_grad)
        chunk = CHUNK_LOGIT_BYTES * -(-tokens // COUNTED_CHUNKS) * len(weight)
        return {block: {
            "logits": logits,
            "chunked_activation_bytes": max(0, counted.kept_bytes[block] - gradients),
            "chunked_working_bytes": max(0, counted.working_bytes[block] - chunk),
        }}  # fmt: skip

    def recomputed(self, policy: Literal["selective", "full"], repeats: int) -> RecomputeCounts:
        """Passes with every layer's policy `policy`, timed (the median counts), after one that finds out how far
        recompute goes, where that is to be found out; the last one's kept results are counted."""
        found, clock = RecomputeCounts(), Clock(self.device)
        ahead = int(policy == "selective" or clock.cuda)
        spans: list[dict[int, list[Any]]] = []
        results: dict[int, list[Any]] = {}

        def recomputes(block: int, *, begins: bool) -> None:
            spans[-1].setdefault(block, []).append(clock.now())

        def keep(block: int, result: Any) -> None:
            results.setdefault(block, []).append(result)

        applied = AppliedPolicies(
            self.model, self.blocks, [policy] * len(self.blocks), recomputes=recomputes, kept=keep
        )
        try:
            for _ in range(repeats + ahead):
                results.clear()
                spans.append({})
                marks = Marks(clock)
                with self._hooked(marks):
                    self._pass(marks)
            clock.synchronize()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:  # a layer that writes its kept results in place, or does not repeat itself
            found.failure = f"not measured: {str(e).splitlines()[0]}"
            return found
        finally:
            applied.remove()
        found.add(results, [{b: clock.seconds(*s) for b, s in one.items() if len(s) == 2} for one in spans[ahead:]])
        return found

    def compiled(self, repeats: int) -> CompiledCounts:
        """Passes with every layer compiled: the first compiles, the second warms up, one counts what is kept, the
        others are timed. What happens inside a compiled layer is hidden from dispatch modes, so that its FLOPs and
        transients are left to the plain passes."""
        from superoffload.engine.compiling import LayerCompiler

        applied = AppliedPolicies(self.model, self.blocks, ["none"] * len(self.blocks), compiler=LayerCompiler())
        try:
            self.passes(2)
            counter = Counter(self.model, len(self.blocks), self.device)
            keep = torch.compiler.disable(counter.keep)  # called from within the layer where it breaks the graph
            with self._hooked(counter):
                with saved_tensors_hooks(keep, lambda t: t):
                    loss = self._forward(counter)
                self._backward(counter, loss)
                counter.close()
            return CompiledCounts(counter.kept_bytes, _medians(self.passes(repeats)))
        finally:
            applied.remove()

    def _pass(self, marks: Marks) -> Any:
        loss = self._forward(marks)
        self._backward(marks, loss)
        return marks.clock.now()

    def _forward(self, marks: Marks) -> Tensor:
        marks.to(0)
        return loss_of(self.model(*self.args, **self.kwargs))

    def _backward(self, marks: Marks, loss: Tensor) -> None:
        marks.to(len(self.blocks) - 1, "backward")
        loss.backward()

    @contextlib.contextmanager
    def _hooked(self, marks: Marks) -> Iterator[None]:
        handles: list[Any] = []
        owned = {id(m) for b in self.blocks for m in b.modules}
        for i, block in enumerate(self.blocks):
            for module in block.modules:
                surrounds = any(id(m) in owned and m is not module for m in module.modules())
                handles.append(module.register_forward_pre_hook(self._entry(marks, i), with_kwargs=True))
                if not surrounds:  # its output's gradient comes before those of the blocks inside it
                    handles.append(module.register_forward_hook(self._exit(marks, i, handles)))
            for _, p in block.parameters:
                handles.append(p.register_post_accumulate_grad_hook(_drop))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _entry(marks: Marks, block: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if marks.phase == "forward":
                marks.to(block)
                if isinstance(marks, Counter) and block not in marks.entered:
                    marks.count_input(block, tree_leaves((args, kwargs)))
                marks.entered.add(block)

        return hook

    @staticmethod
    def _exit(marks: Marks, block: int, handles: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if marks.phase == "forward":
                for t in tree_leaves(output):
                    if isinstance(t, Tensor) and t.requires_grad:
                        handles.append(t.register_hook(lambda grad: marks.to(block)))

        return hook


def _medians(passes: list[dict[tuple[Phase, int], float]]) -> dict[tuple[Phase, int], float]:
    return {key: statistics.median(p[key] for p in passes) for key in passes[0]}


def _drop(parameter: Tensor) -> None:
    parameter.grad = None  # as in training, where the engine takes each gradient as it arrives


def batch_arguments(model: nn.Module, batch: Batch, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of one forward on the model's device; labels are added where the model can make its own loss."""
    is_hf = hasattr(model, "config") and hasattr(model, "save_pretrained")
    if isinstance(batch, Tensor):
        moved = batch.to(device)
        return ((), {"input_ids": moved, "labels": moved}) if is_hf else ((moved,), {})
    kwargs: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in dict(batch).items()}
    if is_hf and "labels" not in kwargs and "input_ids" in kwargs:
        kwargs["labels"] = kwargs["input_ids"]
    return (), kwargs


def _shape(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    tensors = [t for t in (*args, kwargs.get("input_ids"), *kwargs.values()) if isinstance(t, Tensor)]
    if not tensors or tensors[0].ndim == 0 or tensors[0].numel() == 0:
        raise InputError("the batch holds no data", expected="a tensor of token ids [sequences, tokens], or a mapping")
    first = tensors[0]
    per_token = first.ndim >= 3 or (first.ndim == 2 and not first.is_floating_point())
    return int(first.shape[0]), int(first.shape[1]) if per_token else 1


def loss_of(output: Any) -> Tensor:
    """The model's own loss, else the mean square of its first floating output."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not tensors:
            raise InputError(
                "the model's output carries no gradient", expected="a loss, or a tensor that depends on it"
            )
        loss = tensors[0] if tensors[0].ndim == 0 else tensors[0].float().square().mean()
    return loss


def _resident_bytes(model: nn.Module) -> int:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(t.numel() * t.element_size() for t in (*frozen, *model.buffers()))


def _model_flops(model: nn.Module, blocks: Sequence[BlockProfile], micro_batch: int, seq_len: int) -> float:
    """6·N·tokens plus causal attention where the layout is known, else three times the forward's own FLOPs."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        with contextlib.suppress(InputError):
            return from_transformers(config.to_dict()).training_flops(micro_batch * seq_len, seq_len)
    return 3.0 * sum(b.forward_flops for b in blocks)
