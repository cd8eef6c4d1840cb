"""Write a step down operator by operator: what `graph.build` returns is made here.

Each method adds what one part of the engine does, in the order in which the engine does it.
"""

from __future__ import annotations

from superoffload.activation_costs import IN_FLIGHT_BLOCKS, ActivationCost, block_cost, block_seconds, policies_of
from superoffload.collectives import Collectives
from superoffload.graph import (
    VERDICT_S,
    Operator,
    StepGraph,
    backward_tensors,
    bucket_cost,
    buckets_of,
    transfer_s,
)
from superoffload.hardware import Hardware
from superoffload.layout import Bucket
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.tracing import Kind, Lane
from superoffload.units import ADAM_STREAM_BYTES, DTYPE_BYTES, GB


class StepBuilder:
    """The operators of one step of `profile`, fitted to `plan`."""

    def __init__(self, profile: Profile, plan: Plan):
        self.profile, self.plan = profile, plan
        self.hw: Hardware = profile.hardware
        self.ops: list[Operator] = []
        self.buckets = buckets_of(profile, plan.bucket_mb, plan.flow_blocks)
        self.first_retained = len(self.buckets) - plan.retained_buckets
        sums = self.buckets.sums(plan.chips)
        self.slots = sums.ring_slots(self.first_retained, at_once=plan.compile_blocks)
        self.flow = frozenset(plan.flow_blocks)
        self.hbm = self.hw.gpu.hbm_gb_per_s * GB
        self.comms = Collectives.of(self.hw, plan)
        self.scattered: list[int] = []
        """Reduce-scatters of the present micro-batch, in order of buckets."""
        self.scatter_slots = sums.ring_slots(sums.count, at_once=plan.compile_blocks)
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
        self.downs: list[int] = []
        """Copies of gradients down, of all micro-batches, in order."""
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
            op, last = self._through("forward", f"forward of {block.name}", b, self.seconds[b][0], in_forward=first)
            if first:
                self.forward_ops.append((op, b))
            self._use(b, op, last)
            self._offload(b, op, last)

    def _through(self, kind: Kind, name: str, b: int, seconds: float, *, in_forward: bool = False) -> tuple[int, int]:
        """Add a block's forward, or what backward repeats of it: one operator, or three where its attention is divided
        over chips and waits for two all-to-alls. Return the first and the last."""
        exchange, done, waits = self.profile.blocks[b].exchange, 0.0, list[int]()
        first = len(self.ops)
        if exchange:
            for share, nbytes, what in zip(
                exchange.forward, (exchange.before_bytes, exchange.after_bytes), ("query, key and value", "the result"),
                strict=True,
            ):  # fmt: skip
                part = self.add("gpu", kind, name, (share - done) * seconds, block=b, in_forward=in_forward, deps=waits)
                waits, done = [self._exchange(b, what, nbytes, part, in_forward=in_forward)], share
        last = self.add("gpu", kind, name, (1.0 - done) * seconds, block=b, in_forward=in_forward, deps=waits)
        return first, last

    def _exchange(self, b: int, what: str, nbytes: int, after: int, *, in_forward: bool = False) -> int:
        """Add an all-to-all of block `b`'s attention."""
        return self.add(
            "interconnect", "all_to_all", f"all-to-all of {what} in {self.profile.blocks[b].name}",
            self.comms.all_to_all_s(nbytes), link_bytes=self.comms.exchanged_bytes(nbytes), block=b,
            in_forward=in_forward, deps=[after],
        )  # fmt: skip

    def _offload(self, b: int, first: int, forward: int) -> None:
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
            self.ops[first].deps.append(self.down[self.moved[at - IN_FLIGHT_BLOCKS]])

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
        self.scattered = []
        asked = ended = max(op.index for op in self.ops if op.kind == "forward")
        for b in range(len(self.profile.blocks) - 1, -1, -1):
            block, again, backward_s = self.profile.blocks[b], self.saved[b].recompute_s, self.seconds[b][1]
            fetch, asked = self._bring_back(b, asked), ended
            first = len(self.ops)
            if again:
                self._through("recompute", f"recompute of {block.name}", b, again)
            name, done, waits = f"backward of {block.name}", 0.0, list[int]()
            for share, k, nbytes in self._cuts(b, ends.get(b, [])):
                pack = 0.0 if k < 0 else self._pack_bytes(self.buckets[k]) / self.hbm
                seconds = (share - done) * backward_s + pack
                part = self.add("gpu", "backward", name, seconds, block=b, bucket=k, deps=waits)
                done, waits = share, []
                if k < 0:
                    waits = [self._exchange(b, "gradients", nbytes, part)]
                else:
                    packed[k] = part
            if done < 1.0 or len(self.ops) == first or waits:
                self.add("gpu", "backward", name, (1.0 - done) * backward_s, block=b, deps=waits)
            ended = len(self.ops) - 1
            self._use(b, first, ended)
            self.ops[first].deps += fetch
        return packed

    def _cuts(self, b: int, ends: list[tuple[float, int]]) -> list[tuple[float, int, int]]:
        """Where block `b`'s backward is cut, as (share, bucket, bytes): where a bucket is complete, and (bucket -1)
        where an all-to-all of so many bytes comes."""
        cuts = [(share, k, 0) for share, k in ends]
        exchange = self.profile.blocks[b].exchange
        if exchange:
            sizes = (exchange.after_bytes, exchange.before_bytes)
            cuts += [(share, -1, nbytes) for share, nbytes in zip(exchange.backward, sizes, strict=True)]
            cuts.sort(key=lambda cut: cut[0])
        return cuts

    def _pack_bytes(self, bucket: Bucket) -> float:
        """HBM bytes of packing, norm and cast. All of a bucket is packed; of what several chips have reduced, each
        takes the norm and casts its own part."""
        per_param = self.costs[bucket.dtype, bucket.flow].gpu_pack_bytes
        if self.comms.chips == 1:
            return per_param * bucket.params
        packing = 2 * DTYPE_BYTES[bucket.dtype]
        return packing * bucket.params + (per_param - packing) * self._share(bucket)

    def _share(self, bucket: Bucket) -> int:
        """Parameters of a bucket that one chip updates."""
        return self.plan.share(bucket.params)

    def _scatter(self, k: int, packed: dict[int, int], *, free: int | None = None) -> int:
        """Add the reduce-scatter of bucket `k`, where there are several chips; return what completes the gradient.

        Args:
            free: an operator after which there is room for this chip's part.
        """
        if self.comms.chips == 1:
            return packed[k]
        size = DTYPE_BYTES[self.buckets[k].dtype] * self.buckets[k].params
        if len(self.scattered) >= self.scatter_slots:
            self.ops[packed[k]].deps.append(self.scattered[-self.scatter_slots])
        deps = [packed[k]] if free is None else [packed[k], free]
        op = self._collective("reduce_scatter", f"reduce-scatter of bucket {k}", size, deps, bucket=k)
        self.scattered.append(op)
        return op

    def _gather(self, k: int, after: int) -> int:
        """Add the all-gather of bucket `k`'s new weights, where there are several chips; return what completes them."""
        if self.comms.chips == 1:
            return after
        size = DTYPE_BYTES[self.buckets[k].dtype] * self.buckets[k].params
        return self._collective("all_gather", f"all-gather of bucket {k}", size, [after], bucket=k)

    def _collective(self, kind: Kind, name: str, nbytes: int, deps: list[int], **more: object) -> int:
        return self.add(
            "interconnect", kind, name, self.comms.ring_s(nbytes), link_bytes=self.comms.sent_bytes(nbytes), deps=deps,
            **more,
        )  # fmt: skip

    def _accumulate(self, packed: dict[int, int]) -> None:
        """Send the gradients of a micro-batch that is not the last down to where they are held."""
        for k in range(self.first_retained):
            self.held[k] = self._send(k, packed)
        for k in range(self.first_retained, len(self.buckets)):
            self._scatter(k, packed)

    def _send(self, k: int, packed: dict[int, int]) -> int:
        """Add the copy of bucket `k`'s gradient down, and return it.

        A slot of the ring is written again once its last bucket has gone down: by the gradient, or, where earlier
        micro-batches left something in the bucket, by that, ahead of the gradient, which is added to it.
        """
        bucket, chips = self.buckets[k], self.comms.chips
        size = self.costs[bucket.dtype, bucket.flow].down_bytes * self._share(bucket)
        free = self.downs[-self.slots] if len(self.downs) >= self.slots else None
        deps: list[int] = []
        if k in self.held:
            before = [self.held[k]] if free is None else [self.held[k], free]
            fetch = self._copy("link_up", "fetch", f"fetch of held bucket {k}", size, k, before)
            if chips == 1:  # what several chips have reduced is added to beside whatever is computed
                added = self.ops[packed[k]]
                added.deps.append(fetch)
                added.seconds += DTYPE_BYTES[bucket.dtype] * bucket.params / self.hbm
            else:
                deps.append(fetch)
        elif free is not None and chips == 1:
            self.ops[packed[k]].deps.append(free)
        deps.append(self._scatter(k, packed, free=free))
        self.downs.append(self._copy("link_down", "copy_down", f"copy down of bucket {k}", size, k, deps))
        return self.downs[-1]

    def _bucket_ends(self) -> dict[int, list[tuple[float, int]]]:
        """For each block, the shares of its backward at which buckets are complete: by the share of the block's
        parameters whose gradients exist by then, as most of the time goes into their products. A parameter's gradient
        comes whole, however many buckets it fills, and those of a compiled layer come all at once, at its end."""
        upto: list[int] = []
        total = [0] * len(self.profile.blocks)
        for tensor in backward_tensors(self.profile):
            total[tensor.block] += tensor.numel
            upto.append(total[tensor.block])
        ends: dict[int, list[tuple[float, int]]] = {}
        for bucket in self.buckets:
            s = bucket.segments[-1]
            b = self.block_of[s.tensor]
            at_once = self.plan.compile_blocks and self.profile.blocks[b].kind == "layer"
            share = 1.0 if at_once else upto[s.tensor] / total[b]
            ends.setdefault(b, []).append((share, bucket.index))
        for shares in ends.values():
            shares.sort()
        return ends

    def _update(self, packed: dict[int, int]) -> None:
        """Add what happens to each gradient once its bucket is complete."""
        plan, hw = self.plan, self.hw
        known_s = VERDICT_S + self.comms.agree_s
        verdict = self.add("validator", "verdict", "the gradient norm", known_s, deps=[len(self.ops) - 1])
        retained = self.buckets[self.first_retained :]
        gpu_adam = -1
        if retained:
            moved = ADAM_STREAM_BYTES * sum(map(self._share, retained))  # 16-bit: 2 read and 2 written; fp32: 4 read
            name = f"GPU Adam of {len(retained)} retained buckets"
            gpu_adam = self.add("gpu", "gpu_adam", name, moved / self.hbm)
        rate = hw.cpu.adam_at(plan.adam_threads) * GB
        cast_rate = hw.cpu.cast_gb_per_s * GB * min(1.0, rate / (max(hw.cpu.adam_gb_per_s) * GB))
        for k, bucket in enumerate(self.buckets):
            if k >= self.first_retained:
                self.home[k] = [gpu_adam]
                if self.comms.chips > 1:
                    self.ops[gpu_adam].deps.append(self._scatter(k, packed))
                if bucket.flow:  # its home is on the host: the new weights go there
                    down = self._copy("link_down", "copy_down", f"copy down of new weights of bucket {k}",
                                      self._share(bucket) * DTYPE_BYTES[bucket.dtype], k, [gpu_adam])  # fmt: skip
                    self.home[k] = [down]
                continue
            cost, params = self.costs[bucket.dtype, bucket.flow], self._share(bucket)
            down = self._send(k, packed)
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
                self.up[k] = self._gather(k, up)
        if self.first_retained:  # the partial sums follow the last gradient down the same stream
            self.ops[verdict].deps.append(self.downs[-1])
        if self.comms.chips > 1:
            self.ops[verdict].deps += self.scattered[-1:]
            for bucket in reversed(retained):  # in the order in which the next forward needs them
                if not bucket.flow:
                    self.up[bucket.index] = self._gather(bucket.index, gpu_adam)

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
                nbytes = self.plan.share(block.params) * DTYPE_BYTES[block.dtype]
                fetch = self._copy("link_up", "fetch", f"fetch of {block.name}", nbytes, -1, [])
                op = self.ops[fetch]
                op.block, op.in_forward = b, self.ops[first].in_forward
                if last_fetch >= 0:
                    op.deps.append(last_fetch)
                (op.deps if slot in this_step else op.previous).append(last_use[slot])
                if op.in_forward:
                    op.previous += [h for k in self.needs[b] for h in self.home[k]]
                last_fetch = fetch
                if self.comms.chips > 1:  # each chip has fetched its part
                    name, whole = f"all-gather of {block.name}", block.params * DTYPE_BYTES[block.dtype]
                    fetch = self._collective(
                        "all_gather", name, whole, [fetch], block=b, in_forward=op.in_forward
                    )  # fmt: skip
                self.ops[first].deps.append(fetch)
            this_step[slot], last_use[slot] = b, last
