"""Where Adam's threads and memory go, decided for machines that are not here and done on the one that is."""

from __future__ import annotations

import contextlib
import errno
from types import SimpleNamespace

import pytest
import torch

from superoffload.engine import OffloadAdamW, arguments, host_memory
from superoffload.engine import placement as module
from superoffload.engine.host_memory import MAPPED_BYTES, HostMemory
from superoffload.engine.placement import Placement, bind_pages, choose_placement, gpu_address, place
from superoffload.kernels import native
from superoffload.topology import Node, Topology, callers_cores, read_topology
from tests.engine.common import llama

GH200 = Topology((Node(0, tuple(range(72)), 513 * 10**9, (10, 80)), Node(1, (), 99 * 10**9, (80, 10))))
DUAL = Topology((Node(0, tuple(range(16)), 10**11, (10, 21)), Node(1, tuple(range(16, 32)), 10**11, (21, 10))))
ELEMENTS = MAPPED_BYTES // 4 + 1000


def test_on_a_gh200_memory_stays_out_of_the_hbm() -> None:
    for gpu_node in (None, 0, 1):  # whatever the firmware says of the GPU
        found = choose_placement(GH200, gpu_node=gpu_node, allowed=range(72))
        assert found.node == 0 and found.node_bytes == 513 * 10**9
        assert found.cores == tuple(range(2, 72)), "the lowest two are the caller's"


def test_on_two_sockets_the_gpus_decides() -> None:
    assert choose_placement(DUAL, gpu_node=1, allowed=range(32)).cores == tuple(range(18, 32))
    unknown = choose_placement(DUAL, gpu_node=None, allowed=range(32))
    assert unknown.cores == () and unknown.node is None and "unknown" in unknown.reason


def test_the_processs_own_affinity_counts() -> None:
    found = choose_placement(DUAL, gpu_node=1, allowed=(0, 1, 20, 21, 22))
    assert found.cores == (21, 22), "three usable cores: one for the caller"
    refused = choose_placement(DUAL, gpu_node=1, allowed=range(16))
    assert refused.node is None and "may not run on the cores of node 1" in refused.reason


@pytest.mark.parametrize(("threads", "first"), [(1, 18), (14, 18), (15, 17), (16, 16)])
def test_who_asks_for_more_threads_gets_the_callers_cores_too(threads: int, first: int) -> None:
    assert choose_placement(DUAL, gpu_node=1, allowed=range(32), threads=threads).cores == tuple(range(first, 32))


def test_more_threads_than_the_node_has_are_left_to_the_system() -> None:
    found = choose_placement(DUAL, gpu_node=1, allowed=range(32), threads=17)
    assert found.cores == () and found.node is None and "17 Adam threads are more than the 16" in found.reason


def test_one_node_needs_no_binding() -> None:
    for topology in (Topology(()), Topology((DUAL.nodes[0],))):
        assert choose_placement(topology, gpu_node=0, allowed=range(16)) == Placement(reason="one NUMA node")


def test_default_threads_leave_the_callers_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [callers_cores(n) for n in (1, 2, 7, 8, 72)] == [0, 1, 1, 2, 2]
    for cores, threads in ((1, 1), (2, 1), (7, 6), (16, 14)):
        monkeypatch.setattr(arguments, "available_cores", lambda n=cores: n)
        assert arguments.default_adam_threads() == threads
        assert arguments.default_adam_threads(Placement(reason="one NUMA node")) == threads
    near = choose_placement(DUAL, gpu_node=1, allowed=range(32))
    assert arguments.default_adam_threads(near) == 14, "of 32: those of the GPU's node"
    monkeypatch.setattr(arguments, "place", lambda device: near)
    assert arguments.resolve_plan(None, {}, torch.device("cpu")).adam_threads == 14
    assert arguments.resolve_plan(None, {"adam_threads": 3}, torch.device("cpu")).adam_threads == 3


def test_a_gpus_address_is_the_one_of_sys(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(pci_domain_id=9, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    assert gpu_address(torch.device("cuda", 0)) == "0009:af:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="older torch"))
    assert gpu_address(torch.device("cuda", 0)) is None


def test_this_machine_can_be_placed_on() -> None:
    found = place(torch.device("cpu"))
    assert found.reason
    assert (found.node is None) == (not found.cores)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EPERM, "EPERM, forbidden"), (errno.ENOSYS, "ENOSYS"), (errno.EINVAL, "EINVAL")]
)
def test_memory_that_may_not_be_bound_is_used_unbound(monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module.native, "bind_memory", lambda *a: calls.append(a) or code)
    host = HostMemory(can_pin=False, placement=Placement((0,), 0, 0, "a test"))
    x = host.zeros(ELEMENTS, torch.float32)
    assert calls == [(x.data_ptr(), 4 * ELEMENTS, 0)]
    assert words in host.unbound_reason and host.bound_bytes == 0
    assert host.pageable_bytes == 4 * ELEMENTS and not x.any()


