"""Weight flow: weights that live on the host between uses train to the same bits, and are never wrong to look at."""

import copy
import gc
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from superoffload import estimate, graph
from superoffload.engine import OffloadAdamW
from superoffload.errors import EngineError, InputError, NotSupported
from superoffload.model import ModelSpec
from tests.engine.common import Autocast, batches, checkpointed, digest, interrupt_at_random, llama, run_plan, train
from tests.engine.scenario import equal, weights

DATA = batches(6)
LAYERS = 4
"""Blocks 1 to 4; 0 is the embedding, 5 final norm and head."""


def deep(dtype=torch.bfloat16, **kwargs):
    return llama(dtype, layers=LAYERS, **kwargs)


def make(model, **kwargs):
    return OffloadAdamW(
        model, **{"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "bucket_mb": 0.04, "speculate": "on", **kwargs}
    )


_reference: dict[object, tuple[str, list[float]]] = {}


def stationary(dtype, accumulation=1):
    key = (dtype, accumulation)
    if key not in _reference:
        _reference[key] = run_plan(dtype, DATA, model=deep, accumulation=accumulation, bucket_mb=0.04)
    return _reference[key]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("flow", [(2,), (1, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_flow_changes_no_bit(dtype, checkpointing, accumulation, flow):
    def model(dtype, device):
        m = deep(dtype, device=device)
        return m if checkpointing is None else checkpointed(m, checkpointing == "reentrant")

    for prefetch, retained, on in ((1, 0, "gpu"), (2, 5, "cpu"), (9, 0, "cpu")):
        found = run_plan(
            dtype, DATA, model=model, accumulation=accumulation, bucket_mb=0.04, speculate="on", flow_blocks=flow,
            prefetch_blocks=prefetch, retained_buckets=retained, accumulate_on=on, delay_us=100,
        )  # fmt: skip
        assert found == stationary(dtype, accumulation)


@pytest.mark.parametrize("tiny_blocks", [False, True])
def test_mixed_dtypes_in_one_block(tiny_blocks):
    """Norms in float32 beside matrices in bfloat16: two kinds of buckets, and two kinds of runs in a slot."""

    def model(dtype, device):
        m = deep(dtype, device=device)
        for name, p in m.named_parameters():
            if "norm" in name:
                p.data = p.data.float()
        return Autocast(m)

    data = DATA[:4]
    size = 0.04 if tiny_blocks else 1.0
    reference = run_plan(torch.bfloat16, data, model=model, bucket_mb=0.3)
    for retained in (0, 4):
        assert reference == run_plan(
            torch.bfloat16, data, model=model, bucket_mb=size, flow_blocks=(1, 2, 4), retained_buckets=retained
        )


@pytest.mark.parametrize("prefetch", [1, 2, 9])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fetches_are_those_of_the_simulated_step(prefetch, accumulation):
    """The cost model fetches what the engine fetches."""
    plan = {"flow_blocks": (1, 2, 4), "prefetch_blocks": prefetch, "accumulation": accumulation}
    model = deep()
    with make(model, record_trace=True, gradient_accumulation_steps=accumulation, **plan) as opt:
        train(model, opt, DATA, accumulation=accumulation)
        measured = [e.block for e in opt.trace().events if e.kind == "fetch"]
    shape = ModelSpec(name="tiny", hidden=64, layers=LAYERS, mlp=144, heads=4, kv_heads=2, head_dim=16, vocab=384)
    profile = estimate(shape, micro_batch=2, seq_len=24, hardware="h200-pcie5")
    step = graph.build(profile, opt.plan.replace(micro_batch=2, seq_len=24))
    modelled = [op.block for op in step.ops if op.kind == "fetch"]
    assert measured == modelled
    assert len(measured) >= 3


def test_only_slots_are_on_the_device():
    model = deep()
    with make(model, flow_blocks=(1, 2, 3), prefetch_blocks=1) as opt:
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        items = {i.name: i.bytes for i in opt.memory().items}
        everything = sum(p.numel() for p in model.parameters())
        slack = 256 * 40  # alignment of parameters and runs
        assert 0 <= items["flow slots"] - 2 * 2 * layer < slack
        assert 0 <= items["weights"] - 2 * (everything - 3 * layer) < slack
        train(model, opt, DATA[:2])
        before = {i.name: i.bytes for i in opt.memory().items}
        train(model, opt, DATA[2:])
        assert before == {i.name: i.bytes for i in opt.memory().items}


def test_weights_can_be_read_and_written_at_any_time():
    """Between uses the parameters are their homes: no reader sees anything but the weights of the last step."""
    plain, flowing = deep(), deep()
    with make(plain) as a, make(flowing, flow_blocks=(1, 2, 3, 4)) as b:
        for i in range(3):
            for model, opt in ((plain, a), (flowing, b)):
                train(model, opt, DATA[i : i + 1])
                opt.synchronize()
                with torch.no_grad():  # an edit at home
                    model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
            assert equal(weights(plain), weights(flowing))
            for model in (plain, flowing):  # an edit in the slot, after a forward that leaves the block there
                with torch.no_grad():
                    model(input_ids=DATA[0])
                    model.model.layers[3].mlp.up_proj.weight.add_(0.01)
                    model(input_ids=DATA[0])
            assert equal(weights(plain), weights(flowing))
            state = flowing.state_dict()
            assert all(torch.equal(state[k], v) for k, v in plain.state_dict().items())
        assert digest(plain, a) == digest(flowing, b)


def test_an_edit_after_a_fetch_ahead_is_not_lost():
    """Block 2 is fetched ahead while block 1 is entered; what is written into its home then must be what it runs on."""
    plain, flowing = deep(), deep()
    losses = []
    for model, flow in ((plain, ()), (flowing, (1, 2, 3, 4))):
        with make(model, flow_blocks=flow) as opt:
            train(model, opt, DATA[:2])
            opt.synchronize()
            edited = []

            def edit(module, args, model=model, edited=edited):
                if not edited:
                    edited.append(1)
                    with torch.no_grad():
                        model.model.layers[1].mlp.up_proj.weight.add_(0.05)

            handle = model.model.layers[0].register_forward_pre_hook(edit)
            with torch.no_grad():
                losses.append(float(model(input_ids=DATA[2], labels=DATA[2]).loss))
            handle.remove()
    assert losses[0] == losses[1]


def test_eval_generate_and_saving_between_steps(tmp_path):
    plain, flowing = deep(), deep()
    with make(plain) as a, make(flowing, flow_blocks=(1, 3, 4)) as b:
        for i in range(2):
            said = []
            for model, opt in ((plain, a), (flowing, b)):
                train(model, opt, DATA[i : i + 1])
                model.eval()
                with torch.no_grad():
                    loss = float(model(input_ids=DATA[5], labels=DATA[5]).loss)
                model.config.use_cache = True
                tokens = model.generate(DATA[4][:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
                model.config.use_cache = False
                model.train()
                said.append((loss, tokens.tolist()))
            assert said[0] == said[1]
        flowing.save_pretrained(tmp_path)
        twin = copy.deepcopy(flowing)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert equal(weights(loaded), weights(plain))
    assert equal(weights(twin), weights(plain))
    assert equal(weights(flowing), weights(plain)), "close() gives the weights back"
    flowing(input_ids=DATA[0], labels=DATA[0]).loss.backward()
    assert flowing.model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_failed_forward_leaves_nothing_behind():
    plain, flowing = deep(), deep()
    for model, flow in ((plain, ()), (flowing, (1, 2, 3, 4))):
        with make(model, flow_blocks=flow) as opt:
            train(model, opt, DATA[:1])

            def fail(module, args):
                raise RuntimeError("in forward")

            for layer, backward in ((1, False), (2, True), (3, False)):
                where = model.model.layers[layer]
                hook = where.register_full_backward_pre_hook if backward else where.register_forward_pre_hook
                handle = hook(fail)
                with pytest.raises(RuntimeError, match="in forward"):
                    model(input_ids=DATA[1], labels=DATA[1]).loss.backward()
                handle.remove()
                opt.zero_grad()
                train(model, opt, DATA[layer : layer + 1])
            opt.synchronize()
    assert equal(weights(plain), weights(flowing))


@pytest.mark.parametrize("speculate", ["on", "off"])
def test_a_stale_graph_raises(speculate):
    model = deep()
    with make(model, flow_blocks=(1, 2, 3, 4), speculate=speculate) as opt:
        train(model, opt, DATA[:2])
        old = model(input_ids=DATA[2], labels=DATA[2]).loss
        train(model, opt, DATA[3:4])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        opt.zero_grad()
        train(model, opt, DATA[4:])


def test_a_graph_may_be_walked_twice():
    """retain_graph: the second walk fetches everything once more."""
    results = []
    for flow in ((), (1, 2, 3, 4)):
        model = deep()
        with make(model, flow_blocks=flow, speculate="off") as opt:
            train(model, opt, DATA[:2])
            loss = model(input_ids=DATA[2], labels=DATA[2]).loss
            with opt.no_sync():
                loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
            results.append(digest(model, opt))
    assert results[0] == results[1]


class Hidden:
    """Tensors where nobody looks for them."""

    def __init__(self, x):
        self.x = x


class Secretive(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return Hidden(torch.tanh(self.linear(x.x if isinstance(x, Hidden) else x)))


@dataclass
class Open:
    x: torch.Tensor


class Plain(Secretive):
    def forward(self, x):
        return Open(super().forward(x.x if isinstance(x, Open) else x).x)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.x.square().sum()


def test_a_block_whose_backward_nobody_announces_is_told():
    x = torch.randn(4, 32)
    model = Stack(Secretive)
    with make(model, flow_blocks=(0, 1, 2, 3), prefetch_blocks=1) as opt:
        with pytest.raises(EngineError, match=r"layers\.3\.linear\.\w+ got a gradient while its weights"):
            model(x).backward()
        opt.zero_grad()
    results = []
    for flow in ((), (0, 1, 2, 3)):
        model = Stack(Plain)
        with make(model, flow_blocks=flow) as opt:
            for _ in range(3):
                model(x).backward()
                opt.step()
                opt.zero_grad()
            results.append(digest(model, opt))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("flow", "tied", "says"),
    [
        ((9,), False, r"flow_blocks names block 9\. Expected 0 to 5"),
        ((0,), True, r"block 0 \(model\.embed_tokens\), which shares weights with another block"),
        ((5,), True, "which shares weights"),
    ],
)
def test_blocks_that_cannot_flow(flow, tied, says):
    model = deep(tied=tied)
    before = weights(model)
    with pytest.raises(InputError, match=says):
        make(model, flow_blocks=flow)
    assert equal(before, weights(model))


class Around(nn.Module):
    """Holds a weight itself beside its layers, and none of the layers has any of its own in one place."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_a_block_around_others_cannot_flow():
    with pytest.raises(InputError, match="contains other blocks"):
        make(Around(), flow_blocks=(0,))


def test_a_second_optimizer_and_a_rebuild_keep_the_weights():
    model = deep()
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    opt = make(model, flow_blocks=(2, 3))
    train(model, opt, DATA[:2])
    before = weights(model)
    unfrozen = list(model.model.layers[0].parameters())
    for p in unfrozen:
        p.requires_grad_(True)
    opt.add_param_group({"params": unfrozen, "lr": 1e-4})
    opt.synchronize()
    assert equal(before, weights(model))
    train(model, opt, DATA[2:3])
    opt.synchronize()
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second = make(model, flow_blocks=(1, 4))
    assert equal(before, weights(model))
    second.close()
    assert equal(before, weights(model))


def test_dropping_everything_frees_everything():
    model = deep()
    opt = make(model, flow_blocks=(1, 2, 3, 4))
    train(model, opt, DATA[:2])
    opt.synchronize()
    before = weights(model)
    del opt
    gc.collect()
    assert equal(before, weights(model)), "the parameters outlive the optimizer's memory"


def test_ctrl_c_at_any_moment(request):
    found = interrupt_at_random(
        request, lambda: ((m := deep()), make(m, flow_blocks=(1, 2, 3, 4))), DATA[:4], rounds=25,
        between_s=(0.01, 0.2), seed=5,
    )  # fmt: skip
    assert found.interrupted > 5


@pytest.mark.parametrize("flow", [(), (1, 2, 4)])
@pytest.mark.parametrize("undo", ["record", "snapshot"])
def test_a_split_master_changes_no_bit(flow, undo):
    reference = stationary(torch.bfloat16)
    for retained in (0, 6):
        found = run_plan(
            torch.bfloat16, DATA, model=deep, bucket_mb=0.04, speculate="on", master="split", flow_blocks=flow,
            retained_buckets=retained, undo=undo, delay_us=100,
        )  # fmt: skip
        assert found == reference


def test_a_split_master_takes_two_bytes_less():
    sizes = {}
    for master in ("plain", "split"):
        model = deep()
        with make(model, master=master, flow_blocks=(1, 2), speculate="off") as opt:
            host = opt.engine.arenas.host
            sizes[master] = host.pinned_bytes + host.pageable_bytes
            padded = sum(b.layout.numel for b in opt.engine.arenas.buckets)
    assert sizes["plain"] - sizes["split"] == 2 * padded


def test_checkpoints_go_from_one_master_to_the_other(tmp_path):
    """State is kept by parameter as plain fp32, so any plan resumes any other's."""
    digests = set()
    for k, (first, second) in enumerate([({}, {}), ({}, SPLIT), (SPLIT, {}), (SPLIT, SPLIT)]):
        model = deep()
        with make(model, **first) as opt:
            train(model, opt, DATA[:3])
            opt.save(tmp_path / f"{k}.safetensors")
            states = opt.state_dict()
        twins = []
        for load in (lambda o, k=k: o.load(tmp_path / f"{k}.safetensors"), lambda o, s=states: o.load_state_dict(s)):
            again = deep(seed=1)
            with make(again, **second) as opt:
                train(again, opt, DATA[5:])
                load(opt)
                train(again, opt, DATA[3:])
                twins.append(digest(again, opt))
        assert twins[0] == twins[1]
        digests.add(twins[0])
    assert len(digests) == 1
    with make(deep(), **SPLIT) as opt:
        train(opt.model, opt, DATA[:1])
        assert all(bool((s["exp_avg_sq"] >= 0).all()) for s in opt.state_dict()["state"].values())


SPLIT = {"master": "split", "flow_blocks": (1, 2, 3)}


def edited(**fields):
    """Train, write some weights at a step boundary, train on; returns (digest, master right after the edit)."""
    name, model = "model.layers.1.mlp.up_proj.weight", deep()
    with make(model, **fields) as opt:
        train(model, opt, DATA[:2])
        opt.synchronize()
        with torch.no_grad():
            model.get_parameter(name)[0, :8] = 0.25
        opt.synchronize()
        p = next(p for p in opt.engine.params if p.name == name)
        master, weight = opt.engine.weights.gather(p, "master").clone(), model.get_parameter(name).float()
        assert torch.equal(master[0, :8], torch.full((8,), 0.25))
        train(model, opt, DATA[2:4])
        return digest(model, opt), master, weight


def test_edits_of_weights_with_a_split_master():
    """Where the GPU has a copy of its own an edit is torch's; at home, the edited parameter is its own master."""
    plain, split, away = edited(), edited(master="split"), edited(**SPLIT)
    assert plain[0] == split[0]
    assert torch.equal(plain[1], split[1]) and not torch.equal(plain[1], plain[2])
    assert torch.equal(away[1], away[2])


@pytest.mark.parametrize("up", ["gpu", "cpu"])
def test_a_split_master_writes_its_weights_itself(up):
    with pytest.raises(InputError, match=f'master = "split" with cast_up = "{up}"'):
        make(deep(), master="split", cast_up=up)


def test_flow_and_speculation_live_together():
    """Final norm and head are one block with two outputs: its second announcement takes nothing back."""
    for flow in ((), (2,), (1, 2, 3, 4, 5)):
        model = deep()
        with make(model, flow_blocks=flow, max_grad_norm=None) as opt:
            for p in model.parameters():
                p.register_hook(lambda g, o=opt: o.engine.worker.wait_idle())
            # The last bucket is complete after the last hook: nothing must be on its way when step() is called.
            train(model, opt, DATA[:4], before_step=lambda i, o=opt: o.engine.worker.wait_idle())
            opt.synchronize()
            assert all(r.speculated == len(opt.engine.arenas.buckets) for r in opt.ledger[1:])


@pytest.mark.parametrize("flow", [(), (1, 2, 3, 4)])
def test_edits_at_a_step_boundary_survive_speculation(flow):
    results = []
    for speculate in ("off", "on"):
        model = deep()
        with make(model, flow_blocks=flow, speculate=speculate, max_grad_norm=None) as opt:
            for p in model.parameters():
                p.register_hook(lambda g, o=opt: o.engine.worker.wait_idle())
            train(model, opt, DATA[:2])
            opt.synchronize()
            with torch.no_grad():
                model.model.layers[2].mlp.up_proj.weight.zero_()
                model.lm_head.weight.mul_(0.5)
            train(model, opt, DATA[2:3])
            opt.synchronize()
            assert float(model.model.layers[2].mlp.up_proj.weight.detach().abs().max()) < 0.01, "the edit was lost"
            results.append(digest(model, opt))
    assert results[0] == results[1]


class Through(nn.Module):
    """Hands a tensor of the first layer on to all, as T5 does with its position bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Biased() for _ in range(4)])

    def forward(self, x):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x.square().sum()


class Biased(Secretive):
    def forward(self, x, bias):
        y = self.linear(x)
        bias = y.mean(0) if bias is None else bias
        return torch.tanh(y + bias), bias


class Beside(Stack):
    """Uses a layer's weight outside the layer too."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        first, third = self.layers[0].linear.weight, self.layers[2].linear.weight
        return (
            x.x.square().sum() + torch.nn.functional.linear(x.x, third).square().sum() + (first @ third).square().sum()
        )


@pytest.mark.parametrize("kind", [Through, lambda: Beside(Plain)])
def test_odd_models_train_alike(kind):
    x, results = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), []
    for flow in ((), (0, 1, 2, 3)):
        for speculate in ("off", "on"):
            model = kind()
            with make(model, flow_blocks=flow, speculate=speculate) as opt:
                for _ in range(3):
                    opt.synchronize()  # weights are read beside their modules
                    model(x).backward()
                    opt.step()
                    opt.zero_grad()
                results.append(digest(model, opt))
    assert len(set(results)) == 1


def test_second_derivatives_are_refused():
    model = Stack(Plain)
    with make(model, flow_blocks=(1, 2)) as opt:
        loss = model(torch.randn(4, 32))
        with pytest.raises(NotSupported, match="create_graph=True"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        opt.zero_grad()


def test_closing_between_forward_and_backward_fails_loudly():
    model = deep()
    opt = make(model, flow_blocks=(1, 2, 3, 4))
    train(model, opt, DATA[:2])
    loss = model(input_ids=DATA[2], labels=DATA[2]).loss
    opt.close()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_unannounced_backward_is_told_under_no_sync_too():
    model = Stack(Secretive)
    told = pytest.raises(EngineError, match="got a gradient while its weights")
    with make(model, flow_blocks=(0, 1, 2, 3)) as opt, opt.no_sync(), told:
        model(torch.randn(4, 32)).backward()


def test_an_edit_that_is_rejected_is_gone():
    """Written while the worker did: told, and the next step is computed with the weights of the last one."""
    results = []
    for flow in ((), (1, 2, 3, 4)):
        model = deep()
        with make(model, flow_blocks=flow, max_grad_norm=None) as opt:
            train(model, opt, DATA[:2])
            opt.synchronize()
            model(input_ids=DATA[2], labels=DATA[2]).loss.backward()
            opt.engine.worker.wait_idle()
            with torch.no_grad():
                model.model.layers[3].mlp.up_proj.weight.zero_()
            with pytest.raises(EngineError, match="written in place while"):
                opt.step()
            opt.zero_grad()
            train(model, opt, DATA[3:5])
            results.append(digest(model, opt))
    assert results[0] == results[1]


def test_weights_that_do_not_fit_the_gpu_at_the_end_stay_at_home(monkeypatch):
    """In the memory where they lie: a copy might be what ends the process."""
    model, data = llama(), batches(1)
    opt = OffloadAdamW(model, bucket_mb=0.1, flow_blocks=(1, 2))
    train(model, opt, data)
    opt.synchronize()
    flowing = [p for p in opt.engine.params if p.block in (1, 2)]
    homes, values = [p.home.data_ptr() for p in flowing], [p.home.clone() for p in flowing]

    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        with pytest.warns(UserWarning, match="did not fit the GPU's memory"):
            opt.close()
    assert [p.param.data_ptr() for p in flowing] == homes
    assert all(torch.equal(p.param, v) for p, v in zip(flowing, values, strict=True))
    model(input_ids=data[0], labels=data[0]).loss.backward()


def test_a_closed_optimizer_holds_no_home():
    model = deep()
    opt = make(model, flow_blocks=(1, 2, 3, 4))
    train(model, opt, DATA[:1])
    opt.close()
    assert all(p.home.numel() == 0 and p.home_on_device.numel() == 0 for p in opt._managed)
