"""One thing is changed and everything else kept: the link alone, the casts alone, where weights live alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.graph import buckets_of
from superoffload.hardware import Hardware
from superoffload.links import LINKS_GB_PER_S, link_at
from superoffload.plan import CASTS, Plan
from superoffload.plan_presets import pcie_era_plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import retarget
from superoffload.profiler import Profile
from superoffload.simulator import simulate, step_seconds
from superoffload.tracing import Trace
from superoffload.units import ADAM_STREAM_BYTES, GB, TERA


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """One stop of the link knob: the same GPU, CPU and model, another link."""

    gb_per_s: float
    """Plateau of the link each way."""
    era: Trace
    """The PCIe-era plan, modelled."""
    best: Trace
    """The quickest, at this link, of the plans that the planner chooses for any of the links, modelled."""


def link_sweep(profile: Profile, links_gb_per_s: Sequence[float] = LINKS_GB_PER_S) -> tuple[LinkPoint, ...]:
    """The PCIe-era plan and the best that the planner knows, at each link.

    The planner chooses knob after knob, so that its choice for one link may be beaten there, by a percent or two, by
    its choice for another. So each of them is tried at each link: a faster link never makes the best step longer.

    Raises:
        DoesNotFit: no plan of this model fits the machine.
    """

    def with_link(gb_per_s: float) -> Profile:
        return retarget(profile, link_at(profile.hardware, gb_per_s))

    plans: list[Plan] = []
    for rate in sorted({*LINKS_GB_PER_S, *links_gb_per_s}, reverse=True):
        plan = make_plan(with_link(rate))
        if all(plan.replace(reasons={}) != p.replace(reasons={}) for p in plans):
            plans.append(plan)
    points = []
    for rate in links_gb_per_s:
        at = with_link(rate)
        best = min((simulate(at, plan) for plan in plans), key=lambda trace: trace.step_s)
        points.append(LinkPoint(rate, simulate(at, pcie_era_plan(at)), best))
    return tuple(points)


def cast_steps(profile: Profile, **knobs: Any) -> dict[tuple[str, str], float]:
    """Seconds per step for each (cast_down, cast_up), modelled; all else as in `pcie_era_plan`, or as `knobs` say."""
    return {
        (down, up): step_seconds(profile, pcie_era_plan(profile, **{**knobs, "cast_down": down, "cast_up": up}))
        for down in CASTS
        for up in CASTS
    }


def flow_cost(hardware: str | Hardware, tokens: int, model: str = "llama-7b") -> float:
    """How much longer a step takes when all layers flow, 0.1 being ten percent; modelled.

    The step has 16 micro-batches, so that the optimizer's part, which nothing of this changes, weighs little. States
    stay on the CPU, layers are recomputed, casts are fused, Adam speculates. Memory is not checked.

    Args:
        tokens: per micro-batch; a sequence is at most 2,048 of them.

    Raises:
        InputError: tokens that are no whole number of sequences.
    """
    seq_len = min(tokens, 2048)
    if tokens < 1 or tokens % seq_len:
        raise InputError(f"tokens = {tokens}", expected="up to 2,048, or a multiple of 2,048")
    p = estimate(model, micro_batch=tokens // seq_len, seq_len=seq_len, hardware=hardware)
    layers = sum(b.kind == "layer" for b in p.blocks)
    stay, flow = (
        step_seconds(p, pcie_era_plan(p, cast_down="fused", cast_up="fused", speculate="on", accumulation=16, flow=n))
        for n in (0, layers)
    )
    return flow / stay - 1


def retained_steps(profile: Profile, shares: Sequence[float], **knobs: Any) -> dict[float, float]:
    """Seconds per step by the share of buckets, 0 to 1, whose states stay on the GPU; modelled. Nothing flows, layers
    are recomputed, casts are fused, Adam speculates, and memory is not checked."""
    era = {"cast_down": "fused", "cast_up": "fused", "speculate": "on", **knobs}
    total = len(buckets_of(profile, pcie_era_plan(profile, **era).bucket_mb))
    return {
        share: step_seconds(profile, pcie_era_plan(profile, **{**era, "retained_buckets": round(share * total)}))
        for share in shares
    }


def flow_efficiency(tokens: float, gb_per_s: float, tflops: float, *, overlapped: bool = True) -> float:
    """Share of its time in which a GPU computes while all weights flow in, 0 to 1.

    A layer of P parameters takes 2·P·tokens FLOPs and 2·P bytes, so with ait = tokens the fetch takes peak / (ait ·
    bandwidth) times as long as the products. One after the other that leaves ait·bw / (ait·bw + peak) (SuperOffload
    paper, section on weight flow); side by side min(1, ait·bw / peak).

    Args:
        tokens: per micro-batch.
        gb_per_s: the link's way up.
        tflops: what the GPU reaches in matrix products.
        overlapped: fetches run under the products of the block before.
    """
    ratio = tokens * gb_per_s * GB / (tflops * TERA)
    return min(1.0, ratio) if overlapped else ratio / (1 + ratio)


def adam_gb_per_s(params: float, seconds: float) -> float:
    """Bandwidth of an fp32 AdamW step in GB/s: 28 bytes per parameter, reading p, m, v, g and writing p, m, v."""
    return params * ADAM_STREAM_BYTES / seconds / GB
