"""The optimizer contract and ordinary habits: what people do between steps must not train wrongly or leak."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

from superoffload.engine import OffloadAdamW
from superoffload.errors import EngineError, InputError, NotSupported
from tests.engine.common import batches, digest, interrupt_at_random, llama, train

DATA = batches(6)


def make(model=None, **kwargs):
    kwargs = {"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.05, **kwargs}
    return OffloadAdamW(llama(torch.bfloat16) if model is None else model, **kwargs)


def test_is_a_torch_optimizer_with_adamws_defaults():
    with make(llama(), lr=1e-3) as opt:
        ours = dict(opt.defaults)
        theirs = torch.optim.AdamW(nn.Linear(1, 1).parameters()).defaults
        assert isinstance(opt, torch.optim.Optimizer)
        assert ours == {k: theirs[k] for k in ours}


def test_state_dict_is_empty_before_the_first_step_and_fp32_on_the_cpu_after():
    model = llama(torch.bfloat16)
    with make(model, retained_buckets=2) as opt:
        assert opt.state_dict()["state"] == {}
        opt.load_state_dict(opt.state_dict())  # what Accelerate's prepare does
        train(model, opt, DATA[:1])
        state = opt.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
        for s, p in zip(state.values(), model.parameters(), strict=True):
            assert set(s) == {"step", "exp_avg", "exp_avg_sq", "master"}
            assert s["exp_avg"].dtype == s["master"].dtype == torch.float32
            assert s["exp_avg"].device.type == "cpu" and s["exp_avg"].shape == p.shape
            assert torch.equal(s["master"].to(torch.bfloat16), p)


def test_loads_a_torch_adamw_state():
    theirs, ours = llama(), llama()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    train(theirs, reference, DATA[:3], clip=1.0)
    with make(ours) as opt:
        ours.load_state_dict(theirs.state_dict())
        opt.load_state_dict(reference.state_dict())
        # The master weights of an fp32 model are the model's own, so loading the model's weights needs a word.
        expected = train(theirs, reference, DATA[3:], clip=1.0)
        got = train(ours, opt, DATA[3:])
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) < 1e-5


@pytest.mark.parametrize("retained", [0, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_edited_in_place_reach_the_masters(dtype, retained):
    """A clamp or a loaded checkpoint after the optimizer was made; untouched weights keep their fp32 master."""
    model = llama(dtype)
    with make(model, retained_buckets=retained) as opt:
        opt.engine.worker.set_delay_us(2000)
        train(model, opt, DATA[:2])
        p = model.model.layers[0].mlp.up_proj.weight
        managed = next(m for m in opt.engine.params if m.param is p)
        model.load_state_dict(model.state_dict())  # the same weights: no master may lose its low bits
        opt.synchronize()
        before = opt.engine.weights.gather(managed, "master").clone()
        with torch.no_grad():
            p[0].fill_(0.25)
        opt.synchronize()
        after = opt.engine.weights.gather(managed, "master")
        assert (after[0] == 0.25).all() and torch.equal(after[1:], before[1:])
        assert dtype == torch.float32 or not torch.equal(before, before.to(dtype).float())
        train(model, opt, DATA[2:3])
        opt.synchronize()
        assert (p[0].float() - 0.25).abs().max() < 3e-3


def test_wrong_state_is_refused_and_nothing_changed():
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:1])
        before = digest(model, opt)
        state = opt.state_dict()
        state["state"][0] = {**state["state"][0], "exp_avg": torch.zeros(3)}
        with pytest.raises(InputError, match="shape"):
            opt.load_state_dict(state)
        with pytest.raises(InputError, match="parameter groups"):
            opt.load_state_dict({"state": {}, "param_groups": []})
        assert digest(model, opt) == before


def test_zero_grad_without_step_forgets():
    results = []
    for stray in (False, True):
        model = llama(torch.bfloat16)
        with make(model) as opt:
            train(model, opt, DATA[:1])
            if stray:
                model(input_ids=DATA[5], labels=DATA[5]).loss.backward()
                opt.zero_grad()
            train(model, opt, DATA[1:3])
            results.append(digest(model, opt))
    assert results[0] == results[1]


def test_step_without_backward_changes_nothing():
    model = llama(torch.bfloat16)
    with make(model) as opt:
        opt.step()
        train(model, opt, DATA[:1])
        before = digest(model, opt)
        opt.step()
        opt.step()
        assert digest(model, opt) == before


def test_an_exception_in_forward_then_another_step():
    results = []
    for fail in (False, True):
        model = llama(torch.bfloat16)
        with make(model) as opt:
            train(model, opt, DATA[:1])
            if fail:
                handle = model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(input_ids=DATA[1], labels=DATA[1])
                handle.remove()
            train(model, opt, DATA[1:3])
            results.append(digest(model, opt))
    assert results[0] == results[1]


def test_a_bad_gradient_skips_and_counts_nothing():
    model = llama(torch.bfloat16)
    with make(model, retained_buckets=3) as opt:
        train(model, opt, DATA[:1])
        before = digest(model, opt)
        for bad in (float("nan"), float("inf")):
            (model(input_ids=DATA[1], labels=DATA[1]).loss * bad).backward()
            opt.step()
            opt.zero_grad()
            assert opt.stats.verdict == "skip"
            assert digest(model, opt) == before
        assert opt.stats.skipped == 2
        train(model, opt, DATA[1:2])
        assert opt.stats.verdict != "skip" and opt.stats.skipped == 2
        assert digest(model, opt) != before


def test_eval_and_state_dict_between_steps_see_the_new_weights():
    model = llama(torch.bfloat16)
    with make(model) as opt:
        opt.engine.worker.set_delay_us(5000)  # the update is still running when we look
        train(model, opt, DATA[:1])
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        opt.synchronize()
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in saved.items())
        train(model, opt, DATA[1:2])
        model.eval()
        with torch.inference_mode():
            early = model(input_ids=DATA[2]).logits.clone()
            opt.synchronize()
            assert torch.equal(early, model(input_ids=DATA[2]).logits)
        part = model.model.layers[2].state_dict()  # a part's state_dict waits as well
        assert all(torch.equal(v, dict(model.model.layers[2].named_parameters())[k]) for k, v in part.items())


def test_save_pretrained_while_updating(tmp_path):
    from transformers import LlamaForCausalLM

    model = llama(torch.bfloat16)
    with make(model) as opt:
        opt.engine.worker.set_delay_us(3000)
        train(model, opt, DATA[:2])
        model.save_pretrained(tmp_path)
        opt.synchronize()
        back = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), back.parameters(), strict=True))


def test_a_weight_used_outside_its_module_is_waited_for():
    """A fused loss reads head.weight without calling the head."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
            self.head = nn.Linear(64, 256, bias=False)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return nn.functional.linear(x, self.head.weight).square().mean()

    def run(delay):
        torch.manual_seed(0)
        model, x = Odd(), torch.randn(8, 64)
        with OffloadAdamW(model, lr=1e-2, bucket_mb=0.03) as opt:
            opt.engine.worker.set_delay_us(delay)
            losses = []
            for _ in range(4):
                loss = model(x)
                loss.backward()
                opt.step()
                losses.append(float(loss.detach()))
            return losses, digest(model, opt)

    assert run(0) == run(4000)


