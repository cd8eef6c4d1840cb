"""fp16 with a scaled loss: the scale follows the gradients, and nothing else of the training sees it."""

import math

import pytest
import torch

from superoffload.engine import OffloadAdamW
from superoffload.engine.loss_scale import INITIAL, WINDOW, LossScale
from tests.engine.common import batches, ctrl_c, digest, llama

DATA = batches(10)


def run(factors, *, path=None, accumulation=1, **plan):
    """Train in fp16 over `factors`, which the losses are multiplied by; returns (digest, losses, scales, norms)."""
    model = llama(torch.float16)
    losses, scales, norms = [], [], []
    plan = {"bucket_mb": 0.05, "max_grad_norm": 1.0, **plan}
    with OffloadAdamW(model, lr=1e-3, gradient_accumulation_steps=accumulation, **plan) as opt:
        if path is not None and path.exists():
            opt.load(path)
        for x, factor in zip(DATA, factors, strict=False):
            for part in x.chunk(accumulation):
                loss = model(input_ids=part, labels=part).loss / accumulation
                opt.scale_loss(loss * factor).backward()
            losses.append(float(loss.detach()))
            opt.step()
            opt.zero_grad()
            scales.append(opt.stats.loss_scale)
            norms.append(opt.stats.grad_norm)
        if path is not None:
            opt.save(path)
        return digest(model, opt), losses, scales, norms


def test_the_rules():
    s = LossScale()
    assert s.scale == INITIAL
    for _ in range(2):
        s.update(overflow=True)
    assert s.scale == INITIAL / 2, "the first overflow is forgiven, the second is not"
    s.update(overflow=True)
    assert s.scale == INITIAL / 4
    last = s.last_overflow
    while s.steps - last < WINDOW:
        s.update(overflow=False)
        assert s.scale == INITIAL / 4
    s.update(overflow=False)
    assert s.scale == INITIAL / 2
    s.update(overflow=True)
    assert s.scale == INITIAL / 2, "growing forgives one overflow again"
    for _ in range(40):
        s.update(overflow=True)
    assert s.scale == 1.0
    other = LossScale()
    other.load(s.as_dict())
    assert other == s


def test_training_goes_well_and_the_norm_is_the_unscaled_one():
    _, losses, scales, norms = run([1.0] * 10, max_grad_norm=None)
    assert set(scales) == {INITIAL}
    wide = llama(torch.float32)
    wide.load_state_dict(llama(torch.float16).float().state_dict())
    with OffloadAdamW(wide, lr=1e-3) as opt:
        for x, loss, norm in zip(DATA, losses, norms, strict=True):
            exact = wide(input_ids=x, labels=x).loss
            exact.backward()
            opt.step()
            assert loss == pytest.approx(float(exact.detach()), rel=2e-3)
            assert norm == pytest.approx(opt.stats.grad_norm, rel=1e-2)


def test_small_gradients_survive_only_with_the_scale():
    """Multiplied by 1e-7 they are below what fp16 can hold, and Adam would see zeros."""
    with_scale = run([1e-7] * 3)[3]
    assert min(with_scale) > 0
    model = llama(torch.float16)
    with OffloadAdamW(model, lr=1e-3) as opt:
        (model(input_ids=DATA[0], labels=DATA[0]).loss * 1e-7).backward()
        opt.step()
        assert opt.stats.grad_norm < 0.5 * with_scale[0]


PATTERN = [1.0, 1.0, 1e3, 1.0, 1e4, 1.0, 3.0, float("nan"), 1.0, 1.0]


@pytest.mark.parametrize("plan", [{}, {"retained_buckets": 8}, {"cast_down": "gpu", "cast_up": "cpu"}])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_skips_lower_the_scale_and_speculation_changes_nothing(plan, accumulation):
    reference = run(PATTERN, speculate="off", bucket_mb=64, max_grad_norm=6.0, accumulation=accumulation)
    scales, norms = reference[2:]
    assert any(not math.isfinite(n) for n in norms)
    assert scales[-1] < INITIAL
    got = run(PATTERN, speculate="on", max_grad_norm=6.0, accumulation=accumulation, **plan)
    assert got[:3] == reference[:3]
    assert str(got[3]) == str(reference[3])


def test_the_scale_is_part_of_a_checkpoint(tmp_path):
    path = tmp_path / "o.safetensors"
    run(PATTERN[:5], path=path)
    model = llama(torch.float16)
    with OffloadAdamW(model) as opt:
        opt.load(path)
        scale = opt.stats.loss_scale
        assert scale < INITIAL
        state = opt.state_dict()
    with OffloadAdamW(model) as opt:
        assert opt.stats.loss_scale == INITIAL
        opt.load_state_dict(state)
        assert opt.stats.loss_scale == scale


def test_other_dtypes_are_not_scaled():
    model = llama(torch.bfloat16)
    with OffloadAdamW(model) as opt:
        loss = model(input_ids=DATA[0], labels=DATA[0]).loss
        assert opt.scale_loss(loss) is loss
        assert opt.stats.loss_scale == 1.0
        assert "loss_scale" not in opt.state_dict()


def test_ctrl_c_while_step_waits_for_its_update_leaves_the_verdict_to_be_learned():
    model = llama(torch.float16)
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05, max_grad_norm=1.0) as opt:
        for _ in range(2):
            loss = model(input_ids=DATA[0], labels=DATA[0]).loss
            opt.scale_loss(loss * math.inf).backward()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(opt.engine.readiness, "settle", ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    opt.step()
            opt.zero_grad()
            opt.learn_loss_scale()
        assert opt.stats.skipped == 2
        assert opt.stats.loss_scale == INITIAL / 2, "the second overflow halves it"
