"""The contenders of bench_step.py: how each mode builds its model and takes one step."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# hidden, layers, mlp, heads, vocabulary
SIZES = {
    "3b": (3072, 26, 8192, 24, 32000),
    "3b-4-layers": (3072, 4, 8192, 24, 32000),
    "1b": (2048, 22, 5632, 16, 32000),
    "tiny": (128, 4, 344, 4, 1000),
}


@dataclass
class Mode:
    """A model with its training step."""

    step: Callable[[int], torch.Tensor]
    """Takes the step's index, returns the loss."""
    params: int
    optimizer: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    busy: bool = False
    """Whether a Python loop in another thread runs beside the timed steps."""
    interval_ms: float | None = None
    """Python's switch interval in the timed steps; None leaves it as it is."""


def build(args: argparse.Namespace, dtype: torch.dtype, device: str, recompute: bool | None = None) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, mlp, heads, vocab = SIZES[args.size]
    config = LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, intermediate_size=mlp,
                         num_attention_heads=heads, num_key_value_heads=heads, vocab_size=vocab,
                         max_position_embeddings=args.seq, tie_word_embeddings=False, use_cache=False)  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if args.recompute if recompute is None else recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def busy_thread() -> None:
    """A thread that never lets go of Python's lock by itself: a progress bar gone wild, a data loader in Python."""

    def spin() -> None:
        n = 0
        while True:
            n += 1

    threading.Thread(target=spin, daemon=True).start()


def build_mode(args: argparse.Namespace, x: torch.Tensor) -> Mode:
    """Read `NAME[:SHARE][:field=value ...]`.

    Fields of every mode: `busy=1` runs a Python loop in another thread; `interval_ms=F` sets Python's switch interval,
    which is 5 ms, and 0.02 ms while the engine is open. Of `limit` besides: `compile=1` compiles each
    layer with `layer.compile()`, as one would by hand; `recompute=none` or `full` overrides --recompute. Of engine
    modes besides: plan fields by name (`compile_blocks=true:activations=none`; `activations` overrides --recompute),
    `loss=F` multiplies the loss (gradients shrink with it; Adam does not care), `clip_every=K` makes every K-th step
    one whose norm is over the bound, `trace=0` records no trace.
    """
    name, *rest = args.mode.split(":")
    fields = dict(f.split("=") for f in rest if "=" in f)
    busy, interval_ms = bool(int(fields.pop("busy", 0))), fields.pop("interval_ms", None)
    mode = _mode(args, x, name, rest, fields)
    mode.busy, mode.interval_ms = busy, None if interval_ms is None else float(interval_ms)
    return mode


def _mode(args: argparse.Namespace, x: torch.Tensor, name: str, rest: list[str], fields: dict[str, str]) -> Mode:
    if name == "fsdp2":
        return fsdp2(args, x)
    if name == "limit":
        return limit(args, x, fields)
    model = build(args, torch.bfloat16, args.device)
    if name == "engine":
        return engine(args, model, x, float(rest[0]), fields)
    make = {"gpu": all_on_gpu, "offload": torch_offload}[name]
    return Mode(make(args, model, x), sum(p.numel() for p in model.parameters()))


def limit(args: argparse.Namespace, x: torch.Tensor, fields: dict[str, str]) -> Mode:
    recompute = {"none": False, "full": True, "": bool(args.recompute)}[fields.pop("recompute", "")]
    compiled = bool(int(fields.pop("compile", 0)))
    if fields:
        raise SystemExit(f"limit has no {', '.join(fields)}: it takes compile=1, recompute=none|full and busy=1")
    model = build(args, torch.bfloat16, args.device, recompute)
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)

    def step(i: int) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    facts = {"compile": compiled, "recompute": recompute}
    return Mode(step, sum(p.numel() for p in model.parameters()), facts=facts)


def all_on_gpu(args: argparse.Namespace, model: torch.nn.Module, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
    weights = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(i: int) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        for q, p in zip(masters, weights, strict=True):
            q.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([p.data for p in weights], [q.data for q in masters])
        return loss

    return step


def torch_offload(args: argparse.Namespace, model: torch.nn.Module, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """What one would write by hand: after backward, gradients come down in their own dtype into pinned memory, are
    cast, clipped, stepped by torch's fused AdamW on the CPU, cast back and sent up. The ablation's first row."""
    weights = list(model.parameters())
    pin = args.device == "cuda"
    down = [torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pin) for p in weights]
    up = [torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pin) for p in weights]
    masters = [p.detach().float().cpu().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    gradients = [torch.empty_like(q) for q in masters]

    def step(i: int) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        for p, d in zip(weights, down, strict=True):
            d.copy_(p.grad, non_blocking=True)
            p.grad = None
        if pin:
            torch.cuda.synchronize()
        for q, d, g in zip(masters, down, gradients, strict=True):
            q.grad = g.copy_(d)
        torch.nn.utils.clip_grad_norm_(masters, args.clip)
        optimizer.step()
        with torch.no_grad():
            for p, q, u in zip(weights, masters, up, strict=True):
                p.copy_(u.copy_(q), non_blocking=True)
        return loss

    return step


def fsdp2(args: argparse.Namespace, x: torch.Tensor) -> Mode:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    model = build(args, torch.float32, "cpu")
    params = sum(p.numel() for p in model.parameters())
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(i: int) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Mode(step, params)


def engine(
    args: argparse.Namespace, model: torch.nn.Module, x: torch.Tensor, share: float, fields: dict[str, str]
) -> Mode:
    """OffloadAdamW with `share` per cent of its buckets retained."""
    from superoffload.engine import OffloadAdamW
    from superoffload.layout import TensorRef, cut_buckets

    plan: dict[str, Any] = {"bucket_mb": args.bucket_mb, **fields}
    factor, clip_every = float(plan.pop("loss", 1.0)), int(plan.pop("clip_every", 0))
    trace = bool(int(plan.pop("trace", 1))) and bool(args.trace)
    plan["bucket_mb"] = float(plan["bucket_mb"])
    if args.threads is not None:
        plan.setdefault("adam_threads", args.threads)
    refs = [TensorRef(i, 0, p.numel()) for i, p in enumerate(reversed(list(model.parameters())))]
    count = len(cut_buckets(refs, plan["bucket_mb"]))
    plan["retained_buckets"] = round(count * share / 100)
    t0 = time.perf_counter()
    opt = OffloadAdamW(model, lr=1e-5, max_grad_norm=args.clip, record_trace=trace, **plan)
    facts = {"buckets": count, "adam_threads": opt.plan.adam_threads, "loss_factor": factor, "clip_every": clip_every,
             "setup_s": round(time.perf_counter() - t0, 1), "traced": trace,
             "recompute": opt.plan.activations not in ("none", "offload_saved"), **plan}  # fmt: skip

    def step(i: int) -> torch.Tensor:
        loss = model(input_ids=x, labels=x).loss
        # Ten times as large: over any bound that the others are near to, and Adam would not notice without a bound.
        over = clip_every and i % clip_every == clip_every - 1
        (loss * (factor * 10 if over else factor)).backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Mode(step, sum(p.numel() for p in model.parameters()), opt, facts)
