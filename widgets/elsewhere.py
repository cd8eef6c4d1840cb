"""What a profile says of other machines and sizes than those that it was made for, and why it may not say it."""

from __future__ import annotations

from superoffload.errors import NotSupported
from superoffload.estimating import estimate
from superoffload.hardware import Hardware
from superoffload.model import ModelSpec
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile

SHAPE_FIELDS = ("micro_batch", "seq_len")
"""Plan fields that change what a micro-batch costs, so that the profile must be made anew."""
SPEC_KEY = "spec"
"""Where an estimate keeps the model's shape."""


def why_size_fixed(given: Profile) -> str | None:
    """Why nothing can be said of other sizes of a micro-batch, with the remedy; None where it can."""
    if given.source == "measured":
        return (
            "Measured at this size. To see another, profile again with a batch of that shape, "
            "or open Tuner(so.estimate(...))."
        )
    if SPEC_KEY not in given.context:
        return "Estimated without a shape to estimate again from. Open Tuner(so.estimate(...)) with the other size."
    return None


def profile_for(given: Profile, hardware: Hardware, micro_batch: int, seq_len: int) -> Profile:
    """The profile of the same model on another machine or with another micro-batch.

    Raises:
        NotSupported: another size, of which `given` cannot tell.
    """
    same_size = (micro_batch, seq_len) == (given.micro_batch, given.seq_len)
    if same_size and hardware == given.hardware:
        return given
    fixed = why_size_fixed(given)
    if fixed is None and hardware == given.hardware:
        return rescale(given, micro_batch=micro_batch, seq_len=seq_len)
    if fixed is None:
        shape = ModelSpec.from_json(given.context[SPEC_KEY])
        dtype = given.context.get("dtype", "bfloat16")
        return estimate(shape, micro_batch=micro_batch, seq_len=seq_len, hardware=hardware, dtype=dtype)
    if not same_size:
        raise NotSupported(
            f"a profile at micro_batch {given.micro_batch} × seq_len {given.seq_len} cannot tell about "
            f"{micro_batch} × {seq_len}",
            remedy=fixed,
        )
    return retarget(given, hardware)
