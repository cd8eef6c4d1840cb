"""The full run: it learns, writes what it says, stops cleanly, and resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from superoffload import model as shapes  # noqa: E402
from superoffload import model_source as ms  # noqa: E402
from superoffload.config import HardwareRef, OptimizerConfig, TrainingConfig, TunedConfig  # noqa: E402
from superoffload.errors import InputError, NotSupported  # noqa: E402
from superoffload.plan import Plan  # noqa: E402
from superoffload.run_control import ask  # noqa: E402
from superoffload.train import checkpoint, gauges, loop, train  # noqa: E402
from superoffload.train import logging as run_logging  # noqa: E402
from superoffload.train.gauges import GpuSampler  # noqa: E402
from superoffload.train.loop import learning_rate_factor  # noqa: E402

TINY = shapes.ModelSpec(
    name="tiny", layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=64, vocab=300, tied=True
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights in a folder, and a tokenizer of single letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(ms.transformers_config(TINY)).save_pretrained(folder)
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz \n?")}
    words = Tokenizer(models.WordLevel(letters, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(".|\n"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def config(source: Path, dtype: str = "bfloat16", plan: dict[str, Any] | None = None, **training: Any) -> TunedConfig:
    model, _ = ms.load(str(source), dtype)
    fields = {"micro_batch": 2, "seq_len": 16, "bucket_mb": 0.05, "adam_threads": 1, "accumulation": 2, **(plan or {})}
    return TunedConfig(
        model=ms.reference(str(source), model),
        hardware=HardwareRef(name="here", source="probed"),
        plan=Plan.from_dict(fields),
        optimizer=OptimizerConfig(lr=5e-3, max_grad_norm=1.0),
        training=TrainingConfig.from_dict({"dtype": dtype, "schedule": "cosine", "warmup_steps": 2, **training}),
    )


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def saved(run: Path) -> dict[str, Any]:
    """Every tensor's bits and the metadata of the newest checkpoint (the file's own bytes differ: it orders its
    metadata at random)."""
    folder = checkpoint.latest_checkpoint(run)
    found: dict[str, Any] = {}
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        with safetensors.safe_open(folder / name, framework="pt") as f:
            found[name] = f.metadata()
            found |= {f"{name}/{k}": f.get_tensor(k).view(torch.uint8).numpy().tobytes() for k in f.keys()}  # noqa: SIM118
    return found


KEYS = {
    "step", "loss", "lr", "grad_norm", "verdict", "clip_coefficient", "loss_scale", "speculated", "undone",
    "speculated_s", "undo_s", "after_verdict_s", "waited_s", "tokens_per_s", "step_s", "tokens", "cpu_busy", "gpu_busy",
    "gpu_peak_bytes", "gpu_reserved_bytes", "host_bytes",
}  # fmt: skip


def test_a_run_learns_and_writes_what_it_did(source: Path, text: Path, tmp_path: Path) -> None:
    cfg = config(source)
    state = torch.is_grad_enabled(), torch.get_default_dtype()
    result = train(cfg, text, steps=40, out=tmp_path / "run", progress=False)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == state
    run = rows(tmp_path / "run")
    assert [r["step"] for r in run] == list(range(1, 41))
    assert all(set(r) == KEYS for r in run)
    assert result["state"] == status(tmp_path / "run")["state"] == "finished"
    assert sum(r["loss"] for r in run[-5:]) < 0.7 * sum(r["loss"] for r in run[:5])
    assert [r["tokens"] for r in run] == [64 * i for i in range(1, 41)]
    assert {r["verdict"] for r in run} <= {"commit", "clip"}
    assert all(r["grad_norm"] > 0 and r["step_s"] > 0 for r in run)
    assert run[0]["lr"] == pytest.approx(2.5e-3)
    assert TunedConfig.load(tmp_path / "run" / "tuned.json") == cfg
    assert (result["first_loss"], result["last_loss"]) == (run[0]["loss"], run[-1]["loss"])


def test_a_run_measures_what_it_takes_of_the_machine(source: Path, text: Path, tmp_path: Path) -> None:
    train(config(source), text, steps=6, out=tmp_path / "run", progress=False)
    said, run = status(tmp_path / "run"), rows(tmp_path / "run")
    cuda = torch.cuda.is_available()
    assert (said["gpu_name"] is not None) == cuda and said["adam_threads"] == 1 and said["cores"] >= 1
    assert all(0 < r["cpu_busy"] <= 1 for r in run)
    assert all(r["gpu_busy"] is None and r["gpu_peak_bytes"] is None for r in run) or cuda
    # On Linux the resident set holds at least torch, and never more than there is.
    assert all(r["host_bytes"] is None or 50e6 < r["host_bytes"] < said["host_capacity_bytes"] for r in run)
    # The thread's time before and after the verdict is part of the step and of the next.
    assert all(r["after_verdict_s"] > 0 for r in run)
    assert sum(r["speculated_s"] + r["after_verdict_s"] for r in run) < 2 * sum(r["step_s"] for r in run)


def test_every_undone_step_is_in_the_log(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: dict[int, Any] = {}  # which steps are undone depends on how soon each bucket came
    cost_of = loop._cost

    def remember(opt: Any, step: int) -> dict[str, Any]:
        costs[step] = cost_of(opt, step)
        return costs[step]

    monkeypatch.setattr(loop, "_cost", remember)
    cfg = config(source, plan={"speculate": "on"}, log_every=7)
    cfg = cfg.replace(optimizer=cfg.optimizer.replace(max_grad_norm=0.5))
    train(cfg, text, steps=20, out=tmp_path / "run", progress=False)
    undone = {step: cost for step, cost in costs.items() if cost["undone"]}
    assert undone and 1 not in undone and len(costs) == 20
    run = {r["step"]: r for r in rows(tmp_path / "run")}
    assert set(run) == {*undone, 7, 14, 20}
    for step, cost in undone.items():
        assert {k: run[step][k] for k in cost} == cost


def test_the_gauges_of_a_gpu_that_cannot_be_read_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = GpuSampler(torch.device("cuda"))
    assert sampler.source == "not measured: pip install nvidia-ml-py" and sampler.take() == []
    sampler.close()


def test_the_drivers_samples_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver made of numbers: one sample each fifth of a second, each given as long as it is buffered."""
    samples = [
        types.SimpleNamespace(timeStamp=10**18 + i, sampleValue=types.SimpleNamespace(uiVal=50)) for i in range(3)
    ]

    def get(handle: object, kind: int, since: int) -> tuple[int, list[Any]]:
        return 1, samples  # also those that were seen before

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetSamples=get,
        NVML_GPU_UTILIZATION_SAMPLES=1, NVMLError_NotFound=KeyError,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gauges, "POLL_S", 0.01)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="1"))
    sampler = GpuSampler(torch.device("cuda"))
    assert sampler.take() == [0.5, 0.5, 0.5]
    time.sleep(0.1)
    assert sampler.take() == []
    samples.append(types.SimpleNamespace(timeStamp=2 * 10**18, sampleValue=types.SimpleNamespace(uiVal=100)))
    time.sleep(0.1)
    assert sampler.take() == [1.0]
    sampler.close()


