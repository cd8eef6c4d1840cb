"""Published figures about SuperOffload on GH200, each with its standing and its source.

Standing: `P` printed in the paper (arXiv 2509.21271), on its authors' own pages or in their repositories, `O` measured
by others in public reports, `S` secondary notes on the paper, `D` derived here from the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAPER = "SuperOffload, arXiv 2509.21271"
ARTIFACT = "github.com/Supercomputing-System-AI-Lab/SuperOffload"
BLOG = "authors' blog, pytorch.org, SuperOffload: Unleashing the Power of Large-Scale LLM Training on Superchips"
EXAMPLES = "deepspeedai/DeepSpeedExamples, training/DeepSpeed-SuperOffload"


@dataclass(frozen=True)
class Figure:
    """One published number."""

    value: float
    unit: str
    status: Literal["P", "O", "S", "D"]
    source: str


def _seconds(value: float, column: str) -> Figure:
    return Figure(value, "s", "P", f"{PAPER}, Adam on Grace, {column}")


ADAM_SECONDS: dict[float, dict[str, Figure]] = {
    params: {
        name: _seconds(value, column)
        for name, column, value in zip(
            ("pytorch", "deepspeed", "grace_adam"), ("PT-CPU", "CPU-Adam", "GraceAdam"), row, strict=True
        )
    }
    for params, row in {
        1e9: (0.289, 0.098, 0.082),
        2e9: (0.531, 0.198, 0.160),
        4e9: (0.958, 0.393, 0.316),
        8e9: (1.834, 0.769, 0.608),
    }.items()
}
"""Seconds of one Adam step by number of parameters and implementation."""


@dataclass(frozen=True)
class AblationStep:
    """A row of the ablation: what the technique gains over the row above, and the throughput reached with it."""

    name: str
    gain_percent: Figure | None
    tflops: Figure


def _row(name: str, gain: float | None, tflops: float) -> AblationStep:
    notes = "secondary notes on the paper's ablation"
    remembered = "remembered; agrees with the percentages"
    return AblationStep(
        name,
        None if gain is None else Figure(gain, "%", "S", notes),
        Figure(tflops, "TFLOPS", "S", f"{notes}; {remembered}"),
    )


ABLATION: tuple[AblationStep, ...] = (
    _row("baseline", None, 116.20),
    _row("GraceAdam", 10.4, 128.23),
    _row("Superchip-aware casting", 12.7, 144.49),
    _row("speculation-then-validation", 45.0, 209.36),
    _row("bucket repartitioning", 14.1, 238.92),
)
ABLATION_TOTAL = Figure(2.06, "x", "S", "secondary notes on the paper's ablation")

LARGEST_PARAMS = Figure(25e9, "parameters", "P", f"{PAPER}, abstract: on one GH200")
CPU_SHARE = Figure(0.90, "of the optimizer", "P", f"{ARTIFACT}, experiment/throughput/prism.json: offload ratio")
"""Share of the optimizer that stays on the CPU in the authors' runs; the rest is what repartitioning retains."""
HOST_GB = Figure(480, "GB", "P", f"{PAPER}: LPDDR5X of one GH200")

LINK_GB_PER_S = Figure(450, "GB/s each way", "P", f"{PAPER}: NVLink-C2C, 900 GB/s both ways together")
HOPPER_TFLOPS = Figure(990, "TFLOPS", "P", "vendor datasheet, dense bf16")
FLOW_EFFICIENCY: dict[int, Figure] = {
    batch: Figure(value, "%", "D", "ait * bw / (ait * bw + peak) with ait = batch * 1,024 tokens")
    for batch, value in {1: 32, 2: 48, 4: 65, 8: 79}.items()
}
"""Weight-flow efficiency at sequences of 1,024 tokens by batch."""

QWEN_TFLOPS: dict[str, Figure] = {
    "blog": Figure(600, "TFLOPS", "P", f"{BLOG}: up to, sequence 4,096, batch 4, recompute counted"),
    "examples": Figure(500, "TFLOPS", "P", f"{EXAMPLES}, README: up to about, common sequence and batch"),
}
"""Qwen3-14B on one GH200. The two pages disagree."""
QWEN_GAIN = Figure(1.5, "x", "P", f"{EXAMPLES}, README: about 50 % higher than ZeRO-Offload")
GPU_BUSY: dict[str, Figure] = {
    "baseline": Figure(0.50, "of a step", "P", f"{BLOG}: about"),
    "superoffload": Figure(0.80, "of a step", "P", f"{BLOG}: more than"),
}


def adam_gb_per_s(name: str) -> float:
    """Bandwidth of an implementation of Adam on Grace, mean over the four sizes, at 28 bytes per parameter (D)."""
    rates = [28 * params / row[name].value / 1e9 for params, row in ADAM_SECONDS.items()]
    return sum(rates) / len(rates)


def ablation_tokens(params: float, flops_per_parameter: int = 6) -> float:
    """Tokens per step at which the printed Adam seconds alone make the printed gain of GraceAdam (D).

    TFLOPS = flops * N * tokens / step, and the two first rows differ by one Adam step, so
    tokens = (deepspeed - grace_adam) / (flops * N * (1 / tflops_0 - 1 / tflops_1)).

    Args:
        params: N, one of the sizes whose seconds are printed.
        flops_per_parameter: counted per token: 6, or 8 where recomputation counts.
    """
    row = ADAM_SECONDS[params]
    saved = row["deepspeed"].value - row["grace_adam"].value
    slower, faster = (ABLATION[i].tflops.value * 1e12 for i in (0, 1))
    return saved / (flops_per_parameter * params * (1 / slower - 1 / faster))
