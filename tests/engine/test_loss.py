"""Cross-entropy in chunks: the loss and gradients of the whole, at a fraction of its memory."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from superoffload import chunked_cross_entropy
from superoffload.engine import OffloadAdamW
from superoffload.engine.activations import BlockForward
from superoffload.engine.chunked_head import InsteadOfLogits
from superoffload.engine.loss import chunk_bounds
from superoffload.errors import InputError, NotSupported
from superoffload.plan import ACTIVATIONS
from superoffload.profiling_counts import Watch
from tests.engine.common import VOCAB, batches, digest, llama, run_plan, train
from tests.engine.scenario import KINDS, play
from tests.engine.test_activations import dropping

EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of 1: the relative error of one rounding."""


def problem(tokens=23, width=16, classes=37, dtype=torch.float32, ignored=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    weight = torch.randn(classes, width, generator=g, dtype=torch.float64) / width**0.5
    bias = torch.randn(classes, generator=g, dtype=torch.float64)
    labels = torch.randint(0, classes, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < ignored] = -100
    return [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)], labels


def whole(hidden, weight, bias, labels, denominator=None):
    reduction = "mean" if denominator is None else "sum"
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction=reduction) / (denominator or 1)


def gradients(loss, tensors, factor=1.0):
    return torch.autograd.grad(loss * factor, tensors)


def bounds(hidden, weight, bias, labels, chunks, denominator):
    """What the gradients may differ by from exact ones of the same inputs, element by element.

    With u the error of one rounding in the dtype: a logit is rounded once and summed with `width` additions at most in
    float32, so p is off by the factor exp(2 d), d = u |logit| + width 2^-24 sum|h w|; p - 1 is rounded to the dtype.
    Each is then summed over classes or tokens in at least float32 and rounded once, a weight's once for each chunk, and
    once more when backward multiplies.
    """
    u, s = EPS[hidden.dtype], EPS[torch.float32 if hidden.dtype != torch.float64 else torch.float64]
    h, w, b = (t.detach().double() for t in (hidden, weight, bias))
    logits, size = h @ w.T + b, h.abs() @ w.abs().T + b.abs()
    d = (u * logits.abs() + (h.shape[1] + 4) * s * size).amax(1, keepdim=True)
    p = torch.softmax(logits, 1)
    counts = labels != -100
    share = counts.double()[:, None] / (counts.sum() if denominator is None else denominator)
    at = F.one_hot(labels.clamp(min=0), len(w))
    exact = (p - at) * share
    off = (p * torch.expm1(2 * d) + 8 * s + u * (p - at).abs()) * share * 1.1
    n = max(w.shape[0], h.shape[0]) * s

    def product(a, off_a, other):
        return off_a @ other.abs() + n * (a.abs() @ other.abs())

    by_hidden, by_weight, by_bias = exact @ w, exact.T @ h, exact.sum(0)
    partial = exact.abs().T @ h.abs()  # what has been added up at any moment is less
    tiny = torch.finfo(hidden.dtype).smallest_normal * 2 * u * (h.shape[0] + w.shape[0])  # subnormal float16
    return [
        (by_hidden, product(exact, off, w) + 3 * u * by_hidden.abs() + tiny),
        (by_weight, product(exact.T, off.T, h) + (2 * min(chunks, len(h)) + 1) * u * partial + tiny),
        (by_bias, off.sum(0) + n * exact.abs().sum(0) + 3 * u * by_bias.abs() + tiny),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("denominator", [None, 7, 1])
@pytest.mark.parametrize("chunks", [1, 3, 23, 100])
def test_gradients_are_those_of_the_exact_loss(dtype, denominator, chunks):
    tensors, labels = problem(dtype=dtype)
    hidden, weight, bias = tensors
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=chunks, denominator=denominator)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = whole(*(t.detach().double() for t in tensors), labels, denominator)
    slack = 1e-12 if dtype == torch.float64 else 23 * 8 * EPS[dtype] / (denominator or 23)
    assert abs(float(loss.detach()) - float(exact)) <= slack
    for got, (want, most) in zip(gradients(loss, tensors), bounds(*tensors, labels, chunks, denominator), strict=True):
        assert got.dtype == dtype
        error = (got.double() - want).abs()
        assert bool((error <= most).all()), float((error / most).max())
        assert float(most.mean()) < 0.5 * float(want.abs().mean()) + 1e-9, "control: the bound means something"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40), classes=st.integers(1, 30), chunks=st.integers(1, 50), seed=st.integers(0, 1000),
    ignored=st.sampled_from([0.0, 0.3, 1.0]), denominator=st.sampled_from([None, 1.0, 12]),
    wanted=st.lists(st.booleans(), min_size=3, max_size=3), biased=st.booleans(),
    factor=st.sampled_from([1.0, 0.3, -2.0]),
)  # fmt: skip
def test_any_sizes(tokens, classes, chunks, seed, ignored, denominator, wanted, biased, factor):
    tensors, labels = problem(tokens, 5, classes, torch.float64, ignored, seed)
    for t, w in zip(tensors, wanted, strict=True):
        t.requires_grad_(w)
    hidden, weight, bias = tensors if biased else (*tensors[:2], None)
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=chunks, denominator=denominator)
    want = whole(hidden, weight, bias, labels, denominator)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    chosen = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    assert loss.requires_grad == bool(chosen)
    if chosen:
        got, want = gradients(loss, chosen, factor), gradients(want, chosen, factor)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@given(tokens=st.integers(0, 1000), chunks=st.integers(1, 100))
