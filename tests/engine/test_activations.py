"""Activation policies change what is kept and where, never a bit."""

import copy
import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from superoffload.engine import OffloadAdamW, activations, selective
from superoffload.engine.activations import BlockForward
from superoffload.engine.building import rebuild
from superoffload.errors import InputError
from superoffload.plan import ACTIVATIONS, Plan
from tests.engine.common import VOCAB, batches, checkpointed, digest, llama, run_plan, train

POLICIES = tuple(p for p in ACTIVATIONS if p != "none")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """A test's layer is narrow and its tensors are small: take both for large."""
    monkeypatch.setattr(activations, "OFFLOAD_MIN_BYTES", 512)
    monkeypatch.setattr(selective, "KEEP_FLOPS_PER_BYTE", 16)


def dropping(dtype=torch.float32, *, device="cpu", **kwargs):
    """A model whose layers draw random numbers: in attention and after it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=64, resid_pdrop=0.1, attn_pdrop=0.1,
        embd_pdrop=0.1, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(device=device, dtype=dtype).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [llama, dropping])
def test_no_policy_changes_a_bit(dtype, model):
    def run(**kwargs):
        torch.manual_seed(7)
        return run_plan(dtype, batches(6), model=model, bucket_mb=0.1, speculate="on", **kwargs)

    reference = run(activations="none")
    for policy in POLICIES:
        assert run(activations=policy) == reference, policy
        assert run(activations=policy, accumulation=2, hint=False) == run(activations="none", accumulation=2), policy
    mixed = {1: "offload_saved", 2: "selective", 3: "full"}
    assert run(activations="none", activations_by_block=mixed) == reference


def test_dropout_is_drawn():
    """Control of the test above: the random numbers matter."""
    model, (x,) = dropping(), batches(1)
    with torch.no_grad():
        assert float(model(input_ids=x, labels=x).loss) != float(model(input_ids=x, labels=x).loss)


def open_with(model, policy, **kwargs):
    return OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, bucket_mb=0.1, activations=policy, **kwargs)


def live_bytes(policy):
    """Bytes that a forward of long sequences leaves behind, the weights not counted."""
    from superoffload.profiling_counts import Watch

    model, (x,) = llama(), batches(1, size=4, seq=64)
    with open_with(model, policy) as opt:
        train(model, opt, [x])  # selective learns in its first backward
        opt.synchronize()
        watch = Watch(model)
        with watch:
            loss = model(input_ids=x, labels=x).loss
            gc.collect()
            live = watch.live
        loss.backward()
    return live


def test_each_policy_keeps_less_on_the_device():
    full, selected, none = (live_bytes(p) for p in ("full", "selective", "none"))
    assert full < 0.5 * none
    assert full < selected < 0.7 * none


def noting(outputs, name):
    def hook(module, args, out):
        outputs.setdefault(name, weakref.ref(out.untyped_storage()))

    return hook


def test_offloaded_tensors_leave_the_device():
    """Which outputs of the first layer's parts outlive the forward."""
    found = {}
    for policy in ("none", "full", "offload_inputs", "offload_saved"):
        model, (x,) = llama(), batches(1)
        with open_with(model, policy):
            outputs = {}
            for name, part in model.model.layers[0].named_modules():
                if not name.startswith("self_attn"):
                    part.register_forward_hook(noting(outputs, name))
            loss = model(input_ids=x, labels=x).loss
            found[policy] = {name for name, out in outputs.items() if out() is not None}
            loss.backward()
    inside = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj"}
    assert found == {"none": inside | {""}, "full": {""}, "offload_inputs": set(), "offload_saved": set()}


def test_selective_keeps_products_and_attention_and_what_recompute_never_reaches_not():
    model, (x,) = llama(layers=1), batches(1)
    kept = []
    blocks = activations_of(model, "selective", kept=lambda block, result: kept.append((block, result)))
    model(input_ids=x, labels=x).loss.backward()
    shapes = sorted(tuple(r[0].shape) if isinstance(r, tuple) else tuple(r.shape) for _, r in kept)
    tokens, heads = x.numel(), (2, 4, 24, 16)
    first = [(tokens, 144), (tokens, 144), (tokens, 32), (tokens, 32), (tokens, 64), (tokens, 64), (tokens, 64)]
    assert shapes == sorted([*first, heads]), "q k v o gate up down and attention"
    kept.clear()
    model(input_ids=x, labels=x).loss.backward()
    assert len(kept) == 7, "the way down is not asked for: backward reads only its input"
    blocks.remove()


