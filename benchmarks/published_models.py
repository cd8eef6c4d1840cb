"""Memory, links, weight flow and throughput of a GH200, as the cost model has them (bench_published.py prints them).

Everything goes through the package's own presets, estimate, planner, ledger and simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from published_ablation import ADAM_THREADS, BASELINE_CASTS, blocking_seconds, repeating_whole_layers, with_adam
from published_figures import CPU_SHARE, FLOW_EFFICIENCY, HOPPER_TFLOPS, LINK_GB_PER_S, QWEN_TFLOPS

from superoffload import graph
from superoffload.errors import DoesNotFit
from superoffload.estimating import estimate
from superoffload.graph import buckets_of
from superoffload.hardware import Curve, preset
from superoffload.memory import Ledger, Place, ledger
from superoffload.model import ModelSpec, spec
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation, step_seconds
from superoffload.units import GB, TERA
from superoffload.workshop.experiments import flow_efficiency, pcie_era_plan

LINKS = ("gh200-datasheet", "gh200", "gh200-quad")


def account(profile: Profile, plan: Plan) -> dict[str, Any]:
    """Memory of a plan in GB, and bytes per parameter that it puts on the host."""
    book = ledger(profile, plan)
    reserve = sum(i.bytes for i in book.items if i.name == "system and Python")
    return {
        "gpu_gb": round(book.total("gpu") / GB, 1), "host_gb": round(book.total("host") / GB, 1), "fits": book.fits,
        "host_bytes_per_parameter": round((book.total("host") - reserve) / profile.params, 2), "binds": binds(book),
    }  # fmt: skip


def binds(book: Ledger) -> str:
    """Which memory is full: less than 1.5 % of it is left."""
    capacity: dict[Place, int] = {"gpu": book.gpu_capacity_bytes, "host": book.host_capacity_bytes}
    room = {place: 1 - book.total(place) / size for place, size in capacity.items()}
    return " and ".join(p for p, left in room.items() if left < 0.015) or "neither"


def choices(plan: Plan) -> dict[str, Any]:
    """The knobs that differ between machines, short."""
    names = ("cast_down", "cast_up", "master", "speculate", "undo_buckets", "retained_buckets", "activations",
             "loss_chunks", "accumulate_on", "prefetch_blocks")  # fmt: skip
    return {**{n: getattr(plan, n) for n in names}, "flow_blocks": len(plan.flow_blocks),
            "other_activations": len(plan.activations_by_block)}  # fmt: skip


def by_hand(**knobs: Any) -> Plan:
    """A plan of the paper's kind: all states on the CPU, all weights on the GPU, everything recomputed."""
    fixed: dict[str, Any] = {"micro_batch": 1, "seq_len": 2048, "adam_threads": ADAM_THREADS, "activations": "full"}
    return Plan.from_dict({**fixed, **knobs})


GRADIENTS_HELD: dict[str, dict[str, Any]] = {
    "float32 gradients, GPU casts up, all speculated": {"cast_down": "gpu", "cast_up": "gpu", "speculate": "on"},
    "float32 gradients, a 16-bit copy too, all speculated": {"cast_down": "gpu", "cast_up": "fused", "speculate": "on"},
    "16-bit gradients, GPU casts up, all speculated": {"cast_down": "fused", "cast_up": "gpu", "speculate": "on"},
    "float32 gradients, GPU casts up, waiting": {"cast_down": "gpu", "cast_up": "gpu", "speculate": "off"},
}
"""Ways to hold 25B parameters' states on one GH200; no bucket retained."""


def fits_25b() -> dict[str, Any]:
    """25B on one GH200: ways by hand, and what the planner does, alone and with float32 gradients demanded."""
    profile = estimate("paper-25b", micro_batch=1, seq_len=2048, hardware="gh200")
    hand = [{"way": name, **account(profile, by_hand(**knobs))} for name, knobs in GRADIENTS_HELD.items()]
    planned = []
    demands: tuple[dict[str, Any], ...] = ({}, {"cast_down": "gpu"},
               {"cast_down": "gpu", "cast_up": "gpu", "retained_buckets": 0, "activations": "full"})  # fmt: skip
    for knobs in demands:
        plan = make_plan(profile, **knobs)
        planned.append(
            {"given": knobs, "step_s": round(step_seconds(profile, plan), 3), **choices(plan),
             "buckets": len(buckets_of(profile, plan.bucket_mb)), **account(profile, plan),
             "reasons": {k: plan.reasons[k] for k in ("master", "speculate", "undo_buckets", "cast_down")
                         if k in plan.reasons}}
        )  # fmt: skip
    return {"params": profile.params, "by_hand": hand, "planned": planned}


