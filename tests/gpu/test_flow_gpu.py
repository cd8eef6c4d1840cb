"""Weight flow on a GPU: the bits of the stationary step whatever stream is late, and homes that the GPU can read."""

import functools
import gc

import pytest
import torch

from superoffload.engine import OffloadAdamW
from superoffload.engine.device import CudaDevice
from superoffload.engine.host_memory import HostMemory
from tests.engine.common import batches, checkpointed, digest, llama, run_plan, train
from tests.engine.scenario import equal, weights

pytestmark = pytest.mark.usefixtures("deterministic")


@functools.cache
def data():
    return batches(6, device="cuda")


def deep(dtype=torch.bfloat16, device="cuda"):
    return llama(dtype, device=device, layers=6)


def run(dtype, **plan):
    return run_plan(dtype, data(), device="cuda", model=deep, bucket_mb=0.04, **plan)


def test_the_gpu_reads_and_writes_pinned_memory_as_its_own():
    device = CudaDevice(torch.device("cuda", 0))
    memory = HostMemory(can_pin=True)
    for n in (1000, 3 << 20):  # from torch's allocator, and mapped
        host = memory.zeros(n, torch.bfloat16, pinned=True)
        host.copy_(torch.arange(n) % 251)
        alias = device.alias(host)
        assert alias.is_cuda and alias.dtype == torch.bfloat16 and alias.data_ptr() == host.data_ptr()
        assert torch.equal(alias.clone().cpu(), host)
        alias.mul_(2)
        torch.cuda.synchronize()
        assert torch.equal(host.float(), (torch.arange(n) % 251).float() * 2)
    memory.release()


def test_a_state_dict_that_is_kept_past_close_can_be_read():
    model = deep()
    opt = OffloadAdamW(model, flow_blocks=(1, 2, 3), bucket_mb=0.04)
    train(model, opt, data()[:2])
    kept = model.state_dict()
    before = {name: t.cpu() for name, t in kept.items()}
    opt.close()
    del opt
    train(model, torch.optim.AdamW(model.parameters()), data()[2:3])  # other memory, other kernels
    flowed = [name for name in kept if ".layers." in name]
    gc.collect()
    torch.cuda.synchronize()
    same = [name for name in flowed if torch.equal(kept[name].cpu(), before[name])]
    assert len(same) >= 9, "the weights of the blocks that flowed are those of close()"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flow_changes_no_bit(dtype):
    reference = run(dtype)
    assert run(dtype) == reference, "control: the model itself must repeat"
    for flow in ((3,), (1, 2, 3, 4, 5, 6), (0, 2, 4, 7)):
        for prefetch, retained, speculate in ((1, 0, "on"), (2, 9, "on"), (9, 0, "off")):
            found = run(dtype, flow_blocks=flow, prefetch_blocks=prefetch, retained_buckets=retained,
                        speculate=speculate)  # fmt: skip
            assert found == reference, (flow, prefetch, retained, speculate)


@pytest.mark.parametrize("reentrant", [False, True])
def test_held_up_streams_change_nothing(hold_up_streams, reentrant):
    def model(dtype, device):
        return checkpointed(deep(dtype, device), reentrant)

    reference = run_plan(torch.bfloat16, data(), device="cuda", model=model, accumulation=2, bucket_mb=0.04)
    hold_up_streams()
    for prefetch, retained in ((1, 0), (2, 7)):
        found = run_plan(
            torch.bfloat16, data(), device="cuda", model=model, accumulation=2, bucket_mb=0.04, speculate="on",
            flow_blocks=(1, 2, 3, 5, 6), prefetch_blocks=prefetch, retained_buckets=retained, delay_us=300,
        )  # fmt: skip
        assert found == reference


def test_weights_between_uses():
    plain, flowing = deep(), deep()
    kwargs = dict(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, bucket_mb=0.04)
    with OffloadAdamW(plain, **kwargs) as a, OffloadAdamW(flowing, flow_blocks=(1, 2, 3, 4, 5), **kwargs) as b:
        for i in range(3):
            for model, opt in ((plain, a), (flowing, b)):
                train(model, opt, data()[i : i + 1])
                opt.synchronize()
                with torch.no_grad():
                    model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
                    model(input_ids=data()[0])
                    model.model.layers[4].mlp.up_proj.weight.add_(0.01)
            assert equal(weights(plain), weights(flowing))
        assert digest(plain, a) == digest(flowing, b)
    assert equal(weights(plain), weights(flowing))
    assert all(p.is_cuda for p in flowing.parameters())
    flowing(input_ids=data()[0], labels=data()[0]).loss.backward()


def test_the_gpu_holds_slots_and_allocates_nothing_more():
    def wide():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=1024, num_hidden_layers=8, intermediate_size=4096, num_attention_heads=8,
                             vocab_size=384, use_cache=False)  # fmt: skip
        return LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()

    layer = 2 * (4 * 1024**2 + 3 * 1024 * 4096)
    peaks = {}
    for flow in ((), (1, 2, 3, 4, 5, 6, 7, 8)):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = wide()
        with OffloadAdamW(model, lr=1e-4, bucket_mb=8, flow_blocks=flow, prefetch_blocks=1) as opt:
            train(model, opt, data()[:2])
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            now = torch.cuda.memory_allocated()
            train(model, opt, data()[2:])
            torch.cuda.synchronize()
            peaks[flow] = torch.cuda.max_memory_allocated() - before
            assert torch.cuda.memory_allocated() == now
        del model, opt
    saved = peaks[()] - peaks[1, 2, 3, 4, 5, 6, 7, 8]
    assert abs(saved - 6 * layer) < 0.02 * 6 * layer
