"""One optimizer step on a running engine: hooks, collection, verdict, updates and the waits that keep them in order.

Thread and stream order, in one place:

1. Backward (autograd's thread, compute stream) fills ring slots; a full bucket's partial sums are computed on the
   compute stream and its gradient is copied down on the download stream, which waits for the compute stream.
2. `step()` copies the partial sums and then the ticket down the same stream: whoever sees the ticket on the host may
   read every gradient and every partial sum of the step.
3. The worker sees the ticket, decides the verdict, updates the buckets that the next forward needs first, and enqueues
   each upload on the upload stream, which has waited for this step's backward to stop reading the weights.
   A step that speculates has a ticket for each bucket besides (speculation.py): then update and upload come before the
   verdict, into weights that backward is done with, and the verdict leaves them, takes them back or takes them anew.
4. A block's forward waits **on the host** until the worker has enqueued its buckets (a stream wait on an event that
   nobody has recorded is no wait at all), then makes the compute stream wait for the upload's event.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from superoffload.engine.activation_store import ActivationStore
from superoffload.engine.activations import AppliedPolicies, apply_plan
from superoffload.engine.arguments import StepSettings
from superoffload.engine.blocks import Block
from superoffload.engine.buckets import Arenas, BucketState, ManagedParam
from superoffload.engine.chunked_head import ChunkedHead
from superoffload.engine.device import device_for
from superoffload.engine.flow import Flow
from superoffload.engine.gradients import GradientCollector, collect_hook
from superoffload.engine.hooks import BackwardHook, BlockHook, LeaveHook, SyncHook
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.retained import RetainedUpdate
from superoffload.engine.speculation import Speculation
from superoffload.engine.start import Start
from superoffload.engine.stats import StepLog
from superoffload.engine.switch_interval import ShortTurns
from superoffload.engine.weights import Weights, who_reads_what
from superoffload.engine.worker import Lifeline, WorkerFace
from superoffload.errors import EngineError, InputError, NotSupported
from superoffload.gate import Gate
from superoffload.kernels import native
from superoffload.layout import Bucket
from superoffload.plan import Plan


class Engine:
    """State and machinery behind an optimizer; rebuilt when parameters are added.

    Args:
        model: hooks are set on its blocks.
        params: what is trained, in the model's order. layouts: their buckets (`buckets.plan_layout`).
        collects: asked in every gradient hook whether the gradient is taken now, and if so whether by the last backward
            before the step; None leaves it in `p.grad`.
        arguments: what a step would be taken with now; asked at the first gradient of a step that may speculate.
        log: what finished steps did; outlives the engine.
        start: where the model computes, and how its weights get there; None leaves it where it is.
        activations: apply the plan's policies; else the model is run as it is, compiled where the plan says so.
        loss_scale: what the loss of a forward will be multiplied by; asked where the loss is computed in chunks.
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
        collects: Callable[[ManagedParam], bool | None],
        arguments: Callable[[], StepSettings],
        log: StepLog,
        activations: bool,
        loss_scale: Callable[[], float],
        start: Start | None = None,
    ):
        devices = {start.device} if start is not None else {p.param.device for p in params}
        if len(devices) != 1:
            raise InputError(
                f"the trainable parameters are on {sorted(map(str, devices)) or 'no device'}",
                expected="one device",
                remedy="Move the model with model.to(device) before making the optimizer, or pass device=",
            )
        self.plan, self.blocks, self.params = plan, list(blocks), list(params)
        self.device = device_for(devices.pop())
        with self.device.guard():
            self.arenas = Arenas(params, layouts, plan, self.device, trace=trace, start=start)
        life = Lifeline(self.device, self.arenas)
        self.close = weakref.finalize(self, life.end)
        """Remove hooks, stop the worker, unpin memory. The parameters stay where they are, as ordinary tensors. Runs by
        itself when the engine is dropped."""
        life.handles.append(ShortTurns())
        self.recorder = life.recorder = Recorder(self.device, on=trace)
        self.worker = life.worker = WorkerFace(plan.adam_threads, self.arenas, self.device, trace=trace)
        self.collector = GradientCollector(self.arenas, self.device, self.recorder, self.worker)
        self.weights = Weights(self.arenas)
        self.log = log
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
        self._arguments = weakref.WeakMethod(arguments)
        self._reads, self._read_buckets, self._readers = who_reads_what(self.blocks, self.params, self.arenas)
        self.speculation = Speculation(self.arenas, self.device, self.worker, self._readers, self.collector.partials,
                                       self._host_partials)  # fmt: skip
        life.tensors += self.speculation.tensors
        self.gate = Gate(plan.speculate, clips=arguments().max_norm is not None)
        self._waited_s = 0.0
        self._order = [b.index for b in reversed(self.arenas.buckets) if not b.retained]
        self._retained = RetainedUpdate(self.arenas, self.device, self.collector.partials, self.recorder)
        self.flow = life.flow = Flow(self.blocks, self.arenas, self.device, self.recorder, self.worker, self.weights,
                                     self.speculation, self._retained.homed)  # fmt: skip
        self._ready: list[dict[int, int]] = [{} for _ in self.blocks]
        """Block -> stream -> the step whose weights that stream may read."""
        self._entered: set[int] = set()
        self._lazy = [False] * len(self.blocks)
        self._with_gradient: set[int] = set()
        self._unentered: set[int] = set()
        self._unsettled = False
        self._announced: dict[int, int] = {}
        """Block -> the graph task of the last backward that announced it."""
        self._seen = [0] * len(self.params)
        """Parameter -> the step whose weights a forward has waited for."""
        self._params_of = [[self.params[i] for i in {s.tensor: 0 for s in b.layout.segments}]
                           for b in self.arenas.buckets]  # fmt: skip
        """Parameters with a part in each bucket."""
        self._install(model, collects, life.handles)
        self.activations: AppliedPolicies | None = None
        if activations or plan.compile_blocks:
            self.activations = apply_plan(model, self.blocks, plan, self._activation_store, self.recorder.recompute,
                                          activations=activations)  # fmt: skip
            life.handles.append(self.activations)
        if plan.loss_chunks > 1:
            life.handles.append(ChunkedHead(model, plan.loss_chunks, _weakly(loss_scale)))

    def _activation_store(self, min_bytes: int) -> ActivationStore:
        arenas = frozenset(b.weights.untyped_storage().data_ptr() for b in self.arenas.buckets)
        return ActivationStore(self.device, self.arenas.host, self.recorder, arenas=arenas, min_bytes=min_bytes)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, collects: Callable[[ManagedParam], bool | None], handles: list[Any]) -> None:
        # The hooks hold the engine weakly: a model must not keep alive an optimizer that everybody else has dropped.
        this, wanted = weakref.ref(self), weakref.WeakMethod(collects)

        def ready(block: int) -> None:
            if (engine := this()) is not None:
                engine.ready(block)

        def take(p: ManagedParam) -> None:
            engine, collects = this(), wanted()
            if engine is not None:
                engine.flow.check(p)
            last = collects(p) if engine is not None and collects is not None else None
            if engine is not None and last is not None:
                engine.take(p, last)

        def backward_comes(block: int) -> None:
            if (engine := this()) is not None:
                engine.backward_comes(block)

        def left(block: int) -> None:
            if (engine := this()) is not None:
                engine.flow.left(block)

        untraced: Callable[[int], None] = torch.compiler.disable(ready)  # a host wait cannot be traced

        def synchronize() -> None:
            if (engine := this()) is not None:
                engine.synchronize()

        for index, block in enumerate(self.blocks):
            for module in block.modules:
                # Before any other pre-hook, which may read the weights (torch's weight_norm does).
                handles.append(module.register_forward_pre_hook(BlockHook(untraced, index), prepend=True))
                if self.plan.flow_blocks:
                    handles.append(module.register_forward_hook(BackwardHook(backward_comes, index), with_kwargs=True))
            if index in self.plan.flow_blocks:
                handles.append(block.modules[-1].register_forward_hook(LeaveHook(left, index)))
        for p in self.params:
            handles.append(collect_hook(take, p))
        for module in model.modules():
            handles.append(module.register_state_dict_pre_hook(SyncHook(synchronize)))
            handles.append(module.register_load_state_dict_pre_hook(SyncHook(synchronize)))
        self.recorder.watch(self.blocks)

    def take(self, p: ManagedParam, last: bool) -> None:
        """Gradient hook of a backward whose gradients are taken at once; `last`: the step comes after it."""
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
        self._after_verdict()
        if last and not self.collector.final_begun:
            self._begin()
        elif self.collector.is_final(p):
            self._again(p)
        for state in self.collector.take(p, last=last):
            self._arrive(state)

    def _begin(self) -> None:
        """The first gradient of the last backward before a step."""
        arguments = self._arguments()
        # The first step shows how often each gradient fires: a weight that is used twice is not complete at once.
        if arguments is not None and self.sequence and self.gate.open and self._order:
            self._adopt_edits()  # made before backward: the step is taken from them
            self.speculation.begin(self._describe(self.sequence + 1, arguments()))

    def _arrive(self, state: BucketState) -> None:
        if self.speculation.open and state.undo is not None:
            # A graph that would read these weights once more has to fail loudly: they are about to change.
            self.weights.bump(self._params_of[state.index])
            self.speculation.arrive(state)

    def _again(self, p: ManagedParam) -> None:
        """A second gradient of `p` since the last step: what is held is no longer the whole."""
        if self.speculation.has(p):
            # No forward has asked for the weights back. Where autograd kept a weight it raises by itself, but what was
            # recomputed, or read in ways that autograd does not see, was read from weights of the next step.
            p.param.grad = None
            raise EngineError(
                f"{p.name} got a second gradient before step(), from a forward that ran before the first backward",
                expected="each backward right after its forward, or a word that more than one is coming",
                remedy="Put every backward but the last inside `with opt.no_sync():`, or pass speculate='off'; "
                "call zero_grad() to go on",
            )
        self.cancel_speculation()

    def cancel_speculation(self) -> None:
        """Take back what was speculated on gradients that are not yet a step's; they stay collected."""
        if not self.speculation.open:
            return
        with uninterrupted():
            self.gate.cancelled()
            edited = set(self.weights.edited())
            with profiled("take back speculation"):
                sent_again = self.speculation.cancel()
            for state in sent_again:
                for event in state.done:
                    self.device.compute_waits(event)
                params = self._params_of[state.index]
                self._reject([p for p in params if p in edited])
                self.weights.bump(params)
                for block in self._readers[state.index]:
                    self._ready[block].clear()  # other streams have to wait for these uploads too

    def _reject(self, edited: Sequence[ManagedParam]) -> None:
        """Take back edits that raced with the worker."""
        if edited:
            self.device.synchronize_compute()  # an edit that is still queued would land afterwards
            self.weights.reject(edited)
            for p in edited:
                self.flow.drop(p.block)

    def ready(self, block: int) -> None:
        """Make the current stream safe to read `block`'s weights: called before its forward."""
        if self._unsettled:
            self._settle_blocks()
        recomputes = torch._C._current_graph_task_id() != -1
        # A forward before step() reads the weights of the last step. One that makes a graph announces a backward more,
        # which adds to gradients that seem complete and may fill a bucket before it does.
        if self.speculation.touches(block) or (self.speculation.open and torch.is_grad_enabled() and not recomputes):
            self.cancel_speculation()
        self._entered.add(block)
        self._wait_block(block)
        # Inside backward a forward is a recomputation: the blocks before it come next.
        self.flow.use(block, backward=recomputes)
        self.weights.tell_rejected()

    def backward_comes(self, block: int) -> None:
        """Make the current stream safe to run `block`'s backward."""
        if torch.is_grad_enabled():
            raise NotSupported(
                f"a backward with create_graph=True ran through {self.blocks[block].name} while weights flow",
                expected="first derivatives: the graph of a backward does not announce when it needs which weights",
                remedy="Make the optimizer with flow_blocks=()",
            )
        # Once in a walk: what a block's other module makes complete may arrive before this one's output is reached.
        task = torch._C._current_graph_task_id()
        if self._announced.get(block) != task:
            self._announced[block] = task
            if self.speculation.touches(block):
                self.cancel_speculation()  # a backward more: it reads the weights of the last step
        self.flow.use(block, backward=True)

    def _wait_block(self, block: int) -> None:
        stream = self.device.stream_id()
        if self._ready[block].get(stream, 0) == self.sequence:
            return
        for index in self._read_buckets[block]:
            state = self.arenas.buckets[index]
            if state.retained:
                self.device.compute_waits(self._retained.homed if state.flow else self._retained.done)
                continue
            begin = time.perf_counter()
            with profiled(f"wait for bucket {index}"):
                self.worker.wait_bucket(state)
            self._waited_s += time.perf_counter() - begin
            for event in state.done:  # both: the last step may have been skipped, and then the one before counts
                self.device.compute_waits(event)
        # Once a step: a graph of another stream, or of another block with the same weight, stays as good as this one.
        new = [p for p in self._reads[block] if self._seen[p.index] != self.sequence]
        self._reject([p for p in new if self.weights.is_edited(p)])
        self.weights.bump(new)
        for p in new:
            self._seen[p.index] = self.sequence
        self._ready[block][stream] = self.sequence

    def _after_verdict(self) -> None:
        """The last step's partial sums and verdict must be settled before new ones are written."""
        if not self.collector.collected:
            self.worker.wait_verdict(self.sequence)
            self.collect_records()

    def collect_records(self) -> None:
        """Put what finished steps did into the log; the gate learns from it."""
        new = self.log.extend(self.worker.take_records(), self._waited_s)
        if new:
            self._waited_s = 0.0
        for record in new:
            self.gate.observe(record)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, arguments: StepSettings) -> bool:
        """Submit one step over the gradients taken so far. Returns False when there were none.

        The call does not wait for the update: the next forward does, block by block.
        """
        with self.device.guard(), profiled("step"):
            return self._step(arguments)

    def _step(self, arguments: StepSettings) -> bool:
        self.recorder.end_backward()
        self.weights.check_storage()
        for p in self.params:  # what no hook took: under no_sync, or set by hand
            if p.param.grad is not None:
                self._after_verdict()
                if self.collector.is_final(p):
                    self._again(p)
                self.collector.take(p)
        if not self.collector.collected:
            return False
        self.collector.finish()
        self._adopt_edits()
        self.weights.tell_rejected()
        # A recorded step ends where its update begins, so that an update always lies in the step that it overlaps.
        self.recorder.end_step()
        with uninterrupted():
            self._submit(arguments)
        # From here on the step is whole; an interrupted wait is taken up again by the next forward.
        self._settle_blocks()
        if self.recorder.on:
            self.recorder.keep(self.worker.take_spans(), self.sequence)
        return True

    def _submit(self, arguments: StepSettings) -> None:
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
            self.device.down.waits_for_compute()
            with self.device.down.use():
                self._host_partials.copy_(self.collector.partials, non_blocking=True)
                self._device_ticket.fill_(self._ticket_value)
                self._ticket.copy_(self._device_ticket, non_blocking=True)
            self.device.up.waits_for_compute()  # uploads overwrite weights that this step's backward still reads
        step = self._describe(sequence, arguments)
        step.ticket = self._ticket.data_ptr() if self.device.is_cuda else 0
        step.ticket_value, step.active, step.order = self._ticket_value, active.data_ptr(), self._order
        self.flow.forget()  # edits in a slot have been adopted; from here on the homes change
        self.worker.submit(step)
        self.speculation.submitted()
        self.sequence = sequence
        for b in self.arenas.cpu_buckets:
            b.sequence = sequence
        self._unsettled = True
        taken: list[int] = active.tolist()
        self._retained.update(arguments, taken, counts, lambda: self.worker.wait_verdict(self.sequence))
        self.weights.bump([p for p in self.params if taken[p.index]])
        self.collector.consumed()

    def _describe(self, sequence: int, arguments: StepSettings) -> Any:
        """A step as the worker wants it, but for what is only known once it is submitted."""
        d = native.StepDesc()
        d.sequence = sequence
        d.partials, d.partial_count = self._host_partials.data_ptr(), self._host_partials.numel()
        d.max_norm = -1.0 if arguments.max_norm is None else float(arguments.max_norm)
        d.unscale = arguments.unscale
        d.steps, d.groups = self.steps.data_ptr(), self._groups.data_ptr()
        d.param_count = len(self.params)
        for h in arguments.hyper:
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
        """Wait until every weight of the last step is where the model reads it, and its record in the log."""
        with self.device.guard():
            self.worker.wait_verdict(self.sequence)
            self.weights.check_storage()
            self._adopt_edits()
            self.cancel_speculation()
            self.flow.forget()
            for block in range(len(self.blocks)):
                self._wait_block(block)
            self.device.synchronize_compute()
            self.worker.wait_idle()
            self.collect_records()
            self.weights.tell_rejected()

    def _adopt_edits(self) -> None:
        """Weights that somebody has written in place are the ones to step from."""
        if not self.weights.edited():
            return
        self.cancel_speculation()  # which rejects the edits that raced with it
        for p in self.weights.edited():
            self._wait_block(p.block)
            self.weights.adopt(p)
            self.flow.drop(p.block)

    def discard(self) -> None:
        """Forget every gradient since the last step, and what was speculated on them."""
        self.cancel_speculation()
        self.collector.discard()
        self.weights.tell_rejected()


def _weakly(loss_scale: Callable[[], float]) -> Callable[[], float]:
    """Of an optimizer that the model must not keep alive."""
    method = weakref.WeakMethod(loss_scale)

    def scale() -> float:
        bound = method()
        return 1.0 if bound is None else bound()

    return scale
