"""A machine with figures changed by hand."""

from __future__ import annotations

import pytest

from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.hardware import preset
from superoffload.planner import make_plan
from superoffload.simulator import step_seconds
from superoffload.what_if import FIGURES, edited


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_changes_alone_and_says_so(name: str) -> None:
    machine, figure = preset("gh200"), FIGURES[name]
    before = figure.read(machine)
    other = edited(machine, **{name: before * 2})
    assert figure.read(other) == pytest.approx(before * 2)
    assert {n for n, f in FIGURES.items() if f.read(other) != f.read(machine)} == {name}
    assert other.name == "gh200 edited" and other.source == machine.source
    assert other.sources[figure.source] == f"assumed: {before * 2:g} {figure.unit}".rstrip() + (
        f", set by hand in place of {before:g}"
    )
    assert {k: v for k, v in other.sources.items() if k != figure.source} == {
        k: v for k, v in machine.sources.items() if k != figure.source
    }


def test_the_same_figures_are_the_same_machine() -> None:
    machine = preset("gh200")
    assert edited(machine, **{n: f.read(machine) for n, f in FIGURES.items()}) is machine


def test_curves_keep_their_shape_and_mfu_its_meaning() -> None:
    machine = preset("gh200")
    faster = edited(machine, link_down_gb_per_s=900.0, matmul_tflops=2 * machine.gpu.matmul_bf16_tflops)
    shape = [x / machine.link.down.peak for x in machine.link.down.gb_per_s]
    assert [x / faster.link.down.peak for x in faster.link.down.gb_per_s] == pytest.approx(shape)
    assert faster.gpu.peak_bf16_tflops == pytest.approx(2 * machine.gpu.peak_bf16_tflops)


def test_measured_casts_hold_for_the_measured_link_and_memory_only() -> None:
    casts = {"down": {"gpu": 1.0, "cpu": 1.0, "fused": 1.0}, "up": {"gpu": 1.0, "cpu": 1.0, "fused": 1.0}}
    machine = preset("gh200").from_dict(
        {**preset("gh200").model_dump(), "casts": {**casts, "bucket_params": 9, "threads": 1}}
    )
    assert edited(machine, gpu_memory_gb=50).casts == machine.casts is not None
    for name in ("link_up_gb_per_s", "dram_gb_per_s", "adam_gb_per_s"):
        assert edited(machine, **{name: 99}).casts is None, name


def test_a_slower_adam_makes_a_longer_step() -> None:
    machine = preset("gh200")
    profiles = [
        estimate("llama-7b", micro_batch=1, seq_len=2048, hardware=hw)
        for hw in (machine, edited(machine, adam_gb_per_s=60))
    ]
    plan = make_plan(profiles[0], retained_buckets=0)
    fast, slow = (step_seconds(p, plan) for p in profiles)
    assert slow > 2 * fast


@pytest.mark.parametrize(
    ("name", "value"), [("link_up_gb_per_s", 0), ("cpu_cores", 0.4), ("gpu_memory_gb", float("inf"))]
)
def test_values_that_no_machine_has_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match="above 0"):
        edited(preset("gh200"), **{name: value})


def test_unknown_figures_are_named() -> None:
    with pytest.raises(InputError, match="gpu_memory_gb"):
        edited(preset("gh200"), gpu_memory=3)
