"""The measured profile: complete, sane, and without a trace on the model (I10)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from superoffload import estimating, hardware  # noqa: E402
from superoffload import model as shapes  # noqa: E402
from superoffload.engine.blocks import find_blocks  # noqa: E402
from superoffload.errors import DoesNotFit, InputError  # noqa: E402
from superoffload.model_source import fingerprint  # noqa: E402
from superoffload.profiler import BlockProfile, Profile  # noqa: E402
from superoffload.profiling import profile  # noqa: E402
from superoffload.profiling_counts import MORE_FLOPS  # noqa: E402
from tests.engine.common import checkpointed  # noqa: E402

LAPTOP = hardware.preset("laptop")
B, S, H, L, V, M = 2, 16, 32, 3, 300, 64


def tiny(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=H, intermediate_size=M, num_hidden_layers=L, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=V, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def ids() -> Any:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


def bits(t: Any) -> bytes:
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {n: bits(p) for n, p in model.named_parameters()},
        "weight_objects": {n: (id(p), p.data_ptr(), p._version, p.dtype) for n, p in model.named_parameters()},
        "gradients": {n: (id(p.grad), bits(p.grad)) for n, p in model.named_parameters() if p.grad is not None},
        "buffers": {n: (id(b), bits(b)) for n, b in model.named_buffers()},
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "switches": [getattr(m, "gradient_checkpointing", None) for m in model.modules()],
        "random": (random.getstate(), np.random.get_state()[1].tobytes(), bits(torch.get_rng_state())),  # noqa: NPY002
    }


class Restless(nn.Module):
    """Everything that measuring could disturb: dropout, batch statistics, a gradient, mixed modes, a rebound buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(S), nn.Dropout(0.5)) for _ in range(2)]
        )
        self.head = nn.Linear(H, 8)
        self.register_buffer("seen", torch.zeros(3))
        self.fail = False

    def forward(self, x: Any) -> Any:
        self.seen = self.seen + 1
        random.random()
        np.random.rand()  # noqa: NPY002
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        if self.fail:
            raise torch.OutOfMemoryError("no memory left")
        return self.head(x)


@pytest.mark.parametrize("fail", [False, True])
def test_measuring_leaves_the_model_bit_identical(fail: bool) -> None:
    torch.manual_seed(0)
    model = Restless()
    model(ids()).sum().backward()
    model.embed.weight.grad = None
    model.eval()
    model.layers[0].train()
    before = state_of(model)
    model.fail = fail
    if fail:
        with pytest.raises(DoesNotFit, match="smaller micro-batch"):
            profile(model, ids(), hardware=LAPTOP)
    else:
        profile(model, ids(), hardware=LAPTOP, repeats=1)
    assert state_of(model) == before


def test_checkpointing_cache_and_foreign_gradient_hooks_are_lifted_and_put_back() -> None:
    model = tiny()
    checkpointed(model, reentrant=False)
    model.config.use_cache = True
    calls: list[int] = []
    handle = model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    before = state_of(model)
    profile(model, ids(), hardware=LAPTOP, repeats=1)
    assert state_of(model) == before
    assert model.config.use_cache is True
    assert calls == []
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert calls == [1], "the hook of the owner was lost"
    handle.remove()