def test_chunks_are_even_and_cover_every_token_once(tokens, chunks):
    found = list(chunk_bounds(tokens, chunks))
    assert [i for first, end in found for i in range(first, end)] == list(range(tokens))
    sizes = [end - first for first, end in found]
    assert len(sizes) == min(tokens, chunks)
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


def test_each_tokens_loss_and_its_gradient_are_torchs_to_the_bit():
    """One chunk, one token that counts: nothing is added up, so nothing may differ but by the products."""
    (hidden, weight, _), _ = problem(dtype=torch.bfloat16)
    for i in range(5):
        labels = torch.full((23,), -100)
        labels[i] = 3
        loss = chunked_cross_entropy(hidden, weight, labels, chunks=1)
        want = F.cross_entropy(F.linear(hidden, weight).float(), labels)
        assert torch.equal(loss, want)
        assert torch.equal(gradients(loss, [hidden])[0], gradients(want, [hidden])[0])


def test_many_chunks_differ_from_one_by_rounding_only():
    tensors, labels = problem(96, 32, 64, ignored=0.1)
    hidden, weight, bias = tensors

    def run(chunks):
        return gradients(chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=chunks), tensors)

    limits = bounds(*tensors, labels, 96, None)
    one = run(1)
    for chunks in (2, 5, 96):
        for a, b, (_, most) in zip(one, run(chunks), limits, strict=True):
            assert bool(((a - b).abs() <= 2 * most).all())
    assert all(torch.equal(a, b) for a, b in zip(run(5), run(5), strict=True))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_torchs_own_chunks_give_the_same_within_rounding():
    tensors, labels = problem(96, 32, 64)
    hidden, weight, bias = tensors
    options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=24)
    theirs = F.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, options=options)
    ours = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    limits = bounds(*tensors, labels, 4, None)
    for a, b, (_, most) in zip(gradients(ours, tensors), gradients(theirs, tensors), limits, strict=True):
        assert bool(((a - b).abs() <= 2 * most).all())


def test_a_batch_without_labels_is_nan_as_in_torch_and_moves_nothing():
    (hidden, weight, bias), _ = problem()
    labels = torch.full((23,), -100)
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=4)
    assert torch.isnan(loss)
    assert torch.isnan(whole(hidden, weight, bias, labels))
    assert all(not g.any() for g in gradients(loss, [hidden, weight, bias]))


