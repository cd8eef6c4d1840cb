"""The operators of one training step: what runs on which lane, how long it takes alone, what it waits for.

This is the engine's schedule written down as data (docs/cost_model.md). Blocks run forward in order and backward in
reverse; a bucket is complete when the backward of the last block that owns a part of it has produced that part, so a
block's backward is cut into pieces that end where a bucket is complete. Each piece holds the bucket's packing into its
ring slot, its partial sum of squares and, if the GPU casts, the cast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from superoffload.activation_costs import (
    IN_FLIGHT_BLOCKS,
    ActivationCost,
    block_cost,
    block_seconds,
    check_policies,
    policies_of,
)
from superoffload.errors import InputError
from superoffload.hardware import Curve, Hardware
from superoffload.layout import Bucket, TensorRef, cut_buckets, ring_slots
from superoffload.loss_costs import check_loss_chunks
from superoffload.plan import Plan, check_compile, check_master
from superoffload.profiler import Profile, rescale
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
    """What crosses the link."""
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
    buckets: list[Bucket]
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
    return _backward_tensors(tuple((b.dtype, b.tensor_numels) for b in profile.blocks), ())


def buckets_of(profile: Profile, bucket_mb: float, flow_blocks: tuple[int, ...] = ()) -> list[Bucket]:
    """Buckets as the engine cuts them."""
    return _cut(tuple((b.dtype, b.tensor_numels) for b in profile.blocks), bucket_mb, flow_blocks)


@functools.lru_cache(maxsize=128)
def _cut(
    blocks: tuple[tuple[str, tuple[int, ...]], ...], bucket_mb: float, flow_blocks: tuple[int, ...]
) -> list[Bucket]:
    """Cached because a slider move or a search cuts the same model several times; nobody changes the list."""
    return cut_buckets(_backward_tensors(blocks, flow_blocks), bucket_mb)


@functools.lru_cache(maxsize=32)
def _backward_tensors(blocks: tuple[tuple[str, tuple[int, ...]], ...], flow_blocks: tuple[int, ...]) -> list[TensorRef]:
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

    Where the plan's batch is not the profile's, the profile is rescaled (`profiler.rescale`).

    Raises:
        InputError: the plan names blocks or more buckets than there are.
    """
    profile = rescale(profile, micro_batch=plan.micro_batch, seq_len=plan.seq_len)
    check_plan(profile, plan)
    return _Builder(profile, plan).build()


def check_plan(profile: Profile, plan: Plan) -> None:
    """Refuse a plan that cannot belong to this profile."""
    wrong = [b for b in plan.flow_blocks if not 0 <= b < len(profile.blocks)]
    if wrong:
        raise InputError(f"flow_blocks names block {wrong[0]}", expected=f"0 to {len(profile.blocks) - 1}")
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


