"""The operators of one training step: what runs on which lane, how long it takes alone, what it waits for.

This is the engine's schedule written down as data (docs/cost_model.md). Blocks run forward in order and backward in
reverse; a bucket is complete when the backward of the last block that owns a part of it has produced that part, so a
block's backward is cut into pieces that end where a bucket is complete. Each piece holds the bucket's packing into its
ring slot, its partial sum of squares and, if the GPU casts, the cast.

Of several chips one is written down: all do the same at the same time. A bucket's gradient is reduce-scattered, and
from there to the new 16-bit weights, which are gathered, each chip has its part alone.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from superoffload.activation_costs import block_cost, block_seconds, check_policies, policies_of
from superoffload.bucket_sums import CutBuckets
from superoffload.collectives import check_chips
from superoffload.errors import InputError
from superoffload.hardware import Curve
from superoffload.layout import Bucket, TensorRef
from superoffload.loss_costs import check_loss_chunks
from superoffload.plan import Plan, check_compile, check_master
from superoffload.profile_scaling import rescale
from superoffload.profiler import BlockProfile, Profile
from superoffload.quickly import remembered
from superoffload.tracing import Kind, Lane
from superoffload.units import ADAM_STATE_BYTES, ADAM_STREAM_BYTES, DTYPE_BYTES, GB, UNDO_BYTES

VERDICT_S = 50e-6
"""Copy of the last partial sums and their addition on the host; assumed."""


@dataclass(slots=True)
class Operator:
    """One piece of work. `seconds` is its time alone on its lane; sharing makes it longer in the simulation."""

    index: int
    lane: Lane
    kind: Kind
    name: str
    seconds: float
    link_bytes: int = 0
    """What crosses the link; of a collective what one chip sends."""
    dram_bytes: float = 0.0
    """What host memory has to move meanwhile, a costly DMA write counted by its weight."""
    deps: list[int] = field(default_factory=list)
    """Operators of the same step that must have ended."""
    previous: list[int] = field(default_factory=list)
    """Operators of the step before that must have ended."""
    block: int = -1
    bucket: int = -1
    in_forward: bool = False
    """Belongs to the first micro-batch's forward: also simulated for the step after the last."""
    parts: tuple[tuple[Kind, float], ...] = ()
    """How the span is drawn where it is several kinds of work one after another: (kind, share)."""


@dataclass(slots=True)
class StepGraph:
    """Operators of one step and how they share the host. GPU operators run in list order; downloads and uploads in
    the order in which they become ready; Adam takes the highest ready bucket, which the next forward needs first."""

    ops: list[Operator]
    buckets: Sequence[Bucket]
    dram_bytes_per_s: float
    """Cap of everything that host memory moves."""
    both_bytes_per_s: float
    """Cap of both link directions together."""
    shared_cores: float = 0.0
    """Where the CPU is the "GPU": Adam's threads per core. Both slow each other down by 1 / (1 + this). 0 otherwise."""

    @property
    def last_gpu(self) -> int:
        """Index of the operator that ends the step on the GPU."""
        return max(op.index for op in self.ops if op.lane == "gpu")

    def load(self, lane: Lane) -> float:
        """Seconds that `lane` works per step when nothing else disturbs it: no step can be shorter."""
        return sum(op.seconds for op in self.ops if op.lane == lane)


def backward_tensors(profile: Profile) -> list[TensorRef]:
    """Tensors in backward-completion order: blocks reversed, tensors reversed within a block."""
    return _backward_tensors(_shapes(profile.blocks), ())


def buckets_of(profile: Profile, bucket_mb: float, flow_blocks: tuple[int, ...] = ()) -> CutBuckets:
    """Buckets as the engine cuts them. Remembered because a slider move or a search cuts the same model several times;
    nobody changes them."""
    shapes = _shapes(profile.blocks)
    key = (id(shapes), bucket_mb, flow_blocks)
    with _CUTS_LOCK:
        if key in _CUTS:
            _CUTS.move_to_end(key)
            return _CUTS[key]
    cut = CutBuckets(_backward_tensors(shapes, flow_blocks), bucket_mb)
    with _CUTS_LOCK:
        _CUTS[key] = cut
        if len(_CUTS) > MOST_CUTS:
            _CUTS.popitem(last=False)
        large = [k for k, c in _CUTS.items() if len(c) > LARGE_CUT]
        if len(large) > 3 and sum(len(_CUTS[k]) for k in large) > MOST_CUT_BUCKETS:
            del _CUTS[large[0]]
    return cut


