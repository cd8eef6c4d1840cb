"""What collectives between Superchips cost: seconds from bytes, by the arrangement that a plan asks for.

The chips of a sequence-parallel group are neighbours, so that they share a board as far as it goes; states are divided
over all chips (ZeRO over both groups together, as DeepSpeed-Ulysses does it). With S bytes and n chips, k of them on
each board (docs/cost_model.md, "Several Superchips"):

    reduce-scatter, all-gather of S bytes    a chip sends S (n - 1) / n, around a ring    [nccl-tests, PERFORMANCE.md]
    all-to-all, S bytes on each chip         (k - 1) / n of S on the board and (n - k) / n of it over the network

A ring that leaves the board uses the adapters of all k chips (NCCL makes k rings); an all-to-all uses each chip's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from superoffload.errors import InputError
from superoffload.hardware import Hardware, Interconnect, Wire
from superoffload.plan import Plan
from superoffload.units import GB


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of the collectives of one step. Without an interconnect there are none, and `chips` is 1."""

    chips: int
    """Over which states are divided."""
    group: int
    """Chips that share a sequence."""
    net: Interconnect | None

    @classmethod
    def of(cls, hardware: Hardware, plan: Plan) -> Collectives:
        """Those of `plan` on `hardware`, which `check_chips` has accepted."""
        return cls(plan.chips, plan.sequence_parallel, hardware.interconnect if plan.chips > 1 else None)

    def sent_bytes(self, nbytes: float) -> int:
        """What one chip sends in a reduce-scatter or all-gather of `nbytes`."""
        return round(nbytes * (self.chips - 1) / self.chips)

    def ring_s(self, nbytes: float) -> float:
        """Seconds of a reduce-scatter or all-gather of `nbytes` over all chips."""
        return ring_seconds(self.net, self.chips, nbytes) if self.net else 0.0

    def exchanged_bytes(self, nbytes: float) -> int:
        """What one chip sends in an all-to-all within its group."""
        return round(nbytes * (self.group - 1) / self.group)

    def all_to_all_s(self, nbytes: float) -> float:
        """Seconds of an all-to-all within a group, `nbytes` on each chip."""
        return all_to_all_seconds(self.net, self.group, nbytes) if self.net and self.group > 1 else 0.0

    @property
    def agree_s(self) -> float:
        """Seconds until all chips know the sum of their partial norms: a few bytes around the ring twice."""
        return 2 * (self.chips - 1) * _latency(self.net, self.chips) if self.net else 0.0


def ring_seconds(net: Interconnect, n: int, nbytes: float) -> float:
    """Seconds of a reduce-scatter or all-gather of `nbytes` over `n` neighbours."""
    if n == 1 or not nbytes:
        return 0.0
    sent = nbytes * (n - 1) / n
    k = min(n, net.board_chips)
    rates = []
    if k > 1 and net.board:
        rates.append(_part(net, net.board, k) * net.board.ring.at(sent))
    if n > k and net.network:
        rates.append(k * net.network.ring.at(sent / k))
    return sent / (min(rates) * GB) + (n - 2) * _latency(net, n)


def all_to_all_seconds(net: Interconnect, n: int, nbytes: float) -> float:
    """Seconds of an all-to-all over `n` neighbours, `nbytes` on each: board and network work side by side."""
    if n == 1 or not nbytes:
        return 0.0
    k = min(n, net.board_chips)
    times = [0.0]
    if k > 1 and net.board:
        sent = nbytes * (k - 1) / n
        times.append(sent / (_part(net, net.board, k) * net.board.all_to_all.at(sent) * GB))
    if n > k and net.network:
        sent = nbytes * (n - k) / n
        times.append(sent / (net.network.all_to_all.at(sent) * GB))
    return max(times) + (n - 2) * _latency(net, n)


def _part(net: Interconnect, board: Wire, k: int) -> float:
    """Share of a chip's links on the board that lead to `k` - 1 of the others."""
    return (k - 1) / (net.board_chips - 1) if board.mesh else 1.0


def _latency(net: Interconnect | None, n: int) -> float:
    """Of the slowest step of a collective over `n` neighbours; the curves have the first exchange in them."""
    if net is None:
        return 0.0
    wire = net.network if n > net.board_chips else net.board
    return wire.latency_s if wire else 0.0


def check_chips(hardware: Hardware, plan: Plan) -> None:
    """Refuse a plan for more chips than there are.

    Raises:
        InputError: with how many there are.
    """
    there = hardware.interconnect.chips if hardware.interconnect else 1
    if plan.chips > there:
        raise InputError(
            f"data_parallel = {plan.data_parallel} and sequence_parallel = {plan.sequence_parallel} are {plan.chips} "
            f"chips, and {hardware.name} has {there}",
            expected=f"a product of at most {there}",
            remedy=None if hardware.interconnect else 'Name several, as in "gh200-quad-x8" (--chips 8)',
        )
