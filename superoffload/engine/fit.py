"""Whether what an engine is about to allocate fits the memory that is free now: asked before anything is allocated.

An operating system promises memory that it does not have and ends the process when it is touched; a GPU fails in the
middle. What activations will need is not known here: `superoffload plan` knows.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from superoffload.engine.buckets import ManagedParam
from superoffload.errors import DoesNotFit
from superoffload.layout import Bucket
from superoffload.memory import Ledger, ledger_items, state_items
from superoffload.plan import Plan
from superoffload.units import format_bytes

CGROUP = Path("/sys/fs/cgroup")
Account = Callable[[Plan], Ledger]
"""What a plan would allocate, against what is free."""


def free_host_bytes() -> int | None:
    """Host memory that can still be had: the system's own figure, or the container's where that is lower. None where
    the system does not say."""
    free: int | None = None
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, StopIteration, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = (CGROUP / "memory.stat").read_text().splitlines()
        cached = int(next(x for x in stat if x.startswith("inactive_file ")).split()[1])
        here = limit - used + cached
        free = here if free is None else min(free, here)
    return free


def free_device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that can still be had, with what torch's allocator keeps for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def check_fit(
    layouts: Sequence[Bucket],
    params: Sequence[ManagedParam],
    plan: Plan,
    device: torch.device,
    *,
    freed: Ledger | None = None,
) -> None:
    """Refuse a plan whose state does not fit.

    Args:
        layouts: buckets of `params` under `plan`.
        device: the one that computes.
        freed: what an optimizer that is closed first gives back.

    Raises:
        DoesNotFit: with the ledger of what would be allocated, and the nearest plan that fits as the remedy.
    """
    cuda = device.type == "cuda"
    flow: dict[int, int] = dict.fromkeys(plan.flow_blocks, 0)
    for p in params:
        if p.block in flow:
            flow[p.block] += p.numel * p.param.element_size()
    # Weights that lie there already go as their copies in the arenas come.
    there = sum(p.numel * p.param.element_size() for p in params if p.param.device == device)

    def free() -> dict[str, int]:
        host = free_host_bytes()
        return {
            "gpu": free_device_bytes(device) + there + (freed.total("gpu") if freed else 0) if cuda else 0,
            "host": 0 if host is None else host + (freed.total("host") if freed else 0) + (0 if cuda else there),
        }

    def account(plan: Plan) -> Ledger:
        items = ledger_items(state_items(layouts, plan, list(flow.values())), one_memory=not cuda)
        return Ledger(items=items, gpu_capacity_bytes=room["gpu"], host_capacity_bytes=room["host"])

    room = free()
    asked = account(plan)
    if not asked.fits:  # what is garbage may be much: a model and its optimizer held by an error's traceback
        gc.collect()
        room = free()
        asked = account(plan)
    if asked.fits:
        return
    parts = []
    for place, over in asked.overflow().items():
        largest = asked.largest(place)  # type: ignore[arg-type]
        assert largest is not None
        word = "GPU" if place == "gpu" else "host"
        parts.append(
            f"{word} memory: {format_bytes(room[place] + over)} are needed and {format_bytes(room[place])} are free; "
            f"largest item is {largest.name} with {format_bytes(largest.bytes)}"
        )
    nearest = _nearest(plan, len(layouts), any(b.dtype == "bfloat16" for b in layouts), account)
    if nearest is None:
        remedy = "No plan of this model fits what is free: close other programs, or take a smaller model"
    else:
        changes = (k for k in Plan.knobs() if getattr(nearest, k) != getattr(plan, k))
        remedy = "Nearest plan that fits: " + ", ".join(
            f"{k}={getattr(nearest, k)!r} instead of {getattr(plan, k)!r}" for k in changes
        )
    error = DoesNotFit("the optimizer's state does not fit. " + ". ".join(parts), ledger=asked, remedy=remedy)
    error.nearest = nearest
    raise error


def _nearest(plan: Plan, buckets: int, bf16: bool, account: Account) -> Plan | None:
    """A plan that fits and leaves the model as it runs: other records, casts and masters, or another place for some
    states."""
    bases, few = [plan], max(1, buckets // 4)
    for applies, change in (
        (plan.speculate != "off" and plan.undo == "snapshot", {"undo": "record"}),
        (plan.speculate != "off" and few < (plan.undo_buckets or buckets), {"undo_buckets": few}),
        (plan.speculate != "off", {"speculate": "off", "undo_buckets": None}),
        ("gpu" in (plan.cast_down, plan.cast_up), {"cast_down": "fused", "cast_up": "fused"}),
        (bf16 and plan.master == "plain", {"master": "split", "cast_up": "fused"}),
    ):
        if applies:
            bases.append(bases[-1].model_copy(update=change))
    for base in bases:
        if account(base).fits:
            return base
        counts = sorted(range(buckets + 1), key=lambda n: abs(n - base.retained_buckets))
        for n in counts[:: max(1, buckets // 32)]:
            other = base.model_copy(update={"retained_buckets": n})
            if account(other).fits:
                return other
    return None


__all__ = ["check_fit", "free_device_bytes", "free_host_bytes"]
