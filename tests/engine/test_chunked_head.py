"""The loss in chunks in Hugging Face models: their own semantics under every plan, or a refusal."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from superoffload.engine import OffloadAdamW, chunked_head
from superoffload.engine.activations import BlockForward
from superoffload.engine.building import rebuild
from superoffload.engine.chunked_head import InsteadOfLogits
from superoffload.errors import InputError, NotSupported
from superoffload.plan import ACTIVATIONS
from tests.engine.common import VOCAB, batches, digest, llama, run_plan, train
from tests.engine.scenario import KINDS, play
from tests.engine.test_activations import dropping
from tests.engine.test_loss import EPS, peak


def tied(dtype=torch.float32, *, device="cpu"):
    return llama(dtype, device=device, tied=True)


def opened(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.1, "loss_chunks": 3, **kwargs})


def loss_and_gradients(model, **kwargs):
    """Of the model's own forward, and of the loss in three chunks."""
    found = []
    for chunks in (1, 3):
        with opened(model, loss_chunks=chunks) as opt, opt.no_sync():
            loss = model(**kwargs).loss
            loss.backward()
            found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
            opt.zero_grad()
    return found


def assert_alike(found, dtype=torch.float32):
    """Sums in another order, in float32 over at most 384 classes; float32 sums over 48 tokens. The factor is what three
    layers of backward make of it."""
    (loss, want), (chunked, got) = found
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    for name, g in got.items():
        error = (g.double() - want[name].double()).norm() / want[name].double().norm()
        assert error < 100 * EPS[dtype], (name, float(error))


@pytest.mark.parametrize("model", [llama, tied, dropping])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_loss_and_gradients(model, dtype):
    (x,) = batches(1)
    m = model(dtype)
    m.eval()  # no dropout
    labels = x.clone()
    labels[0, 5:] = -100
    assert_alike(loss_and_gradients(m, input_ids=x, labels=labels), dtype)


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 100},
        {"num_items_in_batch": torch.tensor(77)},
        {"shift_labels": torch.roll(batches(1)[0], 2)},
        {"ignore_index": 7},
        {"shift_labels": batches(1)[0][:, -5:].contiguous(), "logits_to_keep": 5},
        {"attention_mask": torch.ones(2, 24, dtype=torch.long), "output_hidden_states": True},
    ],
)
def test_what_a_forward_may_be_given(more):
    (x,) = batches(1)
    assert_alike(loss_and_gradients(llama(), input_ids=x, labels=x, **more))


def test_autocast_of_a_float32_model():
    (x,) = batches(1)
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(loss_and_gradients(model, input_ids=x, labels=x), torch.bfloat16)


def test_a_mixture_that_adds_to_its_loss_in_place():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, num_local_experts=4, output_router_logits=True, use_cache=False,
    ))  # fmt: skip
    (x,) = batches(1)
    assert_alike(loss_and_gradients(model, input_ids=x, labels=x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [llama, tied])
def test_no_plan_changes_a_bit(dtype, model):
    def run(**kwargs):
        return run_plan(dtype, batches(6), model=model, bucket_mb=0.1, loss_chunks=3, **kwargs)

    reference = run(speculate="off")
    assert run(speculate="on", delay_us=200) == reference
    assert run(speculate="on", retained_buckets=4) == reference
    assert run(speculate="on", flow_blocks=(1, 3)) == reference
    assert run(speculate="off", cast_up="gpu", cast_down="cpu") == reference
    for policy in ACTIVATIONS:
        assert run(speculate="on", activations=policy) == reference, policy
    if model is llama:
        for prefetch in (1, 3):
            assert run(speculate="on", flow_blocks=(1, 2, 4), prefetch_blocks=prefetch) == reference, "the head flows"
    twice = run(speculate="off", accumulation=2)
    for where in ("gpu", "cpu"):
        assert run(speculate="on", accumulation=2, accumulate_on=where) == twice
        assert run(speculate="on", accumulation=2, accumulate_on=where, hint=False) == twice
    assert reference != run_plan(dtype, batches(6), model=model, bucket_mb=0.1, speculate="off"), "control"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_every_kind_with_and_without_speculation(dtype):
    steps = list(KINDS.values())
    first = play(llama(dtype, layers=2), steps, speculate="off", bucket_mb=0.05, loss_chunks=3)
    again = play(
        llama(dtype, layers=2), steps, bounds=first.bounds, speculate="on", bucket_mb=0.05, loss_chunks=3, lockstep=True
    )
    assert again.result == first.result
    assert any(r.speculated for r in again.ledger)


def scaled_training(chunks, n=8, unscaled=False, **kwargs):
    model = llama(torch.float16)
    with opened(model, loss_chunks=chunks, **kwargs) as opt:
        losses, verdicts = [], []
        for x in batches(n):
            loss = model(input_ids=x, labels=x).loss
            (loss if unscaled else opt.scale_loss(loss)).backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
            verdicts.append(opt.stats.verdict)
        return losses, verdicts, digest(model, opt)


def test_float16_with_a_loss_scale():
    want, verdicts, _ = scaled_training(1)
    got, chunked, reference = scaled_training(3, speculate="off")
    assert scaled_training(3, speculate="on") == (got, chunked, reference)
    assert chunked == verdicts
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-3, atol=0)


