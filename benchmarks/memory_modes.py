"""What bench_memory.py runs, each in a process of its own: the engine under its plan, the limit, and the peer.

The limit is forward and backward alone, under the plan's activation policies, with weights and gradients on the GPU and
no optimizer: no step with these policies can be shorter, whatever holds the states.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from superoffload import estimate, make_plan, simulate
from superoffload.engine import OffloadAdamW, RandomWeights
from superoffload.graph import build as build_graph
from superoffload.hardware import Hardware, resolve
from superoffload.memory import ledger
from superoffload.model import ModelSpec, spec
from superoffload.plan import Plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation

PEAK_BF16_TFLOPS = 990.0


KEPT: list[Any] = []
"""What lives until the process ends: closing an optimizer gives flow blocks memory on the GPU again."""


def shape_of(args: argparse.Namespace) -> ModelSpec:
    if args.model == "tiny":
        return ModelSpec(name="tiny", hidden=128, layers=6, mlp=344, heads=4, kv_heads=4, head_dim=32, vocab=1000)
    if args.model == "3.14b":
        return ModelSpec(name="llama-3.14b", hidden=3072, layers=26, mlp=8192, heads=24, kv_heads=24, head_dim=128,
                         vocab=32000)  # fmt: skip
    if args.model:
        return spec(args.model)
    return ModelSpec(name=f"llama-{args.layers}-layers", hidden=5120, layers=args.layers, mlp=13824, heads=40,
                     kv_heads=40, head_dim=128, vocab=32000)  # fmt: skip


def file_stem(args: argparse.Namespace) -> str:
    """Name of a run, for its files."""
    model = args.model or f"{args.layers}-layers"
    return f"memory_{model}_{float(args.gpu_gb):.0f}gb_{args.tokens}_{args.seq}"


def build(shape: ModelSpec, seq: int, *, empty: bool) -> torch.nn.Module:
    """The Llama of that shape in bf16, without weights or with random ones."""
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=shape.hidden, num_hidden_layers=shape.layers, intermediate_size=shape.mlp,
                         num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
                         vocab_size=shape.vocab, max_position_embeddings=seq, tie_word_embeddings=False,
                         use_cache=False)  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with init_empty_weights() if empty else contextlib.nullcontext():
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def planned(args: argparse.Namespace) -> tuple[ModelSpec, Profile, Plan]:
    """The plan that the cost model makes, for the memory that is allowed; read where it has been made already."""
    hw: Hardware = Hardware.load(args.hardware) if Path(args.hardware).is_file() else resolve(args.hardware)
    hw = hw.replace(gpu=hw.gpu.replace(memory_gb=args.gpu_gb or hw.gpu.memory_gb),
                    cpu=hw.cpu.replace(memory_gb=args.host_gb or hw.cpu.memory_gb))  # fmt: skip
    shape = shape_of(args)
    fields: dict[str, Any] = dict(f.split("=", 1) for f in args.set.split(",") if f)
    if args.micro_batch:
        fields["micro_batch"] = args.micro_batch
    profile = estimate(shape, micro_batch=1, seq_len=args.seq, hardware=hw)
    asked = [args.set, args.micro_batch, args.threads, args.host_gb, hw.to_json(indent=None)]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    made = Path(args.plans or ".") / f"{file_stem(args)}_{digest}.json"
    if args.plans and made.is_file():
        plan = Plan.load(made)
    else:
        plan = make_plan(profile, adam_threads=args.threads or None, tokens=args.tokens, **fields)
        if args.plans:
            made.parent.mkdir(parents=True, exist_ok=True)
            plan.save(made)
    return shape, rescale(profile, micro_batch=plan.micro_batch), plan


def loads(profile: Profile, plan: Plan) -> dict[str, float]:
    """Seconds that each resource but the GPU works in a step, at the rates that the probe has measured: no step is
    shorter than any of them."""
    graph = build_graph(profile, resolve_speculation(plan))
    found = {lane: graph.load(lane) for lane in ("link_down", "link_up", "cpu_adam")}  # type: ignore[arg-type]
    found["host memory"] = sum(op.dram_bytes for op in graph.ops) / graph.dram_bytes_per_s
    return {k: round(v, 3) for k, v in found.items()}


def host_peak_gb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(next(x for x in text.splitlines() if x.startswith("VmHWM")).split()[1]) * 1024 / 1e9


def anonymous_gb() -> float:
    """Memory of this process that no file backs, as the kernel counts it: pinned or not."""
    return resident_gb()["anonymous"]


def resident_gb() -> dict[str, float]:
    """What the kernel counts as this process's own memory now, by what backs it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = {"anonymous": "RssAnon", "files": "RssFile", "shared": "RssShmem"}
    return {name: round(int(status[field].split()[0]) * 1024 / 1e9, 3) for name, field in kinds.items()}


