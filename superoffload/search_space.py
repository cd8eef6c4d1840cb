"""What the search may change: one line for each field of the plan, and how a point of the space becomes a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from superoffload import graph
from superoffload.errors import InputError
from superoffload.fitting import evenly
from superoffload.loss_costs import can_chunk
from superoffload.plan import CASTS, Activations, Plan
from superoffload.planner import MIN_BUCKETS
from superoffload.planner_placement import open_policies
from superoffload.planner_room import Room
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.units import FP32_BYTES, MIB

Point = tuple[int, ...]
"""For each axis of a space the index of its candidate."""
MOST_SEQUENCES = 256
"""Largest micro-batch that is tried where the number of tokens per step is free."""
MOST_BUCKETS = 1024
"""Smaller buckets than so many are not tried: four of them on the GPU take next to nothing already."""
Mix = tuple[str, int]
"""A policy, and how many layers have it instead of the others'."""
MIXED_WITH: tuple[Activations, ...] = ("none", "selective")
"""Policies that some layers may have where the others have a slower one."""
SHARES = 32
"""Retained buckets are tried in steps of one part in so many."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the candidates of a field may depend on."""

    profile: Profile
    start: Plan
    """The planner's own plan."""
    fixed: frozenset[str]
    """Fields that the user has set."""
    sequences: int | None
    """Sequences per step, of all chips; None where they are free."""

    profiles: dict[tuple[int, int], Profile] = field(default_factory=dict)
    """For each micro-batch and number of chips that share a sequence that was asked for."""
    ranges: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)
    """Plan without retained buckets -> fewest and most that the memory allows."""

    def of(self, plan: Plan) -> Profile:
        """The profile for the plan's micro-batch and for its part of a sequence."""
        key = plan.micro_batch, plan.sequence_parallel
        if key not in self.profiles:
            self.profiles[key] = rescale(self.profile, micro_batch=key[0], sequence_parallel=key[1])
        return self.profiles[key]

    @property
    def alone(self) -> bool:
        """Whether the CPU is the only processor."""
        hw = self.profile.hardware
        return hw.shared_memory and not hw.gpu.peak_bf16_tflops

    def all_weights(self, dtype: str) -> bool:
        return all(b.dtype == dtype for b in self.profile.blocks)


def plan_key(plan: Plan) -> tuple[Any, ...]:
    """What tells plans apart, reasons left out."""
    fields = plan.__dict__
    return tuple(tuple(sorted(fields[n].items())) if isinstance(fields[n], dict) else fields[n] for n in Plan.knobs())


def _field_alone(_: Task, plan: Plan, name: str, value: Any) -> Plan:
    return plan.model_copy(update={name: value})


@dataclass(frozen=True, slots=True)
class Axis:
    """One field that the search may change. The field's value in the start plan is always a candidate too."""

    candidates: Callable[[Task], Sequence[Any]]
    ordered: bool = False
    """Whether a candidate between two others costs something between what they cost."""
    basin: bool = False
    """Whether so much else has to change with it that a descent rarely crosses over: all combinations of such fields
    are starts of descents."""
    place: Callable[[Task, Plan, str, Any], Plan] = _field_alone
    """Put a candidate into a plan whose earlier axes are set."""
    read: Callable[[Task, Plan, str], Any] = lambda task, plan, name: getattr(plan, name)
    """The candidate that a plan has."""
    only: Callable[[Plan], Any] = lambda plan: None
    """The one value that makes sense beside the earlier axes, or None where the choice is open."""


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _sharing(task: Task) -> list[int]:
    """Numbers of chips that may share a sequence: the others then work on sequences of their own."""
    chips, start = task.start.chips, task.start
    if chips == 1 or "data_parallel" in task.fixed:
        return [start.sequence_parallel]
    found = []
    for n in _divisors(chips):
        groups = chips // n
        if task.sequences is not None:
            alone, rest = divmod(task.sequences, groups)
            given = [getattr(start, f) for f in ("accumulation", "micro_batch") if f in task.fixed]
            if rest or any(alone % value for value in given[:1]):
                continue
        try:
            rescale(task.profile, sequence_parallel=n)
        except InputError:  # heads or tokens that n does not divide, or a profile that was measured
            continue
        found.append(n)
    return found