MOST_CUTS, LARGE_CUT, MOST_CUT_BUCKETS = 128, 10_000, 2_000_000
"""Cuts that are remembered, buckets that make one large, and of how many buckets all large ones together may be: some
200 MB. The newest three are kept in any case, since a plan is made by going back and forth between them."""
_CUTS: OrderedDict[tuple[int, float, tuple[int, ...]], CutBuckets] = OrderedDict()
_CUTS_LOCK = threading.Lock()
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_KNOWN_SHAPES: dict[Shapes, Shapes] = {}


@remembered(64)
def _shapes(blocks: tuple[BlockProfile, ...]) -> Shapes:
    """Dtype and tensors of each block; equal models have the same one, which is never dropped."""
    shapes = tuple((b.dtype, b.tensor_numels) for b in blocks)
    return _KNOWN_SHAPES.setdefault(shapes, shapes)


@functools.lru_cache(maxsize=32)
def _backward_tensors(blocks: Shapes, flow_blocks: tuple[int, ...]) -> list[TensorRef]:
    refs: list[TensorRef] = []
    for b in range(len(blocks) - 1, -1, -1):
        dtype, numels = blocks[b]
        for numel in reversed(numels):
            refs.append(TensorRef(len(refs), b, numel, dtype, b in flow_blocks))
    return refs


def up_bytes_per_param(plan: Plan, dtype: str) -> int:
    """Bytes per parameter of new weights that go up the link."""
    return 4 if plan.cast_up == "gpu" else DTYPE_BYTES[dtype]


def down_bytes_per_param(plan: Plan, dtype: str) -> int:
    """Bytes per parameter of gradients that go down the link."""
    return 4 if plan.cast_down == "gpu" else DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class BucketCost:
    """What one parameter of a CPU bucket costs: bytes per parameter and the passes on the Adam pool."""

    down_bytes: int
    up_bytes: int
    adam_bytes: int
    """Of a step that is not recorded."""
    undo_bytes: int
    """Of its undo record or snapshot, where the bucket has one."""
    cast_down_bytes: int
    """Of a separate pass before Adam; 0 without one."""
    cast_up_bytes: int
    """Of a separate pass after Adam; 0 without one."""
    gpu_pack_bytes: int
    """HBM bytes of packing, norm and cast of one gradient."""
    gpu_cast_bytes: int = 0
    """HBM bytes of the GPU's cast of one new weight, on the upload stream."""


def bucket_cost(plan: Plan, dtype: str, *, flow: bool = False) -> BucketCost:
    """Bytes per parameter for the plan's casts.

    A split master is read and written as its two halves, of which one is that copy (24 with m and v).

    A flow bucket's 16-bit weights have their home on the host, so the CPU writes them whatever `cast_up` says: where
    the GPU would cast, inside the Adam pass.

    Adam reads and writes p, m and v (24), reads the gradient (2, or 4 once it is fp32) and, fused, writes the 16-bit
    upload copy in the same pass (2). Where the GPU casts, and for fp32 weights, the master itself goes up.
    """
    item = DTYPE_BYTES[dtype]
    undo = {"record": UNDO_BYTES, "snapshot": ADAM_STATE_BYTES}[plan.undo]
    if item == 4:
        return BucketCost(4, 4, 24 + 4, undo, 0, 0, 12)
    down, up = plan.cast_down, "fused" if flow and plan.cast_up == "gpu" else plan.cast_up
    gradient = 2 if down == "fused" else 4
    copy = 2 if up == "fused" and not (plan.master == "split" and dtype == "bfloat16") else 0
    return BucketCost(
        down_bytes=down_bytes_per_param(plan, dtype),
        up_bytes=0 if flow else up_bytes_per_param(plan, dtype),
        adam_bytes=24 + gradient + copy,
        undo_bytes=undo,
        cast_down_bytes=6 if down == "cpu" else 0,
        cast_up_bytes=6 if up == "cpu" else 0,
        gpu_pack_bytes=8 if down == "gpu" else 6,
        gpu_cast_bytes=6 if up == "gpu" else 0,
    )