def test_another_ignored_label_and_other_shapes():
    (hidden, weight, _), labels = problem(24)
    marked = labels.clone()
    marked[labels == -100] = 5
    keep = labels != 5
    marked[~keep] = 5
    loss = chunked_cross_entropy(hidden.view(2, 3, 4, -1), weight, marked.view(2, 3, 4), chunks=5, ignore_index=5)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, marked, ignore_index=5))
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels.int(), chunks=2).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_acts_as_on_a_linear_layer(dtype):
    (hidden, weight, bias), labels = problem(dtype=dtype)
    tensors = [hidden, weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()]
    hidden, weight, bias = tensors
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=4)
        want = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    rounded = [t.detach().bfloat16() for t in tensors]
    got = gradients(loss, tensors)
    assert [g.dtype for g in got] == [t.dtype for t in tensors]
    for g, (exact, most) in zip(got, bounds(*rounded, labels, 4, None), strict=True):
        assert bool(((g.double() - exact).abs() <= most).all())


def test_small_float16_gradients_survive_a_loss_scale():
    """The mean over many tokens of small gradients: without the scale they would vanish before backward."""
    (hidden, weight, _), labels = problem(4096, 8, 2048, torch.float16)
    scale = 2.0**16

    def error(expected):
        loss = chunked_cross_entropy(hidden, weight, labels, chunks=4, loss_scale=expected)
        got = gradients(loss, [weight], scale)[0].double() / scale
        exact = gradients(whole(hidden.double(), weight.double(), None, labels), [weight])[0].double()
        return float((got - exact).norm() / exact.norm())

    assert error(scale) < 0.01
    assert error(1.0) > 10 * error(scale), "control"


def test_backward_twice_and_second_derivatives():
    tensors, labels = problem()
    hidden, weight, bias = tensors
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=3)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    kept = [g.clone() for g in first]
    third = torch.autograd.grad(loss * 3, tensors)
    for a, b, c in zip(first, kept, third, strict=True):
        assert torch.equal(a, b), "the second backward wrote into the gradients of the first"
        torch.testing.assert_close(c, 3 * a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)
    loss = chunked_cross_entropy(hidden, weight, labels, chunks=3)
    with pytest.raises(NotSupported, match="second derivatives"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


def test_what_is_given_is_not_written_and_may_be_written_afterwards():
    """No input is kept: an edit between forward and backward is no error and changes nothing."""
    tensors, labels = problem()
    hidden, weight, bias = tensors
    before = [t.detach().clone() for t in (*tensors, labels)]
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunks=3)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, labels), before, strict=True))
    want = [g.clone() for g in torch.autograd.grad(loss, tensors, retain_graph=True)]
    with torch.no_grad():
        for t in tensors:
            t.zero_()
        labels.fill_(1)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, tensors), want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    tensors, labels = problem()
    hidden, weight, bias = tensors

    def loss(h):
        return chunked_cross_entropy(torch.tanh(h), weight, labels, bias=bias, chunks=3)

    loss(hidden).backward()
    want = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    checkpoint(loss, hidden, use_reentrant=reentrant).backward()
    assert all(torch.equal(t.grad, w) for t, w in zip(tensors, want, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunks": 0}, "chunks = 0"),
        ({"chunks": 1.5}, "chunks = 1.5"),
        ({"labels": torch.zeros(22, dtype=torch.long)}, r"labels are \[22\]"),
        ({"labels": torch.zeros(23)}, "labels are torch.float32"),
        ({"weight": torch.zeros(37, 15)}, r"weight \[37, 15\]"),
        ({"weight": torch.zeros(37, 16).bfloat16()}, "weight is torch.bfloat16"),
        ({"bias": torch.zeros(16)}, r"bias is \[16\]"),
        ({"denominator": torch.ones(2)}, "denominator"),
        ({"denominator": torch.ones(1, requires_grad=True)}, "denominator"),
        ({"loss_scale": 0.0}, "loss_scale = 0"),
    ],
)
def test_bad_arguments_are_refused(change, words):
    (hidden, weight, _), labels = problem()
    with pytest.raises(InputError, match=words):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, "chunks": 2, **change})


def test_a_label_out_of_range_raises():
    (hidden, weight, _), labels = problem()
    for wrong in (37, -1):
        labels[3] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            chunked_cross_entropy(hidden, weight, labels, chunks=2)