def test_a_plan_for_several_chips_is_refused_before_anything_is_loaded(
    source: Path, text: Path, tmp_path: Path
) -> None:
    cfg = config(source, plan={"data_parallel": 2, "sequence_parallel": 2})
    with pytest.raises(NotSupported, match=r"the plan is for 4 Superchips .*trains on one"):
        train(cfg, text, steps=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_an_ordinary_model_folder(source: Path, text: Path, tmp_path: Path) -> None:
    result = train(config(source), text, steps=3, out=tmp_path / "run", progress=False)
    model, words = ms.load(result["checkpoint"], "bfloat16")
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the tie was lost"
    assert words.encode("ab") == [0, 1]
    start, _ = ms.load(str(source), "bfloat16")
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("dtype", "chunks"), [("bfloat16", 1), ("float16", 1), ("float32", 1), ("bfloat16", 3), ("float16", 3)]
)
def test_resuming_continues_bit_for_bit_also_under_another_plan(
    source: Path, text: Path, tmp_path: Path, dtype: str, chunks: int
) -> None:
    cfg = config(source, dtype, {"loss_chunks": chunks})
    train(cfg, text, steps=8, out=tmp_path / "whole", progress=False)
    saving = cfg.replace(training=cfg.training.replace(save_every=3))
    train(saving, text, steps=8, out=tmp_path / "run", progress=False)
    assert saved(tmp_path / "run") == saved(tmp_path / "whole"), "saving changed the training"
    other = cfg.replace(plan=cfg.plan.replace(bucket_mb=1.0, retained_buckets=1))
    train(other, text, steps=8, out=tmp_path / "run", resume=tmp_path / "run/checkpoints/step-00000006", progress=False)
    assert saved(tmp_path / "run") == saved(tmp_path / "whole")

    def history(run: Path) -> list[tuple[Any, ...]]:
        return [(r["step"], r["loss"], r["lr"], r["grad_norm"], r["verdict"], r["tokens"]) for r in rows(run)]

    assert history(tmp_path / "run") == history(tmp_path / "whole")


