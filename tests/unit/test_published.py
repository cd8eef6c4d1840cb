"""The GH200 preset against published figures (benchmarks/bench_published.py): which bounds hold, and which do not."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from superoffload.estimating import estimate
from superoffload.graph import buckets_of
from superoffload.hardware import preset
from superoffload.memory import Ledger, ledger
from superoffload.plan import Plan
from superoffload.planner import make_plan
from superoffload.profiler import Profile
from superoffload.simulator import step_seconds

NAMES = ("GraceAdam", "Superchip-aware casting", "speculation-then-validation", "bucket repartitioning")


@pytest.fixture(scope="module")
def benchmarks(repository: Path) -> Iterator[Path]:
    """The benchmarks' folder, on the path as when one of them is run."""
    folder = repository / "benchmarks"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def figures(benchmarks: Path) -> ModuleType:
    return importlib.import_module("published_figures")


@pytest.fixture(scope="module")
def ablations(benchmarks: Path) -> ModuleType:
    return importlib.import_module("published_ablation")


@pytest.fixture(scope="module")
def models(benchmarks: Path) -> ModuleType:
    return importlib.import_module("published_models")


@pytest.fixture(scope="module")
def results(benchmarks: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((benchmarks / "results" / "published_gh200_2026-11-30.json").read_text())
    return out


@pytest.fixture(scope="module")
def paper_25b() -> Profile:
    return estimate("paper-25b", micro_batch=1, seq_len=2048, hardware="gh200")


def test_grace_adam_takes_the_printed_seconds(ablations: ModuleType) -> None:
    rows = ablations.adam()
    assert [r["params"] for r in rows] == [1e9, 2e9, 4e9, 8e9]
    for row in rows:
        assert row["modelled_s"] == pytest.approx(row["grace_adam_s"], rel=0.05), row
        assert row["modelled_s"] < row["deepspeed_s"] < row["pytorch_s"]


def test_a_peers_adam_is_its_published_bandwidth_and_nothing_else(ablations: ModuleType, figures: ModuleType) -> None:
    grace = preset("gh200")
    peer = ablations.with_adam(grace, "deepspeed")
    for params, row in figures.ADAM_SECONDS.items():
        assert 28 * params / (peer.cpu.adam_at(65) * 1e9) == pytest.approx(row["deepspeed"].value, rel=0.03)
    same = {"name": grace.name, "sources": grace.sources}
    assert peer.replace(**same, cpu=peer.cpu.replace(adam_gb_per_s=grace.cpu.adam_gb_per_s)) == grace


def test_tokens_of_the_ablation_follow_from_grace_adams_gain(ablations: ModuleType, figures: ModuleType) -> None:
    """Where 4,096 comes from: only the smallest size, whose seconds have two digits, is far from it."""
    tokens = {r["params"]: r["tokens_6n"] for r in ablations.tokens_derived()}
    assert ablations.Ablation().tokens == 4096
    for params in (2e9, 4e9, 8e9):
        assert tokens[params] == pytest.approx(4096, rel=0.05)
    # The formula inverts the throughput: a step that is one GraceAdam step shorter has the next row's TFLOPS.
    n, row = 8e9, figures.ADAM_SECONDS[8e9]
    slower = 6 * n * figures.ablation_tokens(n) / (116.20e12)
    faster = slower - (row["deepspeed"].value - row["grace_adam"].value)
    assert 6 * n * figures.ablation_tokens(n) / faster == pytest.approx(128.23e12)


@pytest.mark.parametrize("hardware", ["gh200", "gh200-datasheet", "gh200-quad"])
def test_the_ablation_holds_with_the_presets_constants(ablations: ModuleType, hardware: str) -> None:
    result = ablations.ablation(ablations.Ablation(hardware=hardware))
    assert tuple(r["row"] for r in result["rows"][1:]) == NAMES
    for row in result["rows"][1:]:
        assert row["gain_percent"] == pytest.approx(row["published_gain_percent"], abs=5.0), row
    assert result["total"] == pytest.approx(2.06, rel=0.10)
    assert result["all_hold"]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"casts": ("cpu", "cpu")}, {"Superchip-aware casting": 1}),
        ({"casts": ("fused", "cpu")}, {"Superchip-aware casting": -1, "total": -1}),
        ({"retained_share": None}, {"bucket repartitioning": 1, "total": 1}),
        ({"activations": "none"}, {"speculation-then-validation": -1, "total": -1}),
        ({"micro_batch": 8}, {"speculation-then-validation": -1, "bucket repartitioning": -1, "total": -1}),
        ({"undo_all": True}, {"speculation-then-validation": -1}),
        ({"blocking": True}, {"speculation-then-validation": -1, "bucket repartitioning": -1, "total": -1}),
        ({"blocking": True, "gpu_rate": 0.8}, {"bucket repartitioning": -1, "total": -1}),
        ({"stops_early": True}, {"speculation-then-validation": -1}),
    ],
    ids=str,
)
def test_the_ablation_misses_where_the_documentation_says_so(
    ablations: ModuleType, changes: dict[str, Any], missed: dict[str, int]
) -> None:
    """+1: the model gains too much, -1: too little. The assumptions on which the agreement rests, one by one."""
    result = ablations.ablation(dataclasses.replace(ablations.Ablation(), **changes))
    found = {r["row"]: 1 if r["off_points"] > 0 else -1 for r in result["rows"][1:] if not r["holds"]}
    if not result["total_holds"]:
        found["total"] = 1 if result["total_off_percent"] > 0 else -1
    assert found == missed


