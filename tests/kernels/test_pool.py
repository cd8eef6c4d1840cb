"""The thread pool: every tile once, threads where they were told to be, calls that cost little, nothing burnt."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from superoffload import kernels
from superoffload.errors import InputError
from superoffload.topology import parse_cpu_list

pytestmark = pytest.mark.skipif(not kernels.capabilities()["compiled"], reason="the numpy fall-back has no threads")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity is set on Linux only")


def pool_threads() -> dict[int, tuple[int, ...]]:
    """Thread -> cores, of the threads in this process that a pool has started."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() != "so-pool":
                continue
            status = (task / "status").read_text()
        except OSError:
            continue  # ended meanwhile
        line = next(row for row in status.splitlines() if row.startswith("Cpus_allowed_list"))
        found[int(task.name)] = parse_cpu_list(line.split(":")[1])
    return found


@LINUX
def test_threads_are_bound_to_the_chosen_cores_and_the_caller_is_not() -> None:
    before, own = set(pool_threads()), os.sched_getaffinity(0)
    core = max(own)
    pool = kernels.native.Pool(4, [core])
    assert (pool.threads, pool.cores, pool.bind_error) == (4, [core], 0)
    mine = {t: cores for t, cores in pool_threads().items() if t not in before}
    assert list(mine.values()) == [(core,)] * 3
    pool.call_ns(64, 10, 0)
    assert os.sched_getaffinity(0) == own
    del pool
    assert set(pool_threads()) == before, "joined"


@LINUX
def test_without_cores_threads_may_run_wherever_the_process_may() -> None:
    before = set(pool_threads())
    pool = kernels.native.Pool(3)
    mine = {t: cores for t, cores in pool_threads().items() if t not in before}
    assert list(mine.values()) == [tuple(sorted(os.sched_getaffinity(0)))] * 2
    assert pool.cores == []


@LINUX
def test_cores_that_are_not_there_leave_the_threads_unbound_and_say_so() -> None:
    pool = kernels.native.Pool(2, [100_000])
    assert os.strerror(pool.bind_error) == "Invalid argument"
    assert len(pool.call_ns(16, 3, 0)) == 3
    with pytest.raises(InputError, match="cores \\[100000\\]"):
        kernels.bind_cores([100_000])
    with pytest.raises(InputError, match="no cores"):
        kernels.bind_cores([])


def step(n: int, threads: int) -> list[bytes]:
    rng = np.random.default_rng(5)
    p, m, v, g = (rng.standard_normal(n, dtype=np.float32) for _ in range(4))
    v = np.abs(v)
    kernels.adam_step(p, m, v, g, lr=1e-3, step=3, threads=threads)
    partials = np.zeros(-(-n // kernels.native.NORM_CHUNK))
    kernels.norm_partials(g, partials, threads=threads)
    return [x.tobytes() for x in (p, m, v, partials)]


@LINUX
def test_results_are_equal_with_and_without_cores() -> None:
    expected = step(300_001, 1)
    for cores in (None, [min(os.sched_getaffinity(0))], kernels.available_core_list()):
        kernels.bind_cores(cores)
        try:
            assert step(300_001, 3) == expected
        finally:
            kernels.bind_cores(None)


def test_many_small_calls_with_changing_threads_do_every_tile_once() -> None:
    """Late threads of one call must neither take nor lose tiles of the next."""
    n = 16384 * 40
    src = np.arange(n, dtype=np.float32)
    for i in range(1500):
        tiles = 1 + i % 40
        dst = np.full(tiles * 16384, -1, dtype=np.float32)
        kernels.cast(src[: len(dst)], dst, threads=1 + i % 7)
        assert np.array_equal(dst, src[: len(dst)])


def test_callers_on_several_threads_take_turns() -> None:
    src = np.arange(16384 * 8, dtype=np.float32)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(200):
            dst = np.zeros_like(src)
            kernels.cast(src, dst, threads=4)
            if not np.array_equal(dst, src):
                wrong.append(seed * 1000 + i)

    callers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong


@pytest.mark.parametrize("rest_us", [0, 300], ids=["just used", "asleep"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_a_call_costs_less_than_ten_microseconds(tiles: int, rest_us: int) -> None:
    """The lower quartile, and the best of five: on cores that are shared with other processes, the kernel may let a
    woken thread run in its caller's place. Medians belong to the benchmark (`call_overhead_us`)."""
    pool = kernels.native.Pool(kernels.available_cores())
    quartiles = [statistics.quantiles(pool.call_ns(tiles, 200, rest_us), n=4)[0] for _ in range(5)]
    assert min(quartiles) < 10_000, quartiles


def test_an_idle_pool_burns_nothing() -> None:
    pool = kernels.native.Pool(4)
    pool.call_ns(64, 100, 0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
    assert pool.threads == 4


def test_a_forked_child_may_use_and_drop_the_pool() -> None:
    code = """
import os, numpy as np
from superoffload import kernels
pool = kernels.native.Pool(3)
pool.call_ns(64, 20, 0)
src, dst = np.arange(100_000, dtype=np.float32), np.zeros(100_000, dtype=np.float32)
kernels.cast(src, dst, threads=2)
child = os.fork()
if child == 0:
    del pool
    dst[:] = 0
    kernels.cast(src, dst, threads=2)
    os._exit(0 if np.array_equal(src, dst) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"
