"""The loss in chunks or not: its logits compete with all that is placed on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superoffload import graph
from superoffload.loss_costs import can_chunk, enough_chunks, in_chunks
from superoffload.plan import Plan
from superoffload.planner_pace import GOOD_ENOUGH, Pace
from superoffload.planner_placement import Placement
from superoffload.planner_room import Room
from superoffload.units import format_bytes, format_seconds


def place(room: Room, pace: Pace, given: Mapping[str, Any], plan: Plan) -> tuple[Plan, dict[str, str]]:
    """Choose `loss_chunks` and the placement: the loss is divided where its logits take memory that shortens the step
    elsewhere.

    Returns:
        The plan, and the reasons of what was chosen.
    """
    blocks = room.profile.blocks
    whole = Placement(room, pace, given, plan)
    if "loss_chunks" in given:
        return whole.finish()
    if not can_chunk(blocks):
        return whole.finish(loss_chunks="1: the profile knows of no other loss than the model's own")
    head = next(b for b in blocks if b.logits is not None)
    policy = {} if "activations" in given else {"activations": "full"}
    chunks = enough_chunks(room.profile, plan.model_copy(update=policy))
    own = f"1: the model's own loss, {format_bytes(head.working_bytes)} in passing"
    if chunks == 1:
        return whole.finish(loss_chunks=f"{own}, which is less than a layer takes or too few tokens to divide")
    if _all_fits(room, given, plan):
        return whole.finish(loss_chunks=f"{own}, which fit the GPU's memory beside everything")
    divided = Placement(room, pace, given, plan.model_copy(update={"loss_chunks": chunks}))
    if whole.fits and whole.seconds <= divided.seconds * GOOD_ENOUGH:
        return whole.finish(loss_chunks=f"{own}: in {chunks} chunks the step would not be shorter")
    saved = f"{format_bytes(in_chunks(head, chunks).working_bytes)} for logits and loss in passing"
    why = "1 does not fit"
    if whole.fits:
        why = f"a step of {format_seconds(divided.seconds)}, {format_seconds(whole.seconds)} with 1"
    return divided.finish(loss_chunks=f"{chunks}: {saved} instead of {format_bytes(head.working_bytes)}; {why}")


def _all_fits(room: Room, given: Mapping[str, Any], plan: Plan) -> bool:
    """Whether the GPU's memory limits nothing: everything kept, every bucket retained."""
    loose: dict[str, Any] = {"activations": "none"}
    hw = room.profile.hardware
    if not (hw.shared_memory and not hw.gpu.peak_bf16_tflops):
        loose["retained_buckets"] = len(graph.buckets_of(room.profile, plan.bucket_mb, plan.flow_blocks))
    changes = {k: v for k, v in loose.items() if k not in given}
    return room.gpu_over(plan.model_copy(update=changes)) <= 0
