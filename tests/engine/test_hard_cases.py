"""Cases that go wrong silently in an engine that is not careful: lifetimes, storage, devices, streams of hooks."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from superoffload.engine import OffloadAdamW, arenas
from superoffload.engine.optimizer import optimizer_of
from superoffload.errors import EngineError, InputError
from tests.engine.common import batches, digest, llama, train

DATA = batches(6)


def make(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.05, **kwargs})


def _in_a_process(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
        env={**os.environ, **env}, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize("ending", ["del opt; gc.collect()", "opt.close()", "pass"])
def test_an_optimizer_may_go_while_its_update_runs(ending):
    """Dropped, closed or left at exit in the middle of an update: the worker must not outlive its memory."""
    out = _in_a_process(f"""
        import gc, torch
        from superoffload.engine import OffloadAdamW
        for _ in range(3):
            model = torch.nn.Linear(2000, 2000, bias=False)
            opt = OffloadAdamW(model, bucket_mb=0.25)
            opt.engine.worker.set_delay_us(2000)
            for _ in range(2):
                model(torch.ones(1, 2000)).sum().backward()
                opt.step()
            {ending}
        print("alive")
    """)
    assert out.strip() == "alive"


def _eight_buckets():
    """One weight that fills several buckets, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 700, bias=False)
    return model, OffloadAdamW(model, bucket_mb=0.25, lr=0.1)


def test_an_optimizer_dropped_in_mid_update_leaves_the_whole_step():
    """The verdict is known, some buckets are updated, others wait: all of them get there."""

    def run(ending):
        model, opt = _eight_buckets()
        for _ in range(2):
            model(torch.ones(1, 700)).sum().backward()
            opt.step()
        opt.synchronize()
        opt.engine.worker.set_delay_us(5000)
        before = model.weight.detach().clone()
        model(torch.ones(1, 700)).sum().backward()
        opt.step()
        opt.engine.worker.wait_verdict(opt.engine.sequence)
        ending(opt)
        del opt
        gc.collect()
        assert not torch.equal(before, model.weight)
        return model.weight.detach().clone()

    assert torch.equal(run(lambda opt: None), run(lambda opt: opt.synchronize()))


def test_a_forked_child_may_leave():
    out = _in_a_process("""
        import os, sys, torch
        from superoffload.engine import OffloadAdamW
        model = torch.nn.Linear(8, 8)
        opt = OffloadAdamW(model)
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        opt.synchronize()
        child = os.fork()
        if child == 0:
            del opt
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert out.strip() == "7"


@pytest.mark.parametrize("state", ["between backward and step", "while an update runs", "synchronized"])
def test_a_forked_child_that_uses_the_optimizer_is_told(state):
    """The worker's thread does not live there: nothing would ever end a wait for it."""
    out = _in_a_process(f"""
        import os, signal, sys, torch, warnings
        from superoffload.engine import OffloadAdamW
        from superoffload.errors import EngineError
        torch.set_num_threads(1)  # MKL would wait for OpenMP's threads, which do not live on in a child
        model, x = torch.nn.Linear(700, 700), torch.ones(1, 700)
        opt = OffloadAdamW(model, bucket_mb=0.25, speculate="on")
        def backward():
            model(x).sum().backward()
        for _ in range(2):
            backward()
            opt.step()
        opt.synchronize()
        opt.engine.worker.set_delay_us(3000)
        state = {state!r}
        if state != "synchronized":
            backward()
        if state == "while an update runs":
            opt.step()
        if os.fork() == 0:
            signal.alarm(20)
            if state == "synchronized":
                model(x)
            for use in (lambda: opt.stats, opt.synchronize, opt.state_dict, model.state_dict, lambda: opt.ledger,
                        lambda: (backward(), opt.step())):
                try:
                    use()
                    os._exit(3)
                except EngineError as e:
                    assert "forked" in str(e) and "synchronize" in str(e), e
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                opt.close()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        opt.step()
        backward()
        opt.step()
        opt.synchronize()
        print(opt.stats.step)
    """)
    assert out.split() == ["7", "4" if state != "synchronized" else "3"]


def test_a_submitted_step_is_finished_before_its_verdict_is_known_too():
    """Dropped right after step(): the device may already have taken the step in the buckets that it retains."""

    def run(ending):
        model, opt = _eight_buckets()
        for _ in range(3):
            opt.engine.worker.set_delay_us(5000)
            model(torch.ones(1, 700)).sum().backward()
            opt.step()
        if ending == "drop":
            del opt
            gc.collect()
        else:
            opt.synchronize()
        return model.weight.detach().clone()

    for _ in range(5):
        assert torch.equal(run("drop"), run("synchronize"))


def test_ctrl_c_while_an_optimizer_closes_leaves_nothing_open(request):
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    model = llama(torch.bfloat16)
    opt = make(model, flow_blocks=(1, 2))
    train(model, opt, DATA[:2])
    engine = opt.engine

    class Handle:
        def remove(self):
            signal.raise_signal(signal.SIGINT)

    life = engine.close.peek()[1].__self__
    life.handles.insert(0, Handle())
    with pytest.raises(KeyboardInterrupt):
        opt.close()
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert engine.arenas.host.pageable_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        engine.worker.wait_idle()
    homes = {b.weights.untyped_storage().data_ptr() for b in engine.arenas.buckets if b.flow}
    assert homes and not any(p.untyped_storage().data_ptr() in homes for p in model.parameters())


def test_a_part_that_cannot_be_ended_does_not_keep_the_others():
    model = llama(torch.bfloat16)
    opt = make(model)
    train(model, opt, DATA[:1])
    engine = opt.engine

    class Handle:
        def remove(self):
            raise OSError("cannot be removed")

    engine.close.peek()[1].__self__.handles.insert(0, Handle())
    with pytest.raises(OSError, match="cannot be removed"):
        opt.close()
    assert not any(m._forward_pre_hooks for m in model.modules()) and engine.arenas.host.pageable_bytes == 0


def test_dropped_optimizers_leave_no_hooks():
    model = llama(torch.bfloat16)
    count = lambda: sum(len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = count()
    for _ in range(3):
        opt = make(model)
        train(model, opt, DATA[:1])
        del opt
        gc.collect()
    assert count() == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_closing_frees_the_state_at_once():
    model = llama(torch.bfloat16)
    opt = make(model)
    train(model, opt, DATA[:1])
    master = weakref.ref(opt.engine.arenas.buckets[0].master)
    gc.disable()  # memory must not wait for the collector
    try:
        opt.close()
        assert master() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["to", "data"])
def test_replaced_storage_is_noticed(how):
    """Weights that moved away would never see an update again."""
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:1])
        opt.synchronize()
        if how == "to":
            model.float().bfloat16()
        else:
            p = next(model.parameters())
            p.data = p.data.clone()
        model(input_ids=DATA[1], labels=DATA[1]).loss.backward()
        with pytest.raises(EngineError, match=r"storage of .* was replaced"):
            opt.step()
        with pytest.warns(RuntimeWarning, match="replaced"):
            opt.close()