def largest_mappings(count: int = 12) -> list[str]:
    """The largest parts of that memory by name and size, equal ones together."""
    found: Counter[tuple[str, str]] = Counter()
    sizes: dict[tuple[str, str], float] = {}
    name = size = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else "anonymous"
        elif words[0] == "Size:":
            size = f"{int(words[1]) * 1024 / 1e9:.2f}"
        elif words[0] == "Rss:" and int(words[1]):
            found[name, size] += 1
            sizes[name, size] = sizes.get((name, size), 0.0) + int(words[1]) * 1024 / 1e9
    largest = sorted(sizes, key=lambda k: -sizes[k])[:count]
    return [f"{sizes[k]:.2f} GB resident: {found[k]} x {k[1]} GB of {k[0]}" for k in largest]


def _tokens(shape: ModelSpec, plan: Plan, device: str) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, shape.vocab, (plan.micro_batch, plan.seq_len), device=device)


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    shape, profile, plan = planned(args)
    account, predicted = ledger(profile, plan), simulate(profile, plan)
    row: dict[str, Any] = {
        "model": shape.name, "params": profile.params, "tokens": plan.tokens_per_step,
        "plan": {k: getattr(plan, k) for k in plan.knobs()}, "reasons": plan.reasons, "loads_s": loads(profile, plan),
        "predicted": {"step_s": round(predicted.step_s, 3), "gpu_gb": round(account.total("gpu") / 1e9, 2),
                      "host_gb": round(account.total("host") / 1e9, 2),
                      "pinned_gb": round(account.total("pinned") / 1e9, 2)},
    }  # fmt: skip
    if cuda and args.gpu_gb:  # a plan that needs more than it may fails
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_gb * 1e9 / total))
    begin = time.perf_counter()
    model = build(shape, args.seq, empty=True)
    before = anonymous_gb()
    # `auto` would wait for the first steps, which are all there are.
    opt = OffloadAdamW(model, lr=1e-5, max_grad_norm=1.0, plan=resolve_speculation(plan),
                       device=args.device, weights=RandomWeights(), gradient_accumulation_steps=1,
                       record_trace=bool(args.trace))  # fmt: skip
    KEPT.append(opt)
    gc.collect()
    gc.freeze()  # as `superoffload train` does
    row["setup_s"] = round(time.perf_counter() - begin, 1)
    row["host_memory_of_the_optimizer"] = {"ledger_gb": round(opt.memory().total("host") / 1e9, 3),
                                           "kernel_gb": round(anonymous_gb() - before, 3)}  # fmt: skip
    x = _tokens(shape, plan, args.device)
    marks, losses = [time.perf_counter()], []
    for i in range(args.warmup + args.steps):
        # Warm-up takes one micro-batch a step. What the step after it meets is the same: the last micro-batch's Adam.
        micro_batches = plan.accumulation if i >= args.warmup else 1
        for k in range(micro_batches):
            with opt.no_sync() if k < micro_batches - 1 else contextlib.nullcontext():
                loss = model(input_ids=x, labels=x).loss
                (loss * (args.loss_factor / micro_batches)).backward()
        opt.step()
        opt.zero_grad()
        if cuda:
            torch.cuda.current_stream().synchronize()
        marks.append(time.perf_counter())
        losses.append(round(float(loss.detach()), 4))
    opt.synchronize()
    steps = [b - a for a, b in itertools.pairwise(marks[args.warmup :])]
    step_s = statistics.median(steps)
    row.update(step_s=round(step_s, 3), steps_s=[round(s, 3) for s in steps], losses=losses)
    row["tokens_per_s"] = round(plan.tokens_per_step / step_s)
    row["mfu"] = round(profile.model_flops * plan.accumulation / step_s / 1e12 / PEAK_BF16_TFLOPS, 4)
    row["measured"] = {"host_gb": round(host_peak_gb(), 2), "pinned_gb": round(opt.stats.pinned_bytes / 1e9, 2)}
    row["host_at_the_end"] = {"resident_gb": resident_gb(), "ledger_gb": round(opt.memory().total("host") / 1e9, 3),
                              "largest": largest_mappings()}  # fmt: skip
    if cuda:
        free, total = torch.cuda.mem_get_info()
        row["measured"].update(gpu_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2),
                               gpu_reserved_gb=round(torch.cuda.max_memory_reserved() / 1e9, 2),
                               gpu_used_gb=round((total - free) / 1e9, 2))  # fmt: skip
    row["verdicts"] = [r.verdict for r in opt.ledger]
    row["speculated_buckets"] = [r.speculated for r in opt.ledger]
    if args.trace:
        trace = opt.trace(tokens_per_step=plan.tokens_per_step, peak_bf16_tflops=PEAK_BF16_TFLOPS)
        row["busy_s"] = {lane: round(trace.busy_s(lane), 3) for lane in ("gpu", "link_down", "link_up", "cpu_adam")}
        row["stalls"] = [s.cause for s in sorted(trace.stalls, key=lambda s: -s.duration_s)[:4]]
        if len(trace.events) < 30000:
            Path(args.trace).write_text(trace.to_json(indent=None))
    return row


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """The plan alone, and what is predicted of it; with --plans it is kept there for other kinds and machines."""
    shape, profile, plan = planned(args)
    account, step = ledger(profile, plan), simulate(profile, plan)
    return {"model": shape.name, "plan": {k: getattr(plan, k) for k in plan.knobs()},
            "predicted": {"step_s": round(step.step_s, 3), "gpu_gb": round(account.total("gpu") / 1e9, 2),
                          "host_gb": round(account.total("host") / 1e9, 2)}}  # fmt: skip