def build(profile: Profile, plan: Plan) -> StepGraph:
    """Write down the step that the engine runs under `plan`.

    Where the plan's batch is not the profile's, the profile is rescaled (`profile_scaling.rescale`).

    Raises:
        InputError: the plan names blocks or more buckets than there are, or more chips.
    """
    profile = fitted(profile, plan)
    check_plan(profile, plan)
    from superoffload.step_builder import StepBuilder

    return StepBuilder(profile, plan).build()


def gpu_seconds(profile: Profile, plan: Plan) -> float:
    """Seconds that the GPU works per step when nothing disturbs it: what the operators of `build` add up to, without
    writing them down."""
    profile = fitted(profile, plan)
    check_plan(profile, plan)
    once = 0.0
    for block, policy in zip(profile.blocks, policies_of(profile.blocks, plan), strict=True):
        recompute_s = block_cost(block, policy, compiled=plan.compile_blocks).recompute_s
        once += sum(block_seconds(block, compiled=plan.compile_blocks)) + recompute_s
    buckets = buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
    sums, packed, updated, held = buckets.sums(plan.chips), 0, 0, 0
    for dtype, flow in sums.kinds:
        pack, packing = bucket_cost(plan, dtype, flow=flow).gpu_pack_bytes, 2 * DTYPE_BYTES[dtype]
        whole, own = sums.whole_params[dtype, flow], sums.params_of_rest((dtype, flow), 0)
        packed += pack * whole if plan.chips == 1 else packing * whole + (pack - packing) * own
        retained = sums.params_of_rest((dtype, flow), len(buckets) - plan.retained_buckets)
        updated += retained
        if plan.chips == 1:  # gradients are added to held ones, which are read besides
            held += DTYPE_BYTES[dtype] * (whole - retained)
    sent = plan.accumulation if plan.accumulate_on == "cpu" else 1
    moved = sent * packed + (sent - 1) * held + ADAM_STREAM_BYTES * updated
    return plan.accumulation * once + moved / (profile.hardware.gpu.hbm_gb_per_s * GB)


def fitted(profile: Profile, plan: Plan) -> Profile:
    """The profile for the plan's batch and chips."""
    return rescale(
        profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len, sequence_parallel=plan.sequence_parallel
    )


def check_plan(profile: Profile, plan: Plan) -> None:
    """Refuse a plan that cannot belong to this profile."""
    check_chips(profile.hardware, plan)
    wrong = [b for b in plan.flow_blocks if not 0 <= b < len(profile.blocks)]
    if wrong:
        raise InputError(f"flow_blocks names block {wrong[0]}", expected=f"0 to {len(profile.blocks) - 1}")
    if plan.activations_by_block:
        check_policies([b.kind for b in profile.blocks], plan)
    check_loss_chunks(profile.blocks, plan)
    check_master(plan)
    check_compile(plan)
    total = len(buckets_of(profile, plan.bucket_mb, plan.flow_blocks))
    if plan.retained_buckets > total:
        raise InputError(
            f"retained_buckets = {plan.retained_buckets}",
            expected=f"at most {total}, the buckets that {profile.model} has at {plan.bucket_mb:g} MiB",
        )


def transfer_s(curve: Curve, nbytes: int) -> float:
    """Seconds of one transfer alone."""
    return nbytes / (curve.at(nbytes) * GB) if nbytes else 0.0


def lanes_of(ops: Sequence[Operator]) -> dict[str, int]:
    """Number of operators on each lane."""
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.lane] = counts.get(op.lane, 0) + 1
    return counts
