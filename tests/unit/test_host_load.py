"""What else a machine did while something was measured on it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from superoffload import host_load
from superoffload.host_load import DISTURBED, KEY, BusyMachine, HostLoad, HostWatch

TICK = 100
LINE = "cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1 2 3\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine of four cores whose clocks and counters are set by hand; the process may use all or two of them."""

    class Machine:
        wall = own = 0.0
        usable = 4

        def says(self, **ticks: int) -> None:
            host_load.STAT.write_text(LINE.format(**ticks))

    at = Machine()
    monkeypatch.setattr(host_load, "STAT", tmp_path / "stat")
    monkeypatch.setattr(host_load.os, "sysconf", lambda name: TICK)
    monkeypatch.setattr(host_load.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(host_load, "usable_cores", lambda: at.usable)
    monkeypatch.setattr(host_load.time, "perf_counter", lambda: at.wall)
    monkeypatch.setattr(host_load.time, "process_time", lambda: at.own)
    return at


def test_what_was_not_ours_was_others(machine) -> None:
    machine.says(user=1000, idle=5000, steal=100)
    watch = HostWatch()
    machine.wall, machine.own = 10.0, 15.0
    machine.says(user=1000 + 30 * TICK, idle=5900, steal=100 + 5 * TICK)  # 30 s of work in 10 s, 15 of them ours
    load = watch.load()
    assert load == HostLoad(others=1.5, stolen=0.5, cores=4)
    assert str(load) == "other processes kept 1.5 of 4 cores busy, the hypervisor took 0.5"
    with pytest.warns(BusyMachine, match="the profile was measured while other processes kept 1.5 of 4 cores busy"):
        assert set(load.noted("the profile")) == {KEY, DISTURBED}


def test_others_on_cores_that_are_not_ours_do_not_count(machine) -> None:
    machine.says(user=0, idle=0, steal=0)
    machine.usable = 2
    watch = HostWatch()
    machine.wall, machine.own = 10.0, 20.0
    machine.says(user=40 * TICK, idle=0, steal=0)  # two cores' worth, and two there are beside ours
    load = watch.load()
    assert load == HostLoad(others=0.0, stolen=0.0, cores=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load.noted("the profile") == {KEY: "other processes kept 0.0 of 2 cores busy"}


def test_a_system_that_does_not_say_claims_nothing(machine) -> None:
    machine.wall = 1.0
    assert HostWatch().noted("the profile") == {}


def test_this_machine_says_something_of_itself() -> None:
    watch = HostWatch()
    sum(range(3_000_000))
    load = watch.load()
    assert load is None or (load.others >= 0 and load.stolen >= 0 and load.cores >= 1)
