"""Between the first gradient and `step()` the weights may already be those of the next step: whatever a person does
there must find the weights of the last one, and training must go on as if nothing had run ahead."""

import contextlib
import gc
import os
import random
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from superoffload.engine import OffloadAdamW
from superoffload.errors import EngineError
from tests.engine.common import batches, digest, llama, train

DATA = batches(8)


def make(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "weight_decay": 0.1, "speculate": "on", "bucket_mb": 0.05, **kwargs})


def small(dtype=torch.bfloat16, **kwargs):
    return llama(dtype, layers=2, **kwargs)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run_ahead(model, opt, x=DATA[6], loss=None):
    """Backward, and wait until every bucket has been updated."""
    before = weights(model)
    (model(input_ids=x, labels=x).loss if loss is None else loss).backward()
    opt.engine.worker.wait_idle()
    if opt.plan.speculate == "on":
        assert opt.engine.speculation.arrived and not equal(before, weights(model)), "nothing ran ahead"
    return before


def in_both_modes(scene, model=small, **kwargs):
    """`scene(model, opt)` must end in the same bits, and see the same, with and without speculation."""
    results = []
    for speculate in ("off", "on"):
        m = model()
        with make(m, speculate=speculate, **kwargs) as opt:
            train(m, opt, DATA[:2])
            opt.synchronize()
            seen = scene(m, opt)
            results.append((seen, digest(m, opt)))
    assert results[0] == results[1]
    return results[0]


def test_zero_grad_without_step():
    def scene(model, opt):
        before = run_ahead(model, opt)
        opt.zero_grad()
        assert equal(before, weights(model))
        train(model, opt, DATA[2:4])

    _, expected = in_both_modes(lambda model, opt: train(model, opt, DATA[2:4]))
    in_both_modes(scene)
    model = small()
    with make(model) as opt:
        train(model, opt, DATA[:2])
        scene(model, opt)
        assert digest(model, opt) == expected


@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore:a second backward ran")
def test_an_exception_in_backward(error, forget):
    """With zero_grad the step never was; without, half its gradients add up, as torch's would."""

    def fail(grad):
        raise error

    def scene(model, opt):
        before = weights(model)
        handle = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
        with pytest.raises(error):
            model(input_ids=DATA[5], labels=DATA[5]).loss.backward()
        handle.remove()
        opt.engine.worker.wait_idle()
        assert bool(opt.engine.speculation.arrived) == (opt.plan.speculate == "on")
        if forget:
            opt.zero_grad()
            assert equal(before, weights(model))
        train(model, opt, DATA[2:5])

    in_both_modes(scene)


def test_an_exception_in_forward_after_a_backward():
    def scene(model, opt):
        run_ahead(model, opt)
        handle = model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=DATA[5])
        handle.remove()
        opt.step()
        opt.zero_grad()
        train(model, opt, DATA[2:4])

    in_both_modes(scene)


def test_a_second_backward_with_a_forward_between():
    """The hint is missing only in some steps, long after the first: gradients add up, weights are read as they were."""

    def scene(model, opt):
        losses = train(model, opt, DATA[2:4])
        losses += train(model, opt, DATA[:4], accumulation=2, hint=False)
        return losses + train(model, opt, DATA[4:6])

    with pytest.warns(UserWarning, match="no_sync"):
        in_both_modes(scene)


def test_two_forwards_and_then_two_backwards_raise():
    model = small()
    with make(model) as opt:
        train(model, opt, DATA[:2])
        opt.synchronize()
        first, second = (model(input_ids=x, labels=x).loss for x in DATA[2:4])
        before = run_ahead(model, opt, loss=first)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        opt.zero_grad()
        assert equal(before, weights(model))
        got = (train(model, opt, DATA[2:4]), digest(model, opt))
    assert got == in_both_modes(lambda model, opt: train(model, opt, DATA[2:4]))


