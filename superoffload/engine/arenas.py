"""Arenas: where every parameter, gradient and moment of a running engine lies.

The device weights of one dtype lie in a few arenas, bucket after bucket, and each parameter's `.data` is a view of one,
so that a bucket's new weights are one transfer; weights of flow blocks have one arena on the host (flow.py). Host
arenas hold master weights, moments, held gradients and 16-bit copies of the CPU buckets; retained buckets have theirs
on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from superoffload.engine.buckets import DTYPES, BucketState, ManagedParam
from superoffload.engine.device import Chunk, Device
from superoffload.engine.host_memory import HostMemory
from superoffload.engine.placement import place
from superoffload.engine.start import Start
from superoffload.engine.undo_memory import undo_memory
from superoffload.kernels import DTYPE_CODES, native
from superoffload.layout import NORM_CHUNK, Bucket, Segment
from superoffload.memory import state_items
from superoffload.plan import Plan

ARENA_BYTES = 1 << 28
"""Of device weights, from which on another arena is begun."""


class Arenas:
    """All buckets of an engine with their memory."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        layouts: Sequence[Bucket],
        plan: Plan,
        device: Device,
        *,
        trace: bool,
        start: Start | None = None,
    ):
        self._start = start or Start(device.device)
        self.host = HostMemory(
            can_pin=device.is_cuda, placement=place(device.device, plan.adam_threads), threads=plan.adam_threads
        )
        self.params = list(params)
        self.plan = plan
        for layout in layouts:
            for segment in layout.segments:
                self.params[segment.tensor].places.append((layout.index, segment))
        self.partial_count = sum(p.chunks for p in params)
        self.capacity = max((b.numel for b in layouts), default=0)
        try:
            self._make(layouts, device, trace)
        except BaseException:
            self.host.release()  # freed while it is pinned, memory could not be pinned again
            raise

    def _make(self, layouts: Sequence[Bucket], device: Device, trace: bool) -> None:
        with self._start.showing([p.param for p in self.params]):
            weights = self._weights(layouts, device)
        items = state_items(layouts, self.plan, [])
        homes = self.host.pinned_bytes + self.host.pageable_bytes
        with self.host.showing(sum(items["pinned"].values()) + sum(items["host"].values()) - homes):
            self.buckets = self._allocate(layouts, weights, device, trace)

    @property
    def cpu_buckets(self) -> list[BucketState]:
        return [b for b in self.buckets if not b.retained]

    def held_dtype(self, dtype: str) -> torch.dtype:
        """Dtype in which gradients of weights of `dtype` cross the link and wait."""
        return torch.float32 if self.plan.cast_down == "gpu" else DTYPES[dtype]

    def _allocate(
        self, layouts: Sequence[Bucket], weights: dict[int, torch.Tensor], device: Device, trace: bool
    ) -> list[BucketState]:
        plan = self.plan
        cpu = [b for b in layouts if b.index < len(layouts) - plan.retained_buckets]
        # The home of fp32 weights that flow is their master.
        home_is_master = {b.index for b in cpu if b.flow and b.dtype == "float32"}
        # Masters of other fp32 weights, and of all weights that the GPU casts, the link themselves, so they are
        # pinned; moments never are.
        goes_up = [b for b in cpu if not b.flow and (b.dtype == "float32" or plan.cast_up == "gpu")]
        halves = {b.index for b in cpu if plan.master == "split" and b.dtype == "bfloat16"}
        own = [b for b in cpu if b.index not in home_is_master | halves]
        masters = self._slices(own, torch.float32, pinned=bool(goes_up))
        masters |= {k: weights[k] for k in home_is_master}
        remainders = self._slices([b for b in cpu if b.index in halves], torch.int16)
        nothing = torch.empty(0, device="cpu")
        exp_avg, exp_avg_sq = (self._slices(cpu, torch.float32) for _ in range(2))
        held: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(self.held_dtype(b.dtype) for b in cpu):
            held |= self._slices([b for b in cpu if self.held_dtype(b.dtype) == dtype], dtype, pinned=True)
        outs = {b.index: weights[b.index] for b in cpu if b.flow and b.dtype != "float32"}
        if plan.cast_up != "gpu":
            for name in dict.fromkeys(b.dtype for b in cpu if b.dtype != "float32" and not b.flow):
                mine = [b for b in cpu if b.dtype == name and not b.flow]
                outs |= self._slices(mine, DTYPES[name], pinned=True)
        undo = undo_memory(cpu, plan, self.host)
        states: list[BucketState] = []
        for b in layouts:
            w = weights[b.index]
            if b.index not in exp_avg:
                on_device = w.to(device.device, copy=True) if b.flow else w  # a home is not a master
                master = on_device if b.dtype == "float32" else on_device.float()
                moments = torch.zeros(2, b.numel, dtype=torch.float32, device=device.device)
                state = BucketState(b, True, w, master, moments[0], moments[1], torch.zeros_like(on_device), None)
            else:
                k = b.index
                state = BucketState(b, False, w, masters.get(k, nothing), exp_avg[k], exp_avg_sq[k], held[k], None,
                                    outs.get(k), remainders.get(k))  # fmt: skip
                if state.out is not None and not b.flow:
                    state.out.copy_(w)
                if k not in home_is_master:
                    state.write("master", slice(None), w)
                state.undo = undo.get(k)
                state.done = (device.new_event(timed=trace), device.new_event(timed=trace))
                if trace:
                    state.upload_start = (device.new_event(timed=True), device.new_event(timed=True))
            state.table = device.chunk_table(self.chunks(b.segments))
            states.append(state)
        return states

    def _slices(
        self, layouts: Sequence[Bucket], dtype: torch.dtype, *, pinned: bool = False
    ) -> dict[int, torch.Tensor]:
        """One host arena for some buckets: bucket -> its part."""
        arena = self.host.zeros(sum(b.numel for b in layouts), dtype, pinned=pinned)
        return _cut(arena, layouts)

    def _weights(self, layouts: Sequence[Bucket], device: Device) -> dict[int, torch.Tensor]:
        """Arenas of the weights, with the parameters moved into them."""
        weights: dict[int, torch.Tensor] = {}
        for dtype, flow in dict.fromkeys((b.dtype, b.flow) for b in layouts):
            mine = [b for b in layouts if (b.dtype, b.flow) == (dtype, flow)]
            for run in [mine] if flow else self._runs(mine):
                if flow:
                    arena = self.host.zeros(sum(b.numel for b in run), DTYPES[dtype], pinned=True)
                else:
                    arena = self._device_arena(run, DTYPES[dtype], device.device)
                parts = _cut(arena, run)
                weights |= parts
                starts = {k: int(part.storage_offset()) for k, part in parts.items()}
                # A `state_dict()` of the model, say, may hold the alias for longer than the engine lives.
                alias = device.alias(arena, then=self.host.lend(arena)) if flow else None
                self._adopt(arena, alias, starts)
        return weights

    def _device_arena(self, run: Sequence[Bucket], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An arena on the device. Where it has no room beside the weights that are to move in, which buckets that cut
        through parameters hold together, these wait on the host."""

        def arena() -> torch.Tensor:
            return torch.zeros(sum(b.numel for b in run), dtype=dtype, device=device)

        with contextlib.suppress(torch.OutOfMemoryError):
            return arena()
        first = {b.index for b in run}
        moving = [p for p in self.params if p.places and p.places[0][0] in first and p.param.device == device]
        for p in moving:
            p.point_to(p.param.detach().to("cpu", copy=True))
        try:
            return arena()
        except torch.OutOfMemoryError:
            for p in moving:
                p.point_to(p.param.detach().to(device))
            raise

    def _runs(self, layouts: Sequence[Bucket]) -> list[list[Bucket]]:
        """Buckets in pieces of some size that no parameter spans. Weights that lie on the device already go as each
        piece is moved, so that they are there twice in part only."""
        last = {s.tensor: b.index for b in layouts for s in b.segments}
        runs: list[list[Bucket]] = [[]]
        size = reach = 0
        for b in layouts:
            if size >= ARENA_BYTES and b.index > reach:
                runs.append([])
                size = 0
            runs[-1].append(b)
            size += b.numel * DTYPES[b.dtype].itemsize
            reach = max(reach, *(last[s.tensor] for s in b.segments))
        return runs

    def _adopt(self, arena: torch.Tensor, alias: torch.Tensor | None, starts: dict[int, int]) -> None:
        """Move the parameters of some buckets into their arena. A parameter that spans buckets stays in one piece: only
        a multiple of the alignment ends a bucket inside a parameter.

        Args:
            alias: of an arena on the host, the same memory as the device reads it.
        """
        for p in self.params:
            if not p.places or p.places[0][0] not in starts:
                continue
            bucket, segment = p.places[0]
            span = slice(starts[bucket] + segment.start, starts[bucket] + segment.start + p.numel)
            view = arena[span].view(p.param.shape)
            self._start.place(p.name, p.param, view)
            if alias is None:
                p.point_to(view)
            else:
                p.home, p.home_on_device = view, alias[span].view(p.param.shape)
                p.point_to(p.home_on_device)

    def chunks(self, segments: Sequence[Segment]) -> list[Chunk]:
        """Norm chunks of some segments of one bucket."""
        found: list[Chunk] = []
        for s in segments:
            first = self.params[s.tensor].first_partial + s.offset // NORM_CHUNK
            for k, i in enumerate(range(0, s.numel, NORM_CHUNK)):
                found.append((s.start + i, min(NORM_CHUNK, s.numel - i), first + k))
        return found

    def partial_runs(self, segments: Sequence[Segment]) -> list[tuple[int, int]]:
        """(first, count) of the partial sums of some segments, neighbours joined."""
        runs: list[tuple[int, int]] = []
        for first, count in sorted(
            (self.params[s.tensor].first_partial + s.offset // NORM_CHUNK, -(-s.numel // NORM_CHUNK)) for s in segments
        ):
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((first, count))
        return runs

    def describe(self, device: Device) -> list[Any]:
        """The CPU buckets as the native worker wants them, at their own indices (retained ones stay empty)."""
        scratch: torch.Tensor | None = None
        if self.plan.cast_down == "cpu" and any(b.layout.dtype != "float32" for b in self.cpu_buckets):
            scratch = self.host.zeros(self.capacity, torch.float32)
        if self.plan.cast_up == "gpu":
            self._stage = torch.zeros(self.capacity, dtype=torch.float32, device=device.device)
        descriptions = []
        for b in self.buckets:
            d = native.BucketDesc()
            descriptions.append(d)
            if b.retained:
                continue
            d.exp_avg, d.exp_avg_sq = b.exp_avg.data_ptr(), b.exp_avg_sq.data_ptr()
            if b.remainder is None:
                d.master = b.master.data_ptr()
            else:
                d.remainder = b.remainder.data_ptr()
            d.grad = b.grad.data_ptr()
            d.grad_dtype = DTYPE_CODES[str(b.grad.dtype).removeprefix("torch.")]
            if scratch is not None and b.grad.dtype != torch.float32:
                d.grad_cast = scratch.data_ptr()
            source = b.master
            if b.out is not None:
                source = b.out
                d.out, d.out_dtype = b.out.data_ptr(), DTYPE_CODES[b.layout.dtype]
                d.out_separate = self.plan.cast_up == "cpu"
            elif not b.flow and b.layout.dtype != "float32":
                d.out_dtype, d.stage, d.stage_numel = (
                    DTYPE_CODES[b.layout.dtype],
                    self._stage.data_ptr(),
                    b.layout.numel,
                )
            if not b.flow:  # what flows is at home already
                d.upload_from, d.upload_to = source.data_ptr(), b.weights.data_ptr()
                d.upload_bytes = b.layout.numel * source.element_size()
            for parity in (0, 1):
                start, done = b.upload_start[parity], b.done[parity]
                d.set_events(parity, device.event_handle(start), device.event_handle(done))
            if b.undo is not None:
                b.undo.describe(d)
            for s in b.layout.segments:
                d.add_segment(s.tensor, s.start, s.numel)
            for first, count in self.partial_runs(b.layout.segments):
                d.add_partials(first, count)
        self._scratch = scratch  # the worker holds only its address
        return descriptions


def _cut(arena: torch.Tensor, layouts: Sequence[Bucket]) -> dict[int, torch.Tensor]:
    """Buckets' parts of an arena, in order."""
    parts: dict[int, torch.Tensor] = {}
    start = 0
    for b in layouts:
        parts[b.index] = arena[start : start + b.numel]
        start += b.numel
    return parts


__all__ = ["ARENA_BYTES", "Arenas"]
