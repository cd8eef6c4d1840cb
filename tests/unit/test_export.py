"""Exports: DeepSpeed's own keys with the same split, Chrome's trace format, a page that stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superoffload import cli, export
from superoffload.config import TunedConfig
from superoffload.errors import MissingDependency, NotSupported
from superoffload.estimating import estimate
from superoffload.planner import make_plan
from superoffload.simulator import simulate
from superoffload.tracing import LANE_TITLES, Trace


def config(**knobs: Any) -> TunedConfig:
    profile = estimate("smollm2-135m", micro_batch=2, seq_len=128, hardware="gh200")
    fields = {"bucket_mb": 64, "retained_buckets": 2, "adam_threads": 36, "accumulation": 3, "speculate": "on", **knobs}
    return TunedConfig.create(profile, make_plan(profile, **fields), optimizer={"lr": 3e-4, "weight_decay": 0.1},
                              training={"steps": 50, "schedule": "cosine", "warmup_steps": 5})  # fmt: skip


def trace() -> Trace:
    profile = estimate("smollm2-135m", micro_batch=2, seq_len=128, hardware="gh200")
    return simulate(profile, make_plan(profile, retained_buckets=0))


def test_deepspeed_gets_the_same_split_and_hyperparameters() -> None:
    cfg = config()
    body, notes = export.deepspeed(cfg)
    zero = body["zero_optimization"]
    offload = zero["offload_optimizer"]
    on_gpu = 2 * 64 * 2**20 // 4
    assert offload["ratio"] == pytest.approx(1 - on_gpu / cfg.model.parameters, abs=1e-4)
    assert offload["device"] == "cpu"
    assert offload["super_offload"] is True
    assert offload["cpuadam_cores_perc"] == 0.5  # 36 of 72 cores
    assert zero["stage"] == 3
    assert zero["sub_group_size"] == 2**24
    assert body["train_micro_batch_size_per_gpu"] == 2
    assert body["gradient_accumulation_steps"] == 3
    assert body["gradient_clipping"] == 1.0
    assert body["bf16"] == {"enabled": True}
    params = body["optimizer"]["params"]
    assert (params["lr"], params["betas"], params["weight_decay"]) == (3e-4, [0.9, 0.999], 0.1)
    assert body["scheduler"]["type"] == "WarmupCosineLR"
    assert body["scheduler"]["params"]["total_num_steps"] == 50
    assert any("cast_down" in n for n in notes)
    assert not any("loss_chunks" in n for n in notes)
    divided = cfg.replace(plan=cfg.plan.replace(loss_chunks=4))
    assert any("loss_chunks 4 is left out" in n for n in export.deepspeed(divided)[1])
    assert any("no asynchronous step while gradient_clipping is set" in n for n in notes)


def test_compiled_layers_are_left_to_the_user_of_deepspeed() -> None:
    notes = {c: export.deepspeed(config(compile_blocks=c, activations="none"))[1] for c in (False, True)}
    assert set(notes[True]) - set(notes[False]) == {
        "compile_blocks is left out: call layer.compile() on each layer before deepspeed.initialize()."
    }


def test_deepspeed_waits_where_the_plan_waits() -> None:
    offload = export.deepspeed(config(speculate="off"))[0]["zero_optimization"]["offload_optimizer"]
    assert offload["super_offload"] is False
    assert "cpuadam_cores_perc" not in offload


def test_deepspeed_refuses_weight_flow() -> None:
    with pytest.raises(NotSupported, match=r"flow_blocks.*--set flow_blocks=none"):
        export.deepspeed(config(flow_blocks=(3,)))


def test_chrome_trace_holds_every_span_on_its_lane() -> None:
    t = trace()
    body = export.chrome_trace(t)
    spans = [e for e in body["traceEvents"] if e["ph"] == "X" and e["cat"] != "stall"]
    stalls = [e for e in body["traceEvents"] if e.get("cat") == "stall"]
    names = {e["tid"]: e["args"]["name"] for e in body["traceEvents"] if e["name"] == "thread_name"}
    assert len(spans) == len(t.events) > 0
    assert len(stalls) == len(t.stalls) > 0
    for e, s in zip(t.events, spans, strict=True):
        assert (s["name"], s["cat"], names[s["tid"]]) == (e.name, e.kind, LANE_TITLES[e.lane])
        assert (s["ts"], s["dur"]) == (e.start_s * 1e6, e.duration_s * 1e6)
    assert body["otherData"]["source"] == "modelled"
    json.dumps(body, allow_nan=False)


def test_html_without_the_lab_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superoffload.export.metadata.entry_points", lambda **_: [])
    with pytest.raises(MissingDependency, match=r"pip install 'superoffload\[lab\]'"):
        export.html(trace())


def test_html_stands_alone() -> None:
    pytest.importorskip("plotly", reason="needs the [lab] extra")
    pytest.importorskip("ipywidgets", reason="needs the [lab] extra")
    page = export.html(trace())
    assert "<html>" in page[:100]
    assert "Plotly.newPlot" in page
    assert '<script src="http' not in page


def test_formats_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config().save("tuned.json")
    trace().save("trace.json")
    assert cli.main(["export", "--config", "tuned.json", "--format", "deepspeed", "--out", "ds.json"]) == 0
    assert json.loads(Path("ds.json").read_text()) == export.deepspeed(config())[0]
    assert "note: cast_down" in capsys.readouterr().out
    assert cli.main(["export", "--config", "tuned.json", "--format", "chrome-trace", "--out", "a.json"]) == 0
    assert json.loads(Path("a.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert cli.main(["export", "--trace", "trace.json", "--format", "chrome-trace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["body"] == export.chrome_trace(trace())


def test_a_measured_model_needs_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = config()
    cfg.replace(model=cfg.model.replace(source="some/folder")).save("tuned.json")
    assert cli.main(["export", "--config", "tuned.json", "--format", "chrome-trace", "--out", "a.json"]) == 2
    assert "superoffload simulate --profile" in capsys.readouterr().err
    assert not Path("a.json").exists()