def run_limit(args: argparse.Namespace) -> dict[str, Any]:
    from superoffload.engine.activations import apply_plan
    from superoffload.engine.blocks import find_blocks

    shape, _, plan = planned(args)
    # Whoever offloads inputs recomputes; whoever offloads everything does not.
    here = {"offload_inputs": "full", "offload_saved": "none"}
    by_block = {b: here.get(p, p) for b, p in plan.activations_by_block.items()}
    alone = plan.replace(activations=here.get(plan.activations, plan.activations), activations_by_block=by_block)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = build(shape, args.seq, empty=False)
    apply_plan(model, find_blocks(model), alone, lambda size: None)  # type: ignore[arg-type, return-value]
    batch = plan.micro_batch
    while True:
        try:
            seconds = _forward_backward(model, _tokens(shape, plan, args.device)[:batch], args)
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2  # all weights and gradients are here too
            torch.cuda.empty_cache()
    return {"model": shape.name, "limit_s": round(seconds * plan.micro_batch / batch, 4), "limit_micro_batch": batch,
            "micro_batches": plan.accumulation}  # fmt: skip


def _forward_backward(model: torch.nn.Module, x: torch.Tensor, args: argparse.Namespace) -> float:
    """Median seconds of one micro-batch; gradients add up, as they do before the last one."""
    times = []
    for _ in range(7):
        if args.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        model(input_ids=x, labels=x).loss.backward()
        if args.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def run_zero_offload(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's ZeRO-Offload (stage 2, optimizer on the CPU, gradients in bf16) with full recomputation."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
                      DS_SKIP_CUDA_CHECK="1")  # fmt: skip
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    shape = shape_of(args)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = build(shape, args.seq, empty=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    batch = args.micro_batch or 1
    config = {
        "train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 10**8},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-5),
                                      config=config)  # fmt: skip
    x = torch.randint(0, shape.vocab, (batch, args.seq), device=args.device)
    times = []
    for _ in range(args.warmup + args.steps):
        begin = time.perf_counter()
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"model": shape.name, "params": sum(p.numel() for p in model.parameters()), "tokens": batch * args.seq,
            "deepspeed": deepspeed.__version__, "step_s": round(statistics.median(times[args.warmup :]), 3),
            "steps_s": [round(t, 3) for t in times], "loss": round(float(loss), 4),
            "measured": {"gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                         "host_gb": round(host_peak_gb(), 2)}}  # fmt: skip


RUNS = {"plan": run_plan, "engine": run_engine, "limit": run_limit, "zero-offload": run_zero_offload}
