"""Hand-made records small enough to count on one's fingers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comm
import pytest
from comm.base_comm import BaseComm

from superoffload.hardware import Hardware, preset
from superoffload.memory import Ledger, LedgerItem
from superoffload.plan import Plan
from superoffload.profiler import BlockProfile, Profile
from superoffload.tracing import Stall, Trace, TraceEvent
from superoffload.widgets import Tuner

GB = 10**9
Sent = list[tuple[str, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every message to the front end as (type, bytes)."""
    out: Sent = []

    class Counting(BaseComm):
        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
        ) -> None:
            size = len(json.dumps(data, default=str)) + sum(memoryview(b).nbytes for b in buffers or ())
            out.append((msg_type, size))

    monkeypatch.setattr(comm, "create_comm", Counting)
    return out


@pytest.fixture
def tuner(profile: Profile, sent: Sent) -> Iterator[Tuner]:
    """A Tuner on the `profile` of the test's module, its own messages not counted."""
    t = Tuner(profile, autosave=False)
    sent.clear()
    yield t
    t.close_all()


@pytest.fixture(scope="session")
def gh200() -> Hardware:
    return preset("gh200")


@pytest.fixture(scope="session")
def small_profile(gh200: Hardware) -> Profile:
    """Embedding, two layers and a head of 1, 2 × 2 and 1 MiB-of-fp32 buckets' worth of parameters."""
    mib = 2**18  # parameters whose fp32 is 1 MiB

    def block(name: str, kind: str, *numels: int) -> BlockProfile:
        return BlockProfile(
            name=name, kind=kind, tensor_numels=numels, forward_s=0.01, backward_s=0.02, forward_flops=1e9,
            input_bytes=1000, activation_bytes=5000,
        )  # fmt: skip

    return Profile(
        source="measured", model="toy", model_fingerprint="toy-fingerprint", micro_batch=2, seq_len=128,
        blocks=(block("embed", "embedding", mib), block("layers.0", "layer", mib, mib),
                block("layers.1", "layer", mib, mib), block("head", "head", mib)),
        model_flops=6e9, hardware=gh200,
    )  # fmt: skip


def build_trace(*, source: str = "modelled", slower: float = 1.0, plan: Plan | None = None) -> Trace:
    """Two steps of 100 ms: forward 20, recompute 10, backward 40, then the GPU waits 30 for CPU Adam."""
    events, stalls = [], []
    for step in range(2):
        t = step * 0.1 * slower

        def add(lane: str, kind: str, name: str, start: float, length: float, bucket: int = -1, nbytes: int = 0,
                t: float = t, step: int = step) -> None:  # fmt: skip
            events.append(TraceEvent(lane, kind, name, t + start * slower, length * slower, nbytes, -1, bucket, step))

        add("gpu", "forward", "layers.0", 0.0, 0.02)
        add("gpu", "recompute", "layers.0", 0.02, 0.01)
        add("gpu", "backward", "layers.0", 0.03, 0.04)
        add("link_down", "copy_down", "bucket 0", 0.05, 0.01, 0, 10**8)
        add("link_down", "copy_down", "bucket 1", 0.06, 0.01, 1, 10**8)
        add("validator", "verdict", "verdict", 0.07, 0.001)
        add("cpu_adam", "adam", "bucket 0", 0.071, 0.012, 0)
        add("cpu_adam", "adam", "bucket 1", 0.083, 0.012, 1)
        add("link_up", "copy_up", "bucket 0", 0.083, 0.005, 0, 10**8)
        add("link_up", "copy_up", "bucket 1", 0.095, 0.005, 1, 10**8)
        stalls.append(Stall("gpu", t + 0.07 * slower, 0.03 * slower, "weights of layers.0",
                            "GPU waits 30 ms: layers.0 weights, Adam of bucket 1 queued behind bucket 0"))  # fmt: skip
    ledger = Ledger(
        items=(LedgerItem("gpu", "weights", 14 * GB), LedgerItem("gpu", "activations", 6 * GB),
               LedgerItem("host", "master and moments", 80 * GB), LedgerItem("pinned", "held gradients", 13 * GB)),
        gpu_capacity_bytes=96 * GB, host_capacity_bytes=480 * GB,
    )  # fmt: skip
    return Trace(
        source=source, step_s=0.1 * slower, tokens_per_step=8192, model_flops_per_step=4e13, peak_bf16_tflops=990.0,
        hardware="gh200", model="toy", plan=plan or Plan(), memory=ledger, events=tuple(events), stalls=tuple(stalls),
        window_s=0.2 * slower,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    return build_trace


@pytest.fixture
def trace() -> Trace:
    return build_trace()


@pytest.fixture
def many_events() -> Trace:
    """5,000 copies of 20 µs, back to back in pairs: too many to draw one by one."""
    events = tuple(
        TraceEvent("link_down", "copy_down", f"bucket {i}", i * 4e-5, 2e-5, 1000, -1, i, 0) for i in range(5000)
    )
    return build_trace().replace(events=events, stalls=(), window_s=0.2, step_s=0.2)


def _write_run(folder: Path, steps: int, *, tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    rows = [
        {"step": i + 1, "loss": 4.0 / (i + 1), "lr": 1e-5, "grad_norm": 1.0, "verdict": "clip" if i == 1 else "commit",
         "tokens_per_s": 1000.0 + i, "step_s": 0.5}
        for i in range(steps)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + tail)
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": steps, "steps": 10}))
    return folder


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """Write a run folder of so many steps, as the training loop does."""
    return _write_run
