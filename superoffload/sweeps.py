"""What-if sweeps: tokens/s of one plan over two quantities, everything else as it is.

Every point is checked against the memory and simulated with the buckets that it has; of more than four micro-batches
the later ones are taken for repetitions of the third (`planner_pace.seconds_of`). What does not fit has no number, but
a reason. All numbers are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from superoffload.errors import InputError, NotSupported, unknown_name
from superoffload.fitting import evenly
from superoffload.graph import buckets_of
from superoffload.hardware import Hardware
from superoffload.links import LINK_NAMES, LINKS_GB_PER_S, link_at
from superoffload.memory import ledger
from superoffload.model import ModelSpec
from superoffload.plan import Plan
from superoffload.planner_pace import seconds_of
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile
from superoffload.units import FP32_BYTES, MIB

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ACCUMULATIONS = (1, 2, 4, 8, 16)
BUCKETS_MIB = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
MOST_BUCKETS = 1024
"""Smaller buckets than so many are not swept: simulating them takes long, and they differ little."""
LEAST_BUCKETS = 4

Setting = tuple[Profile, Plan]


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """A quantity that a sweep may change."""

    title: str
    """With its unit."""
    values: Callable[[Profile, Plan], Sequence[float]]
    """What is tried; the plan's own value is added."""
    own: Callable[[Profile, Plan], float]
    """The value that plan and machine have."""
    place: Callable[[Profile, Plan, float], Setting]
    """Profile and plan with another value."""
    show: Callable[[float], str] = lambda v: f"{v:,.6g}"
    refuse: Callable[[Profile], tuple[str, str] | None] = lambda profile: None
    """Why this profile cannot tell, and what to do; None where it can."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One setting of a sweep."""

    x: float
    y: float
    tokens_per_s: float | None
    """Modelled; None where the plan does not fit or is impossible."""
    reason: str = ""
    """Why there is no number."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Tokens/s over two axes. Points are in rows of equal y, x ascending, as far as the sweep got."""

    x: str
    y: str
    """Names of `AXES`."""
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    own: tuple[float, float]
    """Where the plan itself stands."""
    points: tuple[SweepPoint, ...]
    hardware: str
    model: str
    notes: tuple[str, ...] = ()
    """What was assumed beside the cost model."""
    cancelled: bool = False

    @property
    def best(self) -> SweepPoint | None:
        """The fastest point; None where none fits."""
        ran = [p for p in self.points if p.tokens_per_s is not None]
        return max(ran, key=lambda p: p.tokens_per_s or 0.0, default=None)

    def at(self, x: float, y: float) -> SweepPoint:
        """The point of these values. Raises KeyError where the sweep has none."""
        for p in self.points:
            if (p.x, p.y) == (x, y):
                return p
        raise KeyError((x, y))


def _buckets(profile: Profile, plan: Plan) -> int:
    return len(buckets_of(profile, plan.bucket_mb, plan.flow_blocks))


def _share(profile: Profile, plan: Plan) -> float:
    return min(1.0, plan.retained_buckets / max(1, _buckets(profile, plan)))


def _with_share(profile: Profile, plan: Plan, share: float) -> Setting:
    return profile, plan.model_copy(update={"retained_buckets": round(share * _buckets(profile, plan))})


def _bucket_sizes(profile: Profile, plan: Plan) -> Sequence[float]:
    total = profile.params * FP32_BYTES / MIB
    return [s for s in BUCKETS_MIB if LEAST_BUCKETS <= total / s <= MOST_BUCKETS]


def _with_size(profile: Profile, plan: Plan, size: float) -> Setting:
    """Another bucket size with the same shares of retained buckets and of undo memory."""
    share, before = _share(profile, plan), _buckets(profile, plan)
    changed = plan.model_copy(update={"bucket_mb": size})
    if plan.undo_buckets is not None:
        undo = max(1, round(plan.undo_buckets * _buckets(profile, changed) / before))
        changed = changed.model_copy(update={"undo_buckets": undo})
    return _with_share(profile, changed, share)