def test_a_step_that_blocks_is_never_shorter_and_as_long_as_its_parts(ablations: ModuleType) -> None:
    """Wait-then-step with a blocking end has nothing to overlap Adam with but its own copies."""
    profile, plan = ablations.ablation_plans(ablations.Ablation(model="paper-1b"))[0]
    blocking = ablations.blocking_seconds(profile, plan)
    assert blocking > 1.02 * step_seconds(profile, plan)
    gpu = sum(
        2 * b.forward_s + b.backward_s if b.kind == "layer" else b.forward_s + b.backward_s for b in profile.blocks
    )
    adam = profile.params * (
        28 / (profile.hardware.cpu.adam_at(65) * 1e9) + 6 / (profile.hardware.cpu.cast_gb_per_s * 1e9)
    )
    assert gpu + adam < blocking < 1.1 * (gpu + adam)


def test_25b_with_float32_gradients_and_all_speculated_does_not_fit(models: ModuleType, paper_25b: Profile) -> None:
    held = {name: models.account(paper_25b, models.by_hand(**knobs)) for name, knobs in models.GRADIENTS_HELD.items()}
    too_much = held["float32 gradients, GPU casts up, all speculated"]
    assert not too_much["fits"]
    assert 475 < too_much["host_gb"] < 490
    assert held["float32 gradients, GPU casts up, waiting"]["fits"]
    assert held["16-bit gradients, GPU casts up, all speculated"]["fits"]


def test_the_planner_sees_it(paper_25b: Profile) -> None:
    free = make_plan(paper_25b)
    assert ledger(paper_25b, free).fits
    assert free.cast_down != "gpu", "16-bit gradients"
    demanded = {"cast_down": "gpu", "cast_up": "gpu", "retained_buckets": 0, "activations": "full"}
    plan = make_plan(paper_25b, **demanded)
    assert ledger(paper_25b, plan).fits
    assert plan.speculate == "auto"
    total = len(buckets_of(paper_25b, plan.bucket_mb))
    assert plan.undo_buckets is not None and plan.undo_buckets < total, "speculates in part"
    assert f"host memory allows {_allowed(paper_25b, plan, total)}" in plan.reasons["undo_buckets"]


def _allowed(profile: Profile, plan: Plan, total: int) -> int:
    """The most buckets with undo memory that fit, counted one by one from above."""
    return next(n for n in range(total, 0, -1) if ledger(profile, plan.model_copy(update={"undo_buckets": n})).fits)


@pytest.mark.parametrize("index", [0, 1])
def test_the_largest_model_fits_and_one_more_layer_has_no_room(
    models: ModuleType, results: dict[str, Any], index: int
) -> None:
    """The recorded plan is accounted again; beside its activations and buffers, no division of one more layer's states
    between the two memories fits: 14 or 16 bytes per parameter on the host, 16 on the GPU."""
    row = results["parts"]["largest"]["maximum"][index]
    profile = _wide(models, row["layers"], row["dtype"])
    book = ledger(profile, Plan.from_dict(row["plan"]))
    assert book.fits
    assert book.total("gpu") / 1e9 == pytest.approx(row["gpu_gb"], abs=0.06)
    assert book.total("host") / 1e9 == pytest.approx(row["host_gb"], abs=0.06)
    assert row["binds"] == "gpu and host"
    one_more = _wide(models, row["layers"] + 1, row["dtype"])
    assert _room(book, 14 if row["dtype"] == "bfloat16" else 16) < one_more.params


def _wide(models: ModuleType, layers: int, dtype: str) -> Profile:
    return estimate(models.wide(layers), micro_batch=1, seq_len=2048, hardware="gh200", dtype=dtype)


