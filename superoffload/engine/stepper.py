"""One optimizer step on a running engine: hooks, collection, verdict, updates and the waits that keep them in order.

Thread and stream order, in one place:

1. Backward (autograd's thread, compute stream) fills ring slots; a full bucket's partial sums are computed on the
   compute stream and its gradient is copied down on the download stream, which waits for the compute stream.
2. `step()` copies the partial sums and then the ticket down the same stream: whoever sees the ticket on the host may
   read every gradient and every partial sum of the step.
3. The worker sees the ticket, decides the verdict, updates the buckets that the next forward needs first, and enqueues
   each upload on the upload stream, which has waited for this step's backward to stop reading the weights.
4. A block's forward waits **on the host** until the worker has enqueued its buckets (a stream wait on an event that
   nobody has recorded is no wait at all), then makes the compute stream wait for the upload's event.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from superoffload.engine.blocks import Block
from superoffload.engine.buckets import DTYPES, Arenas, BucketState, ManagedParam
from superoffload.engine.device import device_for
from superoffload.engine.gradients import GradientCollector, collect_hook
from superoffload.engine.hooks import BlockHook, SyncHook
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import KEEP_STEPS, Recorder
from superoffload.engine.retained import Hyper, RetainedUpdate, Verdict
from superoffload.errors import EngineError, InputError
from superoffload.kernels import native
from superoffload.plan import Plan


class Engine:
    """State and machinery behind an optimizer; rebuilt when parameters are added.

    Args:
        model: hooks are set on its blocks.
        params: what is trained, in the model's order.
        collects: asked in every gradient hook whether this backward is the last one before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        params: Sequence[ManagedParam],
        plan: Plan,
        *,
        trace: bool,
        collects: Callable[[ManagedParam], bool],
    ):
        devices = {p.param.device for p in params}
        if len(devices) != 1:
            raise InputError(
                f"the trainable parameters are on {sorted(map(str, devices)) or 'no device'}",
                expected="one device",
                remedy="Move the model with model.to(device) before making the optimizer",
            )
        self.plan, self.blocks, self.params = plan, list(blocks), list(params)
        self.device = device_for(devices.pop())
        self.arenas = Arenas(params, len(blocks), plan, self.device, trace=trace)
        self.recorder = Recorder(self.device, on=trace)
        self.collector = GradientCollector(self.arenas, self.device, self.recorder, self._wait_enqueued)
        self.sequence = 0
        """Steps submitted; the worker's clock. Skipped ones count here, not in `steps`."""
        self.steps = torch.zeros(len(params), dtype=torch.int64)
        """Adam's step count of each parameter, incremented by the worker when a step is committed."""
        self._groups = torch.tensor([p.group for p in params], dtype=torch.int32)
        self._ticket = self.arenas.host.zeros(1, torch.int64, pinned=True)
        self._host_partials = self.collector.partials
        if self.device.is_cuda:
            self._host_partials = self.arenas.host.zeros(self.arenas.partial_count, torch.float64, pinned=True)
            self._device_ticket = torch.zeros(1, dtype=torch.int64, device=self.device.device)
        self._order = [b.index for b in reversed(self.arenas.buckets) if not b.retained]
        self._active: torch.Tensor | None = None
        self._retained = RetainedUpdate(self.arenas, self.device, self.collector.partials, self.recorder)
        self._block_ready = [0] * len(self.blocks)
        self._entered: set[int] = set()
        self._lazy = [False] * len(self.blocks)
        self._with_gradient: set[int] = set()
        self._unentered: set[int] = set()
        self._worker_spans: list[tuple[int, int, int, int, int]] = []
        self._versions = [p.param._version for p in self.params]
        self.worker = native.Worker(plan.adam_threads, self.device.cuda_api)
        self.worker.set_buckets(self.arenas.describe(self.device))
        self.worker.trace(trace)
        self._handles: list[Any] = []
        self._install(model, collects)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, collects: Callable[[ManagedParam], bool]) -> None:
        # The hooks hold the engine weakly: a model must not keep alive an optimizer that everybody else has dropped.
        this, wanted = weakref.ref(self), weakref.WeakMethod(collects)

        def ready(block: int) -> None:
            if (engine := this()) is not None:
                engine.ready(block)

        def take(p: ManagedParam) -> None:
            engine, collects = this(), wanted()
            if engine is not None and collects is not None and collects(p):
                engine.take(p)

        untraced: Callable[[int], None] = torch.compiler.disable(ready)  # a host wait cannot be traced

        def synchronize() -> None:
            if (engine := this()) is not None:
                engine.synchronize()

        for index, block in enumerate(self.blocks):
            for module in block.modules:
                self._handles.append(module.register_forward_pre_hook(BlockHook(untraced, index)))
        for p in self.params:
            self._handles.append(collect_hook(take, p))
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(SyncHook(synchronize)))
            self._handles.append(module.register_load_state_dict_pre_hook(SyncHook(synchronize)))
        self.recorder.watch(self.blocks)

    def take(self, p: ManagedParam) -> None:
        """Gradient hook of the last backward before the step."""
        if p.block not in self._entered:
            # Its weights were used without its block's forward (a fused loss on `head.weight`, say), so nothing waited
            # for them. Until a block has been seen to be entered, `step()` itself waits for it.
            if self._lazy[p.block]:
                raise EngineError(
                    f"{p.name} got a gradient although the forward of {self.blocks[p.block].name} did not run",
                    expected="every weight to be used through its module, as in the steps before",
                    remedy="Call opt.synchronize() before the first forward that uses weights directly",
                )
            self._unentered.add(p.block)
        self._with_gradient.add(p.block)
        self._before_gradient()
        self.collector.take(p)

    def ready(self, block: int) -> None:
        """Make the current stream safe to read `block`'s weights: called before its forward."""
        self._entered.add(block)
        if self._block_ready[block] == self.sequence:
            return
        for index in self.arenas.block_buckets[block]:
            state = self.arenas.buckets[index]
            if state.retained:
                self.device.compute_waits(self._retained.done)
                continue
            self._wait_enqueued(state)
            self.device.compute_waits(state.done[state.sequence & 1])
        self._block_ready[block] = self.sequence

    def _before_gradient(self) -> None:
        """The last step's partial sums and verdict must be settled before new ones are written."""
        if not self.collector.collected and self.sequence:
            self._call(self.worker.wait_verdict, self.sequence)

    def _wait_enqueued(self, state: BucketState) -> None:
        if state.sequence:
            self._call(self.worker.wait_bucket, state.index, state.sequence)

    def _call(self, wait: Callable[..., Any], *args: Any) -> Any:
        """Call the worker; what it failed with becomes an EngineError of its own words."""
        try:
            return wait(*args)
        except RuntimeError as e:
            raise EngineError(
                f"the optimizer's worker stopped: {e}",
                remedy="Make a new OffloadAdamW and load the last checkpoint; this one is not saved from here on",
            ) from e

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, hyper: Sequence[Hyper], max_norm: float | None) -> bool:
        """Submit one step over the gradients taken so far. Returns False when there were none.

        The call does not wait for the update: the next forward does, block by block.
        """
        self.recorder.end_backward()
        for p in self.params:  # what no hook took: under no_sync, or set by hand
            if p.param.grad is not None:
                self._before_gradient()
                self.collector.take(p)
        if not self.collector.collected:
            return False
        self.collector.finish()
        self.adopt_edits()
        # A recorded step ends where its update begins, so that an update always lies in the step that it overlaps.
        self.recorder.end_step()
        with uninterrupted():
            self._submit(hyper, max_norm)
        # From here on the step is whole; an interrupted wait can be taken up again.
        self._settle_blocks()
        if self.recorder.on:
            self._keep_spans()
        return True

    def _submit(self, hyper: Sequence[Hyper], max_norm: float | None) -> None:
        self.sequence += 1
        active = torch.zeros(len(self.params), dtype=torch.uint8)
        active[list(self.collector.collected)] = 1
        if self.device.is_cuda:
            self.device.down_waits_for_compute()
            with self.device.down_stream():
                self._host_partials.copy_(self.collector.partials, non_blocking=True)
                self._device_ticket.fill_(self.sequence)
                self._ticket.copy_(self._device_ticket, non_blocking=True)
            self.device.up_waits_for_compute()

        # The worker reads `active` until the step's last bucket; it is replaced only after the next step's verdict,
        # so the one before last is free.
        self._previous_active, self._active = self._active, active
        # Taken before the worker may count this step. The verdict of the step before is known, so these are the
        # counts that a commit will give; on a skip nothing is written and nobody looks at them.
        counts: list[int] = (self.steps + active).tolist()
        self._call(self.worker.submit, self._describe(hyper, max_norm, active))
        for b in self.arenas.cpu_buckets:
            b.sequence = self.sequence
        self._retained.update(hyper, max_norm, active.tolist(), counts, self._settled_verdict)
        torch.autograd.graph.increment_version([p.param for p in self.params if active[p.index]])
        self._versions = [p.param._version for p in self.params]
        self.collector.collected.clear()

    def _describe(self, hyper: Sequence[Hyper], max_norm: float | None, active: torch.Tensor) -> Any:
        d = native.StepDesc()
        d.sequence = self.sequence
        d.ticket = self._ticket.data_ptr() if self.device.is_cuda else 0
        d.partials, d.partial_count = self._host_partials.data_ptr(), self._host_partials.numel()
        d.max_norm = -1.0 if max_norm is None else float(max_norm)
        d.active, d.steps, d.groups = active.data_ptr(), self.steps.data_ptr(), self._groups.data_ptr()
        d.param_count = len(self.params)
        d.order = self._order
        for h in hyper:
            d.add_group(*h)
        return d

    def _settle_blocks(self) -> None:
        """Blocks seen to be entered before their gradient are waited for by their forward; for the others the step
        itself waits."""
        for block in self._with_gradient:
            self._lazy[block] = block not in self._unentered
        self._with_gradient.clear()
        self._unentered.clear()
        self._entered.clear()
        for block, lazy in enumerate(self._lazy):
            if not lazy:
                self.ready(block)
        self._entered.clear()

    # -- state ---------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every weight of the last step is where the model reads it."""
        if self.sequence:
            self._call(self.worker.wait_verdict, self.sequence)
        entered = set(self._entered)
        for block in range(len(self.blocks)):
            self.ready(block)
        self._entered = entered
        self.adopt_edits()
        if self.device.is_cuda:
            torch.cuda.current_stream(self.device.device).synchronize()

    def adopt_edits(self) -> None:
        """Carry weights that somebody has written in place (a loaded checkpoint, a clamp) into the fp32 masters, as
        torch's AdamW would see them. Where a weight still is its master rounded, the master is kept.

        Edits are noticed by the parameter's version counter; one through `p.data` does not count there.
        """
        edited = [p for p in self.params if p.param._version != self._versions[p.index]]
        for p in edited:
            for index, s in p.places:
                b = self.arenas.buckets[index]
                self._wait_enqueued(b)
                span = slice(s.start, s.start + s.numel)
                weights = b.weights[span].to(b.master.device)
                if b.master.data_ptr() != b.weights.data_ptr():
                    kept = b.master[span].to(weights.dtype) == weights
                    b.master[span].copy_(torch.where(kept, b.master[span], weights.float()))
                if b.out is not None:
                    b.out[span].copy_(weights)
            self._versions[p.index] = p.param._version

    def _settled_verdict(self) -> Verdict:
        self._call(self.worker.wait_verdict, self.sequence)
        return self.worker.verdict()

    def verdict(self) -> Verdict:
        """Of the last judged step."""
        return self.worker.verdict()

    def gather(self, p: ManagedParam, kind: str) -> torch.Tensor:
        """`master`, `exp_avg` or `exp_avg_sq` of a parameter on the CPU, in its shape: a view where it lies in one
        piece, else a copy."""
        pieces: list[torch.Tensor] = [
            getattr(self.arenas.buckets[i], kind)[s.start : s.start + s.numel] for i, s in p.places
        ]
        if len(pieces) == 1:
            return pieces[0].cpu().view(p.param.shape)
        return torch.cat([x.cpu() for x in pieces]).view(p.param.shape)

    def scatter(self, p: ManagedParam, kind: str, value: torch.Tensor) -> None:
        """Set one of them. A new master also becomes the parameter's weights, here and in the copy that goes up."""
        flat = value.detach().reshape(-1)
        for index, s in p.places:
            b = self.arenas.buckets[index]
            span, piece = slice(s.start, s.start + s.numel), flat[s.offset : s.offset + s.numel]
            getattr(b, kind)[span].copy_(piece)
            if kind == "master":
                b.weights[span].copy_(b.master[span].to(DTYPES[p.dtype]))
                if b.out is not None:
                    b.out[span].copy_(b.master[span].to(DTYPES[p.dtype]))
        if kind == "master":
            self._versions[p.index] = p.param._version

    def _keep_spans(self) -> None:
        self._worker_spans += self.worker.take_spans()
        self._worker_spans = [s for s in self._worker_spans if s[2] > self.sequence - KEEP_STEPS]

    def trace_parts(self) -> Any:
        """Events, stalls, step seconds and window of the last complete step; synchronises."""
        self.synchronize()
        self._keep_spans()
        uploads: list[tuple[int, Any, Any, int]] = []
        if self.device.is_cuda and self.sequence > 1:
            parity = (self.sequence - 1) & 1  # the uploads that overlap the last step are of the step before
            for b in self.arenas.cpu_buckets:
                size = b.layout.numel * (b.master if b.out is None else b.out).element_size()
                uploads.append((b.index, b.upload_start[parity], b.done[parity], size))
        return self.recorder.events(self._worker_spans, uploads)

    def close(self) -> None:
        """Remove hooks, stop the worker, unpin memory. The parameters stay where they are, as ordinary tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.recorder.close()
        self.worker.close()
        self.device.close()
        self.arenas.host.release()
