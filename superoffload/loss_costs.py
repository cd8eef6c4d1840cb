"""What a loss in chunks costs (`Plan.loss_chunks`): bytes of the head's block, and how many chunks are enough.

Planner and ledger ask here; `engine/loss.py` does what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from superoffload.activation_costs import Choices, choices_of, peaks
from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.quickly import remembered

if TYPE_CHECKING:
    from superoffload.profiler import BlockProfile, Profile

CHUNK_LOGIT_BYTES = 8
"""Bytes held for each logit of a chunk at its peak: the logits in float32, and their log-probabilities. (Before that
16-bit logits beside their float32 copy are 6, afterwards float32 gradients beside their 16-bit copy are 6 again.)"""
MIN_CHUNK_TOKENS = 512
"""Chunks that the planner makes are no smaller: a product over fewer tokens is bound by reading its weight, and each
chunk reads and writes the whole gradient of the weight."""


def in_chunks(block: BlockProfile, chunks: int) -> BlockProfile:
    """`block` with the bytes that it has where the loss is computed in `chunks`; only the head's change.

    The weight's gradient, which forward makes, is not in them: it is the ledger's "gradient being produced".
    """
    if chunks == 1 or block.logits is None:
        return block
    assert block.chunked_activation_bytes is not None
    assert block.chunked_working_bytes is not None
    working = block.chunked_working_bytes + CHUNK_LOGIT_BYTES * -(-block.logits // chunks)
    return block.model_copy(update={"activation_bytes": block.chunked_activation_bytes, "working_bytes": working})


def can_chunk(blocks: Sequence[BlockProfile]) -> bool:
    """Whether the profile says that the engine can compute this model's loss in chunks."""
    return any(b.logits is not None for b in blocks)


def check_loss_chunks(blocks: Sequence[BlockProfile], plan: Plan) -> None:
    """Refuse chunks for a model that is not known to have such a loss.

    Raises:
        InputError: with what the model needs.
    """
    if plan.loss_chunks > 1 and not can_chunk(blocks):
        raise InputError(
            f"loss_chunks = {plan.loss_chunks}, and the profile does not say that this model's loss can be computed in "
            "chunks",
            expected="a Hugging Face causal language model, profiled or estimated by this version",
            remedy="Plan with loss_chunks=1; a model of your own can call superoffload.chunked_cross_entropy",
        )


def enough_chunks(profile: Profile, plan: Plan) -> int:
    """The fewest chunks, a power of two, with which the head does not decide the activations' peak under the plan's
    policies; as many as leave `MIN_CHUNK_TOKENS` to each where none are enough. 1 where the loss has no chunks."""
    return _enough(profile.blocks, profile.tokens, choices_of(plan))


@remembered(256)
def _enough(blocks: tuple[BlockProfile, ...], tokens: int, choices: Choices) -> int:
    if not can_chunk(blocks):
        return 1
    chunks, plan = 1, choices.plan()
    while tokens // (2 * chunks) >= MIN_CHUNK_TOKENS:
        every = peaks([in_chunks(b, chunks) for b in blocks], plan)
        head = max(n for n, b in zip(every, blocks, strict=True) if b.logits is not None)
        if head <= max((n for n, b in zip(every, blocks, strict=True) if b.logits is None), default=0):
            break
        chunks *= 2
    return chunks