def _layers(profile: Profile) -> tuple[int, ...]:
    return tuple(i for i, b in enumerate(profile.blocks) if b.kind == "layer")


def _with_flow(profile: Profile, plan: Plan, count: float) -> Setting:
    """So many flowing layers, evenly spread, with the same share of retained buckets."""
    if count == len(plan.flow_blocks):
        return profile, plan
    changed = plan.model_copy(update={"flow_blocks": evenly(_layers(profile), int(count))})
    return _with_share(profile, changed, _share(profile, plan))


def _with_field(name: str) -> Callable[[Profile, Plan, float], Setting]:
    def place(profile: Profile, plan: Plan, value: float) -> Setting:
        return profile, plan.model_copy(update={name: int(value)})

    return place


def _with_batch(profile: Profile, plan: Plan, value: float) -> Setting:
    return rescale(profile, micro_batch=int(value)), plan.model_copy(update={"micro_batch": int(value)})


def _with_sequence(profile: Profile, plan: Plan, value: float) -> Setting:
    return rescale(profile, seq_len=int(value)), plan.model_copy(update={"seq_len": int(value)})


def _sequences(profile: Profile, plan: Plan) -> Sequence[float]:
    most = ModelSpec.from_json(profile.context["spec"]).learned_positions
    return [s for s in SEQUENCES if not most or s <= most]


def _no_other_sequence(profile: Profile) -> tuple[str, str] | None:
    if "spec" in profile.context:
        return None
    return (
        "attention grows faster than the sequence, which a measured profile cannot tell",
        "Sweep an estimate: so.estimate(...), or profile with a batch of each length",
    )


def _link_rate(hardware: Hardware) -> float:
    return (hardware.link.down.peak + hardware.link.up.peak) / 2


def _with_link(profile: Profile, plan: Plan, rate: float) -> Setting:
    """Another link; at its own rate the machine keeps its own, which may be faster one way."""
    if rate == _link_rate(profile.hardware):
        return profile, plan
    return retarget(profile, link_at(profile.hardware, rate)), plan


def _show_link(rate: float) -> str:
    return f"{rate:,.4g}" + (f" {LINK_NAMES[rate]}" if rate in LINK_NAMES else "")


def _threads(profile: Profile, plan: Plan) -> Sequence[float]:
    cores = profile.hardware.cpu.cores
    return sorted({max(1, round(cores * k / 8)) for k in range(1, 9)})