def test_what_selective_keeps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.engine import selective

    monkeypatch.setattr(selective, "KEEP_FLOPS_PER_BYTE", 1)  # the layers are narrow
    model = tiny()
    measured = profile(model, ids(), hardware=LAPTOP, repeats=1)
    layer = measured.blocks[1]
    c, tokens = model.config, ids().numel()
    kv = c.num_key_value_heads * c.hidden_size // c.num_attention_heads
    # Input, query, key and value, attention, its way out, gate and up; the log-sum-exp of each head.
    elements = c.hidden_size * 4 + 2 * kv + 2 * c.intermediate_size + c.num_attention_heads
    assert layer.selective_bytes == 4 * tokens * elements
    assert layer.selective_bytes < layer.activation_bytes
    monkeypatch.setattr(estimating, "KEEP_FLOPS_PER_BYTE", 1)
    batch, seq = ids().shape
    shape = shapes.from_transformers(c.to_dict())
    modelled = estimating.estimate(shape, micro_batch=batch, seq_len=seq, hardware=LAPTOP, dtype="float32")
    assert modelled.blocks[1].selective_bytes == layer.selective_bytes
    assert layer.selective_recompute_s is not None
    assert 0 < layer.selective_recompute_s < 2 * layer.forward_s + 0.01
    assert measured.blocks[0].selective_bytes is None, "the embedding has no policy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_loss_in_chunks_are_those_that_a_step_takes(dtype: Any, tied: bool) -> None:
    """From a profile to the ledger's items, against the live bytes of a step under the engine."""
    from superoffload.engine import OffloadAdamW
    from superoffload.loss_costs import CHUNK_LOGIT_BYTES
    from superoffload.memory import ledger
    from superoffload.plan import Plan
    from superoffload.profiling_counts import Watch

    config = transformers.LlamaConfig(
        hidden_size=H, intermediate_size=M, num_hidden_layers=2, num_attention_heads=4, vocab_size=4096,
        use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    x = torch.randint(4096, (2, 256), generator=torch.Generator().manual_seed(1))
    measured = profile(model, x, hardware=LAPTOP, repeats=1)
    modelled = estimating.estimate(
        shapes.from_transformers(config.to_dict()), micro_batch=2, seq_len=256, hardware=LAPTOP,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    assert measured.blocks[-1].logits == modelled.blocks[-1].logits == x.numel() * 4096
    assert all(b.logits is None for p in (measured, modelled) for b in p.blocks[:-1])
    peaks = {}
    for chunks in (2, 8, 32):
        with OffloadAdamW(model, loss_chunks=chunks, speculate="off", bucket_mb=1) as opt, opt.no_sync():
            with Watch(model) as watch:
                model(input_ids=x, labels=x).loss.backward()
            opt.zero_grad()
        peaks[chunks] = watch.peak
        plan = Plan(micro_batch=2, seq_len=256, loss_chunks=chunks, activations="none", speculate="off", bucket_mb=1)
        names = ("activations", "recomputed layer, logits and loss", "gradient being produced")
        for p, tolerance in ((measured, 0.05), (modelled, 0.15)):
            counted = sum(i.bytes for i in ledger(p, plan).items if i.name in names)
            assert watch.peak == pytest.approx(counted, rel=tolerance), (p.source, chunks)
    logits = CHUNK_LOGIT_BYTES * x.numel() * 4096
    assert peaks[2] - peaks[8] == pytest.approx(logits * (1 / 2 - 1 / 8), rel=0.01)
    assert Profile.from_json(measured.to_json()) == measured


def test_a_model_whose_loss_has_no_chunks_is_profiled_as_such() -> None:
    def head(model: nn.Module) -> BlockProfile:
        return profile(model, ids(), hardware=LAPTOP, repeats=1).blocks[-1]

    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        hidden_size=H, intermediate_size=M, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=V, final_logit_softcapping=20.0,
    ))  # fmt: skip
    assert head(capped).logits is None
    assert not any({"forward", "_loss_function"} & set(m.__dict__) for m in capped.modules())
    own = tiny()
    own.loss_function = lambda logits, labels, **_: logits.mean()
    assert head(own).logits is None
    assert head(nn.Sequential(nn.Embedding(V, H), nn.Linear(H, V))).logits is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.engine import compiling

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")  # partitions as inductor does
    torch._dynamo.reset()
    model = tiny()
    before = state_of(model)
    plain = profile(model, ids(), hardware=LAPTOP, repeats=1)
    assert plain.blocks[1].compiled_forward_s is plain.blocks[1].compiled_bytes is None
    measured = profile(model, ids(), hardware=LAPTOP, repeats=2, compile_blocks=True)
    assert state_of(model) == before
    assert "forward" not in model.model.layers[0].__dict__
    for eager, layer in zip(plain.blocks[1:-1], measured.blocks[1:-1], strict=True):
        assert layer.compiled_forward_s is not None and layer.compiled_backward_s is not None
        assert 0 < layer.compiled_forward_s < 0.5, "without the compiler's own time"
        assert 0 < layer.compiled_backward_s < 0.5
        assert layer.compiled_bytes is not None
        assert layer.input_bytes < layer.compiled_bytes
        assert layer.activation_bytes == eager.activation_bytes
    assert measured.blocks[0].compiled_bytes is None, "only layers are compiled"
    assert "torch.compile" in measured.context["compiled"]
    with pytest.raises(InputError, match=r"goes through torch\.compile already"):
        profile(torch.compile(model, backend="eager"), ids(), hardware=LAPTOP, repeats=1, compile_blocks=True)
    # An engine's policy on the model is not what is measured.
    from superoffload.engine import OffloadAdamW

    with OffloadAdamW(model, activations="full", compile_blocks=True):
        attached = profile(model, ids(), hardware=LAPTOP, repeats=1, compile_blocks=True)
    assert [b.compiled_bytes for b in attached.blocks] == [b.compiled_bytes for b in measured.blocks]


def test_a_layer_that_cannot_repeat_itself_is_said_so() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Moody() for _ in range(2)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            inside_backward = torch._C._current_graph_task_id() != -1
            return x if inside_backward else torch.tanh(self.w(x))

    measured = profile(Fickle(), torch.randn(2, 8), hardware=LAPTOP, repeats=1)
    assert measured.blocks[0].selective_bytes is None
    assert measured.context["selective"].startswith("not measured")