def _alone(task: Task) -> list[int]:
    """Sequences per step of one group of chips, for every way in which chips may share."""
    return [(task.sequences or 0) * n // task.start.chips for n in _sharing(task)]


def _batch(task: Task, plan: Plan, micro_batch: int) -> dict[str, int]:
    """The batch with the largest micro-batch up to this one that divides a group's sequences."""
    if task.sequences is None:
        return {"micro_batch": micro_batch}
    alone = task.sequences // plan.data_parallel
    if "accumulation" in task.fixed:
        micro_batch = alone // task.start.accumulation
    elif "micro_batch" not in task.fixed:
        micro_batch = max(n for n in _divisors(alone) if n <= micro_batch)
    return {"micro_batch": micro_batch, "accumulation": alone // micro_batch}


def _place_sharing(task: Task, plan: Plan, name: str, value: int) -> Plan:
    plan = plan.model_copy(update={name: value, "data_parallel": task.start.chips // value})
    return plan.model_copy(update=_batch(task, plan, plan.micro_batch))


def _micro_batches(task: Task) -> Sequence[int]:
    if task.sequences is None:
        return [2**k for k in range(int(math.log2(MOST_SEQUENCES)) + 1)]
    if "accumulation" in task.fixed:
        return []
    return sorted({n for alone in _alone(task) for n in _divisors(alone)})


def _place_micro_batch(task: Task, plan: Plan, name: str, value: int) -> Plan:
    return plan.model_copy(update=_batch(task, plan, value))


def _where_to_wait(task: Task) -> Sequence[str]:
    never = task.sequences is None or max(_alone(task)) == 1 or "micro_batch" in task.fixed
    return () if never and task.start.accumulation == 1 else ("gpu", "cpu")


def _bucket_sizes(task: Task) -> Sequence[float]:
    total = task.profile.params * FP32_BYTES / MIB
    return [2.0**k for k in range(3, 10) if MIN_BUCKETS <= total / 2.0**k <= MOST_BUCKETS]


def _threads(task: Task) -> Sequence[int]:
    """No more than the planner gives Adam: the others are PyTorch's, whose need of them is not modelled."""
    n = task.start.adam_threads
    return [max(1, n // 2), max(1, 3 * n // 4)]


def _masters(task: Task) -> Sequence[str]:
    by_hand = "cast_up" in task.fixed and task.start.cast_up != "fused"
    return ["plain"] if by_hand or not any(b.dtype == "bfloat16" for b in task.profile.blocks) else ["plain", "split"]


def _casts(task: Task) -> Sequence[str]:
    return ["fused"] if task.all_weights("float32") else CASTS


def _layers(task: Task) -> Sequence[int]:
    return [] if task.profile.hardware.shared_memory else range(len(_layer_blocks(task)) + 1)


def _place_flow(task: Task, plan: Plan, name: str, count: int) -> Plan:
    """Evenly spread, over the layers first whose state is on the host whatever is retained."""
    if count == len(task.start.flow_blocks):
        return plan.model_copy(update={name: task.start.flow_blocks})
    stationary = plan.model_copy(update={name: (), "retained_buckets": 0})
    room = Room(task.of(plan), ())
    least = room.relieving_host(stationary)
    return plan.model_copy(update={name: room.flowing(least, count)})


def _retained_range(task: Task, plan: Plan) -> tuple[int, int]:
    """Fewest retained buckets that the host's memory needs, and most that the GPU's allows; where these exclude each
    other, the fewest twice."""
    key = plan_key(plan.model_copy(update={"retained_buckets": 0}))
    if key not in task.ranges:
        task.ranges[key] = _find_range(task.of(plan), plan)
    return task.ranges[key]


def _find_range(profile: Profile, plan: Plan) -> tuple[int, int]:
    room = Room(profile, ())
    total = len(graph.buckets_of(profile, plan.bucket_mb, plan.flow_blocks))

    def over(n: int) -> int:
        return room.gpu_over(plan.model_copy(update={"retained_buckets": n}))

    least = room.relieving_host(plan).retained_buckets
    low = over(least)
    if low > 0:
        return least, least
    high = over(total)
    if high <= 0:
        return least, total
    most = least + math.floor((total - least) * -low / (high - low))  # nearly in proportion
    while over(most) > 0:
        most -= 1
    return least, most


def _place_share(task: Task, plan: Plan, name: str, share: float) -> Plan:
    least, most = _retained_range(task, plan)
    return plan.model_copy(update={name: least + round(share * (most - least))})


def _read_share(task: Task, plan: Plan, name: str) -> float:
    least, most = _retained_range(task, plan)
    return min(1.0, max(0.0, (plan.retained_buckets - least) / max(1, most - least)))


NO_MIX: Mix = ("", 0)


def _mixes(task: Task) -> Sequence[Mix]:
    """Any number of layers under a policy that saves the GPU time for memory. Whoever gives the policy means it for
    all of them."""
    layers = len(_layer_blocks(task))
    if "activations" in task.fixed or layers < 2:
        return ()
    quick = [p for p in MIXED_WITH if p in open_policies(task.profile, compiled=task.start.compile_blocks)]
    return [NO_MIX, *((policy, n) for policy in quick for n in range(1, layers))]


def _place_mix(task: Task, plan: Plan, name: str, value: Mix) -> Plan:
    """Evenly spread, as the planner spreads them."""
    policy, count = value
    by_block: Mapping[int, str] = (
        {} if policy == plan.activations else dict.fromkeys(evenly(_layer_blocks(task), count), policy)
    )
    if value == _read_mix(task, task.start, name) and plan.activations == task.start.activations:
        by_block = task.start.activations_by_block
    return plan.model_copy(update={name: by_block})


def _read_mix(task: Task, plan: Plan, name: str) -> Mix:
    policies = list(plan.activations_by_block.values())
    return (max(policies, key=policies.count), len(policies)) if policies else NO_MIX


def _layer_blocks(task: Task) -> list[int]:
    return [i for i, b in enumerate(task.profile.blocks) if b.kind == "layer"]


def _place_undo(task: Task, plan: Plan, name: str, share: float) -> Plan:
    """As a share of all buckets, since their number depends on their size."""
    total = len(graph.buckets_of(task.profile, plan.bucket_mb))
    return plan.model_copy(update={name: max(1, round(share * total)) if share < 1.0 else None})


def _read_undo(task: Task, plan: Plan, name: str) -> float:
    if plan.undo_buckets is None:
        return 1.0
    return min(1.0, plan.undo_buckets / len(graph.buckets_of(task.profile, plan.bucket_mb)))


AXES: dict[str, Axis] = {
    "sequence_parallel": Axis(_sharing, ordered=True, basin=True, place=_place_sharing),
    "micro_batch": Axis(_micro_batches, ordered=True, basin=True, place=_place_micro_batch),
    "accumulate_on": Axis(_where_to_wait, basin=True, only=lambda plan: "gpu" if plan.accumulation == 1 else None),
    "activations": Axis(lambda task: open_policies(task.profile, compiled=task.start.compile_blocks), basin=True),
    # Ordered within a policy: a step of many layers is seldom better than several of few.
    "activations_by_block": Axis(
        _mixes,
        ordered=True,
        place=_place_mix,
        read=_read_mix,
        only=lambda plan: NO_MIX if plan.activations in ("none", "offload_saved") else None,
    ),
    "loss_chunks": Axis(lambda task: (1, 4, 16) if can_chunk(task.profile.blocks) else (), ordered=True),
    "bucket_mb": Axis(_bucket_sizes, ordered=True),
    "master": Axis(_masters),
    "cast_down": Axis(_casts),
    "cast_up": Axis(_casts, only=lambda plan: "fused" if plan.master == "split" else None),
    "speculate": Axis(lambda task: ("off",) if task.alone else ("auto", "off")),
    "undo_buckets": Axis(
        lambda task: () if task.alone else (0.25, 0.5, 1.0),
        ordered=True,
        place=_place_undo,
        read=_read_undo,
        only=lambda plan: 1.0 if plan.speculate == "off" else None,
    ),
    "adam_threads": Axis(_threads, ordered=True),
    "flow_blocks": Axis(
        _layers, ordered=True, place=_place_flow, read=lambda task, plan, name: len(getattr(plan, name))
    ),
    "retained_buckets": Axis(
        lambda task: () if task.alone else [k / SHARES for k in range(SHARES + 1)],
        ordered=True,
        place=_place_share,
        read=_read_share,
    ),
    "prefetch_blocks": Axis(lambda _: (1, 2, 3), ordered=True, only=lambda plan: None if plan.flow_blocks else 1),
}
"""Field -> its axis. A new field of Plan becomes part of the search by a line here; one that depends on others comes
after them. What is neither here nor in NOT_SEARCHED stays as the planner chose it."""

NOT_SEARCHED: dict[str, str] = {
    "seq_len": "what the model learns from, not how",
    "accumulation": "follows from micro_batch and the tokens per step",
    "undo": "a snapshot takes more memory and more time than a record, whatever the rest is",
    "compile_blocks": "compiling changes the bits of the results, so it is for a person to choose",
    "data_parallel": "follows from sequence_parallel and the number of chips",
}
"""Fields that stay as given or as the planner chose them, and why."""


class Space:
    """All plans that a search may try.

    Args:
        profile: for the start plan's micro-batch.
        start: the planner's own plan.
        fixed: fields that stay as they are in `start`.
        sequences: micro_batch · accumulation · data_parallel of every plan; None leaves it free.
    """

    def __init__(self, profile: Profile, start: Plan, fixed: frozenset[str], sequences: int | None):
        self.task = Task(profile, start, fixed, sequences)
        self.values: dict[str, tuple[Any, ...]] = {}
        """Axes with a choice -> their candidates."""
        for name, axis in AXES.items():
            if name in fixed:
                continue
            own = axis.read(self.task, start, name)
            found = dict.fromkeys(axis.candidates(self.task))
            if own not in found:
                found = dict.fromkeys(sorted([*found, own]) if axis.ordered else [*found, own])
            if len(found) > 1:
                self.values[name] = tuple(found)

    @property
    def size(self) -> int:
        """Number of points; several may be the same plan."""
        return math.prod(len(v) for v in self.values.values())

    @property
    def start(self) -> Point:
        """The point of the start plan."""
        task = self.task
        return tuple(v.index(AXES[n].read(task, task.start, n)) for n, v in self.values.items())

    def plan(self, point: Point) -> Plan:
        """The plan at `point`; where a choice is not open beside the others, its only sensible value."""
        plan = self.task.start.model_copy(update={"reasons": {}})
        chosen = dict(zip(self.values, point, strict=True))
        for name, axis in AXES.items():
            if name in chosen:
                only = axis.only(plan)
                value = self.values[name][chosen[name]] if only is None else only
                plan = axis.place(self.task, plan, name, value)
        return plan

    def moves(self, point: Point) -> list[Point]:
        """Points that differ in one axis: any other candidate, or for long ordered axes those 1, 2, 4 ... away."""
        found: list[Point] = []
        for i, (name, values) in enumerate(self.values.items()):
            n, here = len(values), point[i]
            steps = {2**k for k in range(n.bit_length())} if AXES[name].ordered else set(range(1, n))
            others = sorted({here + s for s in steps} | {here - s for s in steps})
            found += [(*point[:i], k, *point[i + 1 :]) for k in others if 0 <= k < n]
        return found