def peak(function, *there):
    """Bytes that `function` makes beside the tensors that are `there`."""
    holder = nn.Module()
    for i, t in enumerate(there):
        holder.register_buffer(f"t{i}", t.detach())
    with Watch(holder) as watch:
        kept = function()
        gc.collect()
    del kept
    return watch.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunks_logits_at_a_time(dtype):
    """8 bytes for each logit of a chunk, the gradients, and vectors."""
    from superoffload.loss_costs import CHUNK_LOGIT_BYTES

    tokens, width, classes = 512, 8, 4000
    (hidden, weight, _), labels = problem(tokens, width, classes, dtype)
    item = hidden.element_size()
    for chunks in (1, 4, 16):
        used = peak(lambda n=chunks: chunked_cross_entropy(hidden, weight, labels, chunks=n), hidden, weight, labels)
        counted = CHUNK_LOGIT_BYTES * tokens * classes // chunks + (tokens + classes) * width * item
        assert counted <= used <= counted + 64 * tokens
        with torch.no_grad():
            used = peak(
                lambda n=chunks: chunked_cross_entropy(hidden, weight, labels, chunks=n), hidden, weight, labels
            )
        assert used <= CHUNK_LOGIT_BYTES * tokens * classes // chunks + 64 * tokens


def test_backward_makes_no_second_gradient():
    (hidden, weight, _), labels = problem(64, 32, 4000)
    with Watch(nn.Module()) as watch:
        loss = chunked_cross_entropy(hidden, weight, labels, chunks=2)
        held = watch.live
        watch.reset()
        (3 * loss).backward()
        assert held >= 4 * (hidden.numel() + weight.numel())
        assert watch.peak < held + 1000, "gradients are scaled in place and handed on"
    assert weight.grad is not None


# -- in a model --------------------------------------------------------------------------------------------------------


def tied(dtype=torch.float32, *, device="cpu"):
    return llama(dtype, device=device, tied=True)


def opened(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.1, "loss_chunks": 3, **kwargs})


def loss_and_gradients(model, **kwargs):
    """Of the model's own forward, and of the loss in three chunks."""
    found = []
    for chunks in (1, 3):
        with opened(model, loss_chunks=chunks) as opt, opt.no_sync():
            loss = model(**kwargs).loss
            loss.backward()
            found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
            opt.zero_grad()
    return found


def assert_alike(found, dtype=torch.float32):
    """Sums in another order, in float32 over at most 384 classes; float32 sums over 48 tokens. The factor is what three
    layers of backward make of it."""
    (loss, want), (chunked, got) = found
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    for name, g in got.items():
        error = (g.double() - want[name].double()).norm() / want[name].double().norm()
        assert error < 100 * EPS[dtype], (name, float(error))


@pytest.mark.parametrize("model", [llama, tied, dropping])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_loss_and_gradients(model, dtype):
    (x,) = batches(1)
    m = model(dtype)
    m.eval()  # no dropout
    labels = x.clone()
    labels[0, 5:] = -100
    assert_alike(loss_and_gradients(m, input_ids=x, labels=labels), dtype)


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 100},
        {"num_items_in_batch": torch.tensor(77)},
        {"shift_labels": torch.roll(batches(1)[0], 2)},
        {"ignore_index": 7},
        {"shift_labels": batches(1)[0][:, -5:].contiguous(), "logits_to_keep": 5},
        {"attention_mask": torch.ones(2, 24, dtype=torch.long), "output_hidden_states": True},
    ],
)
def test_what_a_forward_may_be_given(more):
    (x,) = batches(1)
    assert_alike(loss_and_gradients(llama(), input_ids=x, labels=x, **more))


def test_autocast_of_a_float32_model():
    (x,) = batches(1)
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(loss_and_gradients(model, input_ids=x, labels=x), torch.bfloat16)


