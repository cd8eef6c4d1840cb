"""Named plans to compare with: how other systems arrange a step, and the paper's techniques one after another.

All of them are modelled with this project's engine and its CPU Adam, so what they show is the arrangement alone: the
real systems are slower for other reasons too, and the paper's GraceAdam is in every line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from superoffload.errors import unknown_name
from superoffload.graph import buckets_of
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile


def pcie_era_plan(profile: Profile, **knobs: Any) -> Plan:
    """The arrangement of ZeRO-Offload, made for PCIe, in this project's words.

    All optimizer states on the CPU, all 16-bit weights on the GPU, every layer recomputed; 16 bits cross the link and
    are cast by passes of their own on the CPU; Adam waits for the gradient norm. Memory is not checked.

    Args:
        knobs: fields of Plan that are to be different; None lets the planner choose.
    """
    era: dict[str, Any] = {
        "retained_buckets": 0, "flow_blocks": (), "activations": "full", "cast_down": "cpu", "cast_up": "cpu",
        "speculate": "off", "master": "plain", "loss_chunks": 1,
    }  # fmt: skip
    if "flow" in knobs:
        del era["flow_blocks"]
    plan = make_plan(profile, check=False, **{**era, **knobs})
    if "speculate" in knobs and knobs["speculate"] is None:
        return plan  # with the undo memory that the planner gives it
    return plan.model_copy(update={"undo_buckets": knobs.get("undo_buckets")})


def _all_on_gpu(profile: Profile, **batch: Any) -> Plan:
    size = make_plan(profile, check=False, retained_buckets=0, flow_blocks=(), activations="none", **batch).bucket_mb
    everything: dict[str, Any] = {
        "bucket_mb": size,
        "retained_buckets": len(buckets_of(profile, size)),
        "flow_blocks": (),
    }
    return make_plan(profile, check=False, speculate="off", **everything, **batch)


def _fsdp(profile: Profile, **batch: Any) -> Plan:
    layers = sum(b.kind == "layer" for b in profile.blocks)
    return pcie_era_plan(profile, flow=layers, cast_down="gpu", cast_up="gpu", **batch)


def _casts(profile: Profile, **batch: Any) -> Plan:
    return pcie_era_plan(profile, cast_down=None, cast_up=None, **batch)


def _speculation(profile: Profile, **batch: Any) -> Plan:
    return pcie_era_plan(profile, cast_down=None, cast_up=None, speculate=None, **batch)


def _repartition(profile: Profile, **batch: Any) -> Plan:
    return pcie_era_plan(profile, cast_down=None, cast_up=None, speculate=None, retained_buckets=None, **batch)


def _planner(profile: Profile, **batch: Any) -> Plan:
    return make_plan(profile, check=False, **batch)


@dataclass(frozen=True, slots=True)
class PlanPreset:
    """One way to arrange a step."""

    what: str
    """One sentence for people who know the system by name."""
    make: Callable[..., Plan]


PRESETS: dict[str, PlanPreset] = {
    "planner's own": PlanPreset("Every field chosen by the cost model: all of the paper's techniques.", _planner),
    "all on the GPU": PlanPreset(
        "As under DDP: weights, master, moments and Adam on the GPU; nothing is offloaded.", _all_on_gpu
    ),
    "ZeRO-Offload-like": PlanPreset(
        "Made for PCIe: states on the CPU, weights on the GPU, layers recomputed, casts in passes of their own on the "
        "CPU, and Adam waits for the gradient norm. The paper's techniques are added to it one after another.",
        pcie_era_plan,
    ),
    "FSDP-offload-like": PlanPreset(
        "As FSDP2 with CPU offload: every layer's weights are fetched, fp32 crosses the link, and Adam waits for the "
        "gradient norm.",
        _fsdp,
    ),
    "+ casts": PlanPreset("ZeRO-Offload-like, with each cast where the cost model finds it cheapest.", _casts),
    "+ speculation": PlanPreset("The same, and Adam starts before the gradient norm is known.", _speculation),
    "+ repartition": PlanPreset("The same, and the last buckets of backward stay on the GPU.", _repartition),
}
"""Name -> how it is made. With "planner's own" at its end, the lines with a + are the paper's ablation; its last step
adds where weights stay or flow, and the other activation policies."""


def preset_plan(name: str, profile: Profile, like: Plan | None = None) -> Plan:
    """The plan of this name. Memory is not checked.

    Args:
        name: one of `PRESETS`.
        profile: measured or estimated.
        like: take micro-batch, sequence length and accumulation from this plan, so that the two train alike.

    Raises:
        InputError: an unknown name.
    """
    if name not in PRESETS:
        raise unknown_name("plan preset", name, PRESETS)
    batch: dict[str, Any] = {}
    if like is not None:
        batch["accumulation"] = like.accumulation
        profile = rescale(profile, micro_batch=like.micro_batch, seq_len=like.seq_len)
    return PRESETS[name].make(profile, **batch)
