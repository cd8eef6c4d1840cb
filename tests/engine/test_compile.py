"""Compiled layers: what is compiled, and that nothing of the engine changes a bit of what it computes.

Structure is tested with the backend `aot_eager`, which traces, partitions and runs a graph as inductor does, with eager
kernels: its bits are those of the eager model. Inductor itself runs where its own kernels matter.
"""

import copy
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from superoffload.engine import OffloadAdamW, activations, compiling
from superoffload.engine.activations import BlockForward
from superoffload.errors import EngineError, InputError
from superoffload.plan import ACTIVATIONS, Plan
from tests.engine.common import Autocast, batches, checkpointed, digest, llama, run_plan
from tests.engine.test_activations import dropping

pytestmark = [  # of torch's compiler itself
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

POLICIES = tuple(p for p in ACTIVATIONS if p != "selective")
DATA = batches(4)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(activations, "OFFLOAD_MIN_BYTES", 512)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Counts the graphs that are compiled, by `aot_eager` unless a test asks for another compiler."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiling, "BACKEND", counter)
    yield counter
    torch._dynamo.reset()


def deep(dtype=torch.float32, **kwargs):
    return llama(dtype, layers=4, **kwargs)


def run(model=deep, dtype=torch.float32, data=DATA, **plan):
    torch.manual_seed(7)
    return run_plan(dtype, data, model=model, **{"bucket_mb": 0.04, "speculate": "on", **plan})


def make(model, **plan):
    return OffloadAdamW(model, **{"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.04, "compile_blocks": True, **plan})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_plan_changes_a_bit(dtype, graphs):
    eager, accumulated = run(dtype=dtype), run(dtype=dtype, accumulation=2)
    for policy in POLICIES:
        assert run(dtype=dtype, compile_blocks=True, activations=policy) == eager, policy
    mixed = {1: "offload_saved", 2: "none", 3: "full"}
    assert run(dtype=dtype, compile_blocks=True, activations="none", activations_by_block=mixed) == eager
    for policy in ("none", "full"):
        flow = {"flow_blocks": (1, 2, 4), "retained_buckets": 3}
        for prefetch, speculate in ((1, "on"), (2, "off")):
            found = run(dtype=dtype, compile_blocks=True, activations=policy, prefetch_blocks=prefetch,
                        **flow | {"speculate": speculate, "delay_us": 100})  # fmt: skip
            assert found == eager, (policy, prefetch, speculate)
        for more in ({}, {"hint": False}, {"accumulate_on": "cpu", **flow}):
            assert run(dtype=dtype, compile_blocks=True, activations=policy, accumulation=2, **more) == accumulated
    assert graphs.frame_count == 1, "one graph for four layers, all policies, slots, steps and engines"


@functools.cache
def inductor_runs():
    """(digest, losses) under plans with inductor's kernels, and the eager ones."""
    compiling.BACKEND = "inductor"  # the fixture of the first test that asks puts it back
    flow = {"flow_blocks": (1, 2, 3, 4), "prefetch_blocks": 1}
    plans = [
        {"activations": "none", "speculate": "off"},
        {"activations": "none"},
        {"activations": "none", **flow},
        {"activations": "full", **flow},
        {"activations": "offload_saved", "retained_buckets": 3, "flow_blocks": (2, 3)},
        {"activations": "offload_inputs"},
    ]
    return run(), [run(compile_blocks=True, **plan) for plan in plans]


def test_inductor_trains_to_the_same_bits_under_every_plan():
    eager, (first, *others) = inductor_runs()
    for i, other in enumerate(others):
        assert other == first, i
    assert first[0] != eager[0], "fused kernels round elsewhere: else nothing was compiled"


def test_inductor_trains_as_the_eager_model_does():
    eager, (first, *_) = inductor_runs()
    for a, b in zip(eager[1], first[1], strict=True):
        assert math.isclose(a, b, rel_tol=1e-5)


class Layer(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.number, self.fails = number, False

    def forward(self, x, scale=1.0):
        h = torch.tanh(self.up(x)) * scale
        if self.fails:
            raise ValueError("broken layer")
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, n=4, layer=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(i) for i in range(n))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))


def steps(model, opt, n=3, x=X):
    for _ in range(n):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()


def trained(layer, policy, *, compiled=True, before=lambda model: None, **plan):
    model = Stack(layer=layer)
    torch.manual_seed(3)
    with make(model, activations=policy, compile_blocks=compiled, **plan) as opt:
        before(model)
        steps(model, opt)
        return digest(model, opt)


class Dropping(Layer):
    def forward(self, x):
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.2, self.training)


def test_recompute_draws_the_same_random_numbers(monkeypatch):
    assert run(dropping, compile_blocks=True, activations="full") == run(dropping, compile_blocks=True,
                                                                         activations="none")  # fmt: skip
    monkeypatch.setattr(compiling, "BACKEND", "inductor")  # draws in a way of its own
    flow = {"flow_blocks": (0, 1, 2, 3)}
    kept = trained(Dropping, "none")
    assert trained(Dropping, "full", **flow) == kept
    assert trained(Dropping, "offload_inputs") == kept
    with torch.random.fork_rng():
        model = Stack(layer=Dropping)
        with make(model, activations="none"):
            assert not torch.equal(model(X), model(X)), "control: masks differ from call to call"


