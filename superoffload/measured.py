"""Measured and published numbers that the workshop shows beside the model's.

The benchmark files stay in the repository (`benchmarks/results`) and are not part of an installed package; these few
values are copied from them, and a test compares the two. Whole steps with their timelines are in `measured_step`.
Paper: SuperOffload, arXiv 2509.21271.
"""

from __future__ import annotations

H200_MACHINE = "one NVIDIA H200 on PCIe 5, 16 Xeon cores, torch 2.11, CUDA 13, 2026-11-30"
"""Where and when `H200_*` was measured."""

H200_STEP_S: dict[str, float] = {
    "forward and backward alone": 0.4552,
    "torch's fused AdamW on the CPU, copies and casts by hand": 3.4645,
    "own Adam, casts in passes of their own": 1.3021,
    "casts fused into Adam": 1.0464,
    "speculation": 0.8505,
    "half of the buckets retained on the GPU": 0.4811,
}
"""Seconds per step of a 3.14B Llama shape, 8,192 tokens, clipping on: each row adds to the one above
(step_ablation_h200)."""

H200_CAST_NS: dict[str, dict[str, float]] = {
    "down": {"cpu": 0.24988627433653032, "gpu": 0.2604098916060229, "fused": 0.19816201925254756},
    "up": {"cpu": 0.2540007233625604, "gpu": 0.25135356187745606, "fused": 0.18447107076675537},
}
"""Nanoseconds per parameter of one bucket alone, from end to end, by who casts (probe_casts_nvidia-h200)."""

ADAM_GB_PER_S: dict[str, dict[str, float]] = {
    "16 Xeon cores": {"PyTorch, fused": 114.3, "DeepSpeed CPU-Adam": 118.2, "SuperOffload": 136.8},
    "2 EPYC cores": {"PyTorch, fused": 55.0, "DeepSpeed CPU-Adam": 55.9, "SuperOffload": 55.6},
}
"""fp32 AdamW at 28 bytes per parameter on all cores: of the H200 machine with AVX-512 (adam_h200), and of a small AMD
EPYC machine, torch 2.13 (adam_epyc-2core), both 2026-11-30."""

PAPER_ADAM_S: dict[str, dict[float, float]] = {
    "PyTorch": {1e9: 0.289, 2e9: 0.531, 4e9: 0.958, 8e9: 1.834},
    "DeepSpeed CPU-Adam": {1e9: 0.098, 2e9: 0.198, 4e9: 0.393, 8e9: 0.769},
    "GraceAdam": {1e9: 0.082, 2e9: 0.160, 4e9: 0.316, 8e9: 0.608},
}
"""Seconds of one Adam step on Grace by parameters, as the paper prints them."""
PAPER_GRACE_GB_PER_S = 500.0
"""Memory bandwidth of Grace as the paper prints it."""
PAPER_COMPUTE_RATIO = 330.0
"""Hopper's compute over Grace's, as the paper prints it."""