class Recomputed(nn.Module):
    """Autograd keeps none of its weights: the inside of each block is recomputed, without the block's own hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3))
        self.blocks = nn.ModuleList(_Inside(layer) for layer in self.layers)

    def forward(self, input_ids, labels):
        x = torch.nn.functional.one_hot(input_ids % 64, 64).float()
        for block in self.blocks:
            x = block(x)
        return type("Out", (), {"loss": x.square().mean()})


class _Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + checkpoint(self.inner.forward, x, use_reentrant=False)


@pytest.mark.parametrize("quiet", [False, True])
def test_two_forwards_and_then_two_backwards_raise_where_autograd_cannot_tell(quiet):
    model = Recomputed()
    with make(model, bucket_mb=0.03) as opt:
        for x in DATA[:2]:
            model(x, x).loss.backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.engine._lazy = [False] * len(opt.engine.blocks)
        first, second = (model(x, x).loss for x in DATA[2:4])
        before = weights(model)
        first.backward()
        opt.engine.worker.wait_idle()
        assert not equal(before, weights(model))
        if quiet:
            with opt.no_sync():
                second.backward()
        with pytest.raises(EngineError, match=r"second gradient before step.*no_sync"):
            opt.step() if quiet else second.backward()
        opt.zero_grad()
        assert equal(before, weights(model))


def _eval(model, opt):
    with torch.no_grad():
        return model.eval()(input_ids=DATA[3]).logits.float().sum().item(), model.train() and None


def _generate(model, opt):
    with torch.inference_mode():
        return model.generate(DATA[3][:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()


def _save(model, opt):
    with pytest.raises(EngineError, match="between backward and step"):
        opt.save("nowhere.safetensors")


def _sums(state):
    return [float(v.double().sum()) for v in state.values()]


HABITS = {
    "nothing": lambda model, opt: None,
    "eval": _eval,
    "generate": _generate,
    "model.state_dict": lambda model, opt: _sums(model.state_dict()),
    "a part's state_dict": lambda model, opt: _sums(model.model.layers[1].state_dict()),
    "opt.state_dict": lambda model, opt: [_sums(s) for s in opt.state_dict()["state"].values()],
    "save": _save,
    "synchronize": lambda model, opt: opt.synchronize() or _sums(weights(model)),
    "load weights": lambda model, opt: model.load_state_dict(small(seed=5).state_dict()) and None,
    "load": lambda model, opt: opt.load_state_dict(opt.state_dict()),
    "stats and ledger": lambda model, opt: (opt.stats.step, len(opt.ledger)),
    "lr": lambda model, opt: opt.param_groups[1].update(lr=3e-3),
    "weight decay": lambda model, opt: opt.param_groups[0].update(weight_decay=0.0),
    "betas": lambda model, opt: opt.param_groups[1].update(betas=(0.5, 0.9)),
    "a bound": lambda model, opt: setattr(opt, "max_grad_norm", 0.01),
    "no bound": lambda model, opt: setattr(opt, "max_grad_norm", None),
    "add_param_group": lambda model, opt: opt.add_param_group({"params": [model.model.norm.weight], "lr": 2e-3}),
}


@pytest.mark.parametrize("retained", [0, 3])
@pytest.mark.parametrize("habit", HABITS)
def test_between_backward_and_step(habit, retained):
    def scene(model, opt):
        before = run_ahead(model, opt)
        seen = HABITS[habit](model, opt)
        if habit in ("eval", "model.state_dict", "opt.state_dict", "synchronize", "save"):
            assert equal(before, weights(model))
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        if opt.plan.speculate == "on" and habit in ("nothing", "lr", "weight decay", "betas", "a bound", "no bound"):
            r = opt.ledger[2]
            assert r.speculated > 3, "this habit gives no reason to take anything back before the verdict"
            partly = 0 < r.undone < r.speculated
            assert (
                partly if habit in ("lr", "weight decay", "betas") else r.undone == r.speculated * (habit == "a bound")
            )
        opt.max_grad_norm = 100.0
        return seen, train(model, opt, DATA[2:4])

    # A model has to be grouped before its optimizer is made.
    results = []
    for speculate in ("off", "on"):
        model = small()
        late = model.model.norm.weight
        rest = [p for p in model.parameters() if p is not late or habit != "add_param_group"]
        groups = [{"params": rest[:-6]}, {"params": rest[-6:], "lr": 2e-3}]
        with make(model, params=groups, speculate=speculate, max_grad_norm=100.0, retained_buckets=retained) as opt:
            train(model, opt, DATA[:2])
            opt.synchronize()
            results.append((scene(model, opt), digest(model, opt)))
    assert results[0] == results[1]


@pytest.mark.parametrize("delay_us", [0, 2000])
@pytest.mark.parametrize("edit", [lambda p: p.fill_(0.25), lambda p: p.mul_(0.5)])
@pytest.mark.parametrize("next_call", ["step", "forward", "zero_grad", "synchronize", "state_dict"])
def test_an_edit_that_races_with_the_update_raises(next_call, edit, delay_us):
    """What it read were weights of the next step, or what it wrote is overwritten: neither must pass for an edit."""
    model = small()
    with make(model) as opt:
        train(model, opt, DATA[:2])
        opt.synchronize()
        before = weights(model)
        opt.engine.worker.set_delay_us(delay_us)
        model(input_ids=DATA[2], labels=DATA[2]).loss.backward()
        with torch.no_grad():
            edit(model.model.layers[1].mlp.up_proj.weight)
        call = {"forward": lambda: model(input_ids=DATA[3]), "state_dict": model.state_dict}
        with pytest.raises(EngineError, match=r"up_proj.weight was written in place.*synchronize"):
            call.get(next_call, getattr(opt, next_call, None))()
        opt.zero_grad()
        assert equal(before, weights(model)), "the edit is told to be lost, and it is"
        train(model, opt, DATA[3:4])


def test_an_edit_before_the_update_of_a_step_has_come_raises():
    model = small()
    with make(model, speculate="off") as opt:
        opt.engine.worker.set_delay_us(2000)
        train(model, opt, DATA[:2])
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(0.25)
        with pytest.raises(EngineError, match=r"up_proj.weight was written in place"):
            model(input_ids=DATA[2])
        train(model, opt, DATA[2:3])


def test_an_edit_after_synchronize_is_what_the_step_starts_from():
    def scene(model, opt):
        run_ahead(model, opt)
        opt.synchronize()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        opt.step()
        opt.zero_grad()
        train(model, opt, DATA[2:4])

    for dtype in (torch.float32, torch.bfloat16):
        in_both_modes(scene, model=lambda dtype=dtype: small(dtype))


@pytest.mark.parametrize("ending", ["close", "drop", "another"])
@pytest.mark.parametrize("delay_us", [0, 2000])
@pytest.mark.filterwarnings("ignore:the model already had")
def test_the_end_between_backward_and_step(ending, delay_us):
    """Also while the worker is still at it."""
    for dtype in (torch.float32, torch.bfloat16):
        model = small(dtype)
        opt = make(model, cast_up="cpu" if delay_us else "gpu")
        train(model, opt, DATA[:3])
        opt.synchronize()
        before = weights(model)
        opt.engine.worker.set_delay_us(delay_us)
        model(input_ids=DATA[3], labels=DATA[3]).loss.backward()
        if not delay_us:
            opt.engine.worker.wait_idle()
            assert not equal(before, weights(model))
        if ending == "close":
            opt.close()
        elif ending == "another":
            make(model).close()
        del opt
        gc.collect()
        assert equal(before, weights(model))


def test_ctrl_c_while_steps_are_speculated(request):
    """SIGINT at random moments; zero_grad then is all it takes to stand at a step boundary."""
    expected: dict[int, str] = {}
    model = small()
    with make(model, retained_buckets=3) as opt:
        for i, x in enumerate(DATA):
            train(model, opt, [x])
            expected[i + 1] = digest(model, opt)
    rng, interrupted, ahead = random.Random(1), 0, 0
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    for _ in range(25):
        model = small()
        with make(model, retained_buckets=3) as opt:
            opt.engine.worker.set_delay_us(300)
            timer = threading.Timer(rng.uniform(0.01, 0.12), os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                train(model, opt, DATA)
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            ahead += opt.engine.speculation.open
            opt.zero_grad()
            done = opt.stats.step
            if done:
                assert digest(model, opt) == expected[done]
            train(model, opt, DATA[done:])
            assert digest(model, opt) == expected[len(DATA)]
    assert interrupted > 5 and ahead > 0


def test_a_failure_while_speculating_surfaces_with_its_own_words(tmp_path):
    model = small()
    opt = make(model)
    train(model, opt, DATA[:2])
    opt.synchronize()
    opt.engine._arguments = lambda: lambda: opt._arguments()._replace(hyper=[])
    x = DATA[2]
    loss = model(input_ids=x, labels=x).loss
    with contextlib.suppress(EngineError):  # depends on how far backward has come by then
        loss.backward()
    with pytest.raises(EngineError, match=r"worker stopped: parameter .* in group 0"):
        opt.engine.worker.wait_idle()
    with pytest.raises(EngineError, match="worker stopped"):
        opt.step()
    with pytest.raises(EngineError, match="worker stopped"):
        opt.save(tmp_path / "half.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.warns(RuntimeWarning, match="failure"):
        opt.close()
