"""Writers for other tools: DeepSpeed's JSON, Chrome's trace format, a stand-alone HTML timeline.

Figures are drawn elsewhere. `html` finds the drawing function through the entry point group "superoffload.figures",
so that this package never imports the widgets, and says so where the lab extra is not installed.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from superoffload.config import TunedConfig
from superoffload.errors import MissingDependency, NotSupported
from superoffload.layout import bucket_elements
from superoffload.tracing import LANE_TITLES, Trace, drawn_lanes

FIGURES = "superoffload.figures"
"""Entry point group of functions that turn a Trace into a plotly figure."""


def deepspeed(config: TunedConfig) -> tuple[dict[str, Any], list[str]]:
    """Translate a tuned config into a DeepSpeed configuration that offloads the same share of the optimizer.

    Keys are those of DeepSpeed 0.19: ``ratio`` is the share of optimizer states on the CPU, ``sub_group_size`` counts
    parameters, ``cpuadam_cores_perc`` is the share of cores for its CPU Adam.

    Returns:
        The configuration, and one sentence for everything that DeepSpeed cannot express.

    Raises:
        NotSupported: the plan streams weights (flow blocks), which DeepSpeed does per model and not per block.
    """
    plan, opt, run = config.plan, config.optimizer, config.training
    if plan.flow_blocks:
        raise NotSupported(
            f"flow_blocks={plan.flow_blocks} has no DeepSpeed equivalent",
            expected="a plan whose weights stay on the GPU",
            remedy="Plan with --set flow_blocks=none",
        )
    elements = bucket_elements(plan.bucket_mb)
    total = max(config.model.parameters, 1)
    on_gpu = min(total, plan.retained_buckets * elements)
    offload: dict[str, Any] = {
        "device": "cpu",
        "pin_memory": True,
        "ratio": round(1 - on_gpu / total, 4),
        "super_offload": plan.speculate != "off",
    }
    cores = int(config.hardware.fingerprint.get("cpu_cores", "0"))
    if plan.speculate != "off" and cores:
        offload["cpuadam_cores_perc"] = round(min(1.0, plan.adam_threads / cores), 4)
    body: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": opt.lr, "betas": list(opt.betas), "eps": opt.eps, "weight_decay": opt.weight_decay},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": elements,
            "sub_group_size": elements,
            "offload_optimizer": offload,
        },
        "bf16": {"enabled": run.dtype == "bfloat16"},
        "fp16": {"enabled": run.dtype == "float16"},
    }
    if opt.max_grad_norm is not None:
        body["gradient_clipping"] = opt.max_grad_norm
    scheduler = _deepspeed_scheduler(config)
    if scheduler:
        body["scheduler"] = scheduler
    recompute = {
        "none": "leave it off",
        "full": "model.gradient_checkpointing_enable()",
        "offload_inputs": "model.gradient_checkpointing_enable(), which keeps the layers' inputs on the GPU",
    }.get(plan.activations, f"it has no {plan.activations}; model.gradient_checkpointing_enable() comes nearest")
    notes = [
        "cast_down and cast_up are left out: DeepSpeed casts gradients and weights in its own places.",
        f"activations is left out: DeepSpeed takes recomputation from the model ({recompute}).",
        f"seq_len {plan.seq_len}, {run.steps} steps and seed {run.seed} belong to your training script.",
    ]
    if plan.loss_chunks > 1:
        notes.append(f"loss_chunks {plan.loss_chunks} is left out: under DeepSpeed the model computes its own loss.")
    if plan.compile_blocks:
        notes.append("compile_blocks is left out: call layer.compile() on each layer before deepspeed.initialize().")
    if plan.chips > 1:
        notes.append(f"{plan.chips} chips are the world size that you launch with, one process for each.")
    if plan.sequence_parallel > 1:
        notes.append(
            f"sequence_parallel {plan.sequence_parallel} is left out: see DeepSpeed's Ulysses tutorial for your model."
        )
    if opt.max_grad_norm is not None and plan.speculate != "off":
        notes.append("DeepSpeed's super_offload takes no asynchronous step while gradient_clipping is set.")
    return body, notes


def _deepspeed_scheduler(config: TunedConfig) -> dict[str, Any] | None:
    lr, run = config.optimizer.lr, config.training
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": run.warmup_steps, "warmup_type": "linear"}
    if run.schedule == "linear":
        return {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": run.steps}}
    if run.schedule == "cosine":
        cosine = {"total_num_steps": run.steps, "warmup_num_steps": run.warmup_steps, "warmup_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": {**cosine, "cos_min_ratio": 0.0}}
    return {"type": "WarmupLR", "params": warmup} if run.warmup_steps else None


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace in Chrome's trace event format, for Perfetto or chrome://tracing.

    One process per trace and one thread per lane; complete events ("ph": "X") with times in microseconds; stalls are
    events of the same lane in the category "stall".
    """
    process = {"name": "process_name", "ph": "M", "pid": 0, "tid": 0,
               "args": {"name": f"{trace.model} on {trace.hardware} ({trace.source})"}}  # fmt: skip
    events: list[dict[str, Any]] = [process]
    lanes = {lane: i for i, lane in enumerate(drawn_lanes(trace.events))}
    for lane, tid in lanes.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": LANE_TITLES[lane]}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    for e in trace.events:
        args = {"bytes": e.bytes, "block": e.block, "bucket": e.bucket, "step": e.step}
        events.append({
            "name": e.name, "cat": e.kind, "ph": "X", "pid": 0, "tid": lanes[e.lane],
            "ts": e.start_s * 1e6, "dur": e.duration_s * 1e6,
            "args": {k: v for k, v in args.items() if k == "step" or (v > 0 if k == "bytes" else v >= 0)},
        })  # fmt: skip
    for s in trace.stalls:
        events.append({
            "name": f"waits for {s.waits_for}", "cat": "stall", "ph": "X", "pid": 0, "tid": lanes[s.lane],
            "ts": s.start_s * 1e6, "dur": s.duration_s * 1e6, "args": {"cause": s.cause},
        })  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": trace.source, "step_s": str(trace.step_s), **trace.context},
    }


def html(trace: Trace) -> str:
    """One self-contained page with the timeline: it opens without a network and without Python.

    Raises:
        MissingDependency: no installed package draws the timeline (the lab extra does).
    """
    found = list(metadata.entry_points(group=FIGURES, name="timeline"))
    try:
        figure = found[0].load()(trace) if found else None
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("superoffload"):
            raise
        figure = None
    if figure is None:
        raise MissingDependency(
            "--format html needs the plotting libraries, which are not installed",
            remedy="Install them: pip install 'superoffload[lab]'; chrome-trace needs nothing",
        )
    text: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return text
