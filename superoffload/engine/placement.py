"""Where the optimizer's threads run and its host memory lies: on the NUMA node of the GPU, strictly.

The decision is a pure function of the topology, the GPU's node and the cores that the process may use. What cannot be
done (a container that forbids it, a node too small) is left undone with the reason kept, never an error: a step is
right wherever its pages lie.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from superoffload.kernels import available_core_list, native
from superoffload.topology import SYS, Node, Topology, callers_cores, format_cpu_list, pci_node, read_topology

NODE_SHARE = 0.9
"""Of a node's memory that may be bound strictly; beyond it the kernel would rather end the process than spill."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where threads and pages go."""

    cores: tuple[int, ...] = ()
    """Of the Adam threads; empty leaves them to the system."""
    node: int | None = None
    """Memory is bound to this node; None does not bind."""
    node_bytes: int = 0
    """Memory of that node; 0 where unknown."""
    reason: str = ""
    """Why so, for people."""

    def __str__(self) -> str:
        threads = f"threads on cores {format_cpu_list(self.cores)}" if self.cores else "threads unbound"
        memory = f"memory on node {self.node}" if self.node is not None else "memory unbound"
        return f"{threads}, {memory} ({self.reason})"


def choose_placement(
    topology: Topology, *, gpu_node: int | None, allowed: Sequence[int], threads: int | None = None
) -> Placement:
    """Decide where `threads` Adam threads and their memory go.

    Args:
        topology: nodes of the machine; memory-only ones are never chosen.
        gpu_node: the GPU's NUMA node, None where unknown.
        allowed: cores that the process may run on.
        threads: None takes all that the node has beyond the caller's.

    Returns:
        Cores that leave the node's lowest to the caller, and the node; unbound, with the reason, where there is one
        node only, the GPU's is unknown, or more threads are wanted than the node has cores.
    """
    if len(topology.nodes) < 2:
        return Placement(reason="one NUMA node")
    if len(topology.cpu_nodes) == 1:
        node: Node | None = topology.cpu_nodes[0]
        why = "the only node with cores"
    else:
        node = topology.cpu_node_near(gpu_node) if gpu_node is not None else None
        why = "the GPU's NUMA node"
    if node is None:
        return Placement(reason="the GPU's NUMA node is unknown")
    cores = sorted(set(node.cores) & set(allowed))
    if not cores:
        return Placement(reason=f"the process may not run on the cores of node {node.index}, {why}")
    if threads is not None and threads > len(cores):
        return Placement(reason=f"{threads} Adam threads are more than the {len(cores)} usable cores of node "
                                f"{node.index}, {why}")  # fmt: skip
    kept = callers_cores(len(cores))
    if threads is not None:
        kept = min(kept, len(cores) - threads)  # who asks for every core gets every core
    return Placement(tuple(cores[kept:]), node.index, node.memory_bytes, why)


def gpu_address(device: torch.device) -> str | None:
    """PCI address of a CUDA device as /sys names it; None where torch does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # an older torch
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def place(device: torch.device, threads: int | None = None, *, sys: Path = SYS) -> Placement:
    """The placement for an optimizer of weights on `device`, on this machine."""
    node = None
    if device.type == "cuda" and (address := gpu_address(device)) is not None:
        node = pci_node(address, sys)
    return choose_placement(read_topology(sys), gpu_node=node, allowed=available_core_list(), threads=threads)


def bind_pages(address: int, size: int, placement: Placement, bound_bytes: int) -> str:
    """Bind fresh pages to the placement's node.

    Args:
        address: of a page that has not been touched.
        size: bytes.
        bound_bytes: bound there already.

    Returns:
        Why not, or "".
    """
    if placement.node is None:
        return placement.reason
    if placement.node_bytes and bound_bytes + size > NODE_SHARE * placement.node_bytes:
        return f"node {placement.node} is too small for all of it"
    code = native.bind_memory(address, size, placement.node)
    if code == 0:
        return ""
    hint = {errno.EPERM: "forbidden here, as in most containers", errno.ENOSYS: "this system has no such call",
            errno.EINVAL: "the process may not use that node's memory"}.get(code, os.strerror(code))  # fmt: skip
    return f"mbind to node {placement.node}: {errno.errorcode.get(code, code)}, {hint}"


__all__ = ["Placement", "bind_pages", "callers_cores", "choose_placement", "gpu_address", "place"]