def test_an_attached_optimizer_trains_on_as_if_nothing_had_been_measured() -> None:
    from superoffload.engine import OffloadAdamW

    weights = []
    for measure in (False, True):
        model = tiny()
        with OffloadAdamW(model, lr=1e-2, max_grad_norm=1.0, bucket_mb=0.05) as optimizer:
            for _ in range(3):
                model(input_ids=ids(), labels=ids()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if measure:
                    profile(model, ids(), hardware=LAPTOP, repeats=1)
            optimizer.synchronize()
            weights.append({n: bits(p) for n, p in model.named_parameters()})
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_with_fewer_key_heads_is_counted(kernel: str) -> None:
    """As attention with as many, whichever kernel torch takes on a GPU."""
    b, heads, few, queries, keys, width = 2, 8, 2, 64, 96, 16
    q = torch.empty(b, heads, queries, width, device="meta", dtype=torch.bfloat16)
    k = torch.empty(b, few, keys, width, device="meta", dtype=torch.bfloat16)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    more: tuple[Any, ...] = {"flash": (), "efficient": (None, False), "cudnn": (None, False)}[kernel]
    with FlopCounterMode(display=False, custom_mapping=MORE_FLOPS) as flops:
        op(q, k, k, *more)
    product = 2 * b * heads * queries * keys * width
    assert flops.get_total_flops() == 2 * product
    backward = MORE_FLOPS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")]
    assert backward(q.shape, q.shape, k.shape, k.shape) == 5 * product


def test_llama_profile_agrees_with_what_can_be_counted_by_hand() -> None:
    model = tiny()
    p = profile(model, ids(), hardware=LAPTOP)
    assert (p.source, p.micro_batch, p.seq_len) == ("measured", B, S)
    assert [b.name for b in p.blocks] == [b.name for b in find_blocks(model)]
    assert p.params == sum(q.numel() for q in model.parameters())
    assert p.model_fingerprint == fingerprint(model)
    spec = shapes.from_transformers(model.config.to_dict())
    assert p.model_flops == spec.training_flops(B * S, S)
    layer, head = p.blocks[1], p.blocks[-1]
    attention = 4 * B * S * S * H  # without the causal half: the kernel computes the mask too
    assert layer.forward_flops == spec.layer_matmul_flops(B * S) + attention
    assert head.forward_flops == spec.head_flops(B * S)
    assert layer.input_bytes == B * S * H * 4
    assert p.blocks[0].input_bytes == B * S * 8
    assert all(b.forward_s > 0 and b.backward_s > 0 for b in p.blocks)
    assert Profile.from_json(p.to_json()) == p


def test_kept_bytes_are_storages_without_weights_counted_once() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    p = profile(Square(), torch.ones(4, 8), hardware=LAPTOP, repeats=1)
    x = 4 * 8 * 4
    assert p.blocks[0].activation_bytes == x  # its input; the weight is not counted
    assert p.blocks[1].activation_bytes == 2 * x  # its input, and what the loss keeps of its output
    assert p.blocks[0].forward_flops == 2 * 4 * 8 * 8


def test_transients_are_seen() -> None:
    class Spike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: Any) -> Any:
            x = self.layers[0](x)
            with torch.no_grad():
                spike = torch.zeros(1 << 18)  # 1 MiB, gone when the layer ends
            del spike
            return self.layers[1](x)

    p = profile(Spike(), torch.ones(4, 8), hardware=LAPTOP, repeats=1)
    assert p.blocks[0].working_bytes >= 1 << 20
    assert p.blocks[1].working_bytes < 1 << 16


def test_blocks_times_add_up_to_the_whole() -> None:
    import time

    class Slow(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.linear, self.seconds = nn.Linear(8, 8), seconds

        def forward(self, x: Any) -> Any:
            time.sleep(self.seconds)
            return self.linear(x)

    model = nn.Sequential(Slow(0.01), Slow(0.04))
    p = profile(model, torch.ones(2, 8), hardware=LAPTOP, repeats=1)
    assert 0.01 <= p.blocks[0].forward_s < 0.03
    assert 0.04 <= p.blocks[1].forward_s < 0.06


def test_frozen_weights_are_resident_and_own_no_tensor() -> None:
    model = tiny()
    model.model.embed_tokens.weight.requires_grad_(False)
    p = profile(model, ids(), hardware=LAPTOP, repeats=1)
    assert p.blocks[0].tensor_numels == ()
    assert p.buffers_bytes >= V * H * 4


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.ReLU(), torch.ones(2, 2), "no trainable parameter"),
        (nn.Linear(2, 2), torch.ones(0, 2), "no data"),
        (nn.Linear(2, 2), {"x": 3}, "no data"),
    ],
)
def test_bad_input_is_refused(model: nn.Module, batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile(model, batch, hardware=LAPTOP)


def test_an_output_without_gradient_is_refused_and_leaves_no_hook() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.linear(x).detach()

    model = Cut()
    before = state_of(model)
    with pytest.raises(InputError, match="carries no gradient"):
        profile(model, torch.ones(2, 2), hardware=LAPTOP)
    assert state_of(model) == before