def _room(book: Ledger, host_bytes: int) -> float:
    """Parameters whose states the memories have room for beside everything else that the plan holds on the GPU."""
    states = ("16-bit weights", "retained master weights and moments", "retained gradients")
    other = sum(i.bytes for i in book.items if i.place == "gpu" and i.name not in states)
    reserve = next(i.bytes for i in book.items if i.name == "system and Python")
    return (book.gpu_capacity_bytes - other) / 16 + (book.host_capacity_bytes - reserve) / host_bytes


@pytest.mark.parametrize("hardware", ["gh200-datasheet", "gh200", "gh200-quad"])
def test_casting_on_the_gpu_beats_casting_on_the_cpu_on_every_c2c_link(models: ModuleType, hardware: str) -> None:
    """The paper's choice between its two ways; fused casts are a third, which it does not have."""
    profile = estimate("paper-5b", micro_batch=4, seq_len=1024, hardware=hardware)
    gpu, cpu = (step_seconds(profile, models.pcie_era_plan(profile, cast_down=w, cast_up=w)) for w in ("gpu", "cpu"))
    assert gpu < 0.85 * cpu


def test_the_reported_links_change_no_step_by_more_than_two_per_cent(results: dict[str, Any]) -> None:
    rows = results["parts"]["links"]["presets"]
    cases: dict[tuple[str, int, int], list[float]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["batch"], row["seq_len"]), []).append(row["step_s"])
    assert [len(seconds) for seconds in cases.values()] == [3] * 5
    for case, seconds in cases.items():
        assert max(seconds) / min(seconds) < 1.02, case


def test_weight_flow_efficiency(models: ModuleType, figures: ModuleType) -> None:
    for batch, published in figures.FLOW_EFFICIENCY.items():
        serial, overlapped = (100 * models.flow_efficiency(batch * 1024, 450, 990, overlapped=o) for o in (False, True))
        assert serial == pytest.approx(published.value, abs=0.5)
        assert overlapped > serial


def test_qwen3_14b_lies_near_the_lower_of_the_authors_two_figures(models: ModuleType, figures: ModuleType) -> None:
    rows = {r["way"].split(":")[0]: r for r in models.throughput()}
    theirs, zero = rows["their settings"], rows["ZeRO-Offload"]
    low, high = figures.QWEN_TFLOPS["examples"].value, figures.QWEN_TFLOPS["blog"].value
    assert 0.95 * low < theirs["authors_count_tflops"] < 1.05 * low < high
    assert zero["step_s"] / theirs["step_s"] == pytest.approx(figures.QWEN_GAIN.value, rel=0.12)
    assert theirs["gpu_busy"] > figures.GPU_BUSY["superoffload"].value
    assert theirs["model_tflops"] < theirs["with_recompute_tflops"] < theirs["authors_count_tflops"]
    # 14.768e9 parameters, 40 layers of 5120: four passes of 2 N and of the whole square of attention, per sequence.
    by_hand = 4 * (8 * 14.768307e9 * 4096 + 16 * 40 * 5120 * 4096**2)
    assert theirs["authors_count_tflops"] * 1e12 * theirs["step_s"] == pytest.approx(by_hand, rel=1e-3)


def test_every_published_figure_says_its_standing(figures: ModuleType) -> None:
    found = 0
    for value in vars(figures).values():
        for figure in _figures(value, figures.Figure):
            assert figure.status in ("P", "O", "S", "D")
            assert figure.source and figure.unit
            found += 1
    assert found > 25


def _figures(value: object, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _figures(v, kind)
    elif isinstance(value, tuple):
        for v in value:
            yield from _figures(v, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _figures(getattr(value, f.name), kind)


def test_the_recorded_results_are_those_of_today(results: dict[str, Any], ablations: ModuleType) -> None:
    """Where this fails the cost model has changed: run bench_published.py again and reread docs/cost_model.md."""
    assert results["status"] == "modelled"
    assert set(results["parts"]) == {"adam", "ablation", "largest", "links", "flow", "throughput"}
    assert results["parts"]["adam"] == ablations.adam()
    today = ablations.ablation(ablations.Ablation())
    recorded = results["parts"]["ablation"]["chosen"]
    for old, new in zip(recorded["rows"], today["rows"], strict=True):
        assert old["step_s"] == pytest.approx(new["step_s"], rel=0.01)
    hw = results["config"]["hardware"]["gh200"]
    assert hw["link"] == json.loads(preset("gh200").to_json())["link"]
