from __future__ import annotations

import pytest

from superoffload import hardware
from superoffload.errors import InputError
from superoffload.hardware import Curve, Hardware

NUMBERS = (
    "gpu.memory_gb", "gpu.peak_bf16_tflops", "gpu.matmul_bf16_tflops", "gpu.hbm_gb_per_s", "cpu.cores",
    "cpu.memory_gb", "cpu.dram_gb_per_s", "cpu.adam_gb_per_s", "cpu.cast_gb_per_s", "cpu.dma_write_cost", "link.down",
    "link.up", "link.both_gb_per_s",
)  # fmt: skip


def test_the_documented_presets_exist() -> None:
    assert hardware.preset_names() == (
        "gh200", "gh200-144gb", "gh200-quad", "gh200-datasheet", "gb200", "mi300a", "h100-pcie5", "h200-pcie5",
        "laptop",
    )  # fmt: skip


@pytest.mark.parametrize("name", hardware.preset_names())
def test_every_number_has_a_source_that_says_its_standing(name: str) -> None:
    hw = hardware.preset(name)
    assert hw.name == name
    assert hw.source == "preset"
    assert set(hw.sources) == set(NUMBERS)
    for field, source in hw.sources.items():
        assert source.split(":")[0] in ("published", "reported", "measured", "assumed"), (field, source)
    assert Hardware.from_json(hw.to_json()) == hw


def test_only_the_measured_machine_says_measured_of_its_link() -> None:
    for name in hardware.preset_names():
        measured = [f for f, s in hardware.preset(name).sources.items() if s.startswith("measured")]
        assert bool(measured) == (name == "h200-pcie5"), name


def test_names_are_exact_and_a_near_miss_is_suggested() -> None:
    with pytest.raises(InputError, match='unknown hardware preset "h200"; did you mean'):
        hardware.preset("h200")
    with pytest.raises(InputError, match="superoffload probe"):
        hardware.preset("GH200")


def test_reported_links_are_asymmetric_and_the_datasheet_is_not() -> None:
    single, quad, sheet = (hardware.preset(n).link for n in ("gh200", "gh200-quad", "gh200-datasheet"))
    assert single.up.peak == 346
    assert single.down.peak == pytest.approx(0.85 * single.up.peak, rel=0.01)
    assert (quad.up.peak, quad.down.peak) == (416, 170)
    assert sheet.up.peak == sheet.down.peak == 450


def test_h200_figures_are_the_measured_ones() -> None:
    hw = hardware.preset("h200-pcie5")
    for mb, gb_per_s in ((1, 38.9), (4, 45.5), (16, 52.4), (64, 54.8), (1024, 55.2)):
        assert hw.link.up.at(mb * 1e6) == pytest.approx(gb_per_s)
        assert hw.link.down.at(mb * 1e6) == pytest.approx(gb_per_s)
    assert [hw.cpu.adam_at(t) for t in (1, 4, 8, 12, 16)] == [18, 62, 98, 118, 118]
    assert (hw.link.both_gb_per_s, hw.cpu.dram_gb_per_s) == (100, 155)


@pytest.mark.parametrize(("params", "seconds"), [(1e9, 0.082), (2e9, 0.160), (4e9, 0.316), (8e9, 0.608)])
def test_grace_adam_meets_the_papers_table(params: float, seconds: float) -> None:
    cpu = hardware.preset("gh200").cpu
    assert 28 * params / (cpu.adam_at(65) * 1e9) == pytest.approx(seconds, rel=0.05)


def test_curve_interpolates_in_log_size_and_is_flat_outside() -> None:
    curve = Curve(size_mb=(1, 4), gb_per_s=(10, 30))
    assert [curve.at(x) for x in (1, 1e6, 2e6, 4e6, 1e9)] == [10, 10, 20, 30, 30]


def test_curve_refuses_what_is_no_curve() -> None:
    for sizes, rates in (((2, 1), (1, 1)), ((1,), (1, 2)), ((1,), (0,)), ((), ())):
        with pytest.raises(InputError):
            Curve.from_dict({"size_mb": sizes, "gb_per_s": rates})