def test_float16_gradients_are_held_at_the_scale_of_the_loss(monkeypatch):
    held, inner = [], chunked_head.chunked_cross_entropy

    def noting(*args, loss_scale, **kwargs):
        held.append(loss_scale)
        return inner(*args, loss_scale=loss_scale, **kwargs)

    monkeypatch.setattr(chunked_head, "chunked_cross_entropy", noting)
    model, data = llama(torch.float16), batches(3)
    with opened(model) as opt:
        for x in data:
            loss = model(input_ids=x, labels=x).loss
            opt.scale_loss(loss).backward()
            assert held[-1] == opt._scaling.rule.scale > 1
            opt.step()
            opt.zero_grad()
        for x in data:
            model(input_ids=x, labels=x).loss.backward()
            opt.step()
            opt.zero_grad()
        assert held[-2:] == [1.0, 1.0], "the last loss was not scaled"
    with opened(llama()) as opt:
        opt.model(input_ids=x, labels=x)
        assert held[-1] == 1.0


def test_logits_are_made_wherever_nothing_trains():
    model, (x,) = llama(), batches(1)
    with torch.no_grad():
        want = model(input_ids=x, labels=x)
        tokens = model.generate(x, max_new_tokens=4, do_sample=False)
    with opened(model):
        assert model(input_ids=x, labels=x).logits is None
        assert len(model(input_ids=x, labels=x, return_dict=False)) == 2
        assert model(input_ids=x, labels=x, return_dict=False)[1] is None
        assert torch.equal(model(input_ids=x).logits, want.logits)
        with torch.no_grad():
            got = model(input_ids=x, labels=x)
            assert torch.equal(got.logits, want.logits)
            assert torch.equal(got.loss, want.loss)
            assert torch.equal(model.generate(x, max_new_tokens=4, do_sample=False), tokens)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=x).logits, want.logits)


def test_hooks_on_the_head_surround_its_use():
    model, (x,) = llama(), batches(1)
    seen = []
    with opened(model) as opt:
        handles = [
            model.lm_head.register_forward_pre_hook(lambda *_: seen.append("before")),
            model.lm_head.register_forward_hook(lambda *_: seen.append("after")),
            model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward")),
        ]
        out = model(input_ids=x, labels=x)
        assert out.logits is None
        out.loss.backward()
        opt.zero_grad()
        assert seen == ["before", "after", "backward"]
        for h in handles:
            h.remove()
        handle = model.lm_head.register_forward_hook(lambda m, a, logits: logits.softmax(-1))
        with pytest.raises(NotSupported, match=r"softmax.*loss_chunks=1"):
            model(input_ids=x, labels=x)
        handle.remove()
        model(input_ids=x, labels=x).loss.backward()


def test_a_recorded_step_has_the_heads_forward_and_backward():
    model, data = llama(), batches(4)
    with opened(model, record_trace=True) as opt:
        train(model, opt, data)
        events = opt.trace().events
    head = {e.kind for e in events if e.block == 4}
    assert {"forward", "backward"} <= head


def capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, use_cache=False, final_logit_softcapping=20.0,
    ))  # fmt: skip


def scaled():
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False, logits_scaling=4.0,
    ))  # fmt: skip


def cohere():
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False, logit_scale=0.5,
    ))  # fmt: skip


