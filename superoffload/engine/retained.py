"""The update of retained buckets, whose master weights and moments live on the device.

On a GPU the verdict is computed there, from the same partial sums as the worker's and by the same formula, so that the
host waits for nothing; where the CPU is the device, the worker's own verdict is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.arguments import Hyper, StepSettings
from superoffload.engine.buckets import BucketState
from superoffload.engine.device import Device
from superoffload.engine.recorder import Recorder
from superoffload.engine.worker import Verdict
from superoffload.kernels import adam_scalars, adam_step


class RetainedUpdate:
    """Runs AdamW over the retained buckets on the compute stream."""

    def __init__(self, arenas: Arenas, device: Device, partials: torch.Tensor, recorder: Recorder):
        self._buckets = [b for b in arenas.buckets if b.retained]
        self._group_of = [p.group for p in arenas.params]
        self._device, self._partials, self._recorder = device, partials, recorder
        self.done = device.new_event()
        """Recorded after the last update, for a forward on another stream."""
        self.homed = device.new_event()
        """Recorded when the new weights of flow blocks have come home."""
        self._stages: list[tuple[torch.Tensor, Any]] = []
        """Where their new weights are made, by turns, with the event that tells when each is free again."""
        flow = [b.layout.numel * b.weights.element_size() for b in self._buckets if b.flow]
        if flow and device.is_cuda:
            self._stages = [
                (torch.empty(max(flow), dtype=torch.uint8, device=device.device), device.new_event()) for _ in range(2)
            ]
        self._judge: Any = None
        if self._buckets and device.is_cuda:
            from superoffload.kernels import gpu

            self._judge = gpu.DeviceVerdict(device.device)

    def update(
        self,
        arguments: StepSettings,
        active: Sequence[int],
        counts: Sequence[int],
        verdict: Callable[[], Verdict],
    ) -> None:
        """Enqueue the update.

        Args:
            arguments: hyperparameters, bound of the norm and scale of the step.
            active: per parameter, 1 where it had a gradient in this step.
            counts: per parameter, the step count that it has when this step is committed.
            verdict: waits for the worker's verdict; called only where the CPU is the device.
        """
        if not self._buckets:
            return
        hyper, max_norm, unscale = arguments
        scale = unscale
        if self._judge is not None:
            self._judge.judge(self._partials, max_norm, unscale)
        else:
            _, _, coefficient, skipped, _ = verdict()
            if skipped:
                return
            scale = float(np.float32(unscale) * np.float32(coefficient))  # as the worker rounds it
        for b in self._buckets:
            start = self._recorder.mark(self._device)
            for span, group, count in self._runs(b, hyper, counts, active):
                self._launch(b, span, hyper[group], count, scale)
            self._recorder.add("gpu", "gpu_adam", start, self._recorder.mark(self._device), bucket=b.index)
            if b.flow:
                self._send_home(b)
        self._device.record(self.done)
        if self._stages:
            self._device.down.record(self.homed)

    def _send_home(self, b: BucketState) -> None:
        """Cast the master into the home of the weights, also after a skipped step: they are the same bits then."""
        if not self._stages:
            b.weights.copy_(b.master)
            return
        memory, free = self._stages[0]
        self._stages.reverse()
        self._device.compute_waits(free)
        stage = memory[: b.weights.numel() * b.weights.element_size()].view(b.weights.dtype)
        stage.copy_(b.master)
        self._device.down.waits_for_compute()
        with self._device.down.use():
            start = self._recorder.mark(self._device, on="down")
            b.weights.copy_(stage, non_blocking=True)
            end = self._recorder.mark(self._device, on="down")
        self._device.down.record(free)
        self._recorder.add("link_down", "copy_down", start, end, bucket=b.index, nbytes=stage.nbytes)

    def _launch(self, b: BucketState, span: slice, h: Hyper, count: int, scale: float) -> None:
        weights = None if b.layout.dtype == "float32" or b.flow else b.weights
        arrays = (b.master, b.exp_avg, b.exp_avg_sq, b.grad)
        if (span.start, span.stop) != (0, b.layout.numel):
            weights = None if weights is None else weights[span]
            arrays = (b.master[span], b.exp_avg[span], b.exp_avg_sq[span], b.grad[span])
        if self._judge is None:
            adam_step(*arrays, **h._asdict(), step=count, grad_scale=scale, out16=weights)
            return
        from superoffload.kernels import gpu

        scalars = adam_scalars(**h._asdict(), step=count)
        gpu.adam_step(*arrays, weights, self._judge.coefficient, self._judge.skip, scale, scalars)

    def _runs(
        self, b: BucketState, hyper: Sequence[Hyper], counts: Sequence[int], active: Sequence[int]
    ) -> list[tuple[slice, int, int]]:
        """Neighbouring segments with equal hyperparameters and step count as (span, group, count), so that most buckets
        are one launch. The padding between them is nobody's."""
        runs: list[tuple[slice, int, int]] = []
        last: tuple[Hyper, int] | None = None
        for s in b.layout.segments:
            if not active[s.tensor]:
                last = None
                continue
            group = self._group_of[s.tensor]
            key, end = (hyper[group], counts[s.tensor]), s.start + s.numel
            if key == last:
                runs[-1] = (slice(runs[-1][0].start, end), group, counts[s.tensor])
            else:
                runs.append((slice(s.start, end), group, counts[s.tensor]))
            last = key
        return runs
