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
from superoffload.engine.buckets import DTYPES, Arenas, ManagedParam
from superoffload.engine.device import device_for
from superoffload.engine.gradients import GradientCollector, collect_hook
from superoffload.engine.hooks import BlockHook, SyncHook
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import KEEP_STEPS, Recorder
from superoffload.engine.retained import Hyper, RetainedUpdate
from superoffload.engine.worker import Lifeline, WorkerFace
from superoffload.errors import EngineError, InputError
from superoffload.kernels import native
from superoffload.layout import Bucket
from superoffload.plan import Plan


class Engine:
    """State and machinery behind an optimizer; rebuilt when parameters are added.

    Args:
        model: hooks are set on its blocks.
        params: what is trained, in the model's order. layouts: their buckets (`buckets.plan_layout`).
        collects: asked in every gradient hook whether this backward is the last one before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        params: Sequence[ManagedParam],
        layouts: Sequence[Bucket],
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
        self.arenas = Arenas(params, layouts, len(blocks), plan, self.device, trace=trace)
        life = Lifeline(self.device, self.arenas)
        self.close = weakref.finalize(self, life.end)
        """Remove hooks, stop the worker, unpin memory. The parameters stay where they are, as ordinary tensors. Runs by
        itself when the engine is dropped."""
        self.recorder = life.recorder = Recorder(self.device, on=trace)
        self.worker = life.worker = WorkerFace(plan.adam_threads, self.arenas, self.device, trace=trace)
        self.collector = GradientCollector(self.arenas, self.device, self.recorder, self.worker)
        self.sequence = 0
        """Steps submitted; the worker's clock. Skipped ones count here, not in `steps`."""
        # Named devices: the worker reads these on the host, whatever torch's default device is.
        self.steps = torch.zeros(len(params), dtype=torch.int64, device="cpu")
        """Adam's step count of each parameter, incremented by the worker when a step is committed."""
        self._groups = torch.tensor([p.group for p in params], dtype=torch.int32, device="cpu")
        self._active = [torch.zeros(len(params), dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._ticket = self.arenas.host.zeros(1, torch.int64, pinned=True)
        self._ticket_value = 0
        self._host_partials = self.collector.partials
        if self.device.is_cuda:
            self._host_partials = self.arenas.host.zeros(self.arenas.partial_count, torch.float64, pinned=True)
            self._device_ticket = torch.zeros(1, dtype=torch.int64, device=self.device.device)
        life.tensors += [self.steps, self._groups, *self._active, self._ticket, self._host_partials]
        self._order = [b.index for b in reversed(self.arenas.buckets) if not b.retained]
        self._retained = RetainedUpdate(self.arenas, self.device, self.collector.partials, self.recorder)
        self._ready: list[dict[int, int]] = [{} for _ in self.blocks]
        """Block -> stream -> the step whose weights that stream may read."""
        self._entered: set[int] = set()
        self._lazy = [False] * len(self.blocks)
        self._with_gradient: set[int] = set()
        self._unentered: set[int] = set()
        self._unsettled = False
        self._worker_spans: list[tuple[int, int, int, int, int]] = []
        self._versions = [p.param._version for p in self.params]
        self._by_block: list[list[ManagedParam]] = [[] for _ in self.blocks]
        for p in self.params:
            self._by_block[p.block].append(p)
        self._install(model, collects, life.handles)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, collects: Callable[[ManagedParam], bool], handles: list[Any]) -> None:
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
                # Before any other pre-hook, which may read the weights (torch's weight_norm does).
                handles.append(module.register_forward_pre_hook(BlockHook(untraced, index), prepend=True))
        for p in self.params:
            handles.append(collect_hook(take, p))
        for module in model.modules():
            handles.append(module.register_state_dict_pre_hook(SyncHook(synchronize)))
            handles.append(module.register_load_state_dict_pre_hook(SyncHook(synchronize)))
        self.recorder.watch(self.blocks)

    def take(self, p: ManagedParam) -> None:
        """Gradient hook of the last backward before the step."""
        if p.block not in self._entered:
            # Its weights were used without its block's forward (a fused loss on `head.weight`, say), so nothing waited
            # for them. Until a block has been seen to be entered, `step()` itself waits for it.
            if self._lazy[p.block] and self.sequence not in self._ready[p.block].values():
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
        if self._unsettled:
            self._settle_blocks()
        self._entered.add(block)
        self._wait_block(block)

    def _wait_block(self, block: int) -> None:
        stream = self.device.stream_id()
        if self._ready[block].get(stream, 0) == self.sequence:
            return
        for index in self.arenas.block_buckets[block]:
            state = self.arenas.buckets[index]
            if state.retained:
                self.device.compute_waits(self._retained.done)
                continue
            self.worker.wait_bucket(state)
            for event in state.done:  # both: the last step may have been skipped, and then the one before counts
                self.device.compute_waits(event)
        self._bump(self._by_block[block])
        self._ready[block][stream] = self.sequence

    def _bump(self, params: Sequence[ManagedParam]) -> None:
        """Tell autograd that these weights are new: a graph that saved older ones must not be used. Once when the step
        is submitted, and again when they have arrived, for a graph that read them in between."""
        torch.autograd.graph.increment_version([p.param for p in params])
        for p in params:
            self._versions[p.index] = p.param._version

    def _before_gradient(self) -> None:
        """The last step's partial sums and verdict must be settled before new ones are written."""
        if not self.collector.collected:
            self.worker.wait_verdict(self.sequence)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, hyper: Sequence[Hyper], max_norm: float | None) -> bool:
        """Submit one step over the gradients taken so far. Returns False when there were none.

        The call does not wait for the update: the next forward does, block by block.
        """
        with self.device.guard():
            return self._step(hyper, max_norm)

    def _step(self, hyper: Sequence[Hyper], max_norm: float | None) -> bool:
        self.recorder.end_backward()
        self._check_storage()
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
        # From here on the step is whole; an interrupted wait is taken up again by the next forward.
        self._settle_blocks()
        if self.recorder.on:
            self._keep_spans()
        return True

    def _submit(self, hyper: Sequence[Hyper], max_norm: float | None) -> None:
        sequence = self.sequence + 1
        # The worker reads this until the step's last bucket. The step before the last is done with the other one: its
        # successor has been judged.
        active = self._active[sequence & 1].zero_()
        active[list(self.collector.collected)] = 1
        # Taken before the worker may count this step. The verdict of the step before is known, so these are the
        # counts that a commit will give; on a skip nothing is written and nobody looks at them.
        counts: list[int] = (self.steps + active).tolist()
        self._ticket_value += 1  # never twice the same, also when a step fails before it is submitted
        if self.device.is_cuda:
            self.device.down_waits_for_compute()
            with self.device.down_stream():
                self._host_partials.copy_(self.collector.partials, non_blocking=True)
                self._device_ticket.fill_(self._ticket_value)
                self._ticket.copy_(self._device_ticket, non_blocking=True)
            self.device.up_waits_for_compute()
        self.worker.submit(self._describe(sequence, hyper, max_norm, active))
        self.sequence = sequence
        for b in self.arenas.cpu_buckets:
            b.sequence = sequence
        self._unsettled = True
        self._retained.update(hyper, max_norm, active.tolist(), counts, lambda: self.worker.wait_verdict(self.sequence))
        self._bump([p for p in self.params if active[p.index]])
        self.collector.collected.clear()

    def _check_storage(self) -> None:
        """The weights must still lie in the arena: elsewhere they would never see an update."""
        for p in self.params:
            if p.places and p.param.data_ptr() != p.address:
                raise EngineError(
                    f"the storage of {p.name} was replaced (by model.to(...) or `p.data = ...`)",
                    expected="weights to stay where the optimizer put them; writing into them in place is fine",
                    remedy="Move or cast the model first and make the OffloadAdamW afterwards; state_dict() carries "
                    "the moments over",
                )

    def _describe(self, sequence: int, hyper: Sequence[Hyper], max_norm: float | None, active: torch.Tensor) -> Any:
        d = native.StepDesc()
        d.sequence = sequence
        d.ticket = self._ticket.data_ptr() if self.device.is_cuda else 0
        d.ticket_value = self._ticket_value
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
        self._unsettled = True
        for block in self._with_gradient:
            self._lazy[block] = block not in self._unentered
        self._with_gradient.clear()
        self._unentered.clear()
        for block, lazy in enumerate(self._lazy):
            if not lazy:
                self._wait_block(block)
        self._entered.clear()
        self._unsettled = False

    # -- state ---------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every weight of the last step is where the model reads it."""
        with self.device.guard():
            self.worker.wait_verdict(self.sequence)
            self._check_storage()
            for block in range(len(self.blocks)):
                self._wait_block(block)
            self.adopt_edits()
            self.device.synchronize_compute()

    def adopt_edits(self) -> None:
        """Carry weights that somebody has written in place (a loaded checkpoint, a clamp) into the fp32 masters, as
        torch's AdamW would see them. Where a weight still is its master rounded, the master is kept.

        Edits are noticed by the parameter's version counter; one through `p.data` does not count there.
        """
        edited = [p for p in self.params if p.param._version != self._versions[p.index]]
        for p in edited:
            self._wait_block(p.block)
            for index, s in p.places:
                b = self.arenas.buckets[index]
                span = slice(s.start, s.start + s.numel)
                weights = b.weights[span].to(b.master.device)
                if b.master.data_ptr() != b.weights.data_ptr():
                    kept = b.master[span].to(weights.dtype) == weights
                    b.master[span].copy_(torch.where(kept, b.master[span], weights.float()))
                if b.out is not None:
                    b.out[span].copy_(weights)
            self._versions[p.index] = p.param._version

    def gather(self, p: ManagedParam, kind: str) -> torch.Tensor:
        """`master`, `exp_avg` or `exp_avg_sq` of a parameter on the CPU, in its shape: a view where it lies in one
        piece, else a copy."""
        pieces: list[torch.Tensor] = [
            getattr(self.arenas.buckets[i], kind)[s.start : s.start + s.numel] for i, s in p.places
        ]
        if not pieces:
            return torch.zeros(p.param.shape, dtype=torch.float32, device="cpu")
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