def test_other_pre_hooks_see_the_new_weights():
    """torch's weight_norm computes the weight in a pre-hook that was there before ours."""

    def run(delay: int) -> list[float]:
        torch.manual_seed(0)
        with pytest.warns(FutureWarning):
            layers = [torch.nn.utils.weight_norm(nn.Linear(96, 96)) for _ in range(4)]
        model, x = nn.Sequential(*layers), torch.randn(4, 96)
        losses = []
        with OffloadAdamW(model, lr=1e-2, bucket_mb=0.03) as opt:
            opt.engine.worker.set_delay_us(delay)
            for _ in range(4):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
                losses.append(float(loss.detach()))
        return losses

    assert run(0) == run(4000)


def test_a_weight_read_too_early_is_an_error_and_not_a_wrong_gradient():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(4, 32)
    with OffloadAdamW(model, lr=1e-2, bucket_mb=0.03) as opt:
        for _ in range(2):
            model(x).square().mean().backward()
            opt.step()
        opt.engine.worker.set_delay_us(5000)
        model(x).square().mean().backward()
        opt.step()
        early = model[2].weight.square().sum()  # before the forward that waits for it
        loss = model(x).square().mean() + early
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        opt.zero_grad()
        opt.synchronize()
        (model[2].weight.square().sum() + model(x).square().mean()).backward()  # the remedy
        opt.step()


def test_synchronize_is_the_remedy_for_direct_use():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    with OffloadAdamW(model, lr=1e-2, bucket_mb=0.03) as opt:
        for _ in range(2):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        with pytest.raises(EngineError, match="synchronize"):
            nn.functional.linear(x, model[0].weight).square().mean().backward()
        opt.zero_grad()
        opt.synchronize()
        nn.functional.linear(x, model[0].weight).square().mean().backward()
        opt.step()
        assert opt.stats.step == 3


def test_torchs_default_device_does_not_matter():
    out = _in_a_process("""
        import torch
        from superoffload.engine import OffloadAdamW
        model, x = torch.nn.Linear(16, 16), torch.ones(2, 16)
        torch.set_default_device("meta")
        opt = OffloadAdamW(model, max_grad_norm=1.0)
        for _ in range(2):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        state = opt.state_dict()["state"][0]
        print(opt.engine.steps.device, opt.stats.step, state["step"].device, state["exp_avg"].device)
    """)
    assert out.split() == ["cpu", "2", "cpu", "cpu"]