def test_accumulation_recompute_and_retained_buckets_do_not_change_the_result(
    source: Path, text: Path, tmp_path: Path
) -> None:
    one = config(source, "float32", {"activations": "none"})
    two = config(source, "float32", {"activations": "full", "retained_buckets": 2, "bucket_mb": 0.1})
    train(one, text, steps=3, out=tmp_path / "one", progress=False)
    train(two, text, steps=3, out=tmp_path / "two", progress=False)
    assert saved(tmp_path / "one") == saved(tmp_path / "two")


def test_ctrl_c_finishes_the_step_saves_and_can_be_continued(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(source)
    train(cfg, text, steps=6, out=tmp_path / "whole", progress=False)
    before = signal.getsignal(signal.SIGINT)
    write = run_logging.RunLog.step

    def interrupt_at_two(self: Any, row: dict[str, Any]) -> None:
        write(self, row)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_logging.RunLog, "step", interrupt_at_two)
    result = train(cfg, text, steps=6, out=tmp_path / "run", progress=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert result["state"] == status(tmp_path / "run")["state"] == "interrupted"
    assert result["step"] == 3, "the step in progress is finished"
    monkeypatch.undo()
    again = train(cfg, text, steps=6, out=tmp_path / "run", resume=tmp_path / "run", progress=False)
    assert again["state"] == "finished"
    assert saved(tmp_path / "run") == saved(tmp_path / "whole")
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_training_runs_in_a_thread_too(source: Path, text: Path, tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    worker = threading.Thread(
        target=lambda: results.append(train(config(source), text, steps=1, out=tmp_path / "run", progress=False))
    )
    worker.start()
    worker.join(60)
    assert results[0]["state"] == "finished"


def test_a_failure_is_written_down_and_leaves_no_half_checkpoint(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_model", disk_full)
    with pytest.raises(OSError, match="no space"):
        train(config(source), text, steps=2, out=tmp_path / "run", progress=False)
    assert status(tmp_path / "run")["state"] == "failed"
    assert "no space left" in status(tmp_path / "run")["error"]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_only_the_newest_checkpoints_are_kept(source: Path, text: Path, tmp_path: Path) -> None:
    train(config(source, save_every=1), text, steps=5, out=tmp_path / "run", progress=False)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def test_bad_input_writes_nothing(source: Path, text: Path, tmp_path: Path) -> None:
    cfg, run = config(source), tmp_path / "run"
    with pytest.raises(InputError, match="no such data file"):
        train(cfg, tmp_path / "missing.txt", steps=2, out=run)
    with pytest.raises(InputError, match="tuned for the model"):
        train(cfg.replace(model=cfg.model.replace(fingerprint="0" * 64)), text, steps=2, out=run)
    with pytest.raises(InputError, match="no checkpoint to resume"):
        train(cfg, text, steps=2, out=run, resume=tmp_path)
    with pytest.raises(InputError, match="steps = 0"):
        train(cfg, text, steps=0, out=run)
    assert not run.exists()
    train(cfg, text, steps=1, out=run, progress=False)
    with pytest.raises(InputError, match="already holds a run"):
        train(cfg, text, steps=2, out=run)
    other = tmp_path / "other.txt"
    other.write_text("another text, which is not that of the run\n" * 40)
    with pytest.raises(InputError, match="other data"):
        train(cfg, other, steps=2, out=run, resume=run)
    assert status(run)["state"] == "finished", "a refused resume must leave the run as it was"
    with pytest.raises(InputError, match="already at step 1"):
        train(cfg, text, steps=1, out=run, resume=run)


def test_metrics_of_steps_that_run_again_are_dropped(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i}) for i in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    log = run_logging.RunLog(tmp_path, steps=5, resume_at=2, progress=False)
    log.step({"step": 3, "loss": float("nan"), "tokens_per_s": 1.0, "undone": float("inf"), "share": [float("nan")]})
    log.set(share=float("inf"))
    log.close()
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3]
    assert rows(tmp_path)[-1]["loss"] is rows(tmp_path)[-1]["undone"] is None and rows(tmp_path)[-1]["share"] == [None]
    assert status(tmp_path)["share"] is None


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules(schedule: Any) -> None:
    training = TrainingConfig(schedule=schedule, warmup_steps=4)
    factors = [learning_rate_factor(training, 20, i) for i in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    tail = factors[5:]
    if schedule == "constant":
        assert set(tail) == {1.0}
    else:
        assert tail == sorted(tail, reverse=True)
        assert 0 < tail[-1] < 0.1
    middle = {"constant": 1.0, "linear": 0.5, "cosine": 0.5}[schedule]
    assert factors[12] == pytest.approx(middle)


def wait_for(folder: Path, condition: Any, seconds: float = 60.0) -> dict[str, Any]:
    """The status once it meets the condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (folder / "status.json").exists() and condition(found := status(folder)):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {status(folder)}")


def test_a_run_pauses_saves_goes_on_and_stops_when_asked(source: Path, text: Path, tmp_path: Path) -> None:
    cfg, folder, result = config(source), tmp_path / "run", []
    thread = threading.Thread(
        target=lambda: result.append(train(cfg, text, steps=100_000, out=folder, progress=False)), daemon=True
    )
    thread.start()
    wait_for(folder, lambda s: s["state"] == "running" and s["step"] > 0)
    ask(folder, "pause")
    wait_for(folder, lambda s: s["state"] == "paused")
    before = rows(folder)
    time.sleep(0.5)
    assert rows(folder) == before, "a paused run computes nothing"
    assert before[-1]["step"] == status(folder)["step"], "the step before the pause is written"
    ask(folder, "checkpoint")
    at = wait_for(folder, lambda s: s.get("checkpoint"))
    assert at["state"] == "paused" and at["checkpoint"].endswith(f"step-{before[-1]['step']:08d}")
    ask(folder, "go on")
    wait_for(folder, lambda s: s["state"] == "running" and s["step"] > before[-1]["step"])
    ask(folder, "stop")
    thread.join(60)
    assert not thread.is_alive() and result[0]["state"] == "interrupted"
    done = result[0]["step"]
    assert [r["step"] for r in rows(folder)] == list(range(1, done + 1))
    with pytest.raises(InputError, match="has ended"):
        ask(folder, "go on")
    # What was asked of the first run is not asked of the one that continues it. (The schedule looks at the last step.)
    assert train(cfg, text, steps=done + 3, out=folder, resume=folder, progress=False)["state"] == "finished"


def test_a_paused_run_can_be_stopped(source: Path, text: Path, tmp_path: Path) -> None:
    cfg, folder, result = config(source), tmp_path / "run", []
    thread = threading.Thread(
        target=lambda: result.append(train(cfg, text, steps=100_000, out=folder, progress=False)), daemon=True
    )
    thread.start()
    wait_for(folder, lambda s: s["state"] == "running")
    ask(folder, "pause")
    wait_for(folder, lambda s: s["state"] == "paused")
    ask(folder, "stop")
    thread.join(60)
    assert not thread.is_alive() and result[0]["state"] == "interrupted"
