"""Checks of notebook 09's exercises; see `superoffload.workshop.checks`."""

from __future__ import annotations

from superoffload.model import spec
from superoffload.units import ADAM_STATE_BYTES, GB
from superoffload.workshop.several import LONG_CHIPS, exchange, long_profile, plain_plan

Result = tuple[bool, str]
STATES_MODEL = "llama-70b"
SMALL_SHARE = 0.10
MILLION = 2**20


def states_of_a_chip(answer: float) -> Result:
    """GB of master weights and moments on each of eight hosts."""
    truth = ADAM_STATE_BYTES * spec(STATES_MODEL).parameters / LONG_CHIPS / GB
    if abs(float(answer) / truth - 1) <= 0.02:
        return True, f"{truth:.1f} GB on each host; one alone has room for 480"
    return False, "12 bytes for each parameter (profile.params), over the chips"


def sent_by_a_layer(answer: float) -> Result:
    """GB that one chip sends in the forward of one layer."""
    layer = next(b for b in long_profile("gh200-quad-x8", MILLION).blocks if b.exchange)
    assert layer.exchange is not None
    truth = (layer.exchange.before_bytes + layer.exchange.after_bytes) * (LONG_CHIPS - 1) / LONG_CHIPS / GB
    if abs(float(answer) / truth - 1) <= 0.02:
        return True, f"{truth:.2f} GB: query, key and value before attention, its result after it"
    return False, "Four tensors of 2 bytes times hidden size and the tokens of one chip; one eighth of each stays"


def short_exchange(answer: int) -> Result:
    """From how many tokens on the all-to-alls take less than a tenth of a step."""

    def share(tokens: int) -> float:
        profile = long_profile("gh200-x8", tokens)
        return exchange(profile, plain_plan(profile)).share

    if answer not in [2**k for k in range(13, 22)]:
        return False, "A power of two from 8,192 to 2,097,152"
    if share(answer) >= SMALL_SHARE:
        return False, f"{share(answer):.1%} of a step with {answer:,} tokens"
    if share(answer // 2) < SMALL_SHARE:
        return False, "Half as many tokens would do"
    return True, f"{share(answer):.1%} of a step with {answer:,} tokens, {share(answer // 2):.1%} with half as many"
