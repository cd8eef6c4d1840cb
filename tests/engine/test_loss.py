"""Cross-entropy in chunks: the loss and gradients of the whole, at a fraction of its memory."""

import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from superoffload import chunked_cross_entropy
from superoffload.engine.loss import chunk_bounds
from superoffload.errors import InputError, NotSupported
from superoffload.profiling_counts import Watch

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
    # A token's loss is off by what its logits, of up to 4, are: twice, of the label's and of the sum.
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


@pytest.mark.parametrize("denominator", [torch.tensor([3.0]), torch.tensor(3), 3, 3.0])
def test_a_denominator_in_every_form(denominator):
    hidden, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 1, -100, 2, 3])
    loss = chunked_cross_entropy(hidden, weight, labels, chunks=2, denominator=denominator)
    whole = F.cross_entropy(hidden @ weight.T, labels, reduction="sum") / 3
    torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("none", [0, torch.tensor(0)])
def test_no_items_at_all_give_what_a_division_gives(none):
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    assert chunked_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.int64), chunks=2, denominator=none).isinf()
    assert chunked_cross_entropy(hidden, weight, torch.full((5,), -100), chunks=2, denominator=none).isnan()
