"""AdamW on flat arrays: near float64, equal in every bit across instruction sets, threads, starts and the fall-back."""

import itertools
import math

import numpy as np
import pytest
import torch

from superoffload import kernels
from superoffload.errors import InputError
from superoffload.kernels import native, reference
from superoffload.kernels.arguments import StepArguments, StepOptions

SIZES = (1, 3, 7, 15, 17, 31, 33, 63, 65, 97, 16384, 16385, 40_007)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HYPER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
ISAS = kernels.capabilities()["isas"]


def arrays(n: int, grad_dtype: torch.dtype, *, seed: int = 0, offset: int = 0) -> list[torch.Tensor]:
    """p, m, v, g with zeros, denormals and a wide range of sizes; `offset` elements off the allocation's start."""
    g = torch.Generator().manual_seed(1000 * seed + n)
    scale = torch.exp(3 * torch.randn(n, generator=g))
    p = torch.randn(n, generator=g)
    m = torch.randn(n, generator=g) * scale * 1e-2
    v = torch.rand(n, generator=g) * scale * scale * 1e-4
    grad = (torch.randn(n, generator=g) * scale).clamp(-6e4, 6e4)
    if n > 30:
        v[::17], grad[::13], m[::19], v[::23] = 0.0, 0.0, 1e-41, 1e-42
    shifted = []
    for x, dtype in ((p, None), (m, None), (v, None), (grad, grad_dtype)):
        room = torch.zeros(n + offset, dtype=dtype or torch.float32)
        room[offset:] = x.to(room.dtype)
        shifted.append(room[offset:])
    return shifted


CHOICES = [
    {},
    {"decoupled_weight_decay": False},
    {"bias_correction": False},
    {"decoupled_weight_decay": False, "bias_correction": False},
]


def step(
    isa: str, a: list[torch.Tensor], out: torch.Tensor | None, *, threads: int = 1, times: int = 2, **choices: bool
) -> list[bytes]:
    """Run some steps on copies; returns the bytes of p, m, v and out. `isa` may be the numpy fall-back."""
    p, m, v, g = (x.clone() for x in a)
    out = None if out is None else out.clone()
    for t in range(1, times + 1):
        if isa == "reference":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "native", reference)
                kernels.adam_step(p, m, v, g, **HYPER, **choices, step=t, grad_scale=0.37, out16=out)
        else:
            with kernels.force_isa(isa):
                kernels.adam_step(p, m, v, g, **HYPER, **choices, step=t, grad_scale=0.37, out16=out, threads=threads)
    return [x.view(torch.uint8).numpy().tobytes() for x in (p, m, v, out) if x is not None]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_every_isa_thread_count_and_start_gives_the_same_bits(grad_dtype, out_dtype):
    for n in SIZES:
        a = arrays(n, grad_dtype)
        out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype)
        expected = step("scalar" if "scalar" in ISAS else "reference", a, out)
        for isa in [*ISAS, "reference"]:
            assert step(isa, a, out) == expected, (isa, n)
        assert step(ISAS[0], a, out, threads=3) == expected, ("three threads", n)
        for offset in (1, 3):
            assert step(ISAS[0], arrays(n, grad_dtype, offset=offset), out) == expected, ("unaligned", n)


@pytest.mark.parametrize("choices", CHOICES[1:])
def test_every_isa_gives_the_same_bits_of_the_other_adams(choices):
    for n in SIZES[:-2]:
        a, out = arrays(n, torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
        results = [step(isa, a, out, **choices) for isa in [*ISAS, "reference"]]
        assert all(r == results[0] for r in results), n
        assert step(ISAS[0], arrays(n, torch.bfloat16, offset=1), out, **choices) == results[0], ("unaligned", n)
        assert n < 30 or results[0] != step(ISAS[0], a, out), "another Adam"


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_one_step_is_near_float64(isa, grad_dtype, choices):
    """Each result within 4 ulp of float64, at the size of the larger operand of its last addition."""
    for n in SIZES:
        a = arrays(n, grad_dtype, seed=1)
        p0, m0, v0, g0 = (x.double().numpy() for x in a)
        p, m, v, g = (x.clone() for x in a)
        with kernels.force_isa(isa):
            kernels.adam_step(p, m, v, g, **HYPER, **choices, step=3, grad_scale=0.37)
        lr, b1, b2, eps, wd = HYPER.values()
        decoupled, corrected = choices.get("decoupled_weight_decay", True), choices.get("bias_correction", True)
        bc1, bc2 = (1 - b1**3, 1 - b2**3) if corrected else (1.0, 1.0)
        scaled = g0 * np.float64(np.float32(0.37))
        grad = scaled if decoupled else scaled + wd * p0
        m1 = m0 + (1 - b1) * (grad - m0)
        v1 = v0 * b2 + (1 - b2) * grad * grad
        rate = lr / bc1 / (np.sqrt(v1) / math.sqrt(bc2) + eps)
        update = rate * m1
        p1 = p0 * (1 - lr * wd * decoupled) - update
        addends = np.abs(grad) if decoupled else np.maximum(np.abs(scaled), np.abs(wd * p0))  # may cancel
        lost = np.maximum(v0, (1 - b2) * np.abs(grad) * addends) / np.maximum(v1, 1e-300)  # of v's digits, there too
        moment = rate * np.maximum(np.abs(m0), addends) * np.maximum(lost, 1.0)
        for name, got, want, size in (
            ("m", m, m1, np.maximum(np.abs(m0), addends)),
            ("v", v, v1, np.maximum(v0, np.abs(grad) * addends)),
            ("p", p, p1, np.maximum(np.abs(p0), moment)),
        ):
            ulp = np.spacing(np.maximum(size, 1e-38).astype(np.float32)).astype(np.float64)
            worst = np.max(np.abs(got.double().numpy() - want) / ulp)
            assert worst <= 4, (name, n, worst)


@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_against_torch(decoupled):
    """Recorded gradients, 20 steps: within 4 ulp at the scale of max(|p|, lr) of torch.optim.AdamW and fused Adam."""
    n = 20_000
    g = torch.Generator().manual_seed(5)
    theirs = torch.nn.Parameter(torch.randn(n, generator=g))
    p, m, v = theirs.detach().clone(), torch.zeros(n), torch.zeros(n)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-3, weight_decay=0.1, fused=not decoupled, foreach=False)
    for t in range(1, 21):
        grad = torch.randn(n, generator=g) * 0.1
        theirs.grad = grad.clone()
        optimizer.step()
        kernels.adam_step(p, m, v, grad, lr=1e-3, weight_decay=0.1, step=t, decoupled_weight_decay=decoupled)
    scale = theirs.detach().abs().clamp(min=1e-3)
    ulps = (p - theirs.detach()).abs() / torch.from_numpy(np.spacing(scale.numpy()))
    assert ulps.max() <= 4
    assert not torch.equal(p, theirs.detach() * 0)