class _Builder:
    def __init__(self, profile: Profile, plan: Plan):
        self.profile, self.plan = profile, plan
        self.hw: Hardware = profile.hardware
        self.ops: list[Operator] = []
        self.buckets = buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
        self.first_retained = len(self.buckets) - plan.retained_buckets
        self.slots = ring_slots(self.buckets[: self.first_retained], at_once=plan.compile_blocks)
        self.flow = frozenset(plan.flow_blocks)
        self.hbm = self.hw.gpu.hbm_gb_per_s * GB
        self.needs: list[list[int]] = [[] for _ in profile.blocks]
        """Buckets that own a part of each block."""
        self.block_of: list[int] = [t.block for t in backward_tensors(profile)]
        for bucket in self.buckets:
            for b in bucket.blocks:
                self.needs[b].append(bucket.index)
        self.costs = {
            (dtype, flow): bucket_cost(plan, dtype, flow=flow) for dtype in DTYPE_BYTES for flow in (False, True)
        }
        self.alone: dict[tuple[Lane, int], float] = {}
        """Seconds of copies alone; those of a model are nearly all alike."""
        self.held: dict[int, int] = {}
        """Copy after which a bucket's gradients of the micro-batches so far are on the host."""
        self.up: dict[int, int] = {}
        """Upload operator of each bucket that has one."""
        self.home: dict[int, list[int]] = {}
        """Operators after which a bucket's new 16-bit weights lie on the host."""
        self.uses: list[tuple[int, int, int]] = []
        """Uses of flow blocks in GPU order: (block, first operator, last operator)."""
        policies = policies_of(profile.blocks, plan)
        compiled = plan.compile_blocks
        self.seconds = [block_seconds(b, compiled=compiled) for b in profile.blocks]
        """Of each block's forward and backward."""
        self.saved: list[ActivationCost] = [
            block_cost(b, p, compiled=compiled) for b, p in zip(profile.blocks, policies, strict=True)
        ]
        """What each block's forward leaves for its backward."""
        self.moved = [b for b, cost in enumerate(self.saved) if cost.moved]
        """Blocks whose saved tensors go to the host, in forward order."""
        self.down: dict[int, int] = {}
        """Their copies down in the present micro-batch."""
        self.forward_ops: list[tuple[int, int]] = []
        """(operator, block) of the first micro-batch, linked to uploads once these exist."""

    def add(self, lane: Lane, kind: Kind, name: str, seconds: float, **more: object) -> int:
        op = Operator(len(self.ops), lane, kind, name, seconds, **more)  # type: ignore[arg-type]
        self.ops.append(op)
        return op.index

    def build(self) -> StepGraph:
        for micro in range(self.plan.accumulation):
            self._forward(micro)
            last = micro == self.plan.accumulation - 1
            packed = self._backward(micro, last or self.plan.accumulate_on == "cpu")
            if not last and packed:
                self._accumulate(packed)
        self._update(packed)
        self._link_forward()
        self._fetches()
        cpu_is_gpu = self.hw.shared_memory and not self.hw.gpu.peak_bf16_tflops
        return StepGraph(
            ops=self.ops,
            buckets=self.buckets,
            dram_bytes_per_s=self.hw.cpu.dram_gb_per_s * GB,
            both_bytes_per_s=self.hw.link.both_gb_per_s * GB,
            shared_cores=self.plan.adam_threads / self.hw.cpu.cores if cpu_is_gpu else 0.0,
        )

    def _forward(self, micro: int) -> None:
        first = micro == 0
        for b, block in enumerate(self.profile.blocks):
            op = self.add("gpu", "forward", f"forward of {block.name}", self.seconds[b][0], block=b, in_forward=first)
            if first:
                self.forward_ops.append((op, b))
            self._use(b, op, op)
            self._offload(b, op)

    def _offload(self, b: int, forward: int) -> None:
        """Send down what `b`'s forward saves. Its memory is given up when the next but one begins, which therefore
        waits for the copy."""
        if not self.saved[b].moved:
            return
        at = self.moved.index(b)
        name = f"activations of {self.profile.blocks[b].name} down"
        copy = self._copy("link_down", "copy_down", name, self.saved[b].moved, -1, [forward])
        self.ops[copy].block, self.ops[copy].in_forward = b, self.ops[forward].in_forward
        self.down[b] = copy
        if at >= IN_FLIGHT_BLOCKS:
            self.ops[forward].deps.append(self.down[self.moved[at - IN_FLIGHT_BLOCKS]])

    def _bring_back(self, b: int, asked: int) -> list[int]:
        """Fetch what `b` saved, once `asked`, the GPU operator before the backward of the block after it, has ended.
        Return the copy, or nothing where none is needed: what the last blocks saved is still there."""
        if not self.saved[b].moved or b in self.moved[-IN_FLIGHT_BLOCKS:]:
            return []
        name = f"activations of {self.profile.blocks[b].name} up"
        fetch = self._copy("link_up", "fetch", name, self.saved[b].moved, -1, [self.down[b], asked])
        self.ops[fetch].block = b
        return [fetch]

    def _use(self, block: int, first: int, last: int) -> None:
        if block not in self.flow:
            return
        self.uses.append((block, first, last))

    def _backward(self, micro: int, sends: bool) -> dict[int, int]:
        """Add the backward of one micro-batch; return, for one that sends its gradients, the piece that completes each
        bucket."""
        ends = self._bucket_ends() if sends else {}
        packed: dict[int, int] = {}
        asked = ended = max(op.index for op in self.ops if op.kind == "forward")
        for b in range(len(self.profile.blocks) - 1, -1, -1):
            block, again, backward_s = self.profile.blocks[b], self.saved[b].recompute_s, self.seconds[b][1]
            fetch, asked = self._bring_back(b, asked), ended
            first = len(self.ops)
            if again:
                self.add("gpu", "recompute", f"recompute of {block.name}", again, block=b)
            name, done = f"backward of {block.name}", 0.0
            for share, k in ends.get(b, []):
                bucket = self.buckets[k]
                pack = self.costs[bucket.dtype, bucket.flow].gpu_pack_bytes * bucket.params / self.hbm
                seconds = (share - done) * backward_s + pack
                packed[k] = self.add("gpu", "backward", name, seconds, block=b, bucket=k)
                done = share
            if done < 1.0 or len(self.ops) == first:
                self.add("gpu", "backward", name, (1.0 - done) * backward_s, block=b)
            ended = len(self.ops) - 1
            self._use(b, first, ended)
            self.ops[first].deps += fetch
        return packed

    def _accumulate(self, packed: dict[int, int]) -> None:
        """Send the gradients of a micro-batch that is not the last down to where they are held."""
        downs: list[int] = []
        for k in range(self.first_retained):
            self._send(k, packed, downs)
        self.held.update(enumerate(downs))

    def _send(self, k: int, packed: dict[int, int], downs: list[int]) -> None:
        """Add the copy of bucket `k`'s gradient to `downs`, those of the buckets before it in this micro-batch.

        One stream carries them: what earlier micro-batches left in a bucket comes up, is added to, and goes down before
        the next bucket's turn. A slot of the ring is packed again once its last bucket has gone down.
        """
        bucket = self.buckets[k]
        size = self.costs[bucket.dtype, bucket.flow].down_bytes * bucket.params
        if len(downs) >= self.slots:
            self.ops[packed[k]].deps.append(downs[-self.slots])
        deps = [packed[k]]
        if k in self.held:
            before = [self.held[k], packed[k], *downs[-1:]]
            deps.append(self._copy("link_up", "fetch", f"fetch of held bucket {k}", size, k, before))
        downs.append(self._copy("link_down", "copy_down", f"copy down of bucket {k}", size, k, deps))

    def _bucket_ends(self) -> dict[int, list[tuple[float, int]]]:
        """For each block, the shares of its backward at which buckets are complete: by the share of the block's
        parameters whose gradients exist by then, as most of the time goes into their products. The gradients of a
        compiled layer come all at once, at its end."""
        before: list[int] = []
        total = [0] * len(self.profile.blocks)
        for tensor in backward_tensors(self.profile):
            before.append(total[tensor.block])
            total[tensor.block] += tensor.numel
        ends: dict[int, list[tuple[float, int]]] = {}
        for bucket in self.buckets:
            s = bucket.segments[-1]
            b = self.block_of[s.tensor]
            at_once = self.plan.compile_blocks and self.profile.blocks[b].kind == "layer"
            share = 1.0 if at_once else (before[s.tensor] + s.offset + s.numel) / total[b]
            ends.setdefault(b, []).append((share, bucket.index))
        for shares in ends.values():
            shares.sort()
        return ends

    def _update(self, packed: dict[int, int]) -> None:
        """Add what happens to each gradient once its bucket is complete."""
        plan, hw = self.plan, self.hw
        verdict = self.add("validator", "verdict", "the gradient norm", VERDICT_S, deps=[len(self.ops) - 1])
        retained = self.buckets[self.first_retained :]
        gpu_adam = -1
        if retained:
            moved = ADAM_STREAM_BYTES * sum(b.params for b in retained)  # 16-bit: 2 read and 2 written; fp32: 4 read
            name = f"GPU Adam of {len(retained)} retained buckets"
            gpu_adam = self.add("gpu", "gpu_adam", name, moved / self.hbm)
        rate = hw.cpu.adam_at(plan.adam_threads) * GB
        cast_rate = hw.cpu.cast_gb_per_s * GB * min(1.0, rate / (max(hw.cpu.adam_gb_per_s) * GB))
        downs: list[int] = []
        for k, bucket in enumerate(self.buckets):
            if k >= self.first_retained:
                self.home[k] = [gpu_adam]
                if bucket.flow:  # its home is on the host: the new weights go there
                    down = self._copy("link_down", "copy_down", f"copy down of new weights of bucket {k}",
                                      bucket.params * DTYPE_BYTES[bucket.dtype], k, [gpu_adam])  # fmt: skip
                    self.home[k] = [down]
                continue
            cost, params = self.costs[bucket.dtype, bucket.flow], bucket.params
            self._send(k, packed, downs)
            down = downs[-1]
            ahead = plan.may_undo(k)  # a step of the others is not recorded and waits for the verdict
            adam_bytes = cost.adam_bytes + (cost.undo_bytes if ahead else 0)
            before = cost.cast_down_bytes * params / cast_rate
            adam = adam_bytes * params / rate
            after = cost.cast_up_bytes * params / cast_rate
            whole = before + adam + after
            passes: list[tuple[Kind, float]] = [("cpu_cast", before), ("adam", adam), ("cpu_cast", after)]
            parts = tuple((kind, s / whole) for kind, s in passes if s)
            step = self.add(
                "cpu_adam", "adam", f"Adam of bucket {k}", whole, bucket=k, parts=parts if len(parts) > 1 else (),
                dram_bytes=float(params * (adam_bytes + cost.cast_down_bytes + cost.cast_up_bytes)),
                deps=[down] if ahead else [down, verdict],
            )  # fmt: skip
            self.home[k] = [step]
            if not bucket.flow:
                size = cost.up_bytes * params
                up = self._copy("link_up", "copy_up", f"copy up of bucket {k}", size, k, [step])
                self._cast_after(self.ops[up], cost.gpu_cast_bytes * params / self.hbm)
                self.up[k] = up
        if downs:  # the partial sums follow the last gradient down the same stream
            self.ops[verdict].deps.append(downs[-1])

    def _cast_after(self, up: Operator, seconds: float) -> None:
        """Let the GPU's cast follow a copy on the upload stream, beside whatever the GPU computes."""
        if seconds:
            whole = up.seconds + seconds
            up.parts = (("copy_up", up.seconds / whole), ("cast", seconds / whole))
            up.seconds = whole

    def _copy(self, lane: Lane, kind: Kind, name: str, nbytes: int, bucket: int, deps: list[int]) -> int:
        if (lane, nbytes) not in self.alone:
            self.alone[lane, nbytes] = transfer_s(self.hw.link.down if lane == "link_down" else self.hw.link.up, nbytes)
        return self.add(
            lane, kind, name, self.alone[lane, nbytes], link_bytes=nbytes, bucket=bucket, deps=deps,
            dram_bytes=nbytes * self._dma_cost(lane),
        )  # fmt: skip

    def _dma_cost(self, lane: Lane) -> float:
        if self.hw.shared_memory:  # a copy within one memory reads and writes it
            return 2.0
        return self.hw.cpu.dma_write_cost if lane == "link_down" else 1.0

    def _link_forward(self) -> None:
        for op, b in self.forward_ops:
            if b not in self.flow:  # a flow block's fetch waits instead
                self.ops[op].previous += [self.up[k] for k in self.needs[b] if k in self.up]

    def _fetches(self) -> None:
        """Fetch each flow block before a use that does not find it in its slot.

        The k-th flow block has slot k modulo their number, `prefetch_blocks` + 1; a fetch waits for the last use of
        what lies there. So the last blocks of forward are still there when backward begins, and the first ones when
        the next micro-batch does; the next step finds none, since their weights are new.
        """
        order = {b: i for i, b in enumerate(sorted(self.flow))}
        slots = min(self.plan.prefetch_blocks + 1, len(order))
        last_use: dict[int, int] = {}
        if slots:  # where the step before has left each slot
            last_use = {order[b] % slots: last for b, _, last in self.uses}
        this_step: dict[int, int] = {}
        """Slot -> the block in it."""
        last_fetch = -1
        for b, first, last in self.uses:
            slot = order[b] % slots
            if this_step.get(slot) != b:
                block = self.profile.blocks[b]
                nbytes = block.params * DTYPE_BYTES[block.dtype]
                fetch = self._copy("link_up", "fetch", f"fetch of {block.name}", nbytes, -1, [])
                op = self.ops[fetch]
                op.block, op.in_forward = b, self.ops[first].in_forward
                if last_fetch >= 0:
                    op.deps.append(last_fetch)
                (op.deps if slot in this_step else op.previous).append(last_use[slot])
                if op.in_forward:
                    op.previous += [h for k in self.needs[b] for h in self.home[k]]
                self.ops[first].deps.append(fetch)
                last_fetch = fetch
            this_step[slot], last_use[slot] = b, last


def transfer_s(curve: Curve, nbytes: int) -> float:
    """Seconds of one transfer alone."""
    return nbytes / (curve.at(nbytes) * GB) if nbytes else 0.0


def lanes_of(ops: Sequence[Operator]) -> dict[str, int]:
    """Number of operators on each lane."""
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.lane] = counts.get(op.lane, 0) + 1
    return counts