def test_threads_that_may_not_be_bound_touch_the_pages_unbound() -> None:
    host = HostMemory(can_pin=False, placement=Placement((100_000,), None, 0, "a test"), threads=2)
    x = host.zeros(ELEMENTS, torch.float32)
    assert "Invalid argument" in host.unbound_reason and not x.any()


def test_bound_memory_lies_on_its_node() -> None:
    nodes = read_topology().cpu_nodes
    if not nodes:
        pytest.skip("this system does not describe its nodes")
    node = nodes[-1]
    host = HostMemory(can_pin=False, placement=Placement(node.cores, node.index, node.memory_bytes, "a test"))
    x = host.zeros(ELEMENTS, torch.float32)
    if host.unbound_reason:
        pytest.skip(f"not allowed here: {host.unbound_reason}")
    assert host.bound_bytes == 4 * ELEMENTS
    end = x.data_ptr() + 4 * (ELEMENTS - 1)
    assert native.node_of_page(x.data_ptr()) == native.node_of_page(end) == node.index


def test_a_node_that_is_not_there_is_refused_by_the_kernel() -> None:
    code = native.bind_memory(HostMemory(can_pin=False).zeros(ELEMENTS, torch.float32).data_ptr(), 4096, 1000)
    assert code in (errno.EINVAL, errno.EPERM, errno.ENOSYS)


def test_a_node_that_is_too_small_is_not_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.native, "bind_memory", lambda *a: 0)
    small = Placement((0,), 0, 1000, "a test")
    assert bind_pages(0, 500, small, 0) == "" and bind_pages(0, 400, small, 500) == ""
    assert "too small" in bind_pages(0, 401, small, 500), "a tenth is left to everything else"


def test_host_memory_accounts_exactly_and_outlives_its_owner() -> None:
    host = HostMemory(can_pin=False, threads=3)
    small, large = host.zeros(7, torch.int64), host.zeros(ELEMENTS, torch.bfloat16, pinned=True)
    empty = host.zeros(0, torch.float32)
    huge = host.zeros(4 * ELEMENTS, torch.float32)
    assert host.pageable_bytes == 56 + 2 * ELEMENTS + 16 * ELEMENTS and host.pinned_bytes == 0
    assert (small.numel(), large.numel(), empty.numel()) == (7, ELEMENTS, 0)
    assert not huge.any() and huge.dtype == torch.float32 and huge.is_contiguous()
    del host
    huge.fill_(1.0)
    assert float(huge.sum()) == 4 * ELEMENTS


def test_touching_much_memory_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, the last one smaller; nothing is shown for little memory, or once the body has ended."""
    import tqdm.auto

    bars: list[tuple[int, list[int]]] = []

    class Bar:
        def __init__(self, *, total: int, **_: object):
            bars.append((total, []))

        def update(self, n: int) -> None:
            bars[-1][1].append(n)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    host = HostMemory(can_pin=False, threads=2)
    with host.showing(host_memory.SHOWN_FROM_BYTES - 1):
        host.zeros(ELEMENTS, torch.float32)
    assert not bars
    monkeypatch.setattr(host_memory, "TOUCH_BYTES", 4 * 2**20)
    with host.showing(host_memory.SHOWN_FROM_BYTES):
        tensor = host.zeros(10 * 2**20 // 4, torch.float32)
    host.zeros(ELEMENTS, torch.float32)
    assert bars == [(host_memory.SHOWN_FROM_BYTES, [4 * 2**20, 4 * 2**20, 2 * 2**20])]
    assert not tensor.any()


def test_an_optimizer_says_how_much_host_memory_it_is_about_to_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(HostMemory, "showing", lambda self, total: asked.append(total) or contextlib.nullcontext())
    with OffloadAdamW(llama(), bucket_mb=0.1, flow_blocks=(1,), speculate="on") as opt:
        homes = sum(b.weights.nbytes for b in opt.engine.arenas.buckets if b.flow)
        touched = opt.engine.arenas.host.pageable_bytes - homes
    assert len(asked) == 1 and asked[0] == pytest.approx(touched, rel=2e-3)