def test_a_mixture_that_adds_to_its_loss_in_place():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, num_local_experts=4, output_router_logits=True, use_cache=False,
    ))  # fmt: skip
    (x,) = batches(1)
    assert_alike(loss_and_gradients(model, input_ids=x, labels=x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [llama, tied])
def test_no_plan_changes_a_bit(dtype, model):
    def run(**kwargs):
        return run_plan(dtype, batches(6), model=model, bucket_mb=0.1, loss_chunks=3, **kwargs)

    reference = run(speculate="off")
    assert run(speculate="on", delay_us=200) == reference
    assert run(speculate="on", retained_buckets=4) == reference
    assert run(speculate="on", flow_blocks=(1, 3)) == reference
    assert run(speculate="off", cast_up="gpu", cast_down="cpu") == reference
    for policy in ACTIVATIONS:
        assert run(speculate="on", activations=policy) == reference, policy
    if model is llama:
        for prefetch in (1, 3):
            assert run(speculate="on", flow_blocks=(1, 2, 4), prefetch_blocks=prefetch) == reference, "the head flows"
    twice = run(speculate="off", accumulation=2)
    for where in ("gpu", "cpu"):
        assert run(speculate="on", accumulation=2, accumulate_on=where) == twice
        assert run(speculate="on", accumulation=2, accumulate_on=where, hint=False) == twice
    assert reference != run_plan(dtype, batches(6), model=model, bucket_mb=0.1, speculate="off"), "control"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_every_kind_with_and_without_speculation(dtype):
    steps = list(KINDS.values())
    first = play(llama(dtype, layers=2), steps, speculate="off", bucket_mb=0.05, loss_chunks=3)
    again = play(
        llama(dtype, layers=2), steps, bounds=first.bounds, speculate="on", bucket_mb=0.05, loss_chunks=3, lockstep=True
    )
    assert again.result == first.result
    assert any(r.speculated for r in again.ledger)


def scaled_training(chunks, n=8, unscaled=False, **kwargs):
    model = llama(torch.float16)
    with opened(model, loss_chunks=chunks, **kwargs) as opt:
        losses, verdicts = [], []
        for x in batches(n):
            loss = model(input_ids=x, labels=x).loss
            (loss if unscaled else opt.scale_loss(loss)).backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
            verdicts.append(opt.stats.verdict)
        return losses, verdicts, digest(model, opt)


def test_float16_with_a_loss_scale():
    want, verdicts, _ = scaled_training(1)
    got, chunked, reference = scaled_training(3, speculate="off")
    assert scaled_training(3, speculate="on") == (got, chunked, reference)
    assert chunked == verdicts
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-3, atol=0)


def test_float16_gradients_are_held_at_the_scale_of_the_loss():
    model, data = llama(torch.float16), batches(3)
    with opened(model) as opt:
        seen = []
        inner = opt._loss_scale_now
        for x in data:
            loss = model(input_ids=x, labels=x).loss
            seen.append((inner(), opt._loss_scale.scale))
            opt.scale_loss(loss).backward()
            opt.step()
            opt.zero_grad()
        assert all(a == b > 1 for a, b in seen)
        for x in data[:2]:
            model(input_ids=x, labels=x).loss.backward()
            opt.step()
            opt.zero_grad()
        assert inner() == 1.0, "the last loss was not scaled"


def test_logits_are_made_wherever_nothing_trains():
    model, (x,) = llama(), batches(1)
    with torch.no_grad():
        want = model(input_ids=x, labels=x)
        tokens = model.generate(x, max_new_tokens=4, do_sample=False)
    with opened(model):
        assert model(input_ids=x, labels=x).logits is None
        assert len(model(input_ids=x, labels=x, return_dict=False)) == 2
        assert model(input_ids=x, labels=x, return_dict=False)[1] is None
        assert torch.equal(model(input_ids=x).logits, want.logits)
        with torch.no_grad():
            got = model(input_ids=x, labels=x)
            assert torch.equal(got.logits, want.logits)
            assert torch.equal(got.loss, want.loss)
            assert torch.equal(model.generate(x, max_new_tokens=4, do_sample=False), tokens)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=x).logits, want.logits)


def test_hooks_on_the_head_surround_its_use():
    model, (x,) = llama(), batches(1)
    seen = []
    with opened(model) as opt:
        handles = [
            model.lm_head.register_forward_pre_hook(lambda *_: seen.append("before")),
            model.lm_head.register_forward_hook(lambda *_: seen.append("after")),
            model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward")),
        ]
        out = model(input_ids=x, labels=x)
        assert out.logits is None
        out.loss.backward()
        opt.zero_grad()
        assert seen == ["before", "after", "backward"]
        for h in handles:
            h.remove()
        handle = model.lm_head.register_forward_hook(lambda m, a, logits: logits.softmax(-1))
        with pytest.raises(NotSupported, match=r"softmax.*loss_chunks=1"):
            model(input_ids=x, labels=x)
        handle.remove()
        model(input_ids=x, labels=x).loss.backward()


def capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, use_cache=False, final_logit_softcapping=20.0,
    ))  # fmt: skip


def scaled():
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False, logits_scaling=4.0,
    ))  # fmt: skip


def cohere():
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False, logit_scale=0.5,
    ))  # fmt: skip


@pytest.mark.parametrize(("make", "operation"), [(capped, "div"), (scaled, "div"), (cohere, "mul")])
def test_models_that_change_their_logits_are_refused_by_their_first_forward(make, operation):
    model, (x,) = make(), batches(1)
    with opened(model) as opt:
        with pytest.raises(NotSupported, match=rf"{operation}.*loss_chunks=1"):
            model(input_ids=x, labels=x)
        assert opt.stats.step == 0
        with torch.no_grad():
            assert model(input_ids=x, labels=x).logits is not None
    model(input_ids=x, labels=x).loss.backward()


def test_a_model_that_changes_labels_or_loss_settings_is_refused():
    from transformers import LlamaForCausalLM

    class Odd(LlamaForCausalLM):
        what = ""

        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            changes = {
                "labels": {"labels": labels + 1}, "num_items_in_batch": {"num_items_in_batch": 5},
                "ignore_index": {"ignore_index": 3}, "classes": {"vocab_size": 10}, "": {},
                "equal": {"labels": labels.clone()},
                "returned": {"logits": self.lm_head(hidden)}, "no logits": {"logits": None},
            }  # fmt: skip
            if self.what == "did not reach":
                return (hidden.mean(), logits)
            given = {"logits": logits, "labels": labels, "vocab_size": VOCAB, **changes[self.what]}
            return (self.loss_function(**given), logits)

    torch.manual_seed(0)
    model, (x,) = Odd(llama().config), batches(1)
    with opened(model):
        for what in ("", "equal"):
            model.what = what
            assert model(x, labels=x)[1] is None
        for what in ("labels", "num_items_in_batch", "ignore_index", "classes", "returned", "did not reach"):
            model.what = what
            with pytest.raises(NotSupported, match=what):
                model(x, labels=x)
        with pytest.raises(InputError, match="48 tokens, and the loss 40 labels"):
            model(x, labels=x[:, :20])
        model.what = ""
        model(x, labels=x)[0].backward()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def custom_loss():
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.mean()
    return model


def other_head():
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    return model


def wrapped_head():
    model = llama()
    model.lm_head.forward = lambda x, inner=model.lm_head.forward: inner(x)
    return model


def two_models():
    return nn.ModuleList([llama(), llama()])


def classifier():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Plain, "Plain is no Hugging Face causal language model.*chunked_cross_entropy"),
        (custom_loss, "the loss of LlamaForCausalLM is <lambda>"),
        (other_head, "the head of LlamaForCausalLM is a Sequential"),
        (wrapped_head, "whose forward is wrapped"),
        (two_models, "2 parts with a head"),
        (classifier, "the loss of BertForMaskedLM is ForMaskedLMLoss"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_happens(make, words):
    model = make()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(NotSupported, match=words):
        opened(model)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    with opened(model, loss_chunks=1):
        pass


def test_a_model_inside_another():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, x):
            return self.inner(input_ids=x, labels=x).loss

    model, (x,) = Outer(), batches(1)
    with opened(model, flow_blocks=(1, 4), speculate="on") as opt:
        for _ in range(3):
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()


def test_close_restores_the_model():
    model, (x,) = llama(), batches(1)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    loss = model.loss_function
    with opened(model) as opt:
        assert isinstance(model.lm_head.forward, BlockForward)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            second = opened(model)  # closes the first
        train(model, second, [x])
        second._rebuild()
        assert model(input_ids=x, labels=x).logits is None
        second.close()
        assert opt is not second
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys(), name
    assert model.loss_function is loss
    assert model(input_ids=x, labels=x).logits is not None
    model.loss_function = loss  # the same, by the owner's hand
    with opened(model):
        assert model.loss_function is not loss
    assert model.__dict__["_loss_function"] is loss


