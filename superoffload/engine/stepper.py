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

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from superoffload.engine.activation_store import ActivationStore
from superoffload.engine.activations import AppliedPolicies, apply_plan
from superoffload.engine.arenas import Arenas
from superoffload.engine.arguments import StepSettings
from superoffload.engine.blocks import Block
from superoffload.engine.buckets import BucketState, ManagedParam
from superoffload.engine.chunked_head import ChunkedHead
from superoffload.engine.device import device_for
from superoffload.engine.flow import Flow
from superoffload.engine.gradients import GradientCollector
from superoffload.engine.hooks import Collects, install
from superoffload.engine.interrupts import uninterrupted
from superoffload.engine.readiness import Readiness
from superoffload.engine.recorder import Recorder, profiled
from superoffload.engine.retained import RetainedUpdate
from superoffload.engine.speculation import Speculation
from superoffload.engine.start import Start
from superoffload.engine.stats import StepLog
from superoffload.engine.submission import Submission
from superoffload.engine.switch_interval import ShortTurns
from superoffload.engine.weights import Weights, who_reads_what
from superoffload.engine.worker import Lifeline, WorkerFace
from superoffload.errors import EngineError, InputError, NotSupported
from superoffload.gate import Gate
from superoffload.layout import Bucket
from superoffload.plan import Plan


class Engine:
    """State and machinery behind an optimizer; rebuilt when parameters are added.

    Args:
        model: hooks are set on its blocks.
        params: what is trained, in the model's order. layouts: their buckets (`buckets.plan_layout`).
        collects: see `hooks.Collects`; held weakly.
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
        collects: Collects,
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
        self.submission = Submission(self.params, self.arenas, self.device, self.collector.partials)
        self.steps = self.submission.steps
        """Adam's step count of each parameter."""
        reads, read_buckets, readers = who_reads_what(self.blocks, self.params, self.arenas)
        self.speculation = Speculation(self.arenas, self.device, self.worker, readers, self.collector.partials,
                                       self.submission.host_partials)  # fmt: skip
        life.tensors += [*self.submission.tensors, *self.speculation.tensors]
        self._arguments = weakref.WeakMethod(arguments)
        self.gate = Gate(plan.speculate, clips=arguments().max_norm is not None)
        self._retained = RetainedUpdate(self.arenas, self.device, self.collector.partials, self.recorder)
        self.flow = life.flow = Flow(self.blocks, self.arenas, self.device, self.recorder, self.worker, self.weights,
                                     self.speculation, self._retained.homed)  # fmt: skip
        self.readiness = Readiness(self.blocks, reads, read_buckets, readers, self.arenas, self.device, self.worker,
                                   self.weights, self.flow, self._retained)  # fmt: skip
        self._announced: dict[int, int] = {}
        """Block -> the graph task of the last backward that announced it."""
        self._params_of = [[self.params[i] for i in {s.tensor: 0 for s in b.layout.segments}]
                           for b in self.arenas.buckets]  # fmt: skip
        """Parameters with a part in each bucket."""
        install(self, model, collects, life.handles)
        self.recorder.watch(self.blocks)
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

    # -- what the hooks tell ------------------------------------------------------------------------------------------

    def take(self, p: ManagedParam, last: bool) -> None:
        """Gradient hook of a backward whose gradients are taken at once; `last`: the step comes after it."""
        self.readiness.gradient(p)
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
        if arguments is not None and self.sequence and self.gate.open and self.submission.updates:
            self._adopt_edits()  # made before backward: the step is taken from them
            self.speculation.begin(self.submission.describe(self.sequence + 1, arguments()))

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
                params = self._params_of[state.index]
                self.readiness.wait_again(state.index)
                self.readiness.reject([p for p in params if p in edited])
                self.weights.bump(params)

    def ready(self, block: int) -> None:
        """Make the current stream safe to read `block`'s weights: called before its forward."""
        self.readiness.settle()
        recomputes = torch._C._current_graph_task_id() != -1
        # A forward before step() reads the weights of the last step. One that makes a graph announces a backward more,
        # which adds to gradients that seem complete and may fill a bucket before it does.
        if self.speculation.touches(block) or (self.speculation.open and torch.is_grad_enabled() and not recomputes):
            self.cancel_speculation()
        self.readiness.enter(block)
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

    def _after_verdict(self) -> None:
        """The last step's partial sums and verdict must be settled before new ones are written."""
        if not self.collector.collected:
            self.worker.wait_verdict(self.sequence)
            self.collect_records()

    def collect_records(self) -> None:
        """Put what finished steps did into the log; the gate learns from it."""
        new = self.log.extend(self.worker.take_records(), self.readiness.waited_s)
        if new:
            self.readiness.waited_s = 0.0
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
        self.readiness.settle()
        if self.recorder.on:
            self.recorder.keep(self.worker.take_spans(), self.sequence)
        return True

    def _submit(self, arguments: StepSettings) -> None:
        sequence = self.sequence + 1
        step, active, counts = self.submission.prepare(sequence, arguments, self.collector.collected)
        self.flow.forget()  # edits in a slot have been adopted; from here on the homes change
        self.worker.submit(step)
        self.speculation.submitted()
        self.sequence = sequence
        for b in self.arenas.cpu_buckets:
            b.sequence = sequence
        self.readiness.submitted(sequence)
        self._retained.update(arguments, active, counts, lambda: self.worker.wait_verdict(self.sequence))
        self.weights.bump([p for p in self.params if active[p.index]])
        self.collector.consumed()

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
                self.readiness.wait(block)
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
            self.readiness.wait(p.block)
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
