"""The loss in chunks on a GPU: the peak really falls, gradients are those of the whole, no plan changes a bit."""

import pytest
import torch
import torch.nn.functional as F

from superoffload import chunked_cross_entropy
from superoffload.engine import OffloadAdamW
from superoffload.loss_costs import CHUNK_LOGIT_BYTES
from superoffload.plan import ACTIVATIONS
from tests.engine.common import batches, digest, llama, run_plan
from tests.engine.test_chunked_head import tied
from tests.engine.test_loss import EPS, bounds, problem

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 3, 23])
def test_gradients_are_those_of_the_exact_loss(dtype, chunks):
    tensors, labels = problem(dtype=dtype)
    tensors = [t.detach().cuda().requires_grad_() for t in tensors]
    hidden, weight, bias = tensors
    labels = labels.cuda()
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=chunks)
    exact = F.cross_entropy(F.linear(*(t.detach().double() for t in tensors)), labels)
    assert abs(float(loss.detach()) - float(exact)) <= 8 * EPS[dtype]
    got = torch.autograd.grad(loss * 0.3, tensors)
    for g, (want, most) in zip(got, bounds(*tensors, labels, chunks, None), strict=True):
        assert g.dtype == dtype
        assert bool(((g.double() - 0.3 * want).abs() <= 0.3 * most).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_the_peak_is_what_is_counted(dtype, chunks):
    tokens, width, classes = 2048, 64, 32000
    (hidden, weight, _), labels = problem(tokens, width, classes, dtype)
    hidden, weight = (t.detach().cuda().requires_grad_() for t in (hidden, weight))
    labels = labels.cuda()

    def step():
        chunked_cross_entropy(hidden, weight, labels, chunks=chunks).backward()
        hidden.grad = weight.grad = None

    step()  # libraries' workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    used = torch.cuda.max_memory_allocated() - before
    counted = CHUNK_LOGIT_BYTES * tokens * classes // chunks + (tokens + classes) * width * hidden.element_size()
    assert counted <= used <= 1.02 * counted + (1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [llama, tied])
def test_no_plan_changes_a_bit(dtype, model, hold_up_streams):
    data = batches(6, device="cuda")

    def run(**kwargs):
        return run_plan(dtype, data, device="cuda", model=model, bucket_mb=0.1, loss_chunks=3, **kwargs)

    reference = run(speculate="off")
    assert run(speculate="off") == reference, "control: the model itself must repeat"
    hold_up_streams()
    assert run(speculate="on") == reference
    assert run(speculate="on", retained_buckets=4) == reference
    assert run(speculate="on", flow_blocks=(1, 3)) == reference
    if model is llama:
        assert run(speculate="on", flow_blocks=(1, 2, 4), prefetch_blocks=2) == reference, "the head flows"
    for policy in ACTIVATIONS:
        assert run(speculate="on", activations=policy) == reference, policy
    assert run(speculate="on", accumulation=2) == run(speculate="off", accumulation=2)


def large_vocabulary():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=128, num_hidden_layers=2, intermediate_size=256, num_attention_heads=4, vocab_size=64000,
        use_cache=False,
    )).to(device="cuda", dtype=torch.bfloat16).train()  # fmt: skip


def peak_bytes(chunks):
    model = large_vocabulary()
    x = torch.randint(64000, (4, 1024), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def step(opt):
        model(input_ids=x, labels=x).loss.backward()
        opt.step()
        opt.zero_grad()

    with OffloadAdamW(model, lr=1e-4, max_grad_norm=1.0, bucket_mb=8, loss_chunks=chunks, speculate="on") as opt:
        for _ in range(3):
            step(opt)
        opt.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(opt)
        opt.synchronize()
        used, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated()
        assert after <= before + (1 << 20), "nothing stays"
    return used


def test_the_peak_of_a_step_falls():
    logits = 4 * 1024 * 64000
    one, two, eight = (peak_bytes(n) for n in (1, 2, 8))
    assert one > 10 * logits
    assert two < 0.6 * one
    assert two - eight == pytest.approx(CHUNK_LOGIT_BYTES * logits * (1 / 2 - 1 / 8), rel=0.05)


def test_a_float32_model_under_autocast():
    data = batches(4, device="cuda")

    def run(chunks, speculate):
        model = llama(device="cuda")
        with OffloadAdamW(
            model, lr=1e-3, max_grad_norm=1.0, bucket_mb=0.1, loss_chunks=chunks, speculate=speculate
        ) as opt:
            losses = []
            for x in data:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=x, labels=x).loss
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(float(loss.detach()))
            return digest(model, opt), losses

    assert run(3, "on") == run(3, "off")
    assert run(3, "off")[1] == pytest.approx(run(1, "off")[1], rel=1e-2)
