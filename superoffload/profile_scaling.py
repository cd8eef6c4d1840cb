"""The same model's profile for another batch, another machine, or with corrected times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.hardware import Hardware, resolve
from superoffload.model import ModelSpec
from superoffload.profiler import BlockProfile, Profile

SECONDS = (
    "forward_s", "backward_s", "selective_recompute_s", "full_recompute_s", "compiled_forward_s", "compiled_backward_s",
)  # fmt: skip
"""Times of a block."""
COUNTS = (
    "input_bytes", "activation_bytes", "working_bytes", "selective_bytes", "compiled_bytes", "compiled_working_bytes",
    "logits", "chunked_activation_bytes", "chunked_working_bytes",
)  # fmt: skip
"""Whole numbers of a block that grow with the tokens."""


def rescale(
    profile: Profile,
    *,
    micro_batch: int | None = None,
    seq_len: int | None = None,
    sequence_parallel: int | None = None,
) -> Profile:
    """Return the profile for another micro-batch or sequence length, or of one of several chips that share a sequence.

    An estimate is made anew. A measured profile is scaled in proportion to its tokens, which is right for another
    micro-batch on a busy GPU and ignores that attention grows faster with the sequence; `context["rescaled"]` says so.

    Raises:
        InputError: the profile is measured and the number of chips that share a sequence is another; or what `estimate`
            refuses.
    """
    b, s = micro_batch or profile.micro_batch, seq_len or profile.seq_len
    n = sequence_parallel or profile.sequence_parallel
    if (b, s, n) == (profile.micro_batch, profile.seq_len, profile.sequence_parallel):
        return profile
    if "spec" in profile.context:
        shape = ModelSpec.from_json(profile.context["spec"])
        dtype = profile.context.get("dtype", "bfloat16")
        new = estimate(shape, micro_batch=b, seq_len=s, hardware=profile.hardware, dtype=dtype, sequence_parallel=n)
        if not profile.corrections:
            return new
        told = {k: v for k, v in profile.context.items() if k == "calibrated"}
        return new.replace(blocks=corrected_blocks(new.blocks, profile.corrections), corrections=profile.corrections,
                           context={**new.context, **told})  # fmt: skip
    if n != profile.sequence_parallel:
        raise InputError(
            f"sequence_parallel = {n} with a profile measured with {profile.sequence_parallel}, which does not say how "
            "attention is divided",
            expected="an estimated profile",
            remedy="Estimate a model preset: superoffload plan --model NAME --hardware NAME",
        )
    f = b * s // n / profile.tokens
    blocks = tuple(
        x.model_copy(
            update={
                **_scaled(x, SECONDS, f),
                "forward_flops": x.forward_flops * f,
                **{name: None if value is None else round(value) for name, value in _scaled(x, COUNTS, f).items()},
            }
        )
        for x in profile.blocks
    )
    note = f"times and activations in proportion to tokens, from {profile.micro_batch} x {profile.seq_len}"
    return profile.replace(
        micro_batch=b,
        seq_len=s,
        blocks=blocks,
        model_flops=profile.model_flops * f,
        context={**profile.context, "rescaled": note},
    )


def corrected_blocks(blocks: Sequence[BlockProfile], factors: Mapping[str, float]) -> tuple[BlockProfile, ...]:
    """Blocks with their times multiplied.

    Args:
        factors: `head` for both times of the head; of layers `forward`, with what is recomputed of it, and `backward`,
            and `compiled_forward` and `compiled_backward`: eager and compiled layers are different
            programs.
    """

    def times(block: BlockProfile, **names: str) -> BlockProfile:
        update = {
            name: value * factors[key]
            for name, key in names.items()
            if key in factors and (value := getattr(block, name)) is not None
        }
        return block.model_copy(update=update)

    def one(block: BlockProfile) -> BlockProfile:
        if block.kind == "head":
            return times(block, forward_s="head", backward_s="head")
        if block.kind != "layer":
            return block
        return times(block, forward_s="forward", selective_recompute_s="forward", full_recompute_s="forward",
                     backward_s="backward", compiled_forward_s="compiled_forward",
                     compiled_backward_s="compiled_backward")  # fmt: skip

    return tuple(map(one, blocks))


def retarget(profile: Profile, hardware: str | Hardware) -> Profile:
    """Return the profile on another machine.

    An estimate is made anew. A measured profile becomes a modelled one: its seconds are scaled by the machines'
    `matmul_bf16_tflops`, which is right for blocks that are busy with products; `context["retargeted"]` says so.
    """
    hw = resolve(hardware)
    if hw == profile.hardware:
        return profile
    if "spec" in profile.context:
        shape = ModelSpec.from_json(profile.context["spec"])
        dtype = profile.context.get("dtype", "bfloat16")
        return estimate(
            shape,
            micro_batch=profile.micro_batch,
            seq_len=profile.seq_len,
            hardware=hw,
            dtype=dtype,
            sequence_parallel=profile.sequence_parallel,
        )
    f = profile.hardware.gpu.matmul_bf16_tflops / hw.gpu.matmul_bf16_tflops
    blocks = tuple(b.model_copy(update=_scaled(b, SECONDS, f)) for b in profile.blocks)
    note = (
        f"block times {profile.source} on {profile.hardware.name}, scaled by {f:.3g}, the ratio of the machines' bf16 "
        "matrix rates"
    )
    context = {**profile.context, "retargeted": note}
    return profile.replace(source="modelled", hardware=hw, blocks=blocks, context=context)


def _scaled(block: BlockProfile, names: Sequence[str], factor: float) -> dict[str, float | None]:
    """Fields of a block times a factor; what nobody has measured stays unknown."""
    values = {name: getattr(block, name) for name in names}
    return {name: None if value is None else value * factor for name, value in values.items()}


__all__ = ["corrected_blocks", "rescale", "retarget"]
