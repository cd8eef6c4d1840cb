"""OffloadAdamW: AdamW whose state lives on the CPU (and, as far as the plan says, on the GPU).

A `torch.optim.Optimizer` with AdamW's names and defaults, that needs the model: it hooks the blocks' forward and every
gradient. Gradients are taken as backward makes them, so `p.grad` is None afterwards, and clipping belongs to the
optimizer (`max_grad_norm`): a `clip_grad_norm_` outside would find nothing to clip.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from superoffload.activation_costs import check_policies
from superoffload.engine import checkpoint, report
from superoffload.engine.activations import model_recomputes
from superoffload.engine.arguments import Hyper, StepSettings, accelerate_syncs, check_hyper, resolve_plan
from superoffload.engine.blocks import Block, find_blocks
from superoffload.engine.buckets import DTYPES, ManagedParam, plan_layout
from superoffload.engine.chunked_head import find_head
from superoffload.engine.device import with_index
from superoffload.engine.fit import check_fit
from superoffload.engine.flow import check_flow_blocks
from superoffload.engine.loss_scale import LossScale
from superoffload.engine.start import Start, WeightSource, check_start, move_rest
from superoffload.engine.stats import Stats, StepLog, StepRecord
from superoffload.engine.stepper import Engine
from superoffload.errors import EngineError, InputError, NotSupported
from superoffload.layout import Bucket
from superoffload.memory import Ledger
from superoffload.plan import Activations, Plan
from superoffload.tracing import Trace

if TYPE_CHECKING:
    from superoffload.config import TunedConfig

_open: weakref.WeakSet[OffloadAdamW] = weakref.WeakSet()
"""Optimizers that are not closed. A parameter has at most one."""


def optimizer_of(model: nn.Module) -> OffloadAdamW | None:
    """The open OffloadAdamW that trains parameters of `model`, if there is one."""
    mine = {id(p) for p in model.parameters()}
    return next((o for o in list(_open) if any(id(p.param) in mine for p in o._managed)), None)


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW with its state offloaded to the CPU.

    Args:
        model: the module to train; all its trainable parameters must be on one device.
        params: parameter groups as for any torch optimizer; default: all trainable parameters of `model`.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, with its defaults.
        max_grad_norm: clip the global gradient norm to this, as `clip_grad_norm_` would; None does not clip.
        gradient_accumulation_steps: backward passes per `step()`, where no `no_sync()` marks them.
        plan: where state lives; default: every bucket on the CPU. Any plan field may be given by name instead.
            What it says of activations is applied to the model's layers until `close()`, in place of the model's own
            checkpointing. Without a plan, and without `activations=...`, the model's own is left as it is. With
            `loss_chunks` above 1 a forward that trains returns its loss and no logits (None).
        device: where the model computes; default: where its weights are. Weights elsewhere go straight to where they
            are trained, so that a model which fits the GPU only with flow blocks can be made on the CPU, or on the meta
            device.
        weights: of parameters on the meta device: `RandomWeights()` or `SafetensorsWeights(PATH)` of this package.
        record_trace: keep timed events of the last steps for `trace()`.

    A gradient that is not finite, in whatever dtype, makes the step a `skip`: nothing is changed and nothing counted.

    Weights may be written in place between steps (loaded, clamped) and the optimizer sees it, but not through `p.data`.
    Before reading weights other than by a module's forward or `state_dict()`, and before writing them other than by
    `load_state_dict()`, call `synchronize()`: between the first gradient and the next forward the worker writes them
    too. A write that raced with it raises at the next call.

    What a `state_dict()` of the model refers to stays readable after `close()`. Weights of flow blocks in it are the
    optimizer's own pinned memory, which stays pinned until they go: copy what is kept for long.

    A process that is forked while it is open cannot use it, and makes the next step copy all of the state: make a
    DataLoader's workers before it, or with `multiprocessing_context="forkserver"`.

    While it is open Python's switch interval is 0.02 ms instead of 5, for the whole process: another thread that runs
    Python would else hold up every operation that is launched (engine/switch_interval.py). One that somebody has set
    shorter, or sets meanwhile, stays.

    A graph that uses a weight without contributing to its gradient (`weight.detach()`) raises where it would read the
    weight after its update; one that hides the use from autograd (`weight.data`, a plain attribute of a custom
    Function) needs `speculate="off"`.

    Raises:
        InputError: a parameter list instead of the model, a parameter that is not the model's, an unknown plan field, a
            block that cannot flow, layers that are compiled already.
        NotSupported: `loss_chunks` above 1 for a model that does not make its loss in the known way.
        DoesNotFit: the state needs more memory than is free; nothing has been allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        plan: Plan | None = None,
        record_trace: bool = False,
        device: torch.device | str | None = None,
        weights: WeightSource | None = None,
        **plan_fields: Any,
    ):
        if not isinstance(model, nn.Module):
            raise InputError(
                f"OffloadAdamW was given a {type(model).__name__} as its first argument",
                expected="the model",
                remedy="Call OffloadAdamW(model, params=model.parameters(), lr=...)",
            )
        check_hyper(lr, betas, eps, weight_decay, max_grad_norm, gradient_accumulation_steps)
        self.model = model
        self.max_grad_norm = max_grad_norm
        self._device = None if device is None else with_index(torch.device(device))
        self._weights = weights
        self.plan = resolve_plan(plan, plan_fields, self._device or next((p.device for p in model.parameters()), None))
        self._applies_activations = plan is not None or any(f.startswith("activations") for f in plan_fields)
        self._record_trace = record_trace
        self._accumulation = gradient_accumulation_steps
        self._fired: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._late: set[int] = set()
        self._sync = True
        self._log = StepLog()
        self._loss_scale: LossScale | None = None
        self._scaled = False
        """Whether the loss of the step that is being gathered was scaled."""
        self._scales = True
        """Whether that of the last step was; before the first one, float16 weights are taken as a sign that it will."""
        self._unlearned = False
        """Whether the last step was scaled, and its verdict is not yet in the loss scale."""
        self._skips_before = 0
        """Of the engines that this one replaced."""
        self._engine: Engine | None = None
        self._names = {id(p): name for name, p in model.named_parameters()}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        chosen = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(chosen, defaults)
        self._build()
        _open.add(self)

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: TunedConfig,
        *,
        record_trace: bool = False,
        device: torch.device | str | None = None,
        weights: WeightSource | None = None,
    ) -> OffloadAdamW:
        """The optimizer of a tuned config; the other arguments are those of the constructor.

        Raises:
            InputError: the config was made for another model.
        """
        from superoffload.model_source import fingerprint

        config.check_model(fingerprint(model), type(model).__name__)
        o = config.optimizer
        return cls(
            model,
            lr=o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            max_grad_norm=o.max_grad_norm,
            gradient_accumulation_steps=config.plan.accumulation,
            plan=config.plan,
            record_trace=record_trace,
            device=device,
            weights=weights,
        )

    # -- construction --------------------------------------------------------------------------------------------------

    def _close_previous(self) -> None:
        previous = optimizer_of(self.model)
        if previous is None or previous is self:
            return
        warnings.warn(
            "the model already had an OffloadAdamW, which is closed now. Its moments are not carried over: to keep "
            "them, pass old.state_dict() to load_state_dict of the new one",
            UserWarning,
            stacklevel=4,
        )
        previous.close()

    def _layout(self) -> tuple[list[Block], list[ManagedParam], list[Bucket]]:
        """Blocks, parameters and buckets of the engine to be made. Everything that can be refused is refused here:
        nothing has changed yet."""
        group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        blocks = find_blocks(self.model)
        check_flow_blocks(blocks, self.plan.flow_blocks)
        block_of = {id(p): i for i, block in enumerate(blocks) for _, p in block.parameters}
        managed: list[ManagedParam] = []
        partials = 0
        for name, p in self.model.named_parameters():
            if id(p) not in group_of or id(p) not in block_of:  # a frozen one has no block
                continue
            dtype = str(p.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise InputError(f"{name} has dtype {dtype}", expected="float32, bfloat16 or float16")
            managed.append(ManagedParam(len(managed), name, p, block_of[id(p)], dtype, group_of[id(p)], partials))
            partials += managed[-1].chunks
        layouts = plan_layout(managed, len(blocks), self.plan)
        check_policies([b.kind for b in blocks], self.plan)
        if self.plan.loss_chunks > 1:
            find_head(self.model)
        if self.plan.compile_blocks:
            from superoffload.engine.compiling import check_compilable  # with all of torch's compiler

            check_compilable(self.model, blocks)
        check_start(self.model, self._weights)
        previous = optimizer_of(self.model)
        freed = report.memory(previous.engine) if previous is not None and previous._engine is not None else None
        computes = self._device or next((p.param.device for p in managed), torch.device("cpu"))
        check_fit(layouts, managed, self.plan, computes, freed=freed)
        return blocks, managed, layouts

    def _build(self) -> None:
        """Make the engine."""
        blocks, managed, layouts = self._layout()
        self._close_previous()
        if not self._applies_activations:  # the plan says what the model does
            own: Activations = "full" if model_recomputes(self.model) else "none"
            self.plan = self.plan.model_copy(update={"activations": own})
        start = None if self._device is None else Start(self._device, self._weights, progress=True)
        if self._device is not None:
            move_rest(self.model, self._device, self._weights, (id(p.param) for p in managed))
        self._engine = Engine(
            self.model, blocks, managed, layouts, self.plan, trace=self._record_trace, collects=self._collects,
            arguments=self._arguments, log=self._log, start=start, activations=self._applies_activations,
            loss_scale=self._loss_scale_now,
        )  # fmt: skip
        self._managed = managed
        if self._loss_scale is None and any(p.dtype == "float16" for p in managed):
            self._loss_scale = LossScale()
        mine = {id(p.param) for p in managed}
        self._unmanaged = [p for group in self.param_groups for p in group["params"] if id(p) not in mine]

    def _rebuild(self) -> None:
        """Make the engine anew around the parameter groups as they are now; state and gradients are kept."""
        engine = self.engine
        self._layout()  # refused while the engine still is as it was
        engine.synchronize()
        self.learn_loss_scale()
        engine.collector.give_back()
        kept = checkpoint.snapshot(engine)
        self._log.steps_before += engine.sequence
        self._skips_before += engine.worker.verdict()[4]
        if self.plan.flow_blocks:  # what does not fit the GPU all at once is left on the host
            self._device = engine.device.device
        engine.close()
        del engine
        self._engine = None  # its memory goes before the new engine's comes
        self._build()
        checkpoint.restore(self.engine, kept)
        self._show_steps()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model (unfrozen layers, say). The engine is rebuilt around them; state is kept."""
        given = param_group.get("params")
        params = [given] if isinstance(given, torch.Tensor) else list(given or ())
        for p in params:
            tensor = p[1] if isinstance(p, tuple) else p
            if id(tensor) not in self._names:
                raise InputError(
                    "a parameter in `params` does not belong to the model",
                    expected="parameters of the model that was passed",
                    remedy="Build the groups from model.named_parameters()",
                )
        super().add_param_group({**param_group, "params": params})
        engine = self._engine
        if engine is None:
            return
        try:
            self._rebuild()
        except BaseException:
            if self._engine is engine:  # refused before anything changed
                self.param_groups.pop()
            raise

    def _show_steps(self) -> None:
        """`state` holds each parameter's step count, live. Tools that look whether an optimizer has stepped (torch's
        distributed checkpoint would otherwise take a step of its own to find out) look there; the moments are in
        `state_dict()`."""
        self.state.clear()
        if self.engine.sequence or bool(self.engine.steps.any()):
            for p in self._managed:
                self.state[p.param] = {"step": self.engine.steps[p.index]}

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the optimizer is closed", remedy="Make a new OffloadAdamW for the model")
        return self._engine

    # -- gradients -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around every backward but the last before `step()`: gradients stay in `p.grad` and add up there."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _collects(self, p: ManagedParam) -> bool | None:
        """Whether the gradient that just arrived is taken now, and by the last backward (True) or an earlier one
        (False); None leaves it in `p.grad` until a later one or `step()` takes it."""
        # Counted under no_sync too, so that both hints may be given at once.
        fired = self._fired[p.index] = self._fired.get(p.index, 0) + 1
        if p.index in self._late:
            return None
        if not self._sync or not accelerate_syncs() or fired < self._accumulation:
            return False if self.plan.accumulate_on == "cpu" else None
        self._taken[p.index] = self._taken.get(p.index, 0) + 1
        return True

    def _arguments(self) -> StepSettings:
        """What a step would be taken with now."""
        hyper = [
            Hyper(float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"]))
            for g in self.param_groups
        ]
        unscale = 1.0 / self._loss_scale.scale if self._scaled and self._loss_scale is not None else 1.0
        return StepSettings(hyper, self.max_grad_norm, unscale)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward()` on where weights are float16: `opt.scale_loss(loss).backward()`.

        Multiplies by a power of two that follows the gradients' range (LossScale), for every micro-batch of a step
        alike; the norm, the clipping and the update are those of the unscaled loss. Returns `loss` itself where no
        trained weight is float16.
        """
        if self._loss_scale is None:
            return loss
        self.learn_loss_scale()
        self._scaled = True
        return loss * self._loss_scale.scale

    def _loss_scale_now(self) -> float:
        """What `scale_loss` will multiply the loss of this forward by, where it is called."""
        if self._loss_scale is None or not self._scales:
            return 1.0
        self.learn_loss_scale()
        return self._loss_scale.scale

    def learn_loss_scale(self) -> None:
        """Wait for the verdict of the last step, if its loss was scaled, and let the scale follow it."""
        if self._unlearned and self._loss_scale is not None:
            skipped = self.engine.worker.wait_verdict(self.engine.sequence)[3]
            self._loss_scale.update(overflow=skipped)
            self._unlearned = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those already taken, unless `step()` has consumed them."""
        if self._engine is not None:
            self._engine.discard()
        self._fired.clear()
        self._taken.clear()
        self._scaled = False
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the gradients since the last step; does not wait for the update to finish.

        Raises:
            EngineError: the worker failed in this step or an earlier one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"max_grad_norm = {self.max_grad_norm}", expected="more than 0, or None for no clipping")
        if any(p.grad is not None for p in self._unmanaged):
            self._rebuild()  # frozen when the engine was made, trained since
        # A weight shared inside one backward (a block run twice under reentrant checkpointing) fires more than once:
        # it is taken at step() from then on. One that fires once again goes back to being taken at once.
        again = {i for i, n in self._fired.items() if i in self._late and n > self._accumulation}
        late = again | {i for i, n in self._taken.items() if n > 1}
        engine, before, returned = self.engine, self.engine.sequence, False
        try:
            engine.step(self._arguments())
            returned = True
        finally:
            # Ctrl-C in a wait before the step is submitted leaves what was counted to the next call; in the wait
            # afterwards the step is taken all the same.
            if returned or engine.sequence != before:
                self._late = late
                self._fired.clear()
                self._taken.clear()
            if engine.sequence != before:
                self._unlearned, self._scales, self._scaled = self._scaled, self._scaled, False
                if not self.state:
                    self._show_steps()
        return loss

    def synchronize(self) -> None:
        """Wait until the weights of the last step are in the model: before reading them other than by a forward."""
        self.engine.synchronize()

    # -- what happened -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Verdict and norm of the last step (waits for that verdict, not for the update), and memory in use."""
        return report.stats(self)

    @property
    def ledger(self) -> tuple[StepRecord, ...]:
        """What the last steps did and cost, oldest first; steps that are still being updated are not in it yet."""
        if self._engine is not None:
            self._engine.collect_records()
        return tuple(self._log.records)

    def memory(self) -> Ledger:
        """Bytes that the engine holds now."""
        return report.memory(self.engine)

    def trace(self, *, tokens_per_step: int | None = None, model_flops_per_step: float | None = None,
              peak_bf16_tflops: float = 0.0, hardware: str = "this machine") -> Trace:  # fmt: skip
        """The last complete step as measured events.

        Args:
            tokens_per_step: default: what the plan says. model_flops_per_step: default: 6·N·tokens.
            peak_bf16_tflops: what MFU is counted against; 0 leaves MFU at 0.

        Raises:
            InputError: recording is off, or fewer than two steps have run.
        """
        return report.trace(self, tokens_per_step, model_flops_per_step, peak_bf16_tflops, hardware)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW (`step`, `exp_avg`, `exp_avg_sq` by parameter index), plus `master`, the fp32 weights, where
        the model's are 16-bit. Tensors are on the CPU, in fp32. Empty before the first step."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, under whatever plan, or a `torch.optim.AdamW` state. Moments keep their fp32 and
        never move to the parameters' device."""
        checkpoint.load_state_dict(self, state_dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write master weights, moments, step counts and groups to one safetensors file, whole or not at all.

        Raises:
            EngineError: the worker has failed, so that the state may be half a step.
        """
        checkpoint.save(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from `save`, bit for bit, under any plan. Sets the model's trained weights too.

        Raises:
            InputError: a missing or foreign file, or one of another model.
        """
        checkpoint.load(self, path)

    def close(self) -> None:
        """Wait for the last step, remove all hooks and free the state; the model is an ordinary one again."""
        engine, self._engine = self._engine, None
        _open.discard(self)
        if engine is None:
            return
        try:
            engine.synchronize()
        except EngineError as e:
            warnings.warn(f"closed after a failure: {e}", RuntimeWarning, stacklevel=2)
        finally:
            engine.close()
            self.state.clear()

    def __enter__(self) -> OffloadAdamW:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise NotSupported("an OffloadAdamW cannot be pickled or copied", remedy="Use state_dict() or save()")

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotSupported("an OffloadAdamW cannot be pickled or copied", remedy="Use state_dict() or save()")

    def __repr__(self) -> str:
        return report.describe(self)

    def _repr_html_(self) -> str:
        return report.html(self)


__all__ = ["OffloadAdamW", "Stats", "optimizer_of"]
