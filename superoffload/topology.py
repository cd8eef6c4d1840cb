"""The machine's NUMA nodes as Linux describes them: which have cores, how much memory, how far apart.

A node without cores is memory only. On a GH200 the GPU's HBM is such a node; host memory that is not bound strictly
spills into it, where it costs the model's room and is slow for the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
LARGE_NODE = 8
"""Cores from which on two are left to the caller instead of one."""


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node."""

    index: int
    cores: tuple[int, ...]
    """Logical CPUs, ascending; empty for a memory-only node."""
    memory_bytes: int
    """Total memory; 0 where unknown."""
    distances: tuple[int, ...] = ()
    """To the nodes of the machine in ascending order of index, 10 to itself (the firmware's SLIT); may be empty."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All nodes, ascending by index; empty where the system does not say."""

    nodes: tuple[Node, ...]

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.cores)

    @property
    def memory_only(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if not n.cores)

    def cpu_node_near(self, index: int) -> Node | None:
        """Node `index`, or where that one has no cores the nearest that has; None if `index` is unknown."""
        node = next((n for n in self.nodes if n.index == index), None)
        if node is None or node.cores:
            return node
        place = {n.index: i for i, n in enumerate(self.nodes)}
        if len(node.distances) != len(self.nodes):
            return None
        return min(self.cpu_nodes, key=lambda n: (node.distances[place[n.index]], n.index), default=None)

    def describe(self) -> str:
        """One line: ``"2 nodes: 0 (cores 0-71, 480.00 GB), 1 (memory only, 96.00 GB)"``."""
        from superoffload.units import format_bytes

        if not self.nodes:
            return "one node, or unknown"
        parts = [
            f"{n.index} ({f'cores {format_cpu_list(n.cores)}' if n.cores else 'memory only'}"
            f"{f', {format_bytes(n.memory_bytes)}' if n.memory_bytes else ''})"
            for n in self.nodes
        ]
        return f"{len(parts)} node{'s' if len(parts) > 1 else ''}: {', '.join(parts)}"


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``parse_cpu_list("0-2,8") == (0, 1, 2, 8)``; also with strides, ``"0-6:2/4"``.

    Raises:
        ValueError: another format.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", part.strip())
        if match is None:
            raise ValueError(f"not a CPU list: {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        used, group = int(match[3] or 1), int(match[4] or 1)
        found.update(i for i in range(first, last + 1) if (i - first) % group < used)
    return tuple(sorted(found))


def format_cpu_list(cores: Iterable[int]) -> str:
    """The inverse of `parse_cpu_list`: ``format_cpu_list((0, 1, 2, 8)) == "0-2,8"``."""
    spans: list[list[int]] = []
    for core in sorted(set(cores)):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def read_topology(sys: Path = SYS) -> Topology:
    """Read the nodes from `sys`/devices/system/node. What is missing or unreadable is left empty: a container may hide
    any of it."""
    nodes = []
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        if not folder.name.removeprefix("node").isdigit():
            continue
        index = int(folder.name.removeprefix("node"))
        cores = parse_cpu_list(_read(folder / "cpulist"))
        total = re.search(r"MemTotal:\s+(\d+) kB", _read(folder / "meminfo"))
        distances = tuple(int(d) for d in _read(folder / "distance").split())
        nodes.append(Node(index, cores, int(total[1]) * 1024 if total else 0, distances))
    return Topology(tuple(sorted(nodes, key=lambda n: n.index)))


def pci_node(address: str, sys: Path = SYS) -> int | None:
    """NUMA node of a PCI device by its address ("0000:3b:00.0"), or None: not there, or the firmware does not say
    (Linux then writes -1, as in most virtual machines)."""
    text = _read(sys / "bus/pci/devices" / address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def callers_cores(cores: int) -> int:
    """How many of `cores` are left to the caller: PyTorch's launching thread and autograd's need theirs."""
    return 0 if cores < 2 else 2 if cores >= LARGE_NODE else 1


__all__ = ["Node", "Topology", "callers_cores", "format_cpu_list", "parse_cpu_list", "pci_node", "read_topology"]