def test_a_stale_graph_raises():
    model = llama()
    with make(model) as opt:
        loss = model(input_ids=DATA[0], labels=DATA[0]).loss
        loss.backward(retain_graph=True)
        opt.step()
        opt.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_close_gives_back_an_ordinary_model():
    model = llama()
    hooks_before = sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules())
    with make(model) as opt:
        train(model, opt, DATA[:1])
    assert sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()) == hooks_before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train(model, reference, DATA[1:3], clip=1.0)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters()) and len(losses) == 2
    with pytest.raises(EngineError, match="closed"):
        opt.step()


def test_a_second_engine_closes_the_first_and_memory_stays_flat():
    model = llama(torch.bfloat16)
    first = make(model)
    with pytest.warns(UserWarning, match="already had an OffloadAdamW"):
        second = make(model)
    with pytest.raises(EngineError, match="closed"):
        first.step()
    train(model, second, DATA[:1])
    threads = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(5):
            opt = make(model)
            train(model, opt, DATA[:1])
            gc.collect()
            threads.append(_native_threads())
    opt.close()
    assert len(set(threads[1:])) == 1, threads


def _native_threads() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Threads:"))


def test_a_dropped_optimizer_goes_away():
    model = llama(torch.bfloat16)
    before = _native_threads()
    opt = make(model)
    assert _native_threads() > before
    del opt
    gc.collect()
    assert _native_threads() == before
    model(input_ids=DATA[0], labels=DATA[0]).loss.backward()  # its hooks do nothing
    assert next(model.parameters()).grad is not None


