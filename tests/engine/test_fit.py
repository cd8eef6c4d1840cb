"""What does not fit the memory that is free is refused before anything is allocated."""

import pytest
import torch

from superoffload.engine import OffloadAdamW, fit
from superoffload.engine.fit import free_host_bytes
from superoffload.errors import DoesNotFit
from superoffload.memory import state_items
from tests.engine.common import batches, llama, train
from tests.engine.scenario import equal, weights

PLANS = [
    {},
    {"speculate": "on"},
    {"speculate": "on", "undo": "snapshot"},
    {"speculate": "on", "undo_buckets": 2, "retained_buckets": 1},
    {"retained_buckets": 5, "speculate": "off"},
    {"cast_down": "gpu", "cast_up": "gpu"},
    {"cast_down": "cpu", "cast_up": "cpu"},
    {"master": "split", "speculate": "off"},
    {"master": "split", "flow_blocks": (1, 3), "retained_buckets": 9, "speculate": "on"},
    {"flow_blocks": (1, 2, 3), "cast_up": "gpu", "prefetch_blocks": 2, "accumulate_on": "cpu"},
]


def wide(dtype):
    """Large enough for tensors of a huge page, so that all that is allocated is counted alike."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, num_hidden_layers=3, intermediate_size=512, num_attention_heads=4,
                         vocab_size=384, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fields", PLANS)
def test_what_is_accounted_for_is_what_is_allocated(dtype, fields):
    """On the host to the byte, but for a table of tickets and sums that is smaller than a thousandth."""
    model = wide(dtype)
    with OffloadAdamW(model, bucket_mb=1, **fields) as opt:
        engine = opt.engine
        away = [f.nbytes for f in engine.flow._order]
        items = state_items([b.layout for b in engine.arenas.buckets], opt.plan, away)
        counted = sum(items["pinned"].values()) + sum(items["host"].values())
        allocated = engine.arenas.host.pinned_bytes + engine.arenas.host.pageable_bytes
        assert 0 <= allocated - counted < 1e-3 * counted
        here = {i.name: i.bytes for i in opt.memory().items if i.place == "gpu"}
        weights = items["gpu"]["16-bit weights"] + items["gpu"]["float32 weights"]
        assert here["weights"] == weights
        assert here["flow slots"] == items["gpu"]["flow slots"]
        retained = items["gpu"]["retained master weights and moments"] + items["gpu"]["retained gradients"]
        assert here["retained buckets"] == retained
        ring = items["gpu"]["gradient ring"]
        assert 0 <= here["gradient ring and norm partials"] - ring < 1e-2 * max(ring, 1e6)


def test_a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does(monkeypatch):
    model = wide(torch.bfloat16)
    before = weights(model)
    n = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(fit, "free_host_bytes", lambda: 20 * n)
    with pytest.raises(DoesNotFit, match=r"host memory: .* are needed and .* are free; largest item is ") as refused:
        OffloadAdamW(model, bucket_mb=1, speculate="on", undo="snapshot")
    assert "Nearest plan that fits: " in str(refused.value)
    assert refused.value.ledger.overflow()["host"] > 0
    nearest = refused.value.nearest
    assert equal(before, weights(model))
    with OffloadAdamW(model, plan=nearest) as opt:
        data = batches(1)
        train(model, opt, data)
    monkeypatch.setattr(fit, "free_host_bytes", lambda: 1 * n)
    with pytest.raises(DoesNotFit, match="No plan of this model fits what is free"):
        OffloadAdamW(model, bucket_mb=1)
    monkeypatch.setattr(fit, "free_host_bytes", lambda: None)  # a system that does not say
    OffloadAdamW(model, bucket_mb=1).close()


def test_the_optimizer_that_is_replaced_gives_its_memory_back_first(monkeypatch):
    model = llama(torch.bfloat16)
    first = OffloadAdamW(model, bucket_mb=0.05)
    used = sum(i.bytes for i in first.memory().items)
    monkeypatch.setattr(fit, "free_host_bytes", lambda: used // 10)
    with pytest.warns(UserWarning, match="already had an OffloadAdamW"):
        second = OffloadAdamW(model, bucket_mb=0.05)
    second.close()
    with pytest.raises(DoesNotFit):
        OffloadAdamW(model, bucket_mb=0.05)


def test_free_memory_is_a_sane_figure(tmp_path, monkeypatch):
    free = free_host_bytes()
    assert free is not None and 2**28 < free < 2**46
    for name, text in (("max", "5000000"), ("current", "3000000"), ("stat", "anon 1\ninactive_file 500000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(fit, "CGROUP", tmp_path)
    assert free_host_bytes() == 5000000 - 3000000 + 500000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes() > 2**28


def test_a_rebuild_that_does_not_fit_leaves_the_optimizer_as_it_was(monkeypatch):
    model = llama(torch.bfloat16)
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    data = batches(3)
    with OffloadAdamW(model, bucket_mb=0.05) as opt:
        train(model, opt, data[:1])
        for p in model.model.layers[0].parameters():
            p.requires_grad_(True)
        monkeypatch.setattr(fit, "free_host_bytes", lambda: 0)
        with pytest.raises(DoesNotFit):
            opt.add_param_group({"params": list(model.model.layers[0].parameters())})
        monkeypatch.undo()
        assert opt.stats.step == 1
        assert len(opt.param_groups) == 1
        train(model, opt, data[1:])