def test_torchs_distributed_checkpoint_takes_no_step_of_its_own():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:2])
        before = digest(model, opt)
        got = get_optimizer_state_dict(model, opt)
        assert digest(model, opt) == before
        assert int(next(iter(got["state"].values()))["step"]) == 2


def test_clipping_may_be_switched_off_and_bad_norms_are_refused():
    results = []
    for retained in (0, 5):
        model = llama(torch.bfloat16)
        with make(model, retained_buckets=retained) as opt:
            train(model, opt, DATA[:2])
            opt.max_grad_norm = None
            train(model, opt, DATA[2:4])
            assert opt.stats.clip_coefficient == 1.0
            results.append(digest(model, opt))
            opt.max_grad_norm = -1.0
            with pytest.raises(InputError, match="max_grad_norm"):
                opt.step()
    assert results[0] == results[1]


def test_all_parameters_may_be_passed_although_some_are_frozen():
    model = llama(torch.bfloat16)
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    with make(model, params=model.parameters()) as opt:
        train(model, opt, DATA[:2])
        managed = len(opt.engine.params)
        assert managed < len(list(model.parameters()))
        for p in model.model.layers[0].parameters():
            p.requires_grad_(True)
        frozen = model.model.layers[0].mlp.up_proj.weight.clone()
        train(model, opt, DATA[2:4])  # thawed: as in torch, they train from here on
        opt.synchronize()
        assert len(opt.engine.params) == len(list(model.parameters()))
        assert not torch.equal(frozen, model.model.layers[0].mlp.up_proj.weight)
        assert opt.stats.step == 4


def test_thawing_equals_torch():
    models = [llama(), llama()]
    results = []
    for model, ours in zip(models, (False, True), strict=True):
        for p in model.model.layers[1].parameters():
            p.requires_grad_(False)
        cls = OffloadAdamW if ours else torch.optim.AdamW
        opt = OffloadAdamW(model, params=model.parameters(), max_grad_norm=1.0) if ours else cls(model.parameters())
        train(model, opt, DATA[:2], clip=None if ours else 1.0)
        for p in model.model.layers[1].parameters():
            p.requires_grad_(True)
        results.append(train(model, opt, DATA[2:], clip=None if ours else 1.0))
        if ours:
            opt.close()
    assert max(abs(a - b) for a, b in zip(*results, strict=True)) < 1e-5


def test_a_refused_parameter_group_leaves_everything_as_it_was():
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:2])
        before = digest(model, opt)
        with pytest.raises(ValueError, match="more than one parameter group"):
            opt.add_param_group({"params": [next(model.parameters())]})
        assert digest(model, opt) == before
        train(model, opt, DATA[2:3])


def test_a_refused_plan_leaves_the_previous_optimizer_open():
    model = llama(torch.bfloat16)
    first = make(model)
    with pytest.raises(InputError, match="at most"):
        make(model, retained_buckets=10_000)
    train(model, first, DATA[:1])
    assert first.stats.step == 1
    first.close()


def test_an_optimizer_of_a_wrapping_module_replaces_that_of_the_wrapped():
    model = llama(torch.bfloat16)
    outer = nn.ModuleDict({"inner": model})
    first = make(model)
    assert optimizer_of(outer) is first
    with pytest.warns(UserWarning, match="already had"):
        second = make(outer)
    train(model, second, DATA[:1])
    assert second.stats.step == 1 and optimizer_of(model) is second
    second.close()
    assert optimizer_of(model) is None


def test_an_error_in_a_step_leaves_the_engine_usable(monkeypatch):
    model = llama(torch.bfloat16)
    with make(model) as opt:
        train(model, opt, DATA[:1])
        with monkeypatch.context() as patch:
            patch.setattr(opt.engine.submission, "describe", lambda *a: 1 / 0)
            model(input_ids=DATA[1], labels=DATA[1]).loss.backward()
            with pytest.raises(ZeroDivisionError):
                opt.step()
        opt.step()  # the gradients are still there
        opt.zero_grad()
        train(model, opt, DATA[2:3])
        assert opt.stats.step == 3


def test_counts_go_on_over_a_rebuild():
    model = llama(torch.bfloat16)
    late = list(model.model.layers[2].parameters())
    with make(model, params=[p for p in model.parameters() if all(p is not q for q in late)]) as opt:
        (model(input_ids=DATA[0], labels=DATA[0]).loss * float("nan")).backward()
        opt.step()
        opt.zero_grad()
        train(model, opt, DATA[1:2])
        opt.add_param_group({"params": late})
        model.zero_grad()
        train(model, opt, DATA[2:3])
        assert (opt.stats.step, opt.stats.skipped) == (3, 1)