class Routed(Layer):
    """A mixture of experts: what runs depends on the data."""

    def forward(self, x):
        chosen = x.sum(-1) > 0
        out = torch.zeros_like(x)
        for expert, rows in ((self.up, chosen), (self.up, ~chosen)):
            at = rows.nonzero().squeeze(-1)
            if at.numel() and float(x.detach().mean()) < 100:
                out = out.index_add(0, at, self.down(torch.tanh(expert(x[at]))))
        return x + out


def hooked(model):
    model.layers[1].up.register_forward_hook(lambda module, args, out: out * 0.5)
    model.layers[2].down.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))


@pytest.mark.parametrize(("layer", "before"), [(Routed, lambda m: None), (Layer, hooked)])
def test_layers_that_break_the_graph_or_have_hooks(layer, before):
    eager = trained(layer, "none", compiled=False, before=before)
    for policy in POLICIES:
        assert trained(layer, policy, before=before, flow_blocks=(1, 2)) == eager, policy


def test_autocast_and_tied_weights():
    def model(dtype, device):
        return Autocast(deep(dtype, device=device, tied=True))

    kept = run(model, compile_blocks=True, activations="none")
    assert run(model, compile_blocks=True, activations="full", flow_blocks=(1, 2)) == kept
    eager = run(model)
    assert kept[1] == pytest.approx(eager[1], rel=1e-2)


STALE = "modified by an inplace operation"


def test_a_stale_graph_raises():
    for plan in ({}, {"flow_blocks": (1, 2, 3)}):
        model = Stack()
        with make(model, activations="none", **plan) as opt:
            old = model.layers[1](model.layers[0](X)).square().mean()  # through layers alone
            steps(model, opt, 1)
            with pytest.raises(RuntimeError, match=STALE):
                old.backward()
            opt.zero_grad()
            old = model.layers[1](X).square().mean()
        if plan:  # its weights lay in a slot that is gone
            with pytest.raises(RuntimeError, match=STALE):
                old.backward()


def test_a_graph_is_walked_once_and_torch_says_so(monkeypatch):
    """Inductor writes into what was saved."""
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    model, (x,) = deep(), batches(1)
    with make(model, activations="none") as opt, opt.no_sync():
        loss = model(input_ids=x, labels=x).loss
        with pytest.raises(RuntimeError, match="retain_graph"):
            loss.backward(retain_graph=True)


def test_a_forward_that_fails_and_other_calls_change_nothing(graphs):
    def play(disturbed, **plan):
        model = Stack()
        with make(model, speculate="on", **plan) as opt:
            steps(model, opt, 2)
            if disturbed:
                model.layers[2].fails = True
                with pytest.raises(ValueError, match="broken layer"):
                    model(X)
                model.layers[2].fails = False
                model(X)  # a graph that is dropped
                before = graphs.frame_count
                model.eval()
                with torch.no_grad():
                    model(X[:7])
                model.train()
                assert graphs.frame_count == before, "without gradients the plain layer runs"
            steps(model, opt, 2)
            return digest(model, opt)

    eager = play(False, compile_blocks=False, activations="none")
    for policy in ("none", "full", "offload_saved"):
        assert play(True, activations=policy) == eager


def test_calls_with_a_cache_run_the_plain_layer(graphs):
    model = llama()
    (x,) = batches(1)
    with make(model, activations="none") as opt:
        model(input_ids=x, labels=x, use_cache=True).loss.backward()
        assert graphs.frame_count == 0
        opt.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        assert graphs.frame_count == 1
        model.eval()
        model.config.use_cache = True
        tokens = model.generate(x[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.config.use_cache = False
        assert tokens.shape == (1, 7)
        assert graphs.frame_count == 1


def test_the_trace_shows_each_recompute_once():
    model = Stack()
    with make(model, activations="full", record_trace=True) as opt:
        steps(model, opt, 3)
        events = opt.trace().events
    assert sorted(e.block for e in events if e.kind == "recompute") == [0, 1, 2, 3]
    assert sum(e.kind == "forward" and e.block >= 0 for e in events) == 5, "a recompute is not one"


def test_layers_that_differ_in_a_number_are_compiled_one_by_one(graphs):
    class Numbered(Layer):
        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x))) / (1 + self.number)

    model, limit = Stack(12, Numbered), torch._dynamo.config.recompile_limit
    assert limit < 12
    with make(model, activations="none") as opt:
        steps(model, opt, 2)
    assert graphs.frame_count == 12
    assert torch._dynamo.config.recompile_limit == limit


def test_each_shape_has_its_own_graph(graphs):
    model = Stack()
    with make(model, activations="none") as opt:
        for rows in (32, 16, 32, 8, 32):
            steps(model, opt, 1, X[:rows])
    assert graphs.frame_count == 2 * 3, "the first layer's input has no gradient, so it has graphs of its own"


