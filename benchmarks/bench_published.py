"""The cost model's GH200 beside what is published about it: all figures are modelled, nothing here is measured.

    python benchmarks/bench_published.py --out benchmarks/results/published_gh200_<date>.json
    python benchmarks/bench_published.py --parts adam,ablation

Parts: `adam` (GraceAdam's seconds), `ablation` (the paper's techniques one after another, and each assumption varied),
`largest` (25B and the largest model on one GH200; takes a minute), `links` (the datasheet's link and those reported),
`flow` (weight-flow efficiency), `throughput` (the authors' Qwen3-14B). Published figures with their standing are in
published_figures.py; docs/cost_model.md discusses both.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import published_ablation as ablations
import published_figures as figures
import published_models as models

from superoffload import __version__, estimating
from superoffload.hardware import preset
from superoffload.record import write_atomic


def ablation() -> dict[str, Any]:
    return {
        "chosen": ablations.ablation(ablations.Ablation()),
        "variants": [ablations.ablation(v) for v in ablations.ablation_variants()],
        "tokens_from_grace_adam": ablations.tokens_derived(),
    }


def largest() -> dict[str, Any]:
    return {
        "25b": models.fits_25b(),
        "paper_shapes": models.paper_shapes(),
        "maximum": [models.largest(dtype) for dtype in ("bfloat16", "float16")],
    }


def links() -> dict[str, Any]:
    return {"presets": models.links(), "slower_down": models.slower_down()}


PARTS: dict[str, Callable[[], Any]] = {
    "adam": ablations.adam,
    "ablation": ablation,
    "largest": largest,
    "links": links,
    "flow": models.flow,
    "throughput": models.throughput,
}


def published() -> dict[str, Any]:
    """Every published figure with its standing."""
    return {
        "adam_seconds": {f"{n:g}": {k: dataclasses.asdict(f) for k, f in row.items()}
                         for n, row in figures.ADAM_SECONDS.items()},
        "ablation": [dataclasses.asdict(row) for row in figures.ABLATION],
        "ablation_total": dataclasses.asdict(figures.ABLATION_TOTAL),
        "largest_params": dataclasses.asdict(figures.LARGEST_PARAMS),
        "cpu_share": dataclasses.asdict(figures.CPU_SHARE),
        "flow_efficiency": {str(b): dataclasses.asdict(f) for b, f in figures.FLOW_EFFICIENCY.items()},
        "qwen3_14b_gain": dataclasses.asdict(figures.QWEN_GAIN),
        "gpu_busy": {k: dataclasses.asdict(f) for k, f in figures.GPU_BUSY.items()},
        "qwen3_14b_tflops": {k: dataclasses.asdict(f) for k, f in figures.QWEN_TFLOPS.items()},
    }  # fmt: skip


def config() -> dict[str, Any]:
    """What the numbers were made with: presets, and the estimate's constants."""
    constants = ("MATMUL_SHARE", "HALF_RATE_TOKENS", "ATTENTION_SHARE", "ATTENTION_BACKWARD", "TRAFFIC_SHARE",
                 "BACKWARD_TRAFFIC", "COMPILED_TRAFFIC", "LOSS_BYTES_PER_LOGIT", "LOGIT_BYTES")  # fmt: skip
    return {
        "superoffload": __version__,
        "hardware": {name: json.loads(preset(name).to_json()) for name in models.LINKS},
        "adam_gb_per_s": {
            name: round(figures.adam_gb_per_s(name), 1) for name in ("pytorch", "deepspeed", "grace_adam")
        },
        "adam_threads": ablations.ADAM_THREADS,
        "bounds": ablations.BOUNDS,
        "estimate": {name: getattr(estimating, name) for name in constants},
    }


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows of dictionaries as a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(str(r.get(c, "")) for c in columns) + " |" for r in rows])


COLUMNS = {
    "adam": "params modelled_s off_percent grace_adam_s deepspeed_s pytorch_s",
    "ablation": "row step_s tflops_6n published_tflops tflops_off_percent gain_percent published_gain_percent holds",
    "tokens": "params tokens_6n tokens_8n",
    "by_hand": "way gpu_gb host_gb host_bytes_per_parameter fits",
    "planned": "given step_s cast_down cast_up master undo_buckets retained_buckets gpu_gb host_gb",
    "shapes": "model dtype params fits step_s master retained_buckets undo_buckets flow_blocks gpu_gb host_gb binds",
    "links": "model batch seq_len hardware step_s cast_down cast_up retained_buckets undo_buckets activations "
    "loss_chunks flow_blocks waiting_gpu_casts_s waiting_cpu_casts_s",
    "slower_down": "model down_gb_per_s step_s cast_down cast_up retained_buckets undo_buckets activations flow_blocks",
    "flow": "batch published_percent serial_percent overlapped_percent simulated_percent",
    "throughput": "way step_s tokens_per_s model_tflops with_recompute_tflops authors_count_tflops gpu_busy "
    "activations flow_blocks",
}
"""Columns of each table."""


def tables(parts: dict[str, Any]) -> str:
    """What was computed, for reading."""
    out = []

    def show(rows: Sequence[dict[str, Any]], name: str) -> None:
        out.append(table(rows, COLUMNS[name].split()))

    if "ablation" in parts:
        chosen, names = parts["ablation"]["chosen"], [row.name for row in figures.ABLATION[1:]]
        show(chosen["rows"], "ablation")
        out.append(f"total {chosen['total']}, holds: {chosen['total_holds']}")
        show(parts["ablation"]["tokens_from_grace_adam"], "tokens")
        variants = [
            {**_changed(v["arrangement"]), "total": v["total"], "all hold": v["all_hold"],
             "TFLOPS off %": ", ".join(f"{row['tflops_off_percent']:+.0f}" for row in v["rows"]),
             **{n: row["gain_percent"] for n, row in zip(names, v["rows"][1:], strict=True)}}
            for v in (chosen, *parts["ablation"]["variants"])
        ]  # fmt: skip
        out.append(table(variants, ("arrangement", *names, "total", "all hold", "TFLOPS off %")))
    if "largest" in parts:
        big = parts["largest"]
        show(big["25b"]["by_hand"], "by_hand")
        show(big["25b"]["planned"], "planned")
        show([*big["paper_shapes"], *big["maximum"]], "shapes")
    if "links" in parts:
        show(parts["links"]["presets"], "links")
        show(parts["links"]["slower_down"], "slower_down")
    for name in ("adam", "flow", "throughput"):
        if name in parts:
            show(parts[name], name)
    return "\n\n".join(out)


def _changed(arrangement: dict[str, Any]) -> dict[str, str]:
    """Name an arrangement by what it changes."""
    chosen = dataclasses.asdict(ablations.Ablation())
    changes = [f"{k}={arrangement[k]}" for k in chosen if arrangement[k] != chosen[k]]
    return {"arrangement": ", ".join(changes) or "as chosen"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    parts: dict[str, Any] = {}
    for name in args.parts.split(","):
        if name not in PARTS:
            parser.error(f"--parts: {name!r} is none of {', '.join(PARTS)}")
        print(f"{name} ...", file=sys.stderr, flush=True)
        parts[name] = PARTS[name]()
    if args.out:
        result = {"what": "published GH200 figures", "date": datetime.date.today().isoformat(), "status": "modelled",
                  "arguments": {k: v for k, v in vars(args).items() if k != "out"}, "config": config(),
                  "published": published(), "parts": parts}  # fmt: skip
        write_atomic(args.out, json.dumps(result, indent=1) + "\n")
    print(tables(parts))


if __name__ == "__main__":
    main()
