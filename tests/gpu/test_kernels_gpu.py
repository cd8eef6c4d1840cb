"""The GPU's kernels give the CPU kernels' bits."""

import pytest
import torch

from superoffload import kernels
from superoffload.engine.device import CudaDevice
from superoffload.layout import NORM_CHUNK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _arrays(n: int, grad_dtype: torch.dtype, spread: float, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(n, generator=g))
    p = torch.randn(n, generator=g)
    m = torch.randn(n, generator=g) * scale * 1e-2
    v = torch.rand(n, generator=g) * scale * scale * 1e-4
    grad = (torch.randn(n, generator=g) * scale).clamp(-6e4, 6e4).to(grad_dtype)
    v[::17] = 0.0
    grad[::13] = 0.0
    m[::19] = 1e-41  # denormal
    v[::23] = 1e-42
    return [p, m, v, grad]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 1023, 100_001])
@pytest.mark.parametrize("choices", [{}, {"decoupled_weight_decay": False, "bias_correction": False}])
def test_adam_is_bit_equal_to_the_cpu(grad_dtype, out_dtype, n, choices):
    from superoffload.kernels import gpu

    for seed, spread in enumerate((0.5, 6.0)):
        cpu = _arrays(n, grad_dtype, spread, seed)
        dev = [x.cuda() for x in cpu]
        out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype)
        out_dev = None if out is None else out.cuda()
        hyper = dict(lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, **choices)
        coefficient = torch.full((1,), 0.3712, dtype=torch.float32, device="cuda")
        skip = torch.zeros(1, dtype=torch.int32, device="cuda")
        for step in (1, 2, 7):
            kernels.adam_step(*cpu, **hyper, step=step, grad_scale=float(coefficient), out16=out)
            gpu.adam_step(*dev, out_dev, coefficient, skip, 1.0, kernels.adam_scalars(**hyper, step=step))
        for name, a, b in zip("pmv", cpu, dev, strict=False):
            assert torch.equal(a.view(torch.int32), b.cpu().view(torch.int32)), (name, seed)
        if out is not None:
            assert torch.equal(out.view(torch.int16), out_dev.cpu().view(torch.int16))


def test_skip_writes_nothing():
    from superoffload.kernels import gpu

    p, m, v, g = (x.cuda() for x in _arrays(5000, torch.bfloat16, 1.0, 0))
    before = [x.clone() for x in (p, m, v)]
    one = torch.ones(1, device="cuda")
    scalars = kernels.adam_scalars(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
    gpu.adam_step(p, m, v, g, None, one, torch.ones(1, dtype=torch.int32, device="cuda"), 1.0, scalars)
    assert all(torch.equal(a, b) for a, b in zip(before, (p, m, v), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_bit_equal_to_the_cpu(dtype):
    from superoffload.kernels import gpu

    device = CudaDevice(torch.device("cuda", 0))
    for n in (1, 63, NORM_CHUNK, NORM_CHUNK + 1, 50 * NORM_CHUNK + 77):
        x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 3).to(dtype)
        count = -(-n // NORM_CHUNK)
        expected = torch.zeros(count, dtype=torch.float64)
        kernels.norm_partials(x, expected)
        chunks = [(i * NORM_CHUNK, min(NORM_CHUNK, n - i * NORM_CHUNK), i) for i in range(count)]
        partials = torch.zeros(count, dtype=torch.float64, device="cuda")
        gpu.norm_partials(x.cuda(), device.chunk_table(chunks), partials)
        assert torch.equal(partials.cpu(), expected)
        judge = gpu.DeviceVerdict(torch.device("cuda"))
        judge.judge(partials, 0.7, 1.0)
        total = kernels.combine_partials(expected)
        ratio = 0.7 / (total**0.5 + 1e-6)
        assert float(judge.coefficient) == float(torch.tensor(min(ratio, 1.0), dtype=torch.float32))
        assert int(judge.skip) == 0


def test_a_gradient_that_is_not_finite_is_seen():
    from superoffload.kernels import gpu

    judge = gpu.DeviceVerdict(torch.device("cuda"))
    for bad in (float("nan"), float("inf")):
        judge.judge(torch.tensor([1.0, bad], dtype=torch.float64, device="cuda"), 1.0, 1.0)
        assert int(judge.skip) == 1
