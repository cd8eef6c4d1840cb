"""Weights written, the optimizer closed or dropped, Ctrl-C and failures while a step is speculated."""

import contextlib
import gc

import pytest
import torch

from superoffload.errors import EngineError
from superoffload.hardware import preset, preset_names
from superoffload.memory import ledger
from superoffload.profiler import BlockProfile, Profile
from tests.engine.common import interrupt_at_random, train
from tests.engine.scenario import DATA, MODELS, equal, in_both_modes, make, run_ahead, small, weights


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

    def fresh():
        model = small()
        return model, make(model, retained_buckets=3)

    found = interrupt_at_random(request, fresh, DATA, rounds=25, between_s=(0.01, 0.12), seed=1)
    assert found.interrupted > 5 and found.ahead > 0


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


@pytest.mark.parametrize("undo", ["record", "snapshot"])
@pytest.mark.parametrize("speculate", ["on", "auto", "off"])
@pytest.mark.parametrize("model", [small, MODELS["float32"]])
def test_the_ledger_tells_beforehand_what_taking_back_needs(model, speculate, undo):
    """What the planner's ledger counts for a plan is what the engine allocates."""
    with make(model(), undo=undo, speculate=speculate, retained_buckets=2) as opt:
        told, found = ledger(_profile(opt), opt.plan), opt.memory()
        buckets = opt.engine.arenas.cpu_buckets
        name, elements = f"undo {undo}s", sum(b.layout.numel for b in buckets)
        assert _bytes(told, name) == _bytes(found, name)
        if speculate == "off":
            assert _bytes(found, name) == 0 and all(b.undo is None for b in buckets)
        elif undo == "snapshot":
            assert _bytes(found, name) == 12 * elements
        else:
            assert 3 * elements < _bytes(found, name)


def _bytes(account, name):
    return sum(i.bytes for i in account.items if i.name == name)


def _profile(opt):
    """The profile of the optimizer's model, as far as the ledger's undo item looks at it."""
    tensors = {}
    for p in opt.engine.params:
        tensors.setdefault(p.block, []).append(p)
    blocks = tuple(
        BlockProfile(
            name=str(b), kind="layer", tensor_numels=tuple(p.numel for p in tensors[b]), dtype=tensors[b][0].dtype,
            forward_s=1.0, backward_s=2.0, forward_flops=1.0, input_bytes=0, activation_bytes=0, working_bytes=0,
        )
        for b in sorted(tensors)
    )  # fmt: skip
    return Profile(
        source="measured", model="small", model_fingerprint="f", micro_batch=1, seq_len=1, blocks=blocks,
        model_flops=1.0, hardware=preset(preset_names()[0]),
    )  # fmt: skip
