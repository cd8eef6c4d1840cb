"""Sums of squares and casts: exact where they can be, the same bits everywhere."""

import math

import numpy as np
import pytest
import torch

from superoffload import kernels
from superoffload.errors import InputError
from superoffload.kernels import native, reference
from superoffload.layout import NORM_CHUNK

ISAS = kernels.capabilities()["isas"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_the_layout_and_the_kernels_agree_on_the_chunk():
    assert native.NORM_CHUNK == reference.NORM_CHUNK == NORM_CHUNK


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares(dtype):
    for n in (1, 3, 63, 64, 65, 127, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, 3 * NORM_CHUNK + 17):
        x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 5).to(dtype)
        exact = math.fsum(float(v) ** 2 for v in x.double())
        results = set()
        for isa in ISAS:
            for threads in (1, 3):
                with kernels.force_isa(isa):
                    results.add(kernels.sum_of_squares(x, threads=threads))
        partials = np.zeros(-(-n // NORM_CHUNK))
        code = kernels.DTYPE_CODES[str(dtype)[6:]]
        reference.norm_partials(x.data_ptr(), code, n, partials.ctypes.data, 1)
        results.add(reference.combine_partials(partials.ctypes.data, partials.size))
        assert len(results) == 1, (n, results)
        assert results.pop() == pytest.approx(exact, rel=1e-13)


def test_many_partials_are_combined_in_one_order():
    x = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = kernels.combine_partials(x)
    assert got == reference.combine_partials(x.data_ptr(), x.numel())
    assert got == pytest.approx(math.fsum(x.tolist()), rel=1e-13)


def test_overflow_of_the_norm_is_not_a_bad_gradient():
    assert math.isfinite(kernels.sum_of_squares(torch.full((10_000,), 3e38)))
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.zeros(9000)
        x[8999] = bad
        assert not math.isfinite(kernels.sum_of_squares(x))


def test_partials_need_room():
    with pytest.raises(InputError, match=r"expected|Expected"):
        kernels.norm_partials(torch.zeros(NORM_CHUNK + 1), torch.zeros(1, dtype=torch.float64))


def _interesting() -> torch.Tensor:
    """fp32 values around every rounding boundary: ties, denormals of each format, overflow, infinities, NaN."""
    g = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31 - 1, (60_000,), generator=g, dtype=torch.int64).to(torch.int32)
    ties = (torch.randint(0, 2**15, (4000,), generator=g, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    halves = torch.arange(0, 2048, dtype=torch.float32) * 2.0**-25
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e38, 3.4e38, math.inf, -math.inf, math.nan, 2.0**-133])
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), halves, -halves, edges])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_casts_round_as_torch_does(isa, dtype):
    x = _interesting()
    out, back = torch.zeros(x.numel(), dtype=dtype), torch.zeros(x.numel())
    if isa == "reference":
        code = kernels.DTYPE_CODES[str(dtype)[6:]]
        reference.cast(x.data_ptr(), 0, out.data_ptr(), code, x.numel(), 1)
        reference.cast(out.data_ptr(), code, back.data_ptr(), 0, x.numel(), 1)
    else:
        with kernels.force_isa(isa):
            kernels.cast(x, out, threads=2)
            kernels.cast(out, back)
    number = ~x.isnan()
    assert torch.equal(out[number].view(torch.int16), x.to(dtype)[number].view(torch.int16))
    assert torch.equal(back[number].view(torch.int32), out.float()[number].view(torch.int32))
    assert out[x.isnan()].isnan().all()


def test_isas_agree_on_nan_too():
    x = _interesting()
    for dtype in (torch.bfloat16, torch.float16):
        results = []
        for isa in ISAS:
            out = torch.zeros(x.numel(), dtype=dtype)
            with kernels.force_isa(isa):
                kernels.cast(x, out)
            results.append(out.view(torch.int16))
        assert all(torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 3, 7, 15, 17, 31, 33, 63, 65, 97, 20011])
@pytest.mark.parametrize("start", [0, 1])
def test_accumulate_is_one_rounded_addition(dtype, n, start):
    g = torch.Generator().manual_seed(n)
    total = torch.randn(n + start, generator=g)[start:]
    x = (torch.randn(n + start, generator=g) * 1e-3).to(dtype)[start:]
    total[:1], x[:1] = 1e-40, 1e-41 if dtype != torch.float16 else 1e-7  # denormals stay
    expected = (total.double() + x.double()).float()  # the sum of two fp32 this close together is exact in double
    for isa in kernels.capabilities()["isas"]:
        with kernels.force_isa(isa):
            got = total.clone()
            kernels.accumulate(got, x, threads=2)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), isa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulate_keeps_what_is_not_finite(dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, inf, 1.0, 1.0, 1.0] * 5, dtype=dtype)
    total = torch.tensor([1.0, 1.0, 1.0, -inf, inf, -inf, nan] * 5)
    expected = total + x.float()
    for isa in kernels.capabilities()["isas"]:
        with kernels.force_isa(isa):
            got = total.clone()
            kernels.accumulate(got, x)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # which NaN is not promised
    largest = torch.full((20,), 3e38)
    kernels.accumulate(largest, torch.full((20,), 3e38))
    assert torch.isinf(largest).all()


def test_accumulate_refuses():
    total, x = torch.zeros(8), torch.ones(8)
    bad = [
        (total.double(), x, "dtype"), (total, x.long(), "dtype"), (total, x[:7], "lengths differ"),
        (total, torch.ones(16)[::2], "strided"), (torch.ones(16)[::2], x, "strided"), (total.half(), x, "dtype"),
        (torch.zeros(8, device="meta"), x, "is on meta"), (torch.zeros(8).requires_grad_(), x, "requires grad"),
        (total, total, "overlap"), (total.view(2, 4), x, "one dimension"),
    ]  # fmt: skip
    for a, b, says in bad:
        with pytest.raises(InputError, match=says):
            kernels.accumulate(a, b)
    frozen = total.numpy().copy()
    frozen.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        kernels.accumulate(frozen, x)
    assert not total.any()