def test_close_restores_the_model():
    model = Stack()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    own = copy.copy(model.layers[1].forward)
    model.layers[1].forward = own
    with make(model, activations="none") as opt:
        assert all(isinstance(layer.forward, BlockForward) for layer in model.layers)
        steps(model, opt, 1)
    assert model.layers[1].__dict__["forward"] is own
    del model.layers[1].forward
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys(), name


def test_a_forward_that_somebody_has_set_is_what_is_compiled(graphs):
    def scaled(model):
        for layer in model.layers:
            layer.forward = functools.partial(type(layer).forward, layer, scale=0.25)

    def play(compiled):
        model = Stack()
        scaled(model)
        with make(model, activations="full", compile_blocks=compiled) as opt:
            steps(model, opt)
            return digest(model, opt)

    assert play(True) == play(False)
    assert graphs.frame_count >= 1
    assert play(True) != trained(Layer, "full")


def test_copies_of_the_model_are_plain(graphs):
    model = Stack()
    with make(model, activations="none") as opt:
        model(X)
        made = graphs.frame_count
        expected = Stack()(X[:5])  # of as many rows: MKL's bits depend on their number on some processors
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(copied.layers[0].forward, BlockForward)
            opt.synchronize()
            assert torch.equal(copied(X[:5]), expected)
            copied(X[:5]).sum().backward()
        assert graphs.frame_count == made


def test_nothing_holds_a_model_that_was_dropped():
    model = Stack()
    with make(model, activations="full", flow_blocks=(1,)) as opt:
        steps(model, opt, 2)
    found = weakref.ref(model.layers[0].up.weight)
    del model, opt
    gc.collect()
    assert found() is None


def test_the_models_own_checkpointing_stays_where_no_policy_was_asked_for(graphs):
    def model(dtype, device):
        return checkpointed(deep(dtype, device=device), reentrant=False)

    m = model(torch.float32, "cpu")
    with make(m) as opt:
        assert opt.plan.activations == "full"
        assert any(getattr(x, "gradient_checkpointing", False) for x in m.modules())
    plan = {"flow_blocks": (1, 2), "speculate": "on"}
    assert run(model, compile_blocks=True, **plan) == run(model)
    assert graphs.frame_count == 1


def test_what_is_compiled_already_is_refused_before_anything_changes():
    model = Stack()
    with pytest.raises(InputError, match=r"the model goes through torch\.compile already.*compile_blocks=False"):
        make(torch.compile(model, backend="eager"))
    model.layers[2].compile(backend="eager")
    with pytest.raises(InputError, match=r"layers\.2 goes through torch\.compile already"):
        make(model)
    assert "forward" not in model.layers[0].__dict__
    model = Stack()
    model.head.compile(backend="eager")  # no layer
    with make(model, activations="none") as opt:
        steps(model, opt, 1)
    with pytest.raises(InputError, match="the model has no layers"):
        make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def test_compiling_the_whole_model_afterwards_takes_the_layers_in():
    model = Stack()
    with make(model, activations="none") as opt:
        whole = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            whole(X).square().mean().backward()
            opt.step()
            opt.zero_grad()
        assert digest(model, opt) == trained(Layer, "none", compiled=False)


def test_selective_is_refused():
    for plan in ({"activations": "selective"}, {"activations": "none", "activations_by_block": {1: "selective"}}):
        with pytest.raises(InputError, match=r"activations = selective.*Take activations = \"none\""):
            make(Stack(), **plan)
    with pytest.raises(InputError, match="selective"):
        OffloadAdamW(Stack(), plan=Plan(compile_blocks=True, activations="selective"))


def test_it_says_once_that_it_compiles(capsys):
    model = Stack()
    with make(model, activations="full") as opt:
        assert capsys.readouterr().err == ""
        steps(model, opt, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "superoffload: compiling the forward and backward of 4 layers (Layer), once for each shape of input"
    )
    assert lines[1].startswith("superoffload: compiled Layer in ")
    assert len(lines) == 2


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_missing_compiler_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    model = Stack()
    with make(model, activations="full") as opt:
        patched = {"cpp.cxx": (None, "/nowhere/g++"), "force_disable_caches": True}
        with (
            torch._inductor.config.patch(patched),
            pytest.raises(EngineError, match=r"forward of Layer .*InvalidCxxCompiler.*compile_blocks=False"),
        ):
            model(X)
    with make(model, activations="full", compile_blocks=False) as opt:
        steps(model, opt, 1)


def test_what_a_compiler_cannot_do_is_told_in_its_own_words(monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no such instruction\nand much more")

    monkeypatch.setattr(compiling, "BACKEND", fails)
    model = Stack()
    with make(model, activations="none"), pytest.raises(EngineError) as e:
        model(X)
    assert str(e.value) == (
        "the forward of Layer could not be compiled: ValueError: no such instruction. Make the optimizer with "
        "compile_blocks=False."
    )