def test_one_l2_step_has_the_moments_of_torchs_fused_adam():
    """weight_decay * p is added by a fused multiply-add, as torch's kernels have it: the moments agree to the bit."""
    p, m, v, grad = arrays(4096, torch.float32)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.Adam([theirs], lr=1e-3, weight_decay=0.1, fused=True)
    state = {"step": torch.tensor(4.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.state[theirs] = state
    theirs.grad = grad.clone()
    optimizer.step()
    kernels.adam_step(p, m, v, grad, lr=1e-3, weight_decay=0.1, step=5, decoupled_weight_decay=False)
    assert torch.equal(m, state["exp_avg"])
    assert torch.equal(v, state["exp_avg_sq"])


def test_without_bias_correction_every_step_is_like_a_late_one():
    """The corrections go to 1: step 10⁹ with them is any step without."""
    late, other = arrays(1000, torch.float32), arrays(1000, torch.float32)
    kernels.adam_step(*late, **HYPER, step=10**9)
    kernels.adam_step(*other, **HYPER, step=1, bias_correction=False)
    assert all(torch.equal(a, b) for a, b in zip(late, other, strict=True))


def test_an_optimizer_that_did_nothing_would_be_noticed():
    p, m, v, g = arrays(1000, torch.float32)
    before = p.clone()
    kernels.adam_step(p, m, v, g, **HYPER, step=1)
    assert (p != before).float().mean() > 0.9


def test_floating_point_modes_of_the_caller_do_not_matter_and_are_restored():
    a = arrays(997, torch.float32)
    expected = step(ISAS[0], a, None)
    torch.set_flush_denormal(True)
    try:
        assert step(ISAS[0], a, None) == expected
        flushed = torch.tensor([1e-41]) * 0.5
        assert flushed.item() == 0.0, "the caller's own mode must still be flush-to-zero"
    finally:
        torch.set_flush_denormal(False)


def _bad_calls():
    def good():
        return dict(zip("pmvg", arrays(64, torch.float32), strict=True))

    yield "dtype", {**good(), "p": torch.zeros(64, dtype=torch.float64)}, "float64"
    yield "stride", {**good(), "m": torch.zeros(128)[::2]}, "strided"
    yield "shape", {**good(), "v": torch.zeros(8, 8)}, "shape"
    yield "length", {**good(), "g": torch.zeros(63)}, "lengths differ"
    yield "grad", {**good(), "p": torch.zeros(64, requires_grad=True)}, "detach"
    yield "device", {**good(), "p": torch.zeros(64, device="meta")}, "meta"
    frozen = np.zeros(64, np.float32)
    frozen.flags.writeable = False
    yield "read-only", {**good(), "p": frozen}, "read-only"
    base = torch.zeros(100)
    yield "overlap", {**good(), "p": base[:64], "m": base[36:]}, "overlap"
    yield "out16", {**good(), "out16": torch.zeros(64)}, "bfloat16"


@pytest.mark.parametrize(("what", "call", "says"), list(_bad_calls()), ids=lambda x: x if isinstance(x, str) else "")
def test_refused_and_nothing_changed(what, call, says):
    before = {k: x.tolist() for k, x in call.items() if getattr(x, "device", None) != torch.device("meta")}
    with pytest.raises(InputError, match=says):
        kernels.adam_step(call["p"], call["m"], call["v"], call["g"], **HYPER, step=1, out16=call.get("out16"))
    assert {k: call[k].tolist() for k in before} == before


def test_unknown_isa():
    with pytest.raises(InputError, match="avx9"), kernels.force_isa("avx9"):
        pass


def test_scalars_are_those_of_the_fallback():
    for t in (1, 2, 17, 1000, 123_456):
        for choices in itertools.product((True, False), repeat=2):
            arguments = (2e-4, 0.9, 0.95, 1e-6, 0.03, t, 0.25, *choices)
            assert native.adam_scalars(arguments) == reference.adam_scalars(arguments)


def test_the_options_are_the_arguments():
    assert set(StepOptions.__annotations__) == set(StepArguments._fields)
    with pytest.raises(TypeError, match="learning_rate"):
        kernels.adam_step(*arrays(8, torch.float32), learning_rate=1e-3, step=1)
    with pytest.raises(InputError, match="step = 0"):
        kernels.adam_step(*arrays(8, torch.float32), lr=1e-3, step=0)
