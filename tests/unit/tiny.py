"""A machine and models whose times can be counted by hand: 1 s to move 1 GB over the link, 1 GB/s and so on."""

from __future__ import annotations

from superoffload.hardware import Cpu, Curve, Gpu, Hardware, Link
from superoffload.layout import NORM_CHUNK
from superoffload.plan import Plan
from superoffload.profiler import BlockProfile, Profile
from superoffload.units import FP32_BYTES, MIB

BUCKET_PARAMS = 128 * NORM_CHUNK
"""1,048,576 parameters, so one bucket of 4 MiB."""
BUCKET_MB = BUCKET_PARAMS * FP32_BYTES / MIB


def hardware(
    *,
    down: float = 1.0,
    up: float = 1.0,
    both: float = 1000.0,
    dram: float = 1e6,
    adam: float = 1.0,
    gpu_gb: float = 1000.0,
    host_gb: float = 1000.0,
    write_cost: float = 1.0,
    peak: float = 100.0,
) -> Hardware:
    """Bandwidths in seconds-friendly units: GB/s such that one bucket's copy takes what the test wants."""
    return Hardware(
        name="counted",
        source="probed",
        gpu=Gpu(name="g", memory_gb=gpu_gb, peak_bf16_tflops=peak, matmul_bf16_tflops=100, hbm_gb_per_s=1e9),
        cpu=Cpu(
            name="c", cores=8, memory_gb=host_gb, dram_gb_per_s=dram, adam_threads=(4,), adam_gb_per_s=(adam,),
            cast_gb_per_s=adam, dma_write_cost=write_cost,
        ),
        link=Link(
            down=Curve(size_mb=(1.0,), gb_per_s=(down,)), up=Curve(size_mb=(1.0,), gb_per_s=(up,)), both_gb_per_s=both
        ),
    )  # fmt: skip


def profile(
    hw: Hardware,
    layers: int = 2,
    *,
    params: int | tuple[int, ...] = BUCKET_PARAMS,
    forward: float = 1.0,
    backward: float = 2.0,
) -> Profile:
    """A model of `layers` equal layers of one tensor each, or of several, in forward order."""
    numels = params if isinstance(params, tuple) else (params,)
    blocks = tuple(
        BlockProfile(
            name=f"layer {i}", kind="layer", tensor_numels=numels, dtype="bfloat16", forward_s=forward,
            backward_s=backward, forward_flops=1.0, input_bytes=1000, activation_bytes=5000, working_bytes=0,
        )
        for i in range(layers)
    )  # fmt: skip
    return Profile(
        source="measured", model="counted", model_fingerprint="f", micro_batch=1, seq_len=1, blocks=blocks,
        model_flops=1e12, hardware=hw,
    )  # fmt: skip


def plan(**fields: object) -> Plan:
    values = {"bucket_mb": BUCKET_MB, "adam_threads": 4, "activations": "none", "speculate": "off", **fields}
    return Plan.model_validate(values)


def link_gb_per_s(seconds_per_bucket: float, bytes_per_param: int = 2) -> float:
    """Link rate at which one bucket's copy takes that long."""
    return BUCKET_PARAMS * bytes_per_param / seconds_per_bucket / 1e9


def adam_gb_per_s(seconds_per_bucket: float, bytes_per_param: int = 28) -> float:
    """Adam rate at which one bucket takes that long."""
    return BUCKET_PARAMS * bytes_per_param / seconds_per_bucket / 1e9
