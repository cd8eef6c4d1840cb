"""Between the first gradient and `step()` the weights may already be those of the next step: whatever a person does
there must find the weights of the last one, and training must go on as if nothing had run ahead."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from superoffload.errors import EngineError
from tests.engine.common import digest, train
from tests.engine.scenario import DATA, equal, in_both_modes, make, run_ahead, small, weights


@pytest.mark.parametrize("undo", ["record", "snapshot"])
def test_zero_grad_without_step(undo):
    def scene(model, opt):
        before = run_ahead(model, opt)
        opt.zero_grad()
        assert equal(before, weights(model))
        train(model, opt, DATA[2:4])

    _, expected = in_both_modes(lambda model, opt: train(model, opt, DATA[2:4]))
    in_both_modes(scene, undo=undo)
    model = small()
    with make(model, undo=undo) as opt:
        train(model, opt, DATA[:2])
        opt.synchronize()
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


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_a_second_backward_that_first_completes_a_bucket(where):
    """What the first one left of a bucket is filled by a parameter that it did not use, before the others' second
    gradients come: the bucket is not complete then."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    uses = [[("a", "b")], [("a",), ("a", "b")], [("a", "b")]]

    def run(speculate, hint):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(64, 64) for name in "ab"})
        with make(model, speculate=speculate, bucket_mb=64, accumulate_on=where) as opt:
            for micros in uses:
                for i, used in enumerate(micros):
                    with opt.no_sync() if hint and i < len(micros) - 1 else contextlib.nullcontext():
                        y = x
                        for name in used:
                            y = model[name](y)
                        y.square().mean().backward()
                opt.step()
                opt.zero_grad()
            return digest(model, opt)

    expected = run("off", hint=True)
    assert run("on", hint=True) == expected
    with pytest.warns(UserWarning, match="no_sync"):
        assert run("on", hint=False) == expected


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
        opt.engine.readiness.lazy = [False] * len(opt.engine.blocks)
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


@pytest.mark.parametrize(("retained", "undo"), [(0, "record"), (3, "record"), (3, "snapshot")])
@pytest.mark.parametrize("habit", HABITS)
def test_between_backward_and_step(habit, retained, undo):
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
        with make(
            model, params=groups, speculate=speculate, max_grad_norm=100.0, retained_buckets=retained, undo=undo
        ) as opt:
            train(model, opt, DATA[:2])
            opt.synchronize()
            results.append((scene(model, opt), digest(model, opt)))
    assert results[0] == results[1]
