"""The engine against clip_grad_norm_ + torch.optim.AdamW on a real small transformer, in closed loop."""

import math

import pytest
import torch

from superoffload.engine import OffloadAdamW
from tests.engine.common import batches, llama, train

LR = 1e-3


def _groups(model):
    """Decay on matrices only, as everybody does it, and a smaller rate for the embedding."""
    decay, plain, slow = [], [], []
    for name, p in model.named_parameters():
        (slow if "embed" in name else decay if p.ndim > 1 else plain).append(p)
    return [
        {"params": decay, "weight_decay": 0.2},
        {"params": plain, "weight_decay": 0.0},
        {"params": slow, "lr": LR / 3, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


def _schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.9**step)


def _compare(theirs, ours, expected, got, lr=LR):
    assert len(expected) == len(got) > 3
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) < 1e-5
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (p - q).abs().max() < 0.05 * lr, name


@pytest.mark.parametrize("retained", [0, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_clipping_groups_and_a_schedule(tied, retained):
    data = batches(10)
    theirs, ours = llama(tied=tied), llama(tied=tied)
    reference = torch.optim.AdamW(_groups(theirs), lr=LR)
    expected = train(theirs, reference, data, clip=1.0, scheduler=_schedule(reference))
    with OffloadAdamW(
        ours, params=_groups(ours), lr=LR, max_grad_norm=1.0, bucket_mb=0.05, retained_buckets=retained
    ) as opt:
        verdicts = []
        got = train(ours, opt, data, scheduler=_schedule(opt), before_step=lambda i: verdicts.append(opt.stats.verdict))
        verdicts.append(opt.stats.verdict)
        assert "clip" in verdicts, "a test of clipping must clip"
    _compare(theirs, ours, expected, got)
    fresh = llama(tied=tied)
    assert all((p - q).abs().max() > 0.5 * LR for p, q in zip(ours.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("hint", ["no_sync", "counter", "both", "none"])
def test_accumulation(hint):
    data = batches(12)
    theirs, ours = llama(), llama()
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=LR), data, accumulation=3, clip=1.0)
    steps = 3 if hint in ("counter", "both") else 1
    with OffloadAdamW(ours, lr=LR, max_grad_norm=1.0, bucket_mb=0.1, gradient_accumulation_steps=steps) as opt:
        if hint == "none":
            with pytest.warns(UserWarning, match="no_sync"):
                got = train(ours, opt, data, accumulation=3, hint=False)
        else:
            got = train(ours, opt, data, accumulation=3, hint=hint in ("no_sync", "both"))
            assert not opt._micro_batches.late, "each gradient is taken as the last backward makes it"
    _compare(theirs, ours, expected, got)


def test_accumulating_k_micro_batches_is_one_batch_k_times_larger():
    data = batches(4, size=2)
    whole = [torch.cat(data)]
    models = []
    for accumulation, batch in ((4, data), (1, whole)):
        model = llama()
        with OffloadAdamW(model, lr=LR, max_grad_norm=1.0) as opt:
            train(model, opt, batch, accumulation=accumulation)
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (p - q).abs().max() < 0.05 * LR


def test_gradients_set_by_hand_and_parameters_without_one():
    theirs, ours = llama(), llama()
    reference = torch.optim.AdamW(theirs.parameters(), lr=LR)
    with OffloadAdamW(ours, lr=LR, bucket_mb=0.05) as opt:
        g = torch.Generator().manual_seed(0)
        for step in range(4):
            for i, (p, q) in enumerate(zip(theirs.parameters(), ours.parameters(), strict=True)):
                if (i + step) % 3 == 0:  # every parameter misses some steps and has its own step count
                    continue
                p.grad = torch.randn(p.shape, generator=g)
                q.grad = p.grad.clone()
            for optimizer in (reference, opt):
                optimizer.step()
                optimizer.zero_grad()
        opt.synchronize()
        steps = [int(s) for s in opt.engine.steps]
    assert steps == [int(reference.state[p]["step"]) for p in theirs.parameters()]
    assert len(set(steps)) > 1
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert (p - q).abs().max() < 0.05 * LR


def test_norm_is_torchs():
    model, (x,) = llama(), batches(1)
    model(input_ids=x, labels=x).loss.backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    model.zero_grad()
    with OffloadAdamW(model, max_grad_norm=0.5, bucket_mb=0.05, retained_buckets=3) as opt:
        model(input_ids=x, labels=x).loss.backward()
        opt.step()
        stats = opt.stats
    assert stats.grad_norm == pytest.approx(expected, rel=1e-5)
    assert stats.clip_coefficient == pytest.approx(0.5 / (expected + 1e-6), rel=1e-5)
    assert stats.verdict == "clip"


def test_frozen_parameters_stay_and_schedules_act_alike_on_both_processors():
    """I8: the same rates, decays and frozen weights on CPU buckets and on retained ones."""
    results = []
    for retained in (0, 1):
        model = llama()
        for p in model.model.layers[0].parameters():
            p.requires_grad_(False)
        frozen = [p.clone() for p in model.model.layers[0].parameters()]
        groups = _groups(model)
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        with OffloadAdamW(model, params=groups, lr=LR, max_grad_norm=1.0, retained_buckets=retained) as opt:
            train(model, opt, batches(4), scheduler=_schedule(opt))
        assert all(torch.equal(a, b) for a, b in zip(frozen, model.model.layers[0].parameters(), strict=True))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_closure_and_loss():
    model, (x,) = llama(), batches(1)
    with OffloadAdamW(model, lr=LR) as opt:

        def closure():
            opt.zero_grad()
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            return loss

        losses = [float(opt.step(closure).detach()) for _ in range(4)]
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))
