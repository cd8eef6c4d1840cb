"""The model's weights as the engine keeps them: their version counters, edits that others made, and the state of one
parameter across its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from superoffload.engine.arenas import Arenas
from superoffload.engine.blocks import Block
from superoffload.engine.buckets import DTYPES, ManagedParam
from superoffload.errors import EngineError


class Weights:
    """Knows which version of each weight is the engine's own, and reads and writes state by parameter."""

    def __init__(self, arenas: Arenas):
        self._arenas = arenas
        self._versions = [p.param._version for p in arenas.params]
        self._rejected: dict[str, None] = {}
        """Parameters that somebody wrote while the worker did; told at the next call."""

    def bump(self, params: Sequence[ManagedParam]) -> None:
        """Tell autograd that these weights are new: a graph that saved older ones must not be used."""
        torch.autograd.graph.increment_version([p.param for p in params])
        for p in params:
            self._versions[p.index] = p.param._version

    def edited(self) -> list[ManagedParam]:
        """Parameters that somebody has written in place since the engine last did.

        Edits are noticed by the parameter's version counter; one through `p.data` does not count there.
        """
        return [p for p in self._arenas.params if self.is_edited(p)]

    def is_edited(self, p: ManagedParam) -> bool:
        return p.param._version != self._versions[p.index]

    def adopt(self, p: ManagedParam) -> None:
        """Carry an edited weight (a loaded checkpoint, a clamp) into its fp32 master, as torch's AdamW would see it.
        Where a weight still is its master rounded, the master is kept. A flow block's split master has no other upper
        half than the weight at home: written there, the lower halves of the whole parameter mean nothing any more."""
        for index, s in p.places:
            b = self._arenas.buckets[index]
            span = slice(s.start, s.start + s.numel)
            # Of a flow block the parameter may lie in the slot or at home; it says where.
            weights = p.param.detach().reshape(-1)[s.offset : s.offset + s.numel].to(b.exp_avg.device)
            if b.remainder is not None and b.flow and p.address == p.home.data_ptr():
                b.write("master", span, weights)
            elif b.remainder is not None or b.master.data_ptr() != b.weights.data_ptr() or b.flow:
                master = b.read("master", span)
                kept = master.to(weights.dtype) == weights
                b.write("master", span, torch.where(kept, master, weights.float()))
            if b.flow:
                b.weights[span].copy_(weights)
            elif b.out is not None:
                b.out[span].copy_(weights)
        self._versions[p.index] = p.param._version

    def reject(self, edited: Iterable[ManagedParam]) -> None:
        """Take back an edit that raced with the worker, so that it was overwritten or made to weights of the next step:
        the weights are those of the last update again (of a flow block at home; a slot is fetched anew)."""
        for p in edited:
            for index, s in p.places:
                b = self._arenas.buckets[index]
                span = slice(s.start, s.start + s.numel)
                b.weights[span].copy_(b.read("master", span) if b.out is None or b.flow else b.out[span])
            self._rejected[p.name] = None

    def tell_rejected(self) -> None:
        """Raise for edits that were rejected since the last call."""
        names = list(self._rejected)
        self._rejected.clear()
        if names:
            raise EngineError(
                f"{names[0]} {f'and {len(names) - 1} others were' if names[1:] else 'was'} written in place while "
                "the optimizer was updating the weights, so that nobody knows what was read or is overwritten",
                expected="weights to be written when no update runs",
                remedy="Call opt.synchronize() before writing weights, or write them before backward",
            )

    def check_storage(self) -> None:
        """The weights must still lie in the arena: elsewhere they would never see an update."""
        for p in self._arenas.params:
            if p.places and p.param.data_ptr() != p.address:
                raise EngineError(
                    f"the storage of {p.name} was replaced (by model.to(...) or `p.data = ...`)",
                    expected="weights to stay where the optimizer put them; writing into them in place is fine",
                    remedy="Move or cast the model first and make the OffloadAdamW afterwards; state_dict() carries "
                    "the moments over",
                )

    def gather(self, p: ManagedParam, kind: str) -> torch.Tensor:
        """`master`, `exp_avg` or `exp_avg_sq` of a parameter on the CPU, in its shape: a view where it lies in one
        piece, else a copy."""
        pieces: list[torch.Tensor] = [
            self._arenas.buckets[i].read(kind, slice(s.start, s.start + s.numel)) for i, s in p.places
        ]
        if not pieces:
            return torch.zeros(p.param.shape, dtype=torch.float32, device="cpu")
        if len(pieces) == 1:
            return pieces[0].cpu().view(p.param.shape)
        return torch.cat([x.cpu() for x in pieces]).view(p.param.shape)

    def scatter(self, p: ManagedParam, kind: str, value: torch.Tensor) -> None:
        """Set one of them. A new master also becomes the parameter's weights, here and in the copy that goes up."""
        flat = value.detach().reshape(-1)
        for index, s in p.places:
            b = self._arenas.buckets[index]
            span, piece = slice(s.start, s.start + s.numel), flat[s.offset : s.offset + s.numel]
            b.write(kind, span, piece)
            if kind == "master":
                rounded = b.read("master", span).to(DTYPES[p.dtype])
                b.weights[span].copy_(rounded)
                if b.out is not None:
                    b.out[span].copy_(rounded)
        if kind == "master":
            self._versions[p.index] = p.param._version


def who_reads_what(
    blocks: Sequence[Block], params: Sequence[ManagedParam], arenas: Arenas
) -> tuple[list[list[ManagedParam]], list[list[int]], list[set[int]]]:
    """Block -> the parameters that its forward reads, a tied one too, and their buckets; bucket -> these blocks."""
    managed = {id(p.param): p for p in params}
    reads: list[list[ManagedParam]] = [[] for _ in blocks]
    for p in params:
        reads[p.block].append(p)
    for mine, block in zip(reads, blocks, strict=True):
        mine += [managed[id(q)] for q in block.shared if id(q) in managed]
    buckets = [list(dict.fromkeys(index for p in mine for index, _ in p.places)) for mine in reads]
    readers: list[set[int]] = [set() for _ in arenas.buckets]
    for i, indices in enumerate(buckets):
        for index in indices:
            readers[index].add(i)
    return reads, buckets, readers


__all__ = ["Weights", "who_reads_what"]
