"""The figure of a profile: a pure function of its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from superoffload.errors import InputError
from superoffload.profiler_events import GpuUse, KernelTotal, OperatorTotal, ProfilerSummary, StepShares
from superoffload.widgets import plot_profile
from superoffload.widgets.profile_figures import SHOWN, profile_spec
from superoffload.widgets.theme import DARK


def summary(kernels: int = 0) -> ProfilerSummary:
    share = StepShares(4, 0.0, 0.1, 0.05 if kernels else 0.0, 0.01 if kernels else 0.0, 0.0, 0.01, 0.02, 0.01)
    return ProfilerSummary(
        source="measured",
        worker="host_1",
        steps=(share,),
        operators=tuple(OperatorTotal(f"aten::op_{i}", i, 0.02 / (i + 1), 0.03, 0.001 * i) for i in range(20)),
        kernels=tuple(KernelTotal(f"void a_long_template_name_that_all_have_in_common<{i}>", 3, 0.1, 0.05)
                      for i in range(kernels)),
        gpus=(GpuUse(0, "NVIDIA H200", 0.5),) if kernels else (),
    )  # fmt: skip


def test_bars_are_the_summary() -> None:
    fig = plot_profile(summary(3))
    by_name = {t.name: t for t in fig.data}
    assert list(by_name["GPU kernels"].y) == [0.05] and list(by_name["CPU operators"].y) == [0.02]
    assert list(by_name["GPU kernels"].x) == ["4"]
    assert len(by_name["In the operator itself"].x) == SHOWN
    assert list(by_name["Kernels"].x) == [0.1, 0.1, 0.1]
    assert len(set(by_name["Kernels"].y)) == 3, "names that look alike when cut are three bars"
    assert "GPU 0 NVIDIA H200 busy 50%" in fig.layout.title.text and "(measured)" in fig.layout.title.text


def test_without_a_gpu_nothing_of_one_is_drawn() -> None:
    fig = plot_profile(summary())
    assert "no GPU was profiled" in fig.layout.title.text
    assert not fig.layout.xaxis3.visible
    assert not next(t for t in fig.data if t.name == "GPU kernels").showlegend
    assert len(profile_spec(summary(), theme=DARK)["data"]) == len(profile_spec(summary(30))["data"])


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="to_tensorboard"):
        plot_profile(tmp_path)