def translator():
    """Its loss is torch's, on labels that are not shifted."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4, vocab_size=VOCAB,
        use_cache=False, decoder_start_token_id=0,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "operation"), [(capped, "div"), (scaled, "div"), (cohere, "mul"), (translator, "size|view")]
)
def test_models_that_change_their_logits_are_refused_by_their_first_forward(make, operation):
    model, (x,) = make(), batches(1)
    with opened(model) as opt:
        with pytest.raises(NotSupported, match=rf"({operation}).*loss_chunks=1"):
            model(input_ids=x, labels=x)
        assert opt.stats.step == 0
        with torch.no_grad():
            assert model(input_ids=x, labels=x).logits is not None
    model(input_ids=x, labels=x).loss.backward()


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model():
    (x,), found = batches(1), []
    for compiled in (False, True):
        model = llama(layers=1)
        with opened(model, speculate="on") as opt:
            run = torch.compile(model, backend="aot_eager") if compiled else model
            for _ in range(3):
                out = run(input_ids=x, labels=x)
                assert out.logits is None
                out.loss.backward()
                opt.step()
                opt.zero_grad()
            found.append(digest(model, opt))
    assert found[0] == found[1]
    torch._dynamo.reset()
    model = capped()
    with opened(model), pytest.raises(Exception, match="loss_chunks=1") as refused:
        torch.compile(model, backend="aot_eager")(input_ids=x, labels=x)
    assert "NotSupported" in repr(refused.value) or "NotSupported" in str(refused.value)
    torch._dynamo.reset()


def test_a_model_that_changes_labels_or_loss_settings_is_refused():
    from transformers import LlamaForCausalLM

    class Odd(LlamaForCausalLM):
        what = ""

        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            changes = {
                "labels": {"labels": labels + 1}, "num_items_in_batch": {"num_items_in_batch": 5},
                "ignore_index": {"ignore_index": 3}, "classes": {"vocab_size": 10}, "": {},
                "equal": {"labels": labels.clone()},
                "returned": {"logits": self.lm_head(hidden)}, "no logits": {"logits": None},
            }  # fmt: skip
            if self.what == "did not reach":
                return (hidden.mean(), logits)
            given = {"logits": logits, "labels": labels, "vocab_size": VOCAB, **changes[self.what]}
            return (self.loss_function(**given), logits)

    torch.manual_seed(0)
    model, (x,) = Odd(llama().config), batches(1)
    with opened(model):
        for what in ("", "equal"):
            model.what = what
            assert model(x, labels=x)[1] is None
        for what in ("labels", "num_items_in_batch", "ignore_index", "classes", "returned", "did not reach"):
            model.what = what
            with pytest.raises(NotSupported, match=what):
                model(x, labels=x)
        with pytest.raises(InputError, match="48 tokens, and the loss 40 labels"):
            model(x, labels=x[:, :20])
        model.what = ""
        model(x, labels=x)[0].backward()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def custom_loss():
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.mean()
    return model


def other_head():
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    return model


def wrapped_head():
    model = llama()
    model.lm_head.forward = lambda x, inner=model.lm_head.forward: inner(x)
    return model


def two_models():
    return nn.ModuleList([llama(), llama()])


def classifier():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Plain, "Plain is no Hugging Face causal language model.*chunked_cross_entropy"),
        (custom_loss, "the loss of LlamaForCausalLM is <lambda>"),
        (other_head, "the head of LlamaForCausalLM is a Sequential"),
        (wrapped_head, "whose forward is wrapped"),
        (two_models, "2 parts with a head"),
        (classifier, "the loss of BertForMaskedLM is ForMaskedLMLoss"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_happens(make, words):
    model = make()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(NotSupported, match=words):
        opened(model)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    with opened(model, loss_chunks=1):
        pass


def test_a_model_inside_another():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, x):
            return self.inner(input_ids=x, labels=x).loss

    model, (x,) = Outer(), batches(1)
    with opened(model, flow_blocks=(1, 4), speculate="on") as opt:
        for _ in range(3):
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()


def test_close_restores_the_model():
    model, (x,) = llama(), batches(1)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    loss = model.loss_function
    with opened(model) as opt:
        assert isinstance(model.lm_head.forward, BlockForward)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            second = opened(model)  # closes the first
        train(model, second, [x])
        rebuild(second)
        assert model(input_ids=x, labels=x).logits is None
        second.close()
        assert opt is not second
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys(), name
    assert model.loss_function is loss
    assert model(input_ids=x, labels=x).logits is not None
    model.loss_function = loss  # the same, by the owner's hand
    with opened(model):
        assert model.loss_function is not loss
    assert model.__dict__["_loss_function"] is loss


def test_a_loss_function_set_over_ours_stays_and_ours_does_nothing_after_close():
    model, (x,) = llama(), batches(1)
    want = float(model(input_ids=x, labels=x).loss.detach())
    with opened(model):
        ours = model.loss_function
        model.loss_function = lambda *a, **k: 2 * ours(*a, **k)
        got = float(model(input_ids=x, labels=x).loss.detach())
        assert abs(got - 2 * want) < 1e-5
    assert float(model(input_ids=x, labels=x).loss.detach()) == 2 * want


def test_copies_of_the_model_are_plain():
    model, (x,) = llama(), batches(1)
    with opened(model) as opt:
        opt.synchronize()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(copied.lm_head.forward, BlockForward)
            out = copied(input_ids=x, labels=x)
            assert out.logits is not None
            out.loss.backward()
            assert copied.lm_head.weight.grad is not None
        assert model.lm_head.weight.grad is None
        assert model(input_ids=x, labels=x).logits is None


def test_profiling_beside_an_open_optimizer_changes_nothing():
    from superoffload import hardware
    from superoffload.profiling import profile

    def run(measure):
        model, data = llama(), batches(4)
        with opened(model) as opt:
            train(model, opt, data[:2])
            if measure:
                found = profile(model, data[0], hardware=hardware.preset("laptop"), repeats=1)
                assert found.blocks[-1].logits == data[0].numel() * VOCAB
                assert found.blocks[-1].activation_bytes > found.blocks[-1].chunked_activation_bytes
            train(model, opt, data[2:])
            assert model(input_ids=data[0], labels=data[0]).logits is None
            opt.zero_grad()
            return digest(model, opt)

    assert run(True) == run(False)


def test_dropping_the_optimizer_gives_the_model_back():
    model, (x,) = llama(), batches(1)
    opt = opened(model)
    train(model, opt, [x])
    del opt
    gc.collect()
    assert model(input_ids=x, labels=x).logits is not None
    assert "_loss_function" not in model.__dict__


def test_an_exception_in_a_forward_leaves_no_trace():
    model, (x,) = llama(), batches(1)
    with opened(model) as opt:
        want = model(input_ids=x, labels=x).loss
        handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=x, labels=x)
        handle.remove()
        assert torch.equal(model(input_ids=x, labels=x).loss, want)
        assert torch.equal(model(input_ids=x).logits, model(input_ids=x).logits)
        opt.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_in_a_checkpoint(reentrant):
    (x,) = batches(1)

    def run(wrap):
        model = llama()
        with opened(model, speculate="off") as opt:
            for _ in range(2):
                embedded = model.model.embed_tokens(x).detach().requires_grad_()

                def loss(e):
                    return model(inputs_embeds=e, labels=x).loss

                (checkpoint(loss, embedded, use_reentrant=reentrant) if wrap else loss(embedded)).backward()
                opt.step()
                opt.zero_grad()
            return digest(model, opt)

    assert run(True) == run(False)


def test_a_frozen_head_and_a_head_alone():
    (x,) = batches(1)
    for trained in ("layers.0", "lm_head"):
        model = llama()
        for name, p in model.named_parameters():
            p.requires_grad_(trained in name)
        found = []
        for chunks in (1, 3):
            with opened(model, loss_chunks=chunks) as opt, opt.no_sync():
                loss = model(input_ids=x, labels=x).loss
                loss.backward()
                found.append(
                    (loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                )
                opt.zero_grad()
        assert found[0][1].keys() == found[1][1].keys() != set()
        assert_alike(found)


def test_nothing_is_kept_of_the_logits():
    """The largest moment of a step, forward and backward, with a large vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2, vocab_size=4096,
        use_cache=False, tie_word_embeddings=True,
    ))  # fmt: skip
    x = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(0))
    logits = x.numel() * 4096 * 4

    def step():
        model(input_ids=x, labels=x).loss.backward()

    used = {}
    for chunks in (1, 2, 8):
        with opened(model, loss_chunks=chunks, speculate="off") as opt, opt.no_sync():
            used[chunks] = peak(step, *model.parameters())
            opt.zero_grad()
    assert used[1] > 2 * logits
    assert used[2] < used[1] - 0.9 * logits
    assert abs((used[2] - used[8]) - 2 * logits * (1 / 2 - 1 / 8)) < 0.1 * logits


def test_the_stand_in_says_what_it_is():
    loss = torch.ones(()).as_subclass(InsteadOfLogits)
    assert "no logits" in repr(loss)
    for use in (lambda t: t + 1, lambda t: 2 * t, lambda t: t[0], lambda t: t.shape, lambda t: t.argmax(-1), torch.tanh,
                lambda t: t.mul_(2), lambda t: t.view(-1), float):  # fmt: skip
        with pytest.raises(NotSupported, match="loss_chunks=1"):
            use(loss)
    assert loss.float().contiguous().to("cpu").dtype == torch.float32


def test_a_copy_of_a_model_that_is_trained_can_be_trained_so_too():
    """Its forward is its class's, wherever the copy has it from."""
    model = llama()
    with OffloadAdamW(model, loss_chunks=3, activations="full"):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for c in copies:
        with OffloadAdamW(c, loss_chunks=3, activations="full") as opt:
            train(c, opt, batches(1))
        assert not any(isinstance(m.__dict__.get("forward"), BlockForward) for m in c.modules())
