"""NUMA topology from /sys: trees as real machines have them, and with parts missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from superoffload import doctor, topology
from superoffload.topology import Node, Topology, format_cpu_list, parse_cpu_list, pci_node, read_topology

GB = 10**9


def tree(root: Path, nodes: dict[int, tuple[str, int, str]], gpus: dict[str, str] | None = None) -> Path:
    """A fake /sys: node -> (cpulist, memory in kB, distances); PCI address -> numa_node."""
    for index, (cpus, kilobytes, distances) in nodes.items():
        folder = root / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(
            f"Node {index} MemTotal:       {kilobytes} kB\nNode {index} MemFree:        {kilobytes // 2} kB\n"
        )
        (folder / "distance").write_text(distances + "\n")
    for address, node in (gpus or {}).items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    return root


def gh200(root: Path) -> Path:
    """One Grace with its LPDDR, the HBM as node 1, and the empty nodes that are reserved for partitions of the GPU."""
    nodes = {0: ("0-71", 501_000_000, " ".join(["10"] + ["80"] * 8)), 1: ("", 97_000_000, "80 10" + " 255" * 7)}
    nodes |= {
        i: ("", 0, " ".join("10" if j == i else "80" if j == 0 else "255" for j in range(9))) for i in range(2, 9)
    }
    return tree(root, nodes, {"0009:01:00.0": "0"})


def dual_socket(root: Path) -> Path:
    nodes = {0: ("0-15,32-47", 256_000_000, "10 21"), 1: ("16-31,48-63", 256_000_000, "21 10")}
    return tree(root, nodes, {"0000:3b:00.0": "0", "0000:af:00.0": "1", "0000:d8:00.0": "-1"})


def test_the_hbm_of_a_gh200_is_a_node_without_cores(tmp_path: Path) -> None:
    found = read_topology(gh200(tmp_path))
    assert [n.index for n in found.nodes] == list(range(9))
    assert [n.index for n in found.cpu_nodes] == [0] and found.cpu_nodes[0].cores == tuple(range(72))
    assert [n.index for n in found.memory_only] == list(range(1, 9))
    assert found.cpu_node_near(0) == found.cpu_node_near(1) == found.nodes[0]
    assert pci_node("0009:01:00.0", tmp_path) == 0


def test_each_gpu_of_a_dual_socket_machine_has_its_node(tmp_path: Path) -> None:
    found = read_topology(dual_socket(tmp_path))
    assert [len(n.cores) for n in found.nodes] == [32, 32]
    assert found.nodes[1].cores[:2] == (16, 17) and found.nodes[1].memory_bytes == 256_000_000 * 1024
    assert pci_node("0000:3b:00.0", tmp_path) == 0
    assert pci_node("0000:AF:00.0", tmp_path) == 1  # torch and nvidia-smi differ in the letters' case
    assert pci_node("0000:d8:00.0", tmp_path) is None, "-1 is Linux for unknown"
    assert pci_node("0000:00:01.0", tmp_path) is None


def test_a_single_node_and_nothing_at_all(tmp_path: Path) -> None:
    one = read_topology(tree(tmp_path / "one", {0: ("0-1", 24_000_000, "10")}))
    assert one.nodes == (Node(0, (0, 1), 24_000_000 * 1024, (10,)),) and not one.memory_only
    assert read_topology(tmp_path / "none") == Topology(())
    assert Topology(()).cpu_node_near(0) is None


def test_missing_files_leave_their_fields_empty(tmp_path: Path) -> None:
    root = dual_socket(tmp_path)
    for name in ("meminfo", "distance"):
        (root / "devices/system/node/node1" / name).unlink()
    (root / "devices/system/node/node0/cpulist").unlink()
    a, b = read_topology(root).nodes
    assert a.cores == () and b.cores and b.memory_bytes == 0 and b.distances == ()


def test_the_nearest_node_with_cores_is_taken_by_distance(tmp_path: Path) -> None:
    nodes = {0: ("0-3", 10**6, "10 20 40"), 1: ("4-7", 10**6, "20 10 17"), 2: ("", 10**6, "40 17 10")}
    found = read_topology(tree(tmp_path, nodes))
    near = found.cpu_node_near(2)
    assert near is not None and near.index == 1
    (tmp_path / "devices/system/node/node2/distance").write_text("")
    assert read_topology(tmp_path).cpu_node_near(2) is None, "a guess would be worse than not binding"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", ()), ("0", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0-1,8,10-11", (0, 1, 8, 10, 11)), ("0-7:2/4", (0, 1, 4, 5))],
)
def test_cpu_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cores
    assert parse_cpu_list(format_cpu_list(cores)) == cores


def test_format_cpu_list_joins_neighbours_only() -> None:
    assert format_cpu_list((8, 0, 1, 2, 10)) == "0-2,8,10"


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0-3:2"])
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU list"):
        parse_cpu_list(text)


def test_doctor_names_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.read_topology, "__defaults__", (gh200(tmp_path / "gh200"),))
    (line,) = doctor._numa()
    assert line.status == "ok" and "0 (cores 0-71, 513.02 GB)" in line.value and "1 (memory only" in line.value
    monkeypatch.setattr(topology.read_topology, "__defaults__", (dual_socket(tmp_path / "dual"),))
    (line,) = doctor._numa()
    assert line.status == "note" and "cores 16-31,48-63" in line.value and "numactl" in line.remedy
    monkeypatch.setattr(topology.read_topology, "__defaults__", (tmp_path / "nothing",))
    (line,) = doctor._numa()
    assert (line.status, line.value) == ("ok", "one node")
