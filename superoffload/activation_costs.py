"""What each activation policy costs a block: bytes on the GPU, on the host and over the link, seconds of recompute.

Planner, ledger and simulator ask here; `engine/activations.py` does what is counted. Only layers have a policy: the
embedding keeps next to nothing, and the head is the first that backward needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superoffload.errors import InputError
from superoffload.plan import Activations, Plan
from superoffload.units import MIB

if TYPE_CHECKING:
    from superoffload.profiler import BlockProfile

OFFLOAD_MIN_BYTES = 1 * MIB
"""Storages below this stay on the GPU: on a 50 GB/s link the launch of a copy takes as long as 1 MiB does, and what is
smaller than that holds next to nothing."""
KEEP_FLOPS_PER_BYTE = 128
"""FLOPs per byte of result from which `selective` keeps a weight product. Hopper's balance is about 150 (700 TFLOP/s to
4.8 TB/s): below it a product costs what moving its bytes costs, like the operations that are recomputed anyway."""
IN_FLIGHT_BLOCKS = 2
"""Blocks whose offloaded tensors are on the GPU at a time: in forward the one at work and the one whose copies may
still run, in backward the one at work and the one that is being fetched."""


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """One block under one policy, for one micro-batch."""

    kept: int
    """GPU bytes from the block's forward to its backward."""
    again: int
    """GPU bytes that its backward makes anew beside those."""
    moved: int
    """Bytes that go down the link in forward, lie in pinned host memory and come up again in backward."""
    recompute_s: float
    """Seconds of GPU work that backward repeats."""


def block_seconds(block: BlockProfile, *, compiled: bool = False) -> tuple[float, float]:
    """Seconds of a block's forward and of its backward, nothing recomputed. Only layers are compiled.

    Raises:
        InputError: `compiled`, and the profile does not say how long that takes.
    """
    if not compiled or block.kind != "layer":
        return block.forward_s, block.backward_s
    if block.compiled_forward_s is None or block.compiled_backward_s is None:
        raise _not_measured(block)
    return block.compiled_forward_s, block.compiled_backward_s


def _not_measured(block: BlockProfile) -> InputError:
    return InputError(
        f"the profile does not say what {block.name} costs under compile_blocks = True",
        remedy="Profile the model again with compile_blocks=True (superoffload profile --compile-blocks), or choose "
        "compile_blocks = False",
    )


def knows_compiled(blocks: Sequence[BlockProfile]) -> bool:
    """Whether there are layers and the profile says of each what it costs under `compile_blocks`."""
    layers = [b for b in blocks if b.kind == "layer"]
    known = all(None not in (b.compiled_forward_s, b.compiled_backward_s, b.compiled_bytes) for b in layers)
    return bool(layers) and known


def block_cost(block: BlockProfile, policy: Activations, *, compiled: bool = False) -> ActivationCost:
    """Cost of `block` under `policy`; a block that is no layer keeps everything under any.

    Args:
        compiled: the plan's `compile_blocks`; not with `selective` (`plan.check_compile`).

    Raises:
        InputError: `selective` or `compiled`, and the profile does not say what is kept.
    """
    everything, entry = block.activation_bytes, block.input_bytes
    if compiled and block.kind == "layer":
        if block.compiled_bytes is None:
            raise _not_measured(block)
        everything = max(entry, block.compiled_bytes)
    forward_s, _ = block_seconds(block, compiled=compiled)
    if block.kind != "layer" or policy == "none":
        return ActivationCost(everything, 0, 0, 0.0)
    # A compiled layer is one program, which is repeated whole.
    again_s = forward_s if compiled or block.full_recompute_s is None else block.full_recompute_s
    if policy == "full":
        return ActivationCost(entry, everything - entry, 0, again_s)
    if policy == "selective":
        if block.selective_bytes is None or block.selective_recompute_s is None:
            raise InputError(
                f"the profile does not say what {block.name} keeps under activations = selective",
                remedy="Profile the model again with this version, or choose none or full",
            )
        return ActivationCost(
            block.selective_bytes, max(0, everything - block.selective_bytes), 0, block.selective_recompute_s
        )
    moved = entry if policy == "offload_inputs" else everything
    if moved < OFFLOAD_MIN_BYTES:
        return block_cost(block, "full" if policy == "offload_inputs" else "none", compiled=compiled)
    if policy == "offload_inputs":
        return ActivationCost(0, everything - entry, entry, again_s)
    return ActivationCost(0, 0, everything, 0.0)


def _working_bytes(block: BlockProfile, *, compiled: bool) -> int:
    if compiled and block.kind == "layer" and block.compiled_working_bytes is not None:
        return block.compiled_working_bytes
    return block.working_bytes


@dataclass(frozen=True, slots=True)
class Choices:
    """What a plan chooses about activations, to remember answers by."""

    activations: Activations
    by_block: tuple[tuple[int, Activations], ...]
    compile_blocks: bool

    def plan(self) -> Plan:
        """A plan that chooses this."""
        return Plan(
            activations=self.activations, activations_by_block=dict(self.by_block), compile_blocks=self.compile_blocks
        )


def choices_of(plan: Plan) -> Choices:
    return Choices(plan.activations, tuple(sorted(plan.activations_by_block.items())), plan.compile_blocks)


def policies_of(blocks: Sequence[BlockProfile], plan: Plan) -> list[Activations]:
    """The policy of each block; `none` where it is no layer."""
    return [plan.activations_of(i) if b.kind == "layer" else "none" for i, b in enumerate(blocks)]


def peaks(blocks: Sequence[BlockProfile], plan: Plan) -> list[int]:
    """GPU bytes at the largest moment of each block: what all blocks up to it keep, what its backward makes anew and
    what it needs in passing. Offloaded tensors in flight are not counted."""
    kept, found = 0, []
    for block, policy in zip(blocks, policies_of(blocks, plan), strict=True):
        cost = block_cost(block, policy, compiled=plan.compile_blocks)
        kept += cost.kept
        found.append(kept + cost.again + _working_bytes(block, compiled=plan.compile_blocks))
    return found


def check_policies(kinds: Sequence[str], plan: Plan) -> None:
    """Refuse overrides for blocks that do not exist or have no policy.

    Args:
        kinds: `kind` of each block.

    Raises:
        InputError: names the block and those that may be named.
    """
    layers = [i for i, kind in enumerate(kinds) if kind == "layer"]
    for i in plan.activations_by_block:
        if i not in layers:
            expected = f"layers, blocks {layers[0]} to {layers[-1]}" if layers else "nothing: the model has no layers"
            raise InputError(f"activations_by_block names block {i}", expected=expected)
