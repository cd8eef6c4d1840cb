"""Several Superchips, modelled: the paper's 13B model with a million tokens on eight GH200, and how a step scales.

python benchmarks/many_superchips.py --out benchmarks/results/many_superchips_<date>.json

Nothing here runs on a GPU, and nothing is fitted to the paper's figures (arXiv 2509.21271: 13B, sequences to 1M tokens,
55 % MFU, eight times as long as Ulysses alone). Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from superoffload import __version__, graph, hardware
from superoffload.activation_costs import policies_of
from superoffload.errors import DoesNotFit
from superoffload.estimating import ATTENTION_BACKWARD, ATTENTION_SHARE, MATMUL_SHARE, estimate
from superoffload.memory import ledger
from superoffload.model import spec
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.record import write_atomic
from superoffload.simulator import simulate
from superoffload.units import GB, TERA

MODEL, MILLION, CHIPS = "paper-13b", 2**20, 8
PAPER = {"mfu": 0.55, "longer_than_ulysses_alone": 8, "tokens": MILLION, "status": "published (arXiv 2509.21271)"}
STRIDE = 2**17
"""Longest sequences are found to this."""
COPIES_OF_ALL = 2
"""16-bit weights of all blocks, per parameter; ZeRO-3 divides them, the plan here has them on each chip."""


def long_sequence(hw: str) -> dict[str, Any]:
    """A step of one sequence of a million tokens over eight chips."""
    profile = estimate(MODEL, micro_batch=1, seq_len=MILLION, hardware=hw, sequence_parallel=CHIPS)
    plan = make_plan(profile)
    trace = simulate(profile, plan)
    built = graph.build(profile, plan)
    exchanged = sum(op.seconds for op in built.ops if op.kind == "all_to_all")
    seconds = {lane: round(built.load(lane), 2) for lane in ("gpu", "link_down", "link_up", "cpu_adam", "interconnect")}  # type: ignore[arg-type]
    return {
        "hardware": hw, "step_s": round(trace.step_s, 1), "tokens_per_s": round(trace.tokens_per_s),
        "mfu": utilisation(profile, plan, trace.step_s), "busy_s": seconds, "all_to_all_s": round(exchanged, 2),
        "memory_gb": {p: round(trace.memory.total(p) / GB, 1) for p in ("gpu", "host", "pinned")},  # type: ignore[arg-type]
        "plan": plan.model_dump(mode="json", exclude={"reasons"}),
    }  # fmt: skip


def utilisation(profile: Profile, plan: Plan, step_s: float) -> dict[str, float]:
    """MFU of one chip by what is counted, and how fast attention would have to be for the paper's figure."""
    shape, peak = spec(MODEL), profile.hardware.gpu.peak_bf16_tflops * TERA
    attention = shape.layers * shape.layer_attention_flops(profile.tokens, profile.seq_len)
    weights = 2.0 * shape.active_parameters * profile.tokens
    counts = {
        "causal": 3 * weights + 3 * attention,
        "causal_and_recompute": 4 * weights + 4 * attention,
        "whole_square": 3 * weights + 6 * attention,
        "whole_square_and_recompute": 4 * weights + 8 * attention,
    }
    repeated = sum(p in ("full", "offload_inputs") for p in policies_of(profile.blocks, plan)) / shape.layers
    rate = profile.hardware.gpu.matmul_bf16_tflops * TERA * MATMUL_SHARE
    at_full_rate = attention * (1 + repeated + ATTENTION_BACKWARD) / rate
    rest = step_s - at_full_rate / ATTENTION_SHARE
    found = {name: round(flops / step_s / peak, 4) for name, flops in counts.items()}
    for name in ("causal", "whole_square"):
        found[f"attention_share_for_the_papers_mfu_if_{name}"] = round(
            at_full_rate / (counts[name] / (PAPER["mfu"] * peak) - rest), 3  # type: ignore[operator]
        )  # fmt: skip
    return found


