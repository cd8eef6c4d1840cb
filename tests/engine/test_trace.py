"""What a measured trace shows of speculation, and what it costs when nobody asks."""

import gc
import itertools

import pytest
import torch

from superoffload.engine import OffloadAdamW
from superoffload.engine.stalls import name_stalls
from superoffload.tracing import TraceEvent
from tests.engine.common import batches, llama

DATA = batches(5)


def train(opt, model, factors, *, before=None, lockstep=False):
    """`lockstep`: backward waits at every gradient until the worker has nothing to do, so that it is certain that
    buckets are speculated, on however busy a machine."""
    if lockstep:
        for p in model.parameters():
            p.register_hook(lambda g: opt.engine.worker.wait_idle())
    for x, factor in zip(DATA, factors, strict=False):
        loss = model(input_ids=x, labels=x).loss
        (loss * factor).backward()
        if before is not None:
            before()
        opt.step()
        opt.zero_grad()


@pytest.fixture(scope="module")
def norms() -> list[float]:
    """Gradient norms of the first steps, without clipping."""
    model = llama(torch.bfloat16, layers=6)
    with OffloadAdamW(model, lr=1e-3) as opt:
        train(opt, model, [1.0] * 4)
        opt.synchronize()
        opt.engine.worker.wait_idle()
        return [r.grad_norm for r in opt.ledger]


def test_speculative_adam_lies_under_backward(norms):
    model = llama(torch.bfloat16, layers=6)
    with OffloadAdamW(
        model, bucket_mb=0.05, speculate="on", max_grad_norm=2 * max(norms), record_trace=True, retained_buckets=2
    ) as opt:
        train(opt, model, [1.0] * 4, lockstep=True)
        trace = opt.trace()
    backward_ends = max(e.end_s for e in trace.events if e.kind == "backward")
    adam = [e for e in trace.events if e.kind == "adam" and e.step == trace.events[-1].step]
    assert any(e.end_s < backward_ends for e in adam), "no bucket was updated before backward had ended"
    uploads = [e for e in trace.events if e.kind == "copy_up"]
    assert any(e.end_s < backward_ends for e in uploads)
    assert not [e for e in trace.events if e.kind == "undo"]


def test_a_clipped_step_shows_what_was_undone(norms):
    """The bound lies just under the norms, so clipping is certain only when nearly all buckets have been updated. A
    trace's window is the last step's forward and backward: it shows the verdict of the step before."""
    model = llama(torch.bfloat16, layers=6)
    bound = 0.99 * min(norms)
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05, speculate="on", max_grad_norm=bound, record_trace=True) as opt:
        train(opt, model, [1.0] * 4, lockstep=True)
        trace, ledger = opt.trace(), opt.ledger
    assert [r.verdict for r in ledger] == ["clip"] * 4
    assert all(r.undone and r.undo_s > 0 for r in ledger[1:])
    assert {e.lane for e in trace.events if e.kind == "undo"} == {"cpu_adam"}


def test_the_spans_of_each_micro_batch_end_where_its_work_does():
    """The first block's backward with its pass, not with the next backward; the loss is a span of its own."""
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, gradient_accumulation_steps=3, record_trace=True) as opt:
        for _ in range(2):
            for x in batches(3):
                model(input_ids=x, labels=x).loss.backward()
            opt.step()
            opt.zero_grad()
        gpu = [e for e in opt.trace().events if e.lane == "gpu" and e.kind in ("forward", "backward")]
    last = max(e.block for e in gpu)
    of_one = (
        [f"forward block {i}" for i in range(last + 1)]
        + ["loss"]
        + [f"backward block {last - i}" for i in range(last + 1)]
    )
    assert [e.name for e in sorted(gpu, key=lambda e: e.start_s)] == of_one * 3
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(sorted(gpu, key=lambda e: e.start_s)))


def test_a_backward_that_fails_leaves_no_span_open():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, record_trace=True) as opt:
        handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=DATA[0], labels=DATA[0]).loss.backward()
        handle.remove()
        opt.zero_grad()
        train(opt, model, [1.0] * 3)
        gpu = [e for e in opt.trace().events if e.lane == "gpu"]
    assert len([e for e in gpu if e.kind == "backward"]) == len({e.block for e in gpu if e.kind == "backward"})
    assert [e.name for e in gpu].count("loss") == 1


def test_a_garbage_collection_is_named():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, record_trace=True) as opt:
        kept = [[[]] for _ in range(300_000)]  # enough to walk for a few milliseconds
        train(opt, model, [1.0] * 3, before=gc.collect)
        stalls = opt.trace().stalls
        del kept
    assert any(s.waits_for == "garbage collection" and "stopped the host" in s.cause for s in stalls)


def test_nothing_is_watched_without_a_trace_or_after_it():
    before = list(gc.callbacks)
    model = llama(torch.bfloat16)
    with OffloadAdamW(model) as opt:
        train(opt, model, [1.0] * 2)
        assert gc.callbacks == before
        assert not opt.engine.worker.take_spans()
    with OffloadAdamW(model, record_trace=True):
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before


def test_the_engine_shows_in_torch_profiler():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model, bucket_mb=0.05) as opt:
        train(opt, model, [1.0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(opt, model, [1.0] * 2)
    names = {e.key for e in profile.key_averages()}
    assert "superoffload: step" in names
    assert any(n.startswith("superoffload: send bucket") for n in names)
    assert any(n.startswith("superoffload: wait for bucket") for n in names)


def test_a_gap_is_put_down_to_the_block_s_own_fetch():
    """Another block's, which was on its way at the same time, is no cause."""

    def event(lane, kind, start, end, block):
        return TraceEvent(lane, kind, f"{kind} block {block}", start, end - start, 0, block, -1, 0)

    gpu = [event("gpu", "forward", 0.0, 1.0, 0), event("gpu", "forward", 2.0, 3.0, 1)]
    mine, ahead = event("link_up", "fetch", 0.5, 1.9, 1), event("link_up", "fetch", 1.9, 2.0, 3)
    (stall,) = name_stalls([*gpu, mine, ahead], 3.0)
    assert stall.waits_for == "fetch block 1"
    (stall,) = name_stalls([*gpu, ahead], 3.0)
    assert stall.waits_for == "launch"
