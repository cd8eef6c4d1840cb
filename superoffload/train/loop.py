"""The full training run of a tuned config: what ``superoffload train`` does."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from superoffload import model_source
from superoffload.config import TrainingConfig, TunedConfig
from superoffload.engine import OffloadAdamW
from superoffload.errors import InputError
from superoffload.plan import check_one_chip
from superoffload.run_control import Request, Requests
from superoffload.train import checkpoint
from superoffload.train.data import TokenBlocks, load_blocks, locate
from superoffload.train.gauges import Gauges
from superoffload.train.logging import METRICS, RunLog

CONFIG = "tuned.json"
PAUSE_POLL_S = 0.2
"""How often a paused run looks for requests."""
COSTS = ("speculated", "undone", "speculated_s", "undo_s", "after_verdict_s", "waited_s")
"""What a row says of its step's `StepRecord`."""


def train(
    config: TunedConfig | str | Path,
    data: str | Path,
    steps: int | None = None,
    out: str | Path = "run",
    resume: str | Path | None = None,
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Train the model of `config` with its plan on `data`.

    Args:
        config: the tuned config, or its file.
        data: see `superoffload.train.data`.
        steps: optimizer steps of the whole run, instead of the config's.
        out: folder of the run: metrics.jsonl, status.json, tuned.json, checkpoints.
        resume: a run's folder (or one checkpoint): continue it bit for bit, under this config's plan. `out` may be the
            same folder.
        progress: draw a progress bar on stderr.

    Returns:
        state (``finished``, or ``interrupted`` after Ctrl-C), step, first and last loss, tokens_per_s (median), out,
        checkpoint.

    Raises:
        InputError: bad data, another model than the config's, a folder that already holds a run.
        NotSupported: the plan is for several chips.
    """
    cfg = config if isinstance(config, TunedConfig) else TunedConfig.load(config)
    check_one_chip(cfg.plan)
    total = cfg.training.steps if steps is None else steps
    if total < 1:
        raise InputError(f"steps = {total}", expected="at least 1")
    locate(data)  # a missing file is said at once, before anything is loaded
    folder = Path(out)
    start_from = checkpoint.latest_checkpoint(Path(resume)) if resume is not None else None
    state = checkpoint.read_state(start_from) if start_from else {}
    if int(state.get("step", 0)) >= total:
        raise InputError(f"the run is already at step {state['step']}", expected=f"more steps than that, not {total}")
    if start_from is None and (folder / METRICS).exists():
        raise InputError(
            f"{folder} already holds a run", remedy=f"Give another --out, or continue it with --resume {folder}"
        )
    run = _Run(cfg, data, total, folder, start_from, state, progress)
    return run.go()


def learning_rate_factor(training: TrainingConfig, total: int, step: int) -> float:
    """Factor on the learning rate of optimizer step `step` (0 is the first) of `total`.

    Linear warm-up, then constant, or down to zero at `total` linearly or along half a cosine.
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    if training.schedule == "constant":
        return 1.0
    done = (step - training.warmup_steps) / max(1, total - training.warmup_steps)
    return 1.0 - done if training.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class _Run:
    """One run from loading to the last checkpoint."""

    def __init__(
        self,
        cfg: TunedConfig,
        data: str | Path,
        total: int,
        folder: Path,
        start_from: Path | None,
        state: dict[str, Any],
        progress: bool,
    ) -> None:
        self.cfg, self.data, self.total, self.folder = cfg, str(data), total, folder
        self.start_from, self.state = start_from, state
        self.step = int(state.get("step", 0))
        self.position = int(state.get("position", 0))
        self.tokens = int(state.get("tokens", 0))
        self.progress = progress
        self.losses: list[float] = []
        self.speeds: list[float] = []
        self.saved: Path | None = None
        self._pending: dict[str, Any] | None = None
        self._gauges: Gauges

    def go(self) -> dict[str, Any]:
        """Load, train, save. A failure is written into status.json before it is raised."""
        cfg, plan = self.cfg, self.cfg.plan
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(cfg.training.seed)
        # Weights that flow need not fit the GPU: a checkpoint's go from the host to where they are trained. Random ones
        # are drawn on the device that trains, so that they do not depend on the plan.
        first = torch.device("cpu") if plan.flow_blocks and cfg.model.init == "pretrained" else device
        model, tokenizer = model_source.load(cfg.model, cfg.training.dtype, first, seed=cfg.training.seed)
        cfg.check_model(model_source.fingerprint(model), cfg.model.source)
        blocks = load_blocks(
            self.data, tokenizer, plan.seq_len, seed=cfg.training.seed, vocab_size=_vocabulary(model, tokenizer)
        )
        if self.start_from is not None:
            if self.state.get("data_fingerprint") != blocks.fingerprint():
                raise InputError(
                    f'the run was on other data than "{self.data}", or with another sequence length or seed',
                    expected=f'"{self.state.get("data")}" as it was, {self.state.get("seq_len")} tokens each',
                    remedy="Resume with the same data and seq_len, or start a new run from the checkpoint's folder",
                )
            checkpoint.load_weights(model, self.start_from)
        with (
            OffloadAdamW.from_config(model, cfg, device=device) as opt,
            contextlib.closing(Gauges(device)) as self._gauges,
        ):
            schedule = torch.optim.lr_scheduler.LambdaLR(
                opt, lambda step: learning_rate_factor(cfg.training, self.total, step)
            )
            if self.start_from is not None:
                self._restore(opt, schedule)
            log = RunLog(self.folder, steps=self.total, resume_at=self.step, progress=self.progress)
            cfg.save(self.folder / CONFIG)
            log.set(**self._gauges.facts(), adam_threads=plan.adam_threads)
            try:
                return self._loop(model, tokenizer, opt, schedule, blocks, log)
            except BaseException as e:
                stopped = isinstance(e, KeyboardInterrupt)
                log.set(state="interrupted" if stopped else "failed", error=f"{type(e).__name__}: {e}")
                raise
            finally:
                log.close()

    def _restore(self, opt: Any, schedule: Any) -> None:
        if self.start_from is None:
            return
        opt.load(self.start_from / checkpoint.OPTIMIZER)
        schedule.last_epoch = self.step
        rates = [base * learning_rate_factor(self.cfg.training, self.total, self.step) for base in schedule.base_lrs]
        schedule._last_lr = rates
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate
        checkpoint.restore_random(self.state.get("random", {}))

    def _loop(
        self, model: Any, tokenizer: Any, opt: Any, schedule: Any, blocks: TokenBlocks, log: RunLog
    ) -> dict[str, Any]:
        plan, training = self.cfg.plan, self.cfg.training
        device = next(model.parameters()).device
        log.set(state="running", data=blocks.name, blocks=len(blocks), model=self.cfg.model.name)
        requests = Requests(self.folder)

        def save() -> None:
            self._save(model, tokenizer, opt, blocks, log)

        with _stop_flag(log) as stop, _quiet_collector():
            begun = self._resume_clock()
            while self.step < self.total and not stop.is_set():
                rate = opt.param_groups[0]["lr"]
                loss = torch.zeros((), device=device)
                for _ in range(plan.accumulation):  # from_config told the optimizer how many belong to a step
                    ids = blocks.batch(self.position, plan.micro_batch).to(device, non_blocking=True)
                    self.position += plan.micro_batch
                    part = model(input_ids=ids, labels=ids).loss / plan.accumulation
                    opt.scale_loss(part).backward()
                    loss += part.detach()
                self._flush(opt, log)  # the last step is certainly over now, and nothing had to wait for it
                opt.step()
                schedule.step()
                opt.zero_grad()
                self.step += 1
                self.tokens += plan.tokens_per_step
                now = time.perf_counter()
                self._pending = {"step": self.step, "loss": loss, "lr": rate, "step_s": now - begun}
                begun = now
                if training.save_every and self.step % training.save_every == 0 and self.step < self.total:
                    save()
                    begun = self._resume_clock()  # saving is not training time
                if asked := requests.take():
                    self._answer(asked, requests, stop, save, opt, log)
                    begun = self._resume_clock()
            opt.synchronize()
            self._flush(opt, log)
            save()
        state = "finished" if self.step >= self.total else "interrupted"
        log.set(state=state, checkpoint=str(self.saved))
        if state == "interrupted":
            log.note(f"stopped after step {self.step}; continue with --resume {self.folder}")
        return {
            "state": state,
            "step": self.step,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "tokens_per_s": sorted(self.speeds)[len(self.speeds) // 2] if self.speeds else None,
            "out": str(self.folder),
            "checkpoint": str(self.saved),
        }

    def _answer(
        self,
        asked: list[Request],
        requests: Requests,
        stop: threading.Event,
        save: Callable[[], None],
        opt: Any,
        log: RunLog,
    ) -> None:
        """Do what somebody asked for through the run's folder; returns when the next step may begin."""
        paused = False
        while True:
            for request in asked:
                if request == "checkpoint":
                    save()
                elif request == "stop":
                    stop.set()
                else:
                    paused = request == "pause"
            if not paused or stop.is_set():
                break
            if log.status["state"] != "paused":
                opt.synchronize()
                self._flush(opt, log)
                log.set(state="paused")
                log.note(f"paused after step {self.step}: memory is kept, nothing is computed")
            time.sleep(PAUSE_POLL_S)
            asked = requests.take()
        log.set(state="running")

    def _resume_clock(self) -> float:
        """The time at which training begins, or goes on after something else."""
        self._gauges.start_over()
        return time.perf_counter()

    def _flush(self, opt: OffloadAdamW, log: RunLog) -> None:
        """Write the row of the last step: its loss and verdict are read one step late, so that nothing waits. A step
        that was undone has a row whatever `log_every` says."""
        if self._pending is None:
            return
        row, self._pending = self._pending, None
        loss = float(row["loss"])
        tokens = self.cfg.plan.tokens_per_step
        stats = opt.stats
        self.losses.append(loss)
        self.speeds.append(tokens / row["step_s"])
        cost = _cost(opt, stats.step)
        if row["step"] % self.cfg.training.log_every and row["step"] != self.total and not cost["undone"]:
            return
        log.step(
            {
                "step": row["step"],
                "loss": loss,
                "lr": row["lr"],
                "grad_norm": None if stats.grad_norm is None else float(stats.grad_norm),
                "verdict": stats.verdict,
                "clip_coefficient": stats.clip_coefficient,
                "loss_scale": stats.loss_scale,
                **cost,
                **self._gauges.read(),
                "tokens_per_s": tokens / row["step_s"],
                "step_s": row["step_s"],
                "tokens": int(self.state.get("tokens", 0)) + tokens * len(self.losses),
            }
        )

    def _save(self, model: Any, tokenizer: Any, opt: Any, blocks: TokenBlocks, log: RunLog) -> None:
        opt.synchronize()
        self._flush(opt, log)
        state = {
            "position": self.position,
            "tokens": self.tokens,
            "steps": self.total,
            "data": self.data,
            "seq_len": blocks.seq_len,
            "data_fingerprint": blocks.fingerprint(),
            "model_fingerprint": self.cfg.model.fingerprint,
            "learning_rates": [group["lr"] for group in opt.param_groups],
        }
        self.saved = checkpoint.save_checkpoint(self.folder, self.step, model, tokenizer, opt, state)
        log.set(checkpoint=str(self.saved))


def _cost(opt: OffloadAdamW, step: int) -> dict[str, Any]:
    """What step `step` of the optimizer, its last one, speculated and cost; None where that is not known yet."""
    ledger = opt.ledger
    record = ledger[-1] if ledger and ledger[-1].step == step else None
    return {k: getattr(record, k, None) for k in COSTS}


def _vocabulary(model: Any, tokenizer: Any) -> int:
    return int(getattr(model.config.get_text_config(), "vocab_size", 0) or len(tokenizer))


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Take everything that exists now out of the garbage collector's sight. A full collection walks hundreds of
    thousands of objects of the libraries, 0.3 s in which no kernel is launched, and training allocates enough to
    trigger one every few dozen steps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _stop_flag(log: RunLog) -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets: the step in progress is finished and saved. A second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        log.note("stopping after this step (once more to stop at once, without saving)")

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
