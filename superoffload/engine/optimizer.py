"""OffloadAdamW: AdamW whose state lives on the CPU (and, as far as the plan says, on the GPU).

A `torch.optim.Optimizer` with AdamW's names and defaults, that needs the model: it hooks the blocks' forward and every
gradient. Gradients are taken as backward makes them, so `p.grad` is None afterwards, and clipping belongs to the
optimizer (`max_grad_norm`): a `clip_grad_norm_` outside would find nothing to clip.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from superoffload.engine import checkpoint, report
from superoffload.engine.arguments import StepSettings, check_hyper, resolve_plan, step_settings
from superoffload.engine.buckets import ManagedParam
from superoffload.engine.building import build, check_group, open_optimizers, optimizer_of, rebuild
from superoffload.engine.device import with_index
from superoffload.engine.loss_scale import LossScaling
from superoffload.engine.micro_batches import MicroBatches
from superoffload.engine.start import WeightSource
from superoffload.engine.stats import Stats, StepLog, StepRecord
from superoffload.engine.stepper import Engine
from superoffload.errors import EngineError, InputError, NotSupported
from superoffload.memory import Ledger
from superoffload.plan import Plan
from superoffload.tracing import Trace

if TYPE_CHECKING:
    from superoffload.config import TunedConfig


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
        self._micro_batches = MicroBatches(gradient_accumulation_steps, early=self.plan.accumulate_on == "cpu")
        self._scaling = LossScaling()
        self._log = StepLog()
        self._skips_before = 0
        """Of the engines that this one replaced."""
        self._engine: Engine | None = None
        self._managed: list[ManagedParam] = []
        self._unmanaged: list[nn.Parameter] = []
        """Of the parameter groups, but frozen when the engine was made."""
        self._model_params = {id(p) for p in model.parameters()}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        chosen = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(chosen, defaults)
        build(self)
        open_optimizers.add(self)

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model (unfrozen layers, say). The engine is rebuilt around them; state is kept."""
        super().add_param_group(check_group(self, param_group))
        engine = self._engine
        if engine is None:
            return
        try:
            rebuild(self)
        except BaseException:
            if self._engine is engine:  # refused before anything changed
                self.param_groups.pop()
            raise

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the optimizer is closed", remedy="Make a new OffloadAdamW for the model")
        return self._engine

    # -- gradients -----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Around every backward but the last before `step()`: gradients stay in `p.grad` and add up there."""
        return self._micro_batches.no_sync()

    def _arguments(self) -> StepSettings:
        """What a step would be taken with now."""
        return step_settings(self.param_groups, self.max_grad_norm, self._scaling.unscale)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward()` on where weights are float16: `opt.scale_loss(loss).backward()`.

        Multiplies by a power of two that follows the gradients' range (LossScale), for every micro-batch of a step
        alike; the norm, the clipping and the update are those of the unscaled loss. Returns `loss` itself where no
        trained weight is float16.
        """
        return self._scaling.scale(loss, self._last_skipped)

    def _loss_scale_now(self) -> float:
        """What `scale_loss` will multiply the loss of this forward by, where it is called."""
        return self._scaling.expected(self._last_skipped)

    def learn_loss_scale(self) -> None:
        """Wait for the verdict of the last step, if its loss was scaled, and let the scale follow it."""
        self._scaling.learn(self._last_skipped)

    def _last_skipped(self) -> bool:
        return self.engine.worker.wait_verdict(self.engine.sequence)[3]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those already taken, unless `step()` has consumed them."""
        if self._engine is not None:
            self._engine.discard()
        self._micro_batches.forget()
        self._scaling.forget()
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
            rebuild(self)  # frozen when the engine was made, trained since
        engine, before, returned = self.engine, self.engine.sequence, False
        try:
            engine.step(self._arguments())
            returned = True
        finally:
            # Ctrl-C in a wait before the step is submitted leaves what was counted to the next call; in the wait
            # afterwards the step is taken all the same.
            if returned or engine.sequence != before:
                self._micro_batches.stepped()
            if engine.sequence != before:
                self._scaling.stepped()
                if not self.state:
                    checkpoint.show_steps(self)
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
        open_optimizers.discard(self)
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