@pytest.mark.parametrize(
    "plan",
    [{}, {"speculate": "on", "accumulate_on": "cpu"}, {"flow_blocks": (0, 1)}, {"activations": "offload_inputs"}],
    ids=lambda plan: ", ".join(plan) or "plain",
)
def test_a_closed_optimizer_gives_its_memory_back_at_once(plan):
    """Not when Python next looks for cycles: the next optimizer may need the same gigabytes."""
    train(model := llama(torch.bfloat16), make(model, **plan), DATA[:1])  # what is made once by the first of its kind
    del model
    gc.collect()
    gc.disable()
    try:
        model = llama(torch.bfloat16)
        with make(model, record_trace=True, **plan) as opt:
            train(model, opt, DATA[:3])
            opt.trace()
            arenas, held = weakref.ref(opt.engine.arenas), weakref.ref(opt.engine.arenas.buckets[0].master)
        assert opt._engine is None and arenas() is None and held() is None
    finally:
        gc.enable()


def test_a_copy_of_the_model_is_free_of_hooks():
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:1])
        opt.synchronize()
        twin = copy.deepcopy(model)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        train(model, opt, DATA[1:2])
        opt.synchronize()
        assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        twin(input_ids=DATA[0], labels=DATA[0]).loss.backward()
        assert next(twin.parameters()).grad is not None
    with make() as opt, pytest.raises(NotSupported, match="pickled or copied"):
        copy.deepcopy(opt)


