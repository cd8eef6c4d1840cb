"""Profile and probe on a GPU: times that add up to the step, plausible rates, and nothing left behind."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from superoffload import hardware, probing  # noqa: E402
from superoffload.errors import DoesNotFit  # noqa: E402
from superoffload.profiling import profile  # noqa: E402

H200 = hardware.preset("h200-pcie5")


def model(layers: int = 4) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def bits(t: Any) -> bytes:
    return t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def test_block_times_add_up_to_the_step_and_nothing_is_left_behind() -> None:
    net = model()
    ids = torch.randint(32000, (4, 2048), device="cuda")
    weights = {n: bits(p) for n, p in net.named_parameters()}
    net(input_ids=ids, labels=ids).loss.backward()  # cuBLAS allocates its workspace at its first product
    net.zero_grad()
    random = bits(torch.cuda.get_rng_state())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    found = profile(net, ids, hardware=H200, repeats=5)
    assert torch.cuda.memory_allocated() == held
    assert bits(torch.cuda.get_rng_state()) == random
    assert {n: bits(p) for n, p in net.named_parameters()} == weights
    assert all(p.grad is None for p in net.parameters())

    seconds = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        net(input_ids=ids, labels=ids).loss.backward()
        stop.record()
        torch.cuda.synchronize()
        net.zero_grad()
        seconds.append(start.elapsed_time(stop) / 1e3)
    whole = sum(b.forward_s + b.backward_s for b in found.blocks)
    assert whole == pytest.approx(statistics.median(seconds[2:]), rel=0.1)
    layers = [b for b in found.blocks if b.kind == "layer"]
    assert max(b.forward_s for b in layers) < 1.5 * min(b.forward_s for b in layers)
    assert all(1.2 < b.backward_s / b.forward_s < 4 for b in layers)


def test_kept_bytes_are_what_the_allocator_holds() -> None:
    net = model(layers=2)
    ids = torch.randint(32000, (4, 1024), device="cuda")
    found = profile(net, ids, hardware=H200, repeats=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = net(input_ids=ids, labels=ids).loss
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert sum(b.activation_bytes for b in found.blocks) == pytest.approx(held, rel=0.05)
    del loss


def test_out_of_memory_leaves_the_model_usable() -> None:
    net = model(layers=2)
    held = torch.cuda.memory_allocated()
    limit = (held + (2 << 30)) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with pytest.raises(DoesNotFit, match="smaller micro-batch"):
            profile(net, torch.randint(32000, (16, 2048)), hardware=H200, repeats=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == held
    assert all(p.grad is None for p in net.parameters())
    net(input_ids=torch.randint(32000, (1, 64), device="cuda")).logits.sum().backward()


def test_probe_measures_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SUPEROFFLOAD_CACHE", str(tmp_path))
    held = torch.cuda.memory_allocated()
    found = probing.probe_machine(refresh=True)
    assert torch.cuda.memory_allocated() == held
    assert found.gpu.name == torch.cuda.get_device_name(0)
    assert not found.shared_memory
    assert found.link.down.peak > 5
    assert max(found.link.down.peak, found.link.up.peak) * 0.9 < found.link.both_gb_per_s
    assert found.gpu.hbm_gb_per_s > found.cpu.dram_gb_per_s
    assert "pinned" in found.sources["link"]
