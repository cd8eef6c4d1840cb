"""What an optimizer says of itself: figures of the last step, memory, traces, and a line for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from superoffload.engine.stats import Stats, verdict_word
from superoffload.engine.stepper import Engine
from superoffload.errors import InputError
from superoffload.kernels import capabilities
from superoffload.memory import Ledger, LedgerItem
from superoffload.tracing import Trace
from superoffload.units import format_bytes, format_count

if TYPE_CHECKING:
    from superoffload.engine.optimizer import OffloadAdamW


def stats(optimizer: OffloadAdamW) -> Stats:
    engine, records = optimizer.engine, optimizer.ledger
    sequence, norm, coefficient, skipped, skips = engine.worker.wait_verdict(engine.sequence)
    cpu = sum(b.layout.params for b in engine.arenas.cpu_buckets)
    host, scale = engine.arenas.host, optimizer._scaling.rule
    return Stats(
        step=optimizer._log.steps_before + sequence,
        verdict=verdict_word(skipped=skipped, coefficient=coefficient) if sequence else "none",
        grad_norm=norm if sequence else None,
        clip_coefficient=coefficient,
        skipped=optimizer._skips_before + skips,
        loss_scale=1.0 if scale is None else scale.scale,
        speculated=sum(1 for r in records if r.speculated),
        undone=sum(1 for r in records if r.undone),
        cpu_params=cpu,
        gpu_params=sum(b.layout.params for b in engine.arenas.buckets) - cpu,
        pinned_bytes=host.pinned_bytes,
        host_bytes=host.pinned_bytes + host.pageable_bytes,
    )


def memory(engine: Engine) -> Ledger:
    buckets = engine.arenas.buckets
    weights = sum(b.weights.nbytes for b in buckets if not b.flow)
    retained = [b for b in buckets if b.retained]
    state = sum((b.exp_avg.numel() * 2 + (b.master.numel() if b.master is not b.weights else 0)) * 4
                + b.grad.numel() * b.grad.element_size() for b in retained)  # fmt: skip
    undo = sum(b.undo.nbytes for b in buckets if b.undo is not None)
    host = engine.arenas.host
    store = engine.activations.store if engine.activations is not None else None
    offloaded = store.pool.bytes if store is not None else 0
    pinned, pageable = host.pinned_bytes, host.pageable_bytes - undo
    if engine.device.is_cuda:
        pinned -= offloaded
    else:
        pageable -= offloaded
    return Ledger(items=(
        LedgerItem("gpu", "weights", weights),
        LedgerItem("gpu", "flow slots", engine.flow.device_bytes),
        LedgerItem("gpu", "retained buckets", state),
        LedgerItem("gpu", "gradient ring and norm partials", engine.collector.device_bytes),
        LedgerItem("host", "master weights and moments", pageable),
        LedgerItem("host", f"undo {engine.plan.undo}s", undo),
        LedgerItem("pinned", "gradients and weights in transit", pinned),
        LedgerItem("pinned" if engine.device.is_cuda else "host", "offloaded activations", offloaded),
    ))  # fmt: skip


def trace(
    optimizer: OffloadAdamW,
    tokens_per_step: int | None,
    model_flops_per_step: float | None,
    peak_bf16_tflops: float,
    hardware: str,
) -> Trace:
    engine, plan = optimizer.engine, optimizer.plan
    if not engine.recorder.on:
        raise InputError("no trace was recorded", remedy="Make the optimizer with record_trace=True")
    engine.synchronize()
    engine.recorder.keep(engine.worker.take_spans(), engine.sequence)
    events, stalls, step_s, window_s = engine.recorder.events(_uploads(engine))
    if not events:
        raise InputError("a trace needs two steps", expected="at least two calls of step()")
    tokens = plan.tokens_per_step if tokens_per_step is None else tokens_per_step
    params = sum(p.numel for p in engine.params)
    return Trace(
        source="measured",
        step_s=step_s,
        tokens_per_step=tokens,
        model_flops_per_step=6.0 * params * tokens if model_flops_per_step is None else model_flops_per_step,
        peak_bf16_tflops=peak_bf16_tflops,
        hardware=hardware,
        model=type(optimizer.model).__name__,
        plan=plan,
        memory=memory(engine),
        events=events,
        stalls=stalls,
        window_s=window_s,
        context={
            "torch": torch.__version__,
            "device": str(engine.device.device),
            "isa": str(capabilities()["active"]),
        },
    )


def _uploads(engine: Engine) -> list[tuple[int, Any, Any, int]]:
    """(bucket, start, end, bytes) of CUDA uploads. Those of the step before overlap the last step, and so do its own
    where it speculated; what lies outside the window is dropped."""
    if not engine.device.is_cuda or engine.sequence < 2:
        return []
    found: list[tuple[int, Any, Any, int]] = []
    for b in engine.arenas.cpu_buckets:
        if b.flow:
            continue
        size = b.layout.numel * (b.master if b.out is None else b.out).element_size()
        found += [(b.index, b.upload_start[parity], b.done[parity], size) for parity in (0, 1)]
    return found


def describe(optimizer: OffloadAdamW) -> str:
    engine = optimizer._engine
    if engine is None:
        return "OffloadAdamW(closed)"
    buckets = engine.arenas.buckets
    retained = sum(b.retained for b in buckets)
    params = sum(p.numel for p in engine.params)
    where = f"{retained} of them retained on {engine.device.device}" if retained else "all on the CPU"
    return (
        f"OffloadAdamW({format_count(params)} parameters in {len(buckets)} buckets, {where}, "
        f"{optimizer.plan.adam_threads} Adam threads)"
    )


def html(optimizer: OffloadAdamW) -> str:
    items = memory(optimizer.engine).items if optimizer._engine is not None else ()
    rows = "".join(f"<tr><td>{i.place}</td><td>{i.name}</td><td>{format_bytes(i.bytes)}</td></tr>" for i in items)
    return f"<b>{optimizer!r}</b><table>{rows}</table>"


__all__ = ["describe", "html", "memory", "stats", "trace"]