def test_adding_a_parameter_group_keeps_the_state():
    def run(split: bool) -> str:
        model = llama(torch.bfloat16)
        late = list(model.model.layers[2].parameters())
        early = [p for p in model.parameters() if all(p is not q for q in late)]
        with make(model, params=early if split else [{"params": early}, {"params": late, "lr": 2e-3}]) as opt:
            if split:
                opt.add_param_group({"params": late, "lr": 2e-3})
            train(model, opt, DATA[:2])
            return digest(model, opt)

    assert run(True) == run(False)
    model = llama(torch.bfloat16)
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    with make(model) as opt:
        train(model, opt, DATA[:2])
        opt.synchronize()  # counted once the step is judged
        steps = int(opt.engine.steps[0])
        for p in model.model.layers[0].parameters():
            p.requires_grad_(True)
        opt.add_param_group({"params": model.model.layers[0].parameters()})
        assert int(opt.engine.steps[0]) == steps == 2
        frozen = model.model.layers[0].mlp.up_proj.weight.clone()
        train(model, opt, DATA[2:4])
        opt.synchronize()
        assert not torch.equal(frozen, model.model.layers[0].mlp.up_proj.weight)
        with pytest.raises(InputError, match="does not belong"):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_worker_failure_surfaces_with_its_own_words_and_nothing_is_saved(tmp_path):
    model = llama(torch.bfloat16)
    opt = make(model)
    train(model, opt, DATA[:1])
    opt.synchronize()
    original = opt.engine.submission.describe
    opt.engine.submission.describe = lambda sequence, arguments: original(
        sequence, arguments._replace(hyper=[])
    )  # no hyperparameters for any group
    model(input_ids=DATA[1], labels=DATA[1]).loss.backward()
    opt.step()
    with pytest.raises(EngineError, match=r"worker stopped: parameter .* in group 0"):
        opt.synchronize()
    with pytest.raises(EngineError):
        model(input_ids=DATA[1])
    with pytest.raises(EngineError):
        opt.save(tmp_path / "half.safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(RuntimeWarning, match="failure"):
        opt.close()


def test_ctrl_c_leaves_a_step_boundary(request):
    """SIGINT at random moments of training; afterwards training goes on as if it had not been, step by step."""

    def fresh():
        model = llama(torch.bfloat16)
        return model, make(model, retained_buckets=3)

    found = interrupt_at_random(request, fresh, DATA, rounds=12, between_s=(0.001, 0.05), seed=0)
    assert found.interrupted > 3


def test_closing_wakes_a_waiting_thread():
    model = llama(torch.bfloat16)
    opt = make(model)
    opt.engine.worker.set_delay_us(50_000)
    train(model, opt, DATA[:1])
    caught = []

    def wait():
        try:
            opt.engine.worker.wait_idle()
        except EngineError as e:
            caught.append(str(e))

    thread = threading.Thread(target=wait)
    thread.start()
    opt.engine.worker.close()
    thread.join(20)
    assert not thread.is_alive() and len(caught) <= 1
    with pytest.warns(RuntimeWarning):
        opt.close()


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"bucket_mbs": 3}, InputError, 'did you mean "bucket_mb"'),
        ({"lr": -1.0}, InputError, "lr = -1.0"),
        ({"weight_decay": "x"}, InputError, "weight_decay = 'x'"),
        ({"betas": 0.9}, InputError, "betas = 0.9"),
        ({"max_grad_norm": 0.0}, InputError, "max_grad_norm"),
        ({"flow_blocks": (99,)}, InputError, "flow_blocks names block 99"),
        ({"retained_buckets": 10**6}, InputError, "at most"),
        ({"bucket_mb": -1}, InputError, "bucket_mb"),
    ],
)
def test_bad_arguments(kwargs, error, says):
    with pytest.raises(error, match=says):
        make(**kwargs)


def test_a_parameter_list_is_refused_with_the_right_call():
    with pytest.raises(InputError, match=r"OffloadAdamW\(model, params="):
        OffloadAdamW(llama().parameters())


def test_foreign_checkpoints_are_refused(tmp_path):
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:1])
        before = digest(model, opt)
        opt.save(tmp_path / "a.safetensors")
        (tmp_path / "plain").touch()
        assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
        (tmp_path / "b.safetensors").write_bytes(b"not a checkpoint")
        for name, says in (("none.safetensors", "no such file"), ("b.safetensors", "cannot be read")):
            with pytest.raises(InputError, match=says):
                opt.load(tmp_path / name)
        assert digest(model, opt) == before
    with make(llama(torch.bfloat16, layers=2)) as opt, pytest.raises(InputError, match="another model"):
        opt.load(tmp_path / "a.safetensors")


def test_measured_trace_on_the_cpu():
    model = llama(torch.bfloat16)
    with make(model, record_trace=True, retained_buckets=2) as opt:
        with pytest.raises(InputError, match="two steps"):
            opt.trace()
        train(model, opt, DATA[:4])
        trace = opt.trace(tokens_per_step=48)
    assert trace.source == "measured" and trace.step_s > 0 and trace.tokens_per_s > 0
    kinds = {e.kind for e in trace.events}
    assert {"forward", "backward", "norm", "copy_down", "adam", "copy_up", "gpu_adam"} <= kinds
    assert all(0 <= e.start_s <= e.end_s <= trace.window_s + 1e-9 for e in trace.events)
    assert type(trace).from_json(trace.to_json()) == trace
