"""Compiled layers on a GPU: one graph serves all layers, slots and steps, and no plan changes a bit of its results."""

import functools
import gc

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from superoffload.engine import OffloadAdamW, activations
from tests.engine.common import batches, digest, llama, run_plan, train
from tests.engine.test_activations import dropping

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # Of torch's compiler itself.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

POLICIES = ("none", "full", "offload_inputs", "offload_saved")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(activations, "OFFLOAD_MIN_BYTES", 512)


@functools.cache
def data():
    return batches(6, device="cuda")


def deep(dtype=torch.bfloat16, device="cuda"):
    return llama(dtype, device=device, layers=6)


def run(dtype=torch.bfloat16, model=deep, **plan):
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    plan = {"bucket_mb": 0.04, "compile_blocks": True, "activations": "none", **plan}
    return run_plan(dtype, data(), device="cuda", model=model, **plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_plan_changes_a_bit(dtype):
    reference = run(dtype)
    assert run(dtype) == reference, "control: the compiled model itself must repeat"
    assert run(dtype, compile_blocks=False)[0] != reference[0], "control: something is compiled"
    made = counters["stats"]["unique_graphs"]
    for policy in POLICIES:
        for speculate in ("on", "off"):
            assert run(dtype, activations=policy, speculate=speculate) == reference, (policy, speculate)
    for flow in ((3,), (1, 2, 3, 4, 5, 6), (0, 2, 4, 7)):
        for prefetch, retained, speculate in ((1, 0, "on"), (2, 9, "on"), (9, 0, "off")):
            for policy in ("none", "full"):
                found = run(dtype, flow_blocks=flow, prefetch_blocks=prefetch, retained_buckets=retained,
                            speculate=speculate, activations=policy)  # fmt: skip
                assert found == reference, (flow, prefetch, retained, speculate, policy)
    assert counters["stats"]["unique_graphs"] == made, "no plan, layer, slot or step needs a graph of its own"


def test_all_layers_share_one_graph():
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    model = deep()
    with OffloadAdamW(
        model, max_grad_norm=1.0, bucket_mb=0.04, compile_blocks=True, activations="full", flow_blocks=(1, 2, 4, 5)
    ) as opt:
        train(model, opt, data())
    assert counters["stats"]["unique_graphs"] == before + 1


def test_held_up_streams_change_nothing(hold_up_streams):
    references = {policy: run(activations=policy, accumulation=2) for policy in ("none", "full")}
    hold_up_streams()
    for policy, reference in references.items():
        for prefetch, retained in ((1, 0), (2, 7)):
            found = run(
                activations=policy, accumulation=2, speculate="on", flow_blocks=(1, 2, 3, 5, 6),
                prefetch_blocks=prefetch, retained_buckets=retained, delay_us=300,
            )  # fmt: skip
            assert found == reference, (policy, prefetch, retained)


def test_recompute_draws_the_same_random_numbers():
    reference = run(model=dropping)
    assert run(model=dropping) == reference, "control"
    for policy in ("full", "offload_inputs", "offload_saved"):
        assert run(model=dropping, activations=policy, flow_blocks=(1, 2)) == reference, policy


def test_it_trains_as_the_eager_model_does():
    eager, compiled = run(torch.float32, compile_blocks=False)[1], run(torch.float32)[1]
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_a_stale_graph_raises():
    model = deep()
    with OffloadAdamW(model, bucket_mb=0.04, compile_blocks=True, activations="none", flow_blocks=(1, 2)) as opt:
        old = model(input_ids=data()[0], labels=data()[0]).loss
        train(model, opt, data()[1:2])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


def test_compiled_layers_keep_less_and_nothing_grows():
    def wide() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=512, num_hidden_layers=8, intermediate_size=1536, num_attention_heads=8,
                             vocab_size=384, use_cache=False)  # fmt: skip
        return LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()

    kept, x = {}, batches(1, device="cuda", size=16, seq=256)[0]
    for compiled in (False, True):
        model = wide()
        with OffloadAdamW(model, lr=1e-4, bucket_mb=8, compile_blocks=compiled, activations="none") as opt:
            train(model, opt, [x] * 3)
            opt.synchronize()
            gc.collect()
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=x, labels=x).loss
            kept[compiled] = torch.cuda.memory_allocated() - before
            loss.backward()
            opt.step()
            opt.zero_grad()
            train(model, opt, [x] * 2)
            opt.synchronize()
            del loss
            gc.collect()
            assert torch.cuda.memory_allocated() == before
            digest(model, opt)
        del model, opt
    assert kept[True] < 0.85 * kept[False], kept
