"""A split master trains with the bits of the plain layout and comes back with its own, whatever they were."""

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from superoffload import kernels
from superoffload.errors import InputError
from superoffload.kernels import native, reference
from superoffload.kernels import split as module
from superoffload.kernels.split import (
    adam_record_split,
    adam_step_split,
    adam_undo_redo_split,
    adam_undo_split,
    join,
    split,
)
from superoffload.kernels.undo import UndoRecord, adam_record
from tests.kernels import test_golden

ISAS = kernels.capabilities()["isas"]
ALL = [*ISAS, "reference"] if ISAS != ["reference"] else ISAS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 7, 15, 17, 31, 33, 511, 513, 16_384, 33_001)
HYPER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
L2 = {"decoupled_weight_decay": False, "bias_correction": False}


@contextmanager
def using(isa: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One instruction set, or the numpy fall-back."""
    if isa == "reference":
        with monkeypatch.context() as patch:
            patch.setattr(module, "native", reference)
            yield
    else:
        with kernels.force_isa(isa):
            yield


def from_bits(u: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(u.astype(np.uint32).view(np.float32))


def bits(*arrays: torch.Tensor) -> list[bytes]:
    return [x.view(torch.uint8).numpy().tobytes() for x in arrays]


def halves(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int16)


def plain_state(n: int, seed: int = 0) -> list[torch.Tensor]:
    """p, m, v; a third of p are ties, of weights even and odd."""
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(n, generator=g) * 0.02
    u = p.view(torch.int32)
    u[::3] = (u[::3] & ~0xFFFF) | 0x8000
    m = torch.randn(n, generator=g) * 1e-3
    return [p, m, m * m]


def gradient(n: int, dtype: torch.dtype, *, size: float = 1e-3, seed: int = 1) -> torch.Tensor:
    g = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * size
    g[::11] = 0.0
    g[::29] = 1e-42
    return g.clamp(-6e4, 6e4).to(dtype)


def split_state(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """weight16, remainder16, m, v of a plain state, which stays as it is."""
    p, m, v = state[0], state[1].clone(), state[2].clone()
    weight, remainder = halves(p.numel())
    split(p, weight, remainder, v)
    return [weight, remainder, m, v]


def joined_bits(weight: torch.Tensor, remainder: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[bytes]:
    p, plain_v = torch.empty_like(m), torch.empty_like(m)
    join(weight, remainder, v, p, plain_v)
    return bits(p, m, plain_v)


# --- the encoding ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not kernels.capabilities()["compiled"], reason="minutes in numpy")
def test_every_fp32_comes_back():
    """All 2^32: exact bits, the weight that rounding in other words gives, v without a change."""
    assert native.split_failures(0, 1 << 16, kernels.available_cores()) == 0


@pytest.mark.parametrize("isa", ALL)
def test_special_fp32_come_back_on_every_isa(isa, monkeypatch):
    """Around zero, infinity and NaN of both signs, and a few even and odd ones between."""
    with using(isa, monkeypatch):
        for first in (0x0000, 0x3F7E, 0x7F7E, 0x7FBE, 0x7FFC, 0x8000, 0xBF80, 0xFF7E, 0xFFFC):
            assert module.native.split_failures(first, 4, 1) == 0, hex(first)


def test_a_lost_bit_is_noticed(monkeypatch):
    """The check is not blind: without the bit, a tie of an odd upper half is taken for its even neighbour."""
    kept = reference._join

    def without_sign(weight, remainder, v, n):
        master, plain = kept(weight, remainder, v, n)
        w, lower = reference._at(weight, n, np.uint16), reference._at(remainder, n, np.uint16).astype(np.uint32)
        guess = ((w.astype(np.uint32) - (lower > 0x8000)) << 16) | lower
        return np.where(np.isnan(master), master.view(np.uint32), guess).astype(np.uint32).view(np.float32), plain

    monkeypatch.setattr(reference, "_join", without_sign)
    assert reference.split_failures(0x3F80, 1, 1) == 0
    assert reference.split_failures(0x3F7F, 1, 1) == 1  # 0x3F7F8000 alone


def test_how_many_masters_have_one_weight():
    """65,537 where the weight is even, both ties; 65,535 where it is odd: torch's rounding, which is monotone, at the
    ends of the interval. So 16 bits do not suffice, and one more does."""
    w = np.arange(1 << 16, dtype=np.int64)
    magnitude = w & 0x7FFF
    w = w[(magnitude > 0) & (magnitude < 0x7F80)]
    odd = w & 1 == 1

    def rounds_to_it(offset: int) -> np.ndarray:
        weight = from_bits((w << 16) + offset).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return weight == w

    for sign in (1, -1):
        assert rounds_to_it(sign * 0x7FFF).all()
        assert np.array_equal(rounds_to_it(sign * 0x8000), ~odd)
        assert not rounds_to_it(sign * 0x8001).any()


@pytest.mark.parametrize("isa", ALL)
def test_split_and_join(isa, monkeypatch):
    for n in SIZES:
        u = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint64)
        u[::5] = u[::5] & ~np.uint64(0xFFFF) | np.uint64(0x8000)
        u[: n // 10] = np.array([0x3F808000, 0x3F7F8000], np.uint64)[np.arange(n // 10) % 2]
        master = from_bits(u)
        v = from_bits(np.random.default_rng(0).integers(0, 1 << 31, n, dtype=np.uint64))
        before, flagged, (weight, remainder) = bits(master, v), v.clone(), halves(n)
        with using(isa, monkeypatch):
            split(master, weight, remainder, flagged, threads=2)
            back, plain_v = torch.zeros(n), torch.zeros(n)
            join(weight, remainder, flagged, back, plain_v, threads=2)
            after_split = bits(weight, remainder, flagged)
            nan = master.isnan()  # torch's vector and scalar casts differ in which NaN they make
            assert bits(weight[~nan]) == bits(master.to(torch.bfloat16)[~nan])
            assert (weight.view(torch.int16)[nan] == 0x7FC0).all()
            assert np.array_equal(remainder.numpy().view(np.uint16), (u & np.uint64(0xFFFF)).astype(np.uint16))
            assert bits(torch.where(nan, 0.0, back)) == bits(torch.where(nan, 0.0, master))
            assert torch.equal(back.isnan(), nan)
            assert bits(plain_v) == before[1:]
            join(weight, remainder, flagged, back, flagged)
            assert bits(flagged) == before[1:], "joined in place"
        with kernels.force_isa("scalar") if "scalar" in ISAS else using("reference", monkeypatch):
            split(master, weight, remainder, v)
        assert bits(weight, remainder, v) == after_split, "the same bytes on every instruction set"


# --- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("choices", [{}, L2])
@pytest.mark.parametrize("isa", ALL)
def test_many_steps_have_the_bits_of_the_plain_layout(isa, grad_dtype, choices, monkeypatch):
    for n in SIZES if isa != "reference" else SIZES[-3:]:
        state = plain_state(n)
        out = torch.zeros(n, dtype=torch.bfloat16)
        with using(isa, monkeypatch):
            arrays = split_state(state)
            for t in range(1, 9):
                g = gradient(n, grad_dtype, seed=t)
                hyper = {
                    **HYPER,
                    **choices,
                    "step": t,
                    "grad_scale": 0.3,
                    "lr": 0.0 if t == 1 else 3e-4,
                }  # ties last for one step
                kernels.adam_step(*state, g, **hyper, out16=out)
                adam_step_split(*arrays, g, **hyper, threads=1 + t % 3)
                assert bits(arrays[0]) == bits(out), (n, t)
                assert joined_bits(*arrays) == bits(*state), (n, t)


@pytest.mark.parametrize("isa", ALL)
def test_nothing_but_ties(isa, monkeypatch):
    """The array that overflows a list of exceptions: here it is like any other, also where it stays so."""
    n = 50_000
    u = (np.random.default_rng(3).integers(0x3000, 0x4000, n) << 16) | 0x8000
    state = [from_bits(u), torch.zeros(n), torch.zeros(n)]
    with using(isa, monkeypatch):
        arrays = split_state(state)
        for t in range(1, 4):
            hyper = {**HYPER, "lr": 0.0, "step": t}
            kernels.adam_step(*state, gradient(n, torch.bfloat16, seed=t), **hyper)
            adam_step_split(*arrays, gradient(n, torch.bfloat16, seed=t), **hyper)
        assert bits(state[0]) == bits(from_bits(u))
        assert joined_bits(*arrays) == bits(*state)


@pytest.mark.parametrize("isa", ALL)
def test_parts_are_stepped_by_themselves(isa, monkeypatch):
    """Any start and length: parameters of different groups lie next to each other in one bucket."""
    n, ends = 5000, [0, 1, 2, 9, 500, 1013, 4999, 5000]
    whole, g = split_state(plain_state(n)), gradient(n, torch.float16)
    parts = [x.clone() for x in whole]
    with using(isa, monkeypatch):
        adam_step_split(*whole, g, **HYPER, step=1)
        for a, b in itertools.pairwise(ends):
            before = bits(*(x[b:] for x in parts))
            adam_step_split(*(x[a:b] for x in parts), g[a:b], **HYPER, step=1)
            assert bits(*(x[b:] for x in parts)) == before
    assert bits(*parts) == bits(*whole)


@pytest.mark.parametrize("choices", [{}, L2])
@pytest.mark.parametrize("isa", ALL)
def test_steps_can_be_taken_back(isa, choices, monkeypatch):
    for n in (*SIZES, 40_001):
        state, g = plain_state(n), gradient(n, torch.bfloat16)
        arrays, record, hyper = split_state(state), UndoRecord(n), {**HYPER, **choices, "step": 4}
        before = bits(*arrays)
        with using(isa, monkeypatch):
            adam_record_split(*arrays, g, record, **hyper, threads=2)
            assert record.waiting == 0
            plain = [x.clone() for x in state]
            adam_record(*plain, g, UndoRecord(n), **hyper)
            assert joined_bits(*arrays) == bits(*plain)
            adam_undo_split(*arrays, g, record, threads=2)
            assert bits(*arrays) == before
            adam_record_split(*arrays, g, record, **hyper)
            adam_undo_redo_split(*arrays, g, record, grad_scale=0.1)
            kernels.adam_step(*state, g, **hyper, grad_scale=0.1)
            assert joined_bits(*arrays) == bits(*state)


def test_a_tile_that_waits_is_as_it_was():
    n = 16_384 + 100
    state = plain_state(n)
    g = gradient(n, torch.bfloat16, size=1e6)
    arrays, record = split_state(state), UndoRecord(n)
    before = bits(*arrays)
    adam_record_split(*arrays, g, record, **HYPER, step=2)
    assert record.waiting >= 1
    assert bits(*(x[:16_384] for x in arrays)) == bits(*(x[:16_384] for x in split_state(state)))
    adam_undo_redo_split(*arrays, g, record, grad_scale=1e-9)
    assert bits(*arrays) != before
    kernels.adam_step(*state, g, **HYPER, step=2, grad_scale=1e-9)
    assert joined_bits(*arrays) == bits(*state)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_change_nothing():
    n = 100
    p, m, v = plain_state(n)
    arrays, g = split_state([p, m, v]), gradient(n, torch.float32)
    weight, remainder, m, flagged = arrays
    before = bits(p, v, *arrays)

    def refused(call, match: str) -> None:
        with pytest.raises(InputError, match=match):
            call()
        assert bits(p, v, *arrays) == before

    step = {**HYPER, "step": 1}
    refused(lambda: split(p, weight, remainder, flagged), "sign set.*Join it first")
    refused(lambda: split(p, weight, remainder, -v), "sign set")
    refused(lambda: split(p, weight.half(), remainder, v), "weight16 has dtype float16")
    refused(lambda: split(p, weight, remainder.int(), v), "remainder16 has dtype int32")
    refused(lambda: split(p[1:], weight, remainder, v), "lengths differ")
    refused(lambda: split(p, weight, weight.view(torch.int16), v), "overlap")
    refused(lambda: split(p, weight, remainder, v, threads=0), "threads = 0")
    refused(lambda: join(weight, remainder, flagged, p, p), "overlap")
    refused(lambda: join(weight, remainder, flagged[::2], p, v), "v is strided")
    refused(lambda: adam_step_split(weight, remainder, m, flagged, g[1:], **step), "lengths differ")
    refused(lambda: adam_step_split(weight, remainder, m, flagged, g, **{**step, "step": 0}), "step = 0")
    refused(lambda: adam_step_split(weight, remainder, m, m, g, **step), "overlap")
    refused(lambda: adam_step_split(weight, remainder, m.double(), flagged, g, **step), "m has dtype float64")
    refused(lambda: adam_step_split(p, remainder, m, flagged, g, **step), "weight16 has dtype float32")
    refused(lambda: adam_record_split(*arrays, g, UndoRecord(99), **step), "for 99 elements")
    refused(lambda: adam_undo_split(*arrays, g, UndoRecord(n)), "holds no step")
    refused(lambda: adam_undo_redo_split(*arrays, g, UndoRecord(n), grad_scale=-1.0), "grad_scale")
    refused(lambda: adam_step_split(weight, remainder, m[::2], flagged, g, **step), "strided.*contiguous m")
    refused(lambda: adam_step_split(weight, remainder, m.view(10, 10), flagged, g, **step), "flat view")
    refused(lambda: adam_step_split(weight, remainder, m, flagged.to("meta"), g, **step), "on meta.*Copy it to the CPU")
    refused(lambda: adam_record_split(weight, remainder, m, flagged.to("meta"), g, UndoRecord(n), **step), "on meta")
    refused(lambda: adam_record_split(weight, remainder, m, m, g, UndoRecord(n), **step), "overlap")
    refused(lambda: adam_record_split(*arrays, g, UndoRecord(n), **step, threads=0), "threads = 0")
    fixed = np.zeros(n, np.uint16)
    fixed.flags.writeable = False
    refused(lambda: split(p, weight, fixed, v), "remainder16 is read-only")
    refused(lambda: adam_step_split(weight, fixed, m, flagged, g, **step), r"read-only.*copy\(\)")
    record = UndoRecord(n)
    adam_record_split(*arrays, g, record, **step)
    before = bits(p, v, *arrays)
    refused(lambda: adam_undo_split(weight, fixed, m, flagged, g, record), "read-only")
    refused(lambda: adam_undo_split(weight, remainder, m, flagged, g[1:], record), "lengths differ")
    refused(lambda: adam_undo_redo_split(weight, remainder, m, m, g, record, grad_scale=0.5), "overlap")


def test_empty_arrays():
    arrays = split_state([torch.zeros(0)] * 3)
    adam_step_split(*arrays, torch.zeros(0), **HYPER, step=1)
    assert joined_bits(*arrays) == [b""] * 3


# --- Arm ------------------------------------------------------------------------------------------------------------


def test_on_arm(tmp_path):
    """csrc/test_split.cpp: NEON and SVE files, cross-compiled, on emulated CPUs with and without SVE."""
    compiler = test_golden.shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)")
    emulator = test_golden._emulator("aarch64")
    common = ["-O1", "-fno-tree-vectorize", *test_golden._DEFINITIONS["aarch64"]]
    units = {s: [*common, *test_golden._file_flags(s)] for s in test_golden._ISA_SOURCES["aarch64"]}
    sources = ("test_split.cpp", "split.cpp", "undo.cpp", "dispatch.cpp", "adam_scalar.cpp")
    program = test_golden._build(tmp_path, compiler, units | dict.fromkeys(sources, common), link=("-static",))
    for cpu, isas in (("max,sve256=on", ["sve", "neon", "scalar"]), ("neoverse-n1", ["neon", "scalar"])):
        command = [emulator, "-cpu", cpu, str(program.path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split("\n")) == (0, [*isas, ""]), done.stderr