def test_a_loss_function_set_over_ours_stays_and_ours_does_nothing_after_close():
    model, (x,) = llama(), batches(1)
    want = float(model(input_ids=x, labels=x).loss.detach())
    with opened(model):
        ours = model.loss_function
        model.loss_function = lambda *a, **k: 2 * ours(*a, **k)
        got = float(model(input_ids=x, labels=x).loss.detach())
        assert abs(got - 2 * want) < 1e-5
    assert float(model(input_ids=x, labels=x).loss.detach()) == 2 * want


def test_copies_of_the_model_are_plain():
    model, (x,) = llama(), batches(1)
    with opened(model) as opt:
        opt.synchronize()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(copied.lm_head.forward, BlockForward)
            out = copied(input_ids=x, labels=x)
            assert out.logits is not None
            out.loss.backward()
            assert copied.lm_head.weight.grad is not None
        assert model.lm_head.weight.grad is None
        assert model(input_ids=x, labels=x).logits is None


def test_dropping_the_optimizer_gives_the_model_back():
    model, (x,) = llama(), batches(1)
    opt = opened(model)
    train(model, opt, [x])
    del opt
    gc.collect()
    assert model(input_ids=x, labels=x).logits is not None
    assert "_loss_function" not in model.__dict__


def test_an_exception_in_a_forward_leaves_no_trace():
    model, (x,) = llama(), batches(1)
    with opened(model) as opt:
        want = model(input_ids=x, labels=x).loss
        handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=x, labels=x)
        handle.remove()
        assert torch.equal(model(input_ids=x, labels=x).loss, want)
        assert torch.equal(model(input_ids=x).logits, model(input_ids=x).logits)
        opt.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_in_a_checkpoint(reentrant):
    (x,) = batches(1)

    def run(wrap):
        model = llama()
        with opened(model, speculate="off") as opt:
            for _ in range(2):
                embedded = model.model.embed_tokens(x).detach().requires_grad_()

                def loss(e):
                    return model(inputs_embeds=e, labels=x).loss

                (checkpoint(loss, embedded, use_reentrant=reentrant) if wrap else loss(embedded)).backward()
                opt.step()
                opt.zero_grad()
            return digest(model, opt)

    assert run(True) == run(False)


def test_a_frozen_head_and_a_head_alone():
    (x,) = batches(1)
    for trained in ("layers.0", "lm_head"):
        model = llama()
        for name, p in model.named_parameters():
            p.requires_grad_(trained in name)
        found = []
        for chunks in (1, 3):
            with opened(model, loss_chunks=chunks) as opt, opt.no_sync():
                loss = model(input_ids=x, labels=x).loss
                loss.backward()
                found.append(
                    (loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                )
                opt.zero_grad()
        assert found[0][1].keys() == found[1][1].keys() != set()
        assert_alike(found)


def test_nothing_is_kept_of_the_logits():
    """The largest moment of a step, forward and backward, with a large vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2, vocab_size=4096,
        use_cache=False, tie_word_embeddings=True,
    ))  # fmt: skip
    x = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(0))
    logits = x.numel() * 4096 * 4

    def step():
        model(input_ids=x, labels=x).loss.backward()

    used = {}
    for chunks in (1, 2, 8):
        with opened(model, loss_chunks=chunks, speculate="off") as opt, opt.no_sync():
            used[chunks] = peak(step, *model.parameters())
            opt.zero_grad()
    assert used[1] > 2 * logits
    assert used[2] < used[1] - 0.9 * logits
    assert abs((used[2] - used[8]) - 2 * logits * (1 / 2 - 1 / 8)) < 0.1 * logits


def test_the_stand_in_says_what_it_is():
    loss = torch.ones(()).as_subclass(InsteadOfLogits)
    assert "no logits" in repr(loss)
    for use in (lambda t: t + 1, lambda t: 2 * t, lambda t: t[0], lambda t: t.shape, lambda t: t.argmax(-1), torch.tanh,
                lambda t: t.mul_(2), lambda t: t.view(-1), float):  # fmt: skip
        with pytest.raises(NotSupported, match="loss_chunks=1"):
            use(loss)
    assert loss.float().contiguous().to("cpu").dtype == torch.float32
