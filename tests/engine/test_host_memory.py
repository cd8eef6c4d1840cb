"""Pinned host memory: unpinned exactly once, and never while something refers to it. The driver is played here."""

import collections
import gc

import pytest
import torch

from superoffload.engine import OffloadAdamW, arenas
from superoffload.engine import device as devices
from superoffload.engine.host_memory import HostMemory
from superoffload.errors import EngineError
from tests.engine.common import llama


class Driver:
    """What `torch.cuda.cudart()` does to pinned memory."""

    def __init__(self, room=10**9):
        self.pinned: dict[int, int] = {}
        self.room = room

    def cudaHostRegister(self, address, size, flags):
        if sum(self.pinned.values()) + size > self.room:
            return 2
        assert address not in self.pinned, "already registered"
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]  # KeyError: unpinned twice
        return 0


@pytest.fixture
def driver(monkeypatch):
    played = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    return played


def test_release_unpins_what_is_not_lent(driver):
    host = HostMemory(can_pin=True)
    a, b, c = (host.zeros(1000 + i, torch.float32, pinned=True) for i in range(3))
    unpin = host.lend(b)
    host.free(a)
    assert set(driver.pinned) == {b.data_ptr(), c.data_ptr()}
    host.release()
    assert set(driver.pinned) == {b.data_ptr()} and host.pinned_bytes == 0
    unpin()
    assert not driver.pinned


def test_an_alias_keeps_its_memory_pinned_until_its_last_view_goes(driver, monkeypatch):
    """A `state_dict()` that is kept past `close()` holds views of what the GPU reads across the link."""
    idle = []
    monkeypatch.setattr(torch.cuda, "synchronize", idle.append)
    # What torch makes of memory that says where it lies: a tensor whose storage keeps the teller alive.
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: _Over(memory))
    gpu = object.__new__(devices.CudaDevice)
    gpu.device = torch.device("cuda", 0)
    host = HostMemory(can_pin=True)
    home = host.zeros(1000, torch.bfloat16, pinned=True)
    view = gpu.alias(home, then=host.lend(home))
    host.release()
    del home
    gc.collect()
    assert driver.pinned and not idle
    del view
    assert idle == [gpu.device] and not driver.pinned, "unpinned once the device is idle"


class _Over:
    def __init__(self, memory):
        self._memory = memory

    def view(self, dtype):
        return self

    def data_ptr(self):
        return self._memory.__cuda_array_interface__["data"][0]


@pytest.mark.parametrize("flow_blocks", [(), (1, 2)])
def test_memory_that_cannot_be_pinned_leaves_none_pinned(driver, monkeypatch, flow_blocks):
    """The next try, with a smaller plan, pins the same addresses again."""
    asked = collections.Counter()

    class Pins(HostMemory):
        def __init__(self, **kwargs):
            super().__init__(**{**kwargs, "can_pin": True})
            asked["made"] += 1

    monkeypatch.setattr(arenas, "HostMemory", Pins)
    driver.room = 500_000
    model = llama(torch.bfloat16)
    with pytest.raises(EngineError, match="cannot pin"):
        OffloadAdamW(model, flow_blocks=flow_blocks)
    lent = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert asked["made"] and set(driver.pinned) <= lent
    driver.room = 10**9
    OffloadAdamW(model, flow_blocks=flow_blocks).close()