def wide(layers: int) -> ModelSpec:
    """The paper's 25B shape with another number of layers."""
    return spec("paper-25b").replace(name=f"{layers} layers of 8192", layers=layers)


def trial(model: str | ModelSpec, dtype: str, hardware: str = "gh200") -> dict[str, Any] | None:
    """The planner's plan of one sequence of 2,048 tokens, or None where none fits."""
    profile = estimate(model, micro_batch=1, seq_len=2048, hardware=hardware, dtype=dtype)
    try:
        plan = make_plan(profile)
    except DoesNotFit:
        return None
    return {"model": profile.model, "params": profile.params, "dtype": dtype, "fits": True, **choices(plan),
            **account(profile, plan), "step_s": round(step_seconds(profile, plan), 3),
            "plan": plan.model_dump(mode="json", exclude={"reasons"})}  # fmt: skip


def largest(dtype: str, low: int = 30, high: int = 64) -> dict[str, Any]:
    """The most layers of the 8192-wide shape that a plan fits, by bisection: `low` fits, `high` does not."""
    best = trial(wide(low), dtype)
    assert best is not None
    while high - low > 1:
        middle = (low + high) // 2
        found = trial(wide(middle), dtype)
        low, high, best = (middle, high, found) if found else (low, middle, best)
    return {"layers": low, **best}


def paper_shapes(dtype: str = "bfloat16") -> list[dict[str, Any]]:
    """The paper's larger shapes, fitting or not."""
    names = ("paper-15b", "paper-20b", "paper-25b", "paper-30b", "paper-50b")
    return [trial(n, dtype) or {"model": n, "params": spec(n).parameters, "dtype": dtype, "fits": False} for n in names]


LINK_CASES = (
    ("paper-5b", 4, 1024),
    ("llama-3-8b", 1, 8192),
    ("qwen3-14b", 1, 4096),
    ("paper-25b", 2, 4096),
    ("paper-25b", 1, 2048),
)
"""(model, micro-batch, sequence) of the comparison of links."""


def links() -> list[dict[str, Any]]:
    """The planner's choices on the datasheet's link and on the reported ones, beside casts by the GPU (the paper's
    way, fp32 over the link) and by passes of the CPU."""
    rows = []
    for model, batch, seq in LINK_CASES:
        for name in LINKS:
            profile = estimate(model, micro_batch=batch, seq_len=seq, hardware=name)
            plan = make_plan(profile)
            row = {"model": model, "batch": batch, "seq_len": seq, "hardware": name,
                   "step_s": round(step_seconds(profile, plan), 4), **choices(plan)}  # fmt: skip
            for way in ("gpu", "cpu"):
                other = pcie_era_plan(profile, cast_down=way, cast_up=way)
                row[f"waiting_{way}_casts_s"] = round(step_seconds(profile, other), 4)
            rows.append(row)
    return rows


def slower_down(rates: Sequence[float] = (294, 170, 100, 64, 32, 16)) -> list[dict[str, Any]]:
    """How slow the way down may be before it shows: the `gh200` preset with its plateau lowered, planned anew."""
    hw = preset("gh200")
    rows = []
    for model, batch, seq in (LINK_CASES[0], LINK_CASES[3]):
        for rate in rates:
            down = hw.link.down
            curve = Curve(size_mb=down.size_mb, gb_per_s=tuple(x * rate / down.peak for x in down.gb_per_s))
            machine = hw.replace(name=f"gh200, {rate:g} GB/s down", link=hw.link.replace(down=curve))
            profile = estimate(model, micro_batch=batch, seq_len=seq, hardware=machine)
            plan = make_plan(profile)
            rows.append({"model": model, "down_gb_per_s": rate, "step_s": round(step_seconds(profile, plan), 4),
                         **choices(plan)})  # fmt: skip
    return rows


