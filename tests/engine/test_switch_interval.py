"""Python's lock beside other threads: the engine shortens the turns while it is open and leaves no trace of it."""

import gc
import sys

import pytest
import torch

from superoffload.engine import OffloadAdamW
from superoffload.engine.switch_interval import SWITCH_INTERVAL_S
from tests.engine.common import llama


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def make(model=None):
    return OffloadAdamW(llama(torch.bfloat16) if model is None else model, lr=1e-3, max_grad_norm=1.0, bucket_mb=0.05)


def test_short_while_any_optimizer_is_open():
    gc.collect()
    sys.setswitchinterval(0.004)
    first, second = make(), make()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.close()
    second.close()
    assert sys.getswitchinterval() == pytest.approx(0.004)
    with make():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_dropped_optimizer_gives_it_back():
    sys.setswitchinterval(0.004)
    opt = make()
    del opt
    gc.collect()
    assert sys.getswitchinterval() == pytest.approx(0.004)


@pytest.mark.parametrize("theirs", [5e-6, 3e-3])
def test_what_somebody_sets_meanwhile_stays(theirs):
    with make():
        sys.setswitchinterval(theirs)
        with make():
            assert sys.getswitchinterval() == pytest.approx(theirs)
    assert sys.getswitchinterval() == pytest.approx(theirs)


def test_a_shorter_one_stays():
    sys.setswitchinterval(5e-6)
    with make():
        assert sys.getswitchinterval() == pytest.approx(5e-6)
    assert sys.getswitchinterval() == pytest.approx(5e-6)