def test_flops_per_byte_are_those_that_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    for dtype in (torch.bfloat16, torch.float32):
        a, b, bias = torch.zeros(6, 32, dtype=dtype), torch.zeros(32, 10, dtype=dtype), torch.zeros(10, dtype=dtype)
        for op, args in ((torch.ops.aten.mm.default, (a, b)), (torch.ops.aten.addmm.default, (bias, a, b))):
            with FlopCounterMode(display=False) as counter:
                out = op(*args)
            assert selective.flops_per_byte(op, args) == counter.get_total_flops() / out.untyped_storage().nbytes()


def test_selective_leaves_narrow_products_and_random_attention(monkeypatch):
    monkeypatch.setattr(selective, "KEEP_FLOPS_PER_BYTE", 1e9)
    model, (x,) = llama(layers=1), batches(1)
    kept = []
    applied = activations_of(model, "selective", kept=lambda block, result: kept.append(result))
    model(input_ids=x, labels=x).loss.backward()
    assert len(kept) == 1, "attention alone"
    applied.remove()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1)
    assert selective._draws(op, (q, q, q, 0.1), {})
    assert not selective._draws(op, (q, q, q), {})
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert selective._draws(op, (q, q, q, None, True, 0.5), {})


def activations_of(model, policy, **kwargs):
    from superoffload.engine.blocks import find_blocks

    blocks = find_blocks(model)
    return activations.AppliedPolicies(model, blocks, [policy] * len(blocks), **kwargs)


