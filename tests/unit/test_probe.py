"""The probe measures, keeps what it measured, and disturbs nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from superoffload import hardware, probing, probing_casts, probing_link  # noqa: E402
from superoffload.plan import CASTS, Cast  # noqa: E402


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same measurements on less data, into a cache of their own."""
    monkeypatch.setenv("SUPEROFFLOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(probing_link, "ADAM_PARAMS", 1 << 18)
    monkeypatch.setattr(probing_link, "LINK_SIZES_MB", (1, 4))
    monkeypatch.setattr(probing_casts, "BUCKET_PARAMS", 1 << 18)


@pytest.mark.usefixtures("small")
def test_probe_measures_once_and_reads_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    lines: list[str] = []
    begun = time.perf_counter()
    found = probing.probe_machine(progress=lines.append)
    assert time.perf_counter() - begun < 30
    assert torch.equal(torch.get_rng_state(), state)
    assert found.source == "probed"
    assert "CPU Adam" in lines
    assert found.cpu.adam_threads[-1] == found.cpu.cores
    assert found.cpu.dram_gb_per_s >= found.cpu.adam_gb_per_s[-1]
    assert found.shared_memory is (not torch.cuda.is_available())
    for rate in (*found.link.down.gb_per_s, *found.link.up.gb_per_s, found.cpu.cast_gb_per_s, found.gpu.hbm_gb_per_s):
        assert 0.1 < rate < 20_000, "GB/s of no machine"
    assert found.casts is not None
    for way in (found.casts.down, found.casts.up):
        assert all(0.001 < getattr(way, cast) < 1000 for cast in CASTS), "ns per parameter of no machine"
    for field in ("cpu.adam_gb_per_s", "link", "casts", "gpu.matmul_bf16_tflops"):
        assert "measured" in found.sources[field]

    def measured_again(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(probing, "measure", measured_again)
    assert hardware.probe() == found
    with pytest.raises(AssertionError, match="measured again"):
        hardware.probe(refresh=True)


@pytest.mark.usefixtures("small")
def test_large_machines_are_measured_on_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's caches would serve a part of what a small machine can spare."""
    assert [probing_link.scale_for(b) for b in (16e9, 480e9)] == [1, 4]
    sizes: list[int] = []
    monkeypatch.setattr(probing_link, "LARGE_MEMORY_BYTES", 1e9)
    monkeypatch.setattr(probing, "run_adam", lambda state, threads: sizes.append(state[0].numel()))
    found = probing.probe_machine(refresh=True)
    assert set(sizes) == {4 << 18}
    assert "1M parameters" in found.sources["cpu.adam_gb_per_s"]


@pytest.mark.usefixtures("small")
def test_another_machine_or_a_broken_file_is_measured_anew() -> None:
    identity = probing.machine_fingerprint()
    assert probing.cache_path(identity) != probing.cache_path({**identity, "cpu": "another"})
    path = probing.cache_path(identity)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert probing.probe_machine().source == "probed"
    assert hardware.Hardware.load(path).cpu.name == identity["cpu"]


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_placement_is_measured_on_the_same_work(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing_casts, "BUCKET_PARAMS", 3 * 1024 + 5)
    bucket = probing_casts.OneBucket(torch.device("cpu"), 2)
    gradient = torch.randn(3 * 1024 + 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    bucket.near16.copy_(gradient)
    master, m, v = (torch.zeros(3 * 1024 + 5) for _ in range(3))
    adam = {"lr": 1e-5, "step": 10, "threads": 1}
    probing_casts.kernels.adam_step(master, m, v, gradient.float(), **adam)
    bucket.down(cast)
    assert torch.equal(bucket.state[0], master)

    bucket.host32.copy_(gradient)
    probing_casts.kernels.adam_step(master, m, v, gradient.float(), **adam)
    bucket.up(cast)
    assert torch.equal(bucket.state[0], master)
    assert torch.equal(bucket.near16, master.bfloat16())