def longest(hw: str) -> dict[str, Any]:
    """Longest sequence on eight chips, in multiples of STRIDE tokens: under our plan, and with everything on the GPUs.

    "Ulysses alone" keeps states and the layers' inputs on the GPUs and recomputes; with ZeRO-3 the 16-bit weights are
    divided too (their seven other parts taken off the ledger), and logits are whole or in chunks.
    """

    def at(tokens: int) -> Profile:
        return estimate(MODEL, micro_batch=1, seq_len=tokens, hardware=hw, sequence_parallel=CHIPS)

    def ours(tokens: int) -> bool:
        try:
            make_plan(at(tokens))
        except DoesNotFit:
            return False
        return True

    def alone(tokens: int, chunks: int) -> bool:
        profile = at(tokens)
        plan = Plan(
            seq_len=tokens, sequence_parallel=CHIPS, activations="full", speculate="off", loss_chunks=chunks,
            retained_buckets=len(graph.buckets_of(profile, 64.0)),
        )  # fmt: skip
        account = ledger(profile, plan)
        divided = COPIES_OF_ALL * profile.params * (CHIPS - 1) // CHIPS
        return account.total("gpu") - divided <= account.gpu_capacity_bytes

    def last(fits: Any) -> int:
        n = 1
        while fits(2 * n * STRIDE):
            n *= 2
        low, high = n, 2 * n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * STRIDE) else (low, middle)
        return low * STRIDE

    found = {
        "ours": last(ours),
        "ulysses_alone": last(lambda n: alone(n, 1)),
        "ulysses_alone_loss_in_chunks": last(lambda n: alone(n, 64)),
    }
    return {"hardware": hw, "tokens": found, "times_ulysses_alone": round(found["ours"] / found["ulysses_alone"], 2)}


def scaling(model: str, family: str, micro_batch: int, seq_len: int, chips: tuple[int, ...]) -> list[dict[str, Any]]:
    """The same micro-batch on each of ever more chips (data parallel)."""
    rows: list[dict[str, Any]] = []
    for n in chips:
        name = family if n == 1 else f"{family}-x{n}"
        profile = estimate(model, micro_batch=micro_batch, seq_len=seq_len, hardware=name)
        try:
            plan = make_plan(profile)
        except DoesNotFit:
            rows.append({"hardware": name, "model": model, "fits": False})
            continue
        trace = simulate(profile, plan)
        rows.append(
            {
                "hardware": name, "model": model, "fits": True, "step_s": round(trace.step_s, 4),
                "tokens_per_s": round(trace.tokens_per_s), "mfu": round(trace.mfu, 4),
                "retained_buckets": plan.retained_buckets, "activations": plan.activations,
                "flow_blocks": len(plan.flow_blocks), "gpu_gb": round(trace.memory.total("gpu") / GB, 1),
                "host_gb": round(trace.memory.total("host") / GB, 1),
                "interconnect_s": round(graph.build(profile, plan).load("interconnect"), 4),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    machines = [f"{name}-x{CHIPS}" for name in ("gh200", "gh200-144gb", "gh200-quad", "gh200-datasheet")]
    result = {
        "what": "several Superchips", "status": "modelled", "superoffload": __version__, "paper": PAPER,
        "interconnects": {
            m: {k: v for k, v in hardware.preset(m).sources.items() if k.startswith("interconnect")} for m in machines
        },
        "a_million_tokens": [long_sequence(m) for m in machines],
        "longest": [longest(m) for m in machines if "144" not in m],
        "scaling": [
            *scaling("llama-7b", "gh200-quad", 4, 2048, (1, 2, 4, 8, 16)),
            *scaling("llama-7b", "gh200", 1, 2048, (1, 2, 4, 8, 16)),
            *scaling("paper-50b", "gh200-quad", 4, 2048, (1, 2, 4, 8, 16)),
            *scaling("llama-70b", "gh200-quad", 4, 2048, (1, 2, 4, 8, 16)),
        ],
    }  # fmt: skip
    text = json.dumps(result, indent=1) + "\n"
    if args.out:
        write_atomic(args.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
