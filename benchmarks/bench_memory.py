"""Memory: the plan that the cost model makes for a model and a memory, trained for a few steps, beside its prediction.

    python benchmarks/bench_memory.py --hardware probe.json --layers 52 --steps 3            # the largest model
    python benchmarks/bench_memory.py --model llama-3-8b --gpu-gb 24 --tokens 131072 ...     # less GPU memory
    python benchmarks/bench_memory.py --model tiny --device cpu                              # dry run anywhere

The model is built without weights and filled at random where it is trained. Bytes on the GPU are the allocator's peak,
on the host the kernel's own figure for the process (VmHWM) and the pinned bytes that the driver was asked for.
`--gpu-gb` also caps the allocator, so that a plan that needs more fails. A list in `--tokens`, `--layers` or `--gpu-gb`
makes runs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_step import machine

from superoffload import estimate, make_plan, simulate
from superoffload.engine import OffloadAdamW, RandomWeights
from superoffload.hardware import Hardware, resolve
from superoffload.memory import ledger
from superoffload.model import ModelSpec, spec

PEAK_BF16_TFLOPS = 990.0


def shape_of(args: argparse.Namespace) -> ModelSpec:
    if args.model == "tiny":
        return ModelSpec(name="tiny", hidden=128, layers=6, mlp=344, heads=4, kv_heads=4, head_dim=32, vocab=1000)
    if args.model:
        return spec(args.model)
    return ModelSpec(name=f"llama-{args.layers}-layers", hidden=5120, layers=args.layers, mlp=13824, heads=40,
                     kv_heads=40, head_dim=128, vocab=32000)  # fmt: skip


def build(shape: ModelSpec, seq: int) -> torch.nn.Module:
    """The Llama of that shape, without weights."""
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=shape.hidden, num_hidden_layers=shape.layers, intermediate_size=shape.mlp,
                         num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
                         vocab_size=shape.vocab, max_position_embeddings=seq, tie_word_embeddings=False,
                         use_cache=False)  # fmt: skip
    config._attn_implementation = "sdpa"
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def host_peak_gb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(next(x for x in text.splitlines() if x.startswith("VmHWM")).split()[1]) * 1024 / 1e9


def run(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    hw: Hardware = Hardware.load(args.hardware) if Path(args.hardware).is_file() else resolve(args.hardware)
    gpu_gb, host_gb = args.gpu_gb or hw.gpu.memory_gb, args.host_gb or hw.cpu.memory_gb
    hw = hw.replace(gpu=hw.gpu.replace(memory_gb=gpu_gb), cpu=hw.cpu.replace(memory_gb=host_gb))
    shape = shape_of(args)
    micro = args.micro_batch
    accumulation = max(1, args.tokens // (micro * args.seq))
    fields = dict(f.split("=", 1) for f in args.set.split(",") if f)
    profile = estimate(shape, micro_batch=micro, seq_len=args.seq, hardware=hw)
    if accumulation > 1:
        fields["accumulation"] = str(accumulation)
    plan = make_plan(profile, adam_threads=args.threads or None, **fields)
    account, predicted = ledger(profile, plan), simulate(profile, plan)
    row: dict[str, Any] = {
        "model": shape.name, "params": profile.params, "gpu_gb_allowed": round(gpu_gb, 1), "tokens": args.tokens,
        "plan": {k: getattr(plan, k) for k in plan.knobs()},
        "predicted": {"step_s": round(predicted.step_s, 3), "gpu_gb": round(account.total("gpu") / 1e9, 2),
                      "host_gb": round(account.total("host") / 1e9, 2),
                      "pinned_gb": round(account.total("pinned") / 1e9, 2)},
    }  # fmt: skip
    if cuda:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, gpu_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory)
        )
    begin = time.perf_counter()
    model = build(shape, args.seq)
    opt = OffloadAdamW(model, lr=1e-5, max_grad_norm=1.0, plan=plan, device=args.device, weights=RandomWeights(),
                       gradient_accumulation_steps=1, record_trace=bool(args.trace))  # fmt: skip
    row["setup_s"] = round(time.perf_counter() - begin, 1)
    torch.manual_seed(1)
    x = torch.randint(0, shape.vocab, (micro, args.seq), device=args.device)
    marks, losses = [], []
    for _ in range(args.steps + 1):
        for k in range(accumulation):
            with opt.no_sync() if k < accumulation - 1 else contextlib.nullcontext():
                loss = model(input_ids=x, labels=x).loss / accumulation
                loss.backward()
        opt.step()
        opt.zero_grad()
        if cuda:
            torch.cuda.current_stream().synchronize()
        marks.append(time.perf_counter())
        losses.append(round(float(loss.detach()) * accumulation, 4))
    opt.synchronize()
    step_s = statistics.median(b - a for a, b in itertools.pairwise(marks))
    row.update(step_s=round(step_s, 3), steps_s=[round(b - a, 3) for a, b in itertools.pairwise(marks)], losses=losses)
    row["tokens_per_s"] = round(args.tokens / step_s)
    row["mfu"] = round(profile.model_flops * accumulation / step_s / 1e12 / PEAK_BF16_TFLOPS, 4)
    row["measured"] = {"host_gb": round(host_peak_gb(), 2), "pinned_gb": round(opt.stats.pinned_bytes / 1e9, 2)}
    if cuda:
        free, total = torch.cuda.mem_get_info()
        row["measured"].update(gpu_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2),
                               gpu_reserved_gb=round(torch.cuda.max_memory_reserved() / 1e9, 2),
                               gpu_used_gb=round((total - free) / 1e9, 2))  # fmt: skip
    row["verdicts"] = [r.verdict for r in opt.ledger]
    if args.trace:
        trace = opt.trace(tokens_per_step=args.tokens, peak_bf16_tflops=PEAK_BF16_TFLOPS)
        row["busy_s"] = {lane: round(trace.busy_s(lane), 3) for lane in ("gpu", "link_down", "link_up", "cpu_adam")}
        row["stalls"] = [s.cause for s in sorted(trace.stalls, key=lambda s: -s.duration_s)[:3]]
        if len(trace.events) < 30000:
            Path(args.trace).write_text(trace.to_json(indent=None))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200-pcie5", help="a preset, or a file of superoffload probe")
    parser.add_argument("--model", default="", help="a preset, or tiny; omitted: hidden 5120 with --layers")
    parser.add_argument("--layers", default="52")
    parser.add_argument("--gpu-gb", default="0", help="0: all there is")
    parser.add_argument("--host-gb", type=float, default=0)
    parser.add_argument("--tokens", default="4096", help="per step, by accumulation")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", default="", help="plan fields, comma-separated: speculate=off,master=split")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--trace", default="", help="folder for measured traces")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", default="")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.layers, args.gpu_gb, args.tokens = int(args.layers), float(args.gpu_gb), int(args.tokens)
        print("RESULT " + json.dumps(run(args)), flush=True)
        os._exit(0)  # giving tens of gigabytes back page by page is nobody's wish
    rows: list[dict[str, Any]] = []
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for layers, gpu_gb, tokens in itertools.product(args.layers.split(","), args.gpu_gb.split(","),
                                                    args.tokens.split(",")):  # fmt: skip
        command = [sys.executable, __file__, "--child", "--layers", layers, "--gpu-gb", gpu_gb, "--tokens", tokens]
        for name in ("hardware", "model", "host_gb", "micro_batch", "seq", "steps", "threads", "set", "device"):
            command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
        if args.trace:
            Path(args.trace).mkdir(parents=True, exist_ok=True)
            name = args.model or f"{layers}-layers"
            command += ["--trace", str(Path(args.trace) / f"memory_{name}_{float(gpu_gb):.0f}gb_{tokens}.json")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout, env=env)
            line = next((r for r in done.stdout.splitlines() if r.startswith("RESULT ")), None)
            row = json.loads(line[7:]) if line else {"failed": done.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            row = {"failed": f"not done after {args.timeout:g} s"}
        rows.append({"layers": layers, "gpu_gb": gpu_gb, **row})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if args.out:
            facts = {"what": "memory", "date": datetime.date.today().isoformat(), "status": "measured",
                     "machine": machine(args.device), "arguments": {k: v for k, v in vars(args).items() if k != "out"},
                     "rows": rows}  # fmt: skip
            Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