def flow(model: str = "paper-13b") -> list[dict[str, Any]]:
    """Weight-flow efficiency: the paper's serial formula, the overlapped one, and the simulated engine, which is
    measured against itself with all weights on the GPU (16 micro-batches, states on the CPU)."""
    rows = []
    for batch, published in FLOW_EFFICIENCY.items():
        tokens = batch * 1024
        serial, overlapped = (
            100 * flow_efficiency(tokens, LINK_GB_PER_S.value, HOPPER_TFLOPS.value, overlapped=o) for o in (False, True)
        )
        profile = estimate(model, micro_batch=batch, seq_len=1024, hardware="gh200-datasheet")
        layers = sum(b.kind == "layer" for b in profile.blocks)
        fused = {"cast_down": "fused", "cast_up": "fused", "speculate": "on", "accumulation": 16}
        stay, flowing = (step_seconds(profile, pcie_era_plan(profile, **fused, flow=n)) for n in (0, layers))
        rows.append({"batch": batch, "published_percent": published.value, "serial_percent": round(serial, 1),
                     "overlapped_percent": round(overlapped, 1),
                     "simulated_percent": round(100 * stay / flowing, 1)})  # fmt: skip
    return rows


def authors_flops(model: ModelSpec, micro_batch: int, seq_len: int, *, passes: int) -> float:
    """FLOPs of a step as the authors' example script counts them: 2 * N per token and pass, attention over the whole
    square of the sequence; four passes with activation checkpointing, otherwise three (DeepSpeedExamples)."""
    products = 2 * passes * model.parameters * seq_len
    return float(micro_batch * (products + 4 * passes * model.layers * model.hidden * seq_len**2))


def throughput(model: str = "qwen3-14b", micro_batch: int = 4, seq_len: int = 4096) -> list[dict[str, Any]]:
    """TFLOPS of the authors' example in three counts: this project's (6 * N * tokens and causal attention), the same
    with what is recomputed, and the authors' own."""
    grace = preset("gh200")
    machines = {"grace_adam": grace, "deepspeed": with_adam(grace, "deepspeed")}
    profiles = {
        name: estimate(model, micro_batch=micro_batch, seq_len=seq_len, hardware=hw) for name, hw in machines.items()
    }
    fixed: dict[str, Any] = {"activations": "full", "activations_by_block": {}, "flow_blocks": (), "loss_chunks": 1,
                             "adam_threads": ADAM_THREADS}  # fmt: skip
    down, up = BASELINE_CASTS
    kept = round((1 - CPU_SHARE.value) * len(buckets_of(profiles["grace_adam"], 64.0)))
    theirs = {**fixed, "cast_down": "gpu", "cast_up": "gpu", "retained_buckets": kept}
    zero = {**fixed, "cast_down": down, "cast_up": up, "speculate": "off", "retained_buckets": 0}
    ways: tuple[tuple[str, str, bool, dict[str, Any]], ...] = (
        ("ZeRO-Offload: all states on the CPU, waiting, blocking step", "deepspeed", True, zero),
        ("their settings: 10 % on the GPU, fp32 over the link, blocking step", "grace_adam", True, theirs),
        ("their settings in this engine", "grace_adam", False, theirs),
        ("the planner's choice", "grace_adam", False, {}),
        ("the planner's choice, layers compiled", "grace_adam", False, {"compile_blocks": True}),
    )
    rows = []
    for way, adam, blocking, knobs in ways:
        profile = repeating_whole_layers(profiles[adam]) if blocking else profiles[adam]
        plan = make_plan(profile, **knobs)
        seconds = (blocking_seconds if blocking else step_seconds)(profile, plan)
        layers = [i for i, b in enumerate(profile.blocks) if b.kind == "layer"]
        repeated = [i for i in layers if plan.activations_of(i) in ("full", "offload_inputs")]
        again = sum(profile.blocks[i].forward_flops for i in repeated)
        # Their script knows all or nothing; a plan between the two has no number in their count.
        passes = {0: 3, len(layers): 4}.get(len(repeated))
        count = passes and authors_flops(spec(model), micro_batch, seq_len, passes=passes) / seconds / TERA
        rows.append({"way": way, "step_s": round(seconds, 3), "tokens_per_s": round(profile.tokens / seconds),
                     "model_tflops": round(profile.model_flops / seconds / TERA, 1),
                     "with_recompute_tflops": round((profile.model_flops + again) / seconds / TERA, 1),
                     "authors_count_tflops": count and round(count, 1),
                     "gpu_busy": round(graph.build(profile, resolve_speculation(plan)).load("gpu") / seconds, 3),
                     **choices(plan), **{f"published_{k}": v.value for k, v in QWEN_TFLOPS.items()}})  # fmt: skip
    return rows