AXES: dict[str, SweepAxis] = {
    "bucket_mb": SweepAxis("bucket size, MiB", _bucket_sizes, lambda profile, plan: plan.bucket_mb, _with_size),
    "retained": SweepAxis(
        "retained buckets, % of all", lambda profile, plan: SHARES, _share, _with_share, lambda v: f"{100 * v:.3g}"
    ),
    "micro_batch": SweepAxis(
        "micro-batch, sequences", lambda profile, plan: MICRO_BATCHES, lambda profile, plan: plan.micro_batch,
        _with_batch,
    ),
    "seq_len": SweepAxis(
        "sequence, tokens", _sequences, lambda profile, plan: plan.seq_len, _with_sequence, refuse=_no_other_sequence
    ),
    "link_gb_per_s": SweepAxis(
        "link each way, GB/s", lambda profile, plan: LINKS_GB_PER_S, lambda profile, plan: _link_rate(profile.hardware),
        _with_link, _show_link,
    ),
    "flow": SweepAxis(
        "layers whose weights flow", lambda profile, plan: sorted({len(_layers(profile)) * k // 8 for k in range(9)}),
        lambda profile, plan: len(plan.flow_blocks), _with_flow,
    ),
    "adam_threads": SweepAxis(
        "Adam threads", _threads, lambda profile, plan: plan.adam_threads, _with_field("adam_threads")
    ),
    "accumulation": SweepAxis(
        "micro-batches per step", lambda profile, plan: ACCUMULATIONS, lambda profile, plan: plan.accumulation,
        _with_field("accumulation"),
    ),
}  # fmt: skip
"""Name -> what a sweep changes. The machine's link comes before what the plan says (`_ORDER`)."""
_ORDER = ("link_gb_per_s", "micro_batch", "seq_len", "accumulation", "flow", "bucket_mb", "retained", "adam_threads")
"""In which order two axes are applied: a share of retained buckets counts those of the size that was set before."""


def sweep(
    profile: Profile,
    plan: Plan,
    x: str = "bucket_mb",
    y: str = "retained",
    *,
    xs: Sequence[float] | None = None,
    ys: Sequence[float] | None = None,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Simulate a plan over two quantities, everything else of it as it is.

    Args:
        profile: measured or estimated, on the machine of interest.
        plan: the plan that is varied.
        x, y: two different names of `AXES`.
        xs, ys: values to try instead of the usual ones; the plan's own is added.
        cancel: asked before each point; the sweep then returns what it has.
        progress: called after each point with (points done, points in all).

    Raises:
        InputError: an unknown axis, or the same twice.
        NotSupported: the profile cannot tell about another value.
    """
    for name in (x, y):
        if name not in AXES:
            raise unknown_name("sweep axis", name, AXES)
    if x == y:
        raise InputError(f"both axes are {x}", expected="two different axes")
    profile = rescale(profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len)
    for name in (x, y):
        refused = AXES[name].refuse(profile)
        if refused is not None:
            raise NotSupported(f"{name} cannot be swept: {refused[0]}", remedy=refused[1])
    own = {name: float(AXES[name].own(profile, plan)) for name in (x, y)}
    values = {
        name: tuple(sorted({own[name], *map(float, AXES[name].values(profile, plan) if given is None else given)}))
        for name, given in ((x, xs), (y, ys))
    }
    total, points, cancelled = len(values[x]) * len(values[y]), [], False
    for vy in values[y]:
        for vx in values[x]:
            if cancel is not None and cancel():
                cancelled = True
                break
            points.append(_point(profile, plan, {x: vx, y: vy}, vx, vy))
            if progress is not None:
                progress(len(points), total)
        if cancelled:
            break
    return Sweep(
        x=x, y=y, xs=values[x], ys=values[y], own=(own[x], own[y]), points=tuple(points),
        hardware=profile.hardware.name, model=profile.model, notes=_notes(profile, (x, y)), cancelled=cancelled,
    )  # fmt: skip


def setting(profile: Profile, plan: Plan, values: Mapping[str, float]) -> Setting:
    """The profile and the plan of one point: `plan` with other values of some `AXES`.

    Of a sweep's point: ``setting(profile, plan, {sweep.x: point.x, sweep.y: point.y})``. The profile is another one
    where the batch or the machine's link is.

    Raises:
        InputError: an unknown axis, or a value that is not possible.
    """
    for name in values:
        if name not in AXES:
            raise unknown_name("sweep axis", name, AXES)
    profile = rescale(profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len)
    for name in _ORDER:
        if name in values:
            profile, plan = AXES[name].place(profile, plan, values[name])
    return profile, plan


def _point(profile: Profile, plan: Plan, values: dict[str, float], x: float, y: float) -> SweepPoint:
    try:
        profile, plan = setting(profile, plan, values)
        lacks = ledger(profile, plan).shortage()
        if lacks:
            return SweepPoint(x, y, None, f"does not fit: {lacks}")
        return SweepPoint(x, y, plan.tokens_per_step / seconds_of(profile, plan))
    except InputError as e:
        return SweepPoint(x, y, None, f"impossible: {e.what}")


def _notes(profile: Profile, names: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if "micro_batch" in names and "spec" not in profile.context:
        notes.append("times and activations of another micro-batch are in proportion to its tokens")
    if "link_gb_per_s" in names:
        hw = profile.hardware
        notes.append(
            f"the link of {hw.name} itself is {hw.link.down.peak:,.4g} GB/s down and {hw.link.up.peak:,.4g} up; others "
            "are alike both ways, and the rest of the machine stays"
        )
    return tuple(notes)