def test_empty_parameters_and_other_devices():
    model = nn.Linear(4, 4)
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    with OffloadAdamW(model) as opt:
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        state = opt.state_dict()
        opt.load_state_dict(state)
        opt.synchronize()
    with pytest.raises(InputError, match="on the meta device, without values"):
        OffloadAdamW(nn.Linear(4, 4, device="meta"))


def test_second_backward_with_a_full_ring():
    """Parameters that span buckets, all slots open, gradients added to ones already sent."""
    torch.manual_seed(0)
    layers = [nn.Linear(160, 160, bias=False) for _ in range(8)]
    xs = [torch.randn(4, 160) for _ in range(3)]

    def run(ours: bool) -> list[torch.Tensor]:
        model = nn.Sequential(*[nn.Linear(160, 160, bias=False) for _ in layers])
        for target, source in zip(model, layers, strict=True):
            target.weight.data.copy_(source.weight)
        if ours:
            opt = OffloadAdamW(model, lr=1e-3, bucket_mb=0.04)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for order in ((0, 2, 4, 6, 1, 3, 5, 7), (7, 6, 5, 4, 3, 2, 1, 0), (3, 1, 7, 5, 0, 2, 6, 4)):
            for i in order:
                for x in xs[:2]:
                    model[i](x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        if ours:
            opt.close()
        return [p.detach() for p in model.parameters()]

    with pytest.warns(UserWarning, match="no_sync"):
        ours = run(True)
    for p, q in zip(run(False), ours, strict=True):
        assert (p - q).abs().max() < 0.05 * 1e-3


def test_an_empty_parameter_is_in_no_bucket():
    """A vocabulary that is extended by nothing, say."""

    class Extended(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.extra = nn.Linear(8, 8), nn.Parameter(torch.zeros(0, 8))

        def forward(self, x):
            return nn.functional.linear(self.base(x), torch.cat([self.base.weight, self.extra])).sum()

    model = Extended()
    with OffloadAdamW(model, lr=1e-2, bucket_mb=0.05) as opt:
        before = model.base.weight.detach().clone()
        for _ in range(2):
            model(torch.ones(2, 8)).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        assert not torch.equal(model.base.weight, before)


@pytest.mark.parametrize("refusals", [1, 2])
def test_weights_wait_on_the_host_where_the_device_has_no_room_for_them_twice(monkeypatch, refusals):
    model = llama()
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05) as opt:
        losses, one = train(model, opt, batches(2)), digest(model, opt)

    model, left, zeros = llama(), [refusals], torch.zeros
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = model.lm_head.weight.detach()  # of somebody else: it must not be emptied

    def full(*size, **kwargs):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room")
        return zeros(*size, **kwargs)

    monkeypatch.setattr(arenas.torch, "zeros", full)
    if refusals == 1:
        with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05) as opt:
            assert torch.equal(kept, before["lm_head.weight"])
            assert (train(model, opt, batches(2)), digest(model, opt)) == (losses, one)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            OffloadAdamW(model, lr=1e-3, bucket_mb=0.05)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05) as opt:
            assert train(model, opt, batches(2)) == losses


def test_old_weights_go_while_the_new_arenas_come(monkeypatch):
    """A model on the GPU must not need its weights' memory twice to be trained."""
    monkeypatch.setattr(arenas, "ARENA_BYTES", 1 << 30)
    model = llama()
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05) as opt:
        losses = train(model, opt, batches(2))
        one = digest(model, opt)

    monkeypatch.setattr(arenas, "ARENA_BYTES", 40_000)
    model, old = llama(), []
    for p in model.parameters():
        array = p.detach().numpy().copy()
        p.data = torch.from_numpy(array)
        old.append(weakref.ref(array))
        del array
    left, adopt = [], arenas.Arenas._adopt

    def watched(self, arena, alias, starts):
        left.append(sum(a().nbytes for a in old if a() is not None) / sum(p.nbytes for p in model.parameters()))
        return adopt(self, arena, alias, starts)

    monkeypatch.setattr(arenas.Arenas, "_adopt", watched)
    with OffloadAdamW(model, lr=1e-3, bucket_mb=0.05) as opt:
        assert len(left) > 5 and left[0] == 1 and all(a > b for a, b in itertools.pairwise(left))
        assert left[-1] < 0.2
        assert not any(a() is not None for a in old)
        assert train(model, opt, batches(2)) == losses
        assert digest(model, opt) == one