class Counting(nn.Module):
    """A layer that counts its forwards and can fail in one."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls, self.fails = 0, False

    def forward(self, x, scale=1.0):
        self.calls += 1
        h = torch.tanh(self.up(x)) * scale
        if self.fails:
            raise ValueError("broken layer")
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting() for _ in range(n))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))


def steps(model, opt, n=3):
    for _ in range(n):
        model(X).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("offload_saved", 1), ("full", 2), ("selective", 2), ("offload_inputs", 2)])  # fmt: skip  # noqa: E501
def test_how_often_forward_runs(policy, calls):
    model = Stack()
    with open_with(model, policy) as opt:
        steps(model, opt, 1)
    assert [layer.calls for layer in model.layers] == [calls] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_what_happens_between_steps_changes_nothing(policy):
    def run(activations, disturbed):
        model = Stack()
        with open_with(model, activations, speculate="on") as opt:
            steps(model, opt, 2)
            if disturbed:
                model.layers[2].fails = True
                with pytest.raises(ValueError, match="broken layer"):
                    model(X)
                model.layers[2].fails = False
                model(X)  # a graph that is dropped
                model.eval()
                model(X)
                with torch.no_grad():
                    model(X)
                model.train()
            steps(model, opt, 2)
            return digest(model, opt)

    assert run(policy, True) == run("none", False)


@pytest.mark.parametrize("policy", POLICIES)
def test_close_restores_the_model(policy):
    model = Stack()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    model.layers[1].forward = wrapper = copy.copy(model.layers[1].forward)
    with open_with(model, policy) as opt:
        assert isinstance(model.layers[0].forward, BlockForward)
        with open_with_warning(model, policy) as second:  # closes the first
            steps(model, second, 1)
        assert opt is not second
    assert model.layers[1].__dict__["forward"] is wrapper
    del model.layers[1].forward
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys(), name


def open_with_warning(model, policy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return open_with(model, policy)


def test_a_wrapper_set_over_ours_stays_and_does_nothing_after_close():
    model = Stack()
    with open_with(model, "full"):
        ours = model.layers[0].forward
        model.layers[0].forward = functools.partial(ours, scale=0.25)
    model.layers[0].calls = 0
    model.layers[0](X).sum().backward()
    assert model.layers[0].calls == 1


@pytest.mark.parametrize("policy", ["full", "offload_saved"])
def test_copies_of_the_model_are_plain(policy):
    model = Stack()
    with open_with(model, policy) as opt:
        expected = model(X)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(copied.layers[0].forward, BlockForward)
            opt.synchronize()
            assert torch.equal(copied(X), expected)
            copied(X).sum().backward()
            assert copied.layers[0].up.weight.grad is not None
            assert copied.layers[0].calls == 3, "one of the original's, two of its own"
        assert model.layers[0].up.weight.grad is None
        expected.sum().backward()


def test_the_models_own_checkpointing():
    flags = lambda m: [x.gradient_checkpointing for x in m.modules() if hasattr(x, "gradient_checkpointing")]  # noqa: E731
    model = checkpointed(llama(), reentrant=False)
    on = flags(model)
    assert any(on)
    with OffloadAdamW(model) as opt:  # no plan: the model's own stays
        assert flags(model) == on
        assert opt.plan.activations == "full"
    with open_with(model, "full"):
        assert flags(model) == on, "nothing to do"
        assert "forward" not in model.model.layers[0].__dict__
    with open_with(model, "selective") as opt:
        assert not any(flags(model))
        rebuild(opt)
        assert not any(flags(model))
        with OffloadAdamW(llama()) as bare:
            assert bare.plan.activations == "none"
    assert flags(model) == on


def test_the_cache_is_off_where_layers_are_recomputed():
    model = llama()
    model.config.use_cache = True
    (x,) = batches(1)
    with open_with(model, "full") as opt:
        assert not model.config.use_cache
        model(input_ids=x, labels=x).loss.backward()
        opt.zero_grad()
        model(input_ids=x, labels=x, use_cache=True).loss.backward()  # asked for by name: the layers run plain
    assert model.config.use_cache


@pytest.mark.parametrize("policy", ["offload_inputs", "offload_saved"])
def test_nothing_is_allocated_after_the_second_step(policy):
    model, data = llama(torch.bfloat16), batches(5)
    with open_with(model, policy, gradient_accumulation_steps=1) as opt:
        pool = opt.engine.activations.store.pool
        train(model, opt, data[:2])
        made, size, memory = pool.made, pool.bytes, opt.memory()
        assert size > 0
        train(model, opt, data[2:])
        gc.collect()
        assert (pool.made, pool.bytes) == (made, size)
        assert opt.memory() == memory
        assert pool.idle_bytes == size, "every buffer came back"
        item = next(i for i in opt.memory().items if i.name == "offloaded activations")
        assert item.bytes == size


def test_the_pool_does_not_grow_with_every_new_size():
    from superoffload.engine.buffer_pool import BufferPool
    from superoffload.engine.host_memory import HostMemory

    host = HostMemory(can_pin=False)
    pool = BufferPool(host, cuda=False)
    for size in (100, 50, 80, 120, 7, 120, 130):
        buffer = pool.take(size)
        assert buffer.data.numel() >= size
        pool.give(buffer)
    assert pool.bytes == 130 == host.pageable_bytes
    two = [pool.take(60), pool.take(60)]
    assert pool.bytes == 190 == host.pageable_bytes
    for b in two:
        pool.give(b)
    exact = pool.take(60)
    assert exact.data.numel() == 60, "its own size before a larger one"


def test_what_is_saved_twice_is_copied_once_and_weights_never():
    model = Stack(1)
    with open_with(model, "offload_saved") as opt:
        store = opt.engine.activations.store
        loss = model(X).square().mean()
        gc.collect()
        layer = model.layers[0]
        # The layer saves x (for up), tanh's result (for itself, and for the multiplication) and the product (for down).
        assert store.pool.made == 3
        weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        assert not weights & {s.origin().data_ptr() for s in store._by_storage.values() if s.origin() is not None}
        loss.backward()


def test_a_graph_can_be_used_twice():
    def gradients(policy):
        model = Stack()
        with open_with(model, policy) as opt, opt.no_sync():
            loss = model(X).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return [p.grad.clone() for p in model.parameters()]

    for policy in ("full", "offload_inputs", "offload_saved"):
        assert all(map(torch.equal, gradients(policy), gradients("none"))), policy


def test_selective_allows_one_backward_and_says_so():
    model = Stack()
    for _ in range(2):  # the first recompute, which learns, and one after it
        with open_with(model, "selective") as opt, opt.no_sync():
            loss = model(X).square().mean()
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="backward an extra time"):
                loss.backward()


def test_two_graphs_at_once():
    """Two forwards, then their backwards in either order: what is fetched ahead belongs to the other graph."""

    def gradients(policy, order):
        model = Stack()
        with open_with(model, policy) as opt, opt.no_sync():
            losses = [model(X * k).square().mean() for k in (1.0, 2.0)]
            for i in order:
                losses[i].backward()
            return [p.grad.clone() for p in model.parameters()]

    for order in ((0, 1), (1, 0)):
        expected = gradients("none", order)
        for policy in POLICIES:
            assert all(map(torch.equal, gradients(policy, order), expected)), (policy, order)


def test_a_stale_graph_raises_under_offload_too():
    model = Shared()  # layers alone: nothing outside them can raise first
    with open_with(model, "offload_saved") as opt:
        old = model(X).square().mean()
        steps(model, opt, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


def test_a_saved_tensor_that_stays_and_is_written_raises(monkeypatch):
    monkeypatch.setattr(activations, "OFFLOAD_MIN_BYTES", 1 << 40)
    model = Stack()
    with open_with(model, "offload_saved"):
        x = X.clone().requires_grad_()
        y = x * 1.0
        loss = model(y).sum()
        with torch.no_grad():
            y.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_bad_overrides_are_refused_before_anything_changes():
    model = llama()
    with pytest.raises(InputError, match=r"names block 0\. Expected layers, blocks 1 to 3"):
        OffloadAdamW(model, plan=Plan(activations_by_block={0: "full"}))
    assert "forward" not in model.model.layers[0].__dict__
    with pytest.raises(InputError, match="activations_by_block"):
        OffloadAdamW(model, activations_by_block={1: "sometimes"})


@pytest.mark.parametrize(
    ("policy", "kind"), [("full", "recompute"), ("selective", "recompute"), ("offload_saved", "fetch")]
)
def test_the_trace_shows_it(policy, kind):
    model = Stack()
    with open_with(model, policy, record_trace=True) as opt:
        steps(model, opt, 3)
        spans = [e for e in opt.trace().events if e.kind == kind]
        forwards = [e for e in opt.trace().events if e.kind == "forward" and e.block >= 0]
    assert {e.block for e in spans} == {0, 1, 2, 3}
    assert len(forwards) == 5, "a recompute is not one"


def test_profiling_a_model_with_an_engine_sees_the_plain_layers(monkeypatch):
    from superoffload.hardware import preset
    from superoffload.profiling import profile

    model, (x,) = llama(), batches(1)
    alone = profile(model, x, hardware=preset("laptop"), repeats=1)
    with open_with(model, "full"):
        attached = profile(model, x, hardware=preset("laptop"), repeats=1)
    assert [b.activation_bytes for b in attached.blocks] == [b.activation_bytes for b in alone.blocks]


class Shared(nn.Module):
    """Layers that all get one large tensor beside their input, as a mask or an encoder's output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SharedLayer() for _ in range(4))

    def forward(self, x):
        table = torch.sin(x)
        for layer in self.layers:
            x = layer(x, table=table)
        return x


class SharedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(64, 64)

    def forward(self, x, table):
        return torch.tanh(self.w(x)) * table


def test_what_all_layers_share_is_copied_and_fetched_once():
    def run(policy, counts=None):
        model = Shared()
        with open_with(model, policy, record_trace=True) as opt:
            loss = model(X).square().mean()
            if counts is not None:
                counts["made"] = opt.engine.activations.store.pool.made
            loss.backward()
            if counts is not None:
                counts["fetched"] = sum(1 for _, _, kind, *_ in opt.engine.recorder._spans if kind == "fetch")
            opt.step()
            return digest(model, opt)

    counts = {}
    assert run("offload_inputs", counts) == run("none")
    assert counts == {"made": 5, "fetched": 5}, "four inputs and the table"


class Chunks(nn.Module):
    """Saves two views of one storage, with offset and strides."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(64, 128)

    def forward(self, x):
        a, b = self.w(x).chunk(2, dim=-1)
        return a.transpose(0, 1).mul(b.transpose(0, 1)).transpose(0, 1)


class Rewrites(nn.Module):
    """Saves a tensor, writes it, and saves it again; backward reads the second one."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(64, 64)

    def forward(self, x):
        h = self.w(x)
        t = torch.ones_like(h)
        self.aside = h * t
        t.add_(1.0)
        return h * t


@pytest.mark.parametrize(("layer", "copies"), [(Chunks, 2), (Rewrites, 3)])
def test_views_and_versions_come_back_as_they_were(layer, copies):
    def gradients(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([layer()]))
        model.forward = lambda x: model[0][0](x).square().mean()
        with open_with(model, policy) as opt, opt.no_sync():
            x = X.clone().requires_grad_()
            loss = model(x)
            if policy == "offload_saved":
                assert opt.engine.activations.store.pool.made == copies
            loss.backward()
            return [x.grad, *(p.grad.clone() for p in model.parameters())]

    expected = gradients("none")
    for policy in POLICIES:
        assert all(map(torch.equal, gradients(policy), expected)), policy
