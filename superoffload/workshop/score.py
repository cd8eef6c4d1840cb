"""The capstone: plans scored against the planner's own, and codes that carry a plan to a leaderboard.

A code holds the knobs that were set, not the score: whoever reads it computes the score again, so a code can
neither be wrong nor be made up.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from superoffload.errors import InputError, did_you_mean
from superoffload.estimating import estimate
from superoffload.fitting import spread_layers
from superoffload.plan import ACTIVATIONS, CASTS, Plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import rescale
from superoffload.profiler import Profile
from superoffload.simulator import resolve_speculation, simulate
from superoffload.tracing import Trace

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: no I, L, O or U, which are misread."""
CHECK = len(ALPHABET) ** 2
NAME = re.compile(r"[A-Z0-9]{1,8}")


ALL_BUCKETS = 2048
"""As many as a code can hold, and more than the challenges' models have."""


@dataclass(frozen=True, slots=True)
class Score:
    """One plan beside the planner's own; both modelled."""

    name: str
    knobs: dict[str, Any]
    """Fields of Plan that were set; the planner chose the others."""
    trace: Trace
    autotuner: Trace
    code: str

    @property
    def percent(self) -> float:
        """Tokens per second above the planner's own plan, in percent."""
        return (self.trace.tokens_per_s / self.autotuner.tokens_per_s - 1) * 100

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.trace.tokens_per_s:,.0f} tokens/s, the planner's own plan "
            f"{self.autotuner.tokens_per_s:,.0f} (modelled, {self.trace.hardware}): {self.percent:+.2f} %\n"
            f"code: {self.code}"
        )

    __repr__ = __str__


@dataclass(frozen=True)
class Challenge:
    """A model, a machine and the tokens of a step; everything else is open.

    Tokens per step are `micro_batch` · `seq_len`; smaller micro-batches are made up for by accumulation.
    """

    model: str = "paper-25b"
    hardware: str = "gh200"
    micro_batch: int = 4
    seq_len: int = 2048
    _known: dict[str, Trace] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def profile(self) -> Profile:
        """Estimated seconds and bytes of the model on the machine."""
        return estimate(self.model, micro_batch=self.micro_batch, seq_len=self.seq_len, hardware=self.hardware)

    @cached_property
    def autotuner(self) -> Trace:
        """What `make_plan` finds when nothing is set by hand, modelled."""
        return simulate(self.profile, self._own)

    def score(self, plan: Plan | None = None, *, name: str = "ANON", **knobs: Any) -> Score:
        """Score a plan.

        Args:
            plan: scored as it is, with all its fields; `Tuner.plan` is one.
            name: up to 8 letters and digits, for the leaderboard.
            knobs: or fields by name, as for `make_plan`, which chooses the others.

        Raises:
            InputError: a field that is not scored, a value that a code cannot hold, another number of tokens.
            DoesNotFit: the plan needs more memory than the machine has.
        """
        name = name.upper()
        if not NAME.fullmatch(name):
            raise InputError(f'name "{name}"', expected="1 to 8 letters and digits")
        if plan is None:
            return self._scored(name, self._digits(knobs))
        if knobs:
            raise InputError(f"a plan, and {', '.join(knobs)} beside it", remedy="Give one of them")
        fields = (*self._options, "flow_blocks", "accumulation", "seq_len")
        values = {**plan.__dict__, "undo_buckets": _values(plan)["undo_buckets"]}
        if _values(plan) == _values(self._own):
            fields = ()
        score = self._scored(name, self._digits({k: values[k] for k in fields}))
        for name, value in _values(score.trace.plan).items():
            if value != _values(plan)[name]:  # a field that no code holds
                raise InputError(f'{name} = {getattr(plan, name)!r}, and "{name}" is not scored', expected=f"{value!r}")
        return score

    def read(self, code: str) -> Score:
        """Score the plan that a code holds.

        Raises:
            InputError: this is no code of this challenge.
        """
        name, _, rest = code.strip().upper().partition("-")
        text = rest.replace("-", "").replace(" ", "").translate(str.maketrans("ILO", "110"))
        if not NAME.fullmatch(name) or len(text) < 3 or set(text) - set(ALPHABET):
            raise InputError(f'"{code}" is not a score code', expected="NAME-XXXXX-XXXXX, as score() prints it")
        number = 0
        for letter in text:
            number = number * len(ALPHABET) + ALPHABET.index(letter)
        number, check = divmod(number, CHECK)
        if check != self._check(name, number):
            raise InputError(
                f'"{code}" does not belong to this challenge',
                remedy="Compare it letter by letter with what was printed",
            )
        digits: dict[str, int] = {}
        for knob, values in self._options.items():
            number, digits[knob] = divmod(number, len(values) + 1)
        digits["flow_blocks"] = number
        return self._scored(name, digits)

    @cached_property
    def _own(self) -> Plan:
        return make_plan(self.profile)

    @cached_property
    def _options(self) -> dict[str, tuple[Any, ...]]:
        """Values of each scored field except `flow_blocks`; the order is that of a code's digits and must stay."""
        return {
            "bucket_mb": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
            "retained_buckets": tuple(range(2048)),
            "cast_down": CASTS,
            "cast_up": CASTS,
            "activations": ACTIVATIONS,
            "prefetch_blocks": (1, 2, 3, 4, 5, 6, 7, 8),
            "master": ("plain", "split"),
            "speculate": ("auto", "on", "off"),
            "undo": ("record", "snapshot"),
            "accumulate_on": ("gpu", "cpu"),
            "adam_threads": tuple(range(1, self.profile.hardware.cpu.cores + 1)),
            "micro_batch": tuple(n for n in range(1, self.micro_batch + 1) if self.micro_batch % n == 0),
            "loss_chunks": (1, 2, 4, 8, 16, 32, 64),
            "compile_blocks": (False, True),
            "undo_buckets": tuple(range(1, ALL_BUCKETS + 1)),
        }

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        return tuple(i for i, b in enumerate(self.profile.blocks) if b.kind == "layer")

    def _digits(self, knobs: dict[str, Any]) -> dict[str, int]:
        """Position of each given value among its options, counted from 1; 0 where the planner is to choose."""
        given = {k: v for k, v in knobs.items() if v is not None}
        tokens = given.pop("accumulation", None), given.pop("seq_len", None)
        rest = self.micro_batch // given.get("micro_batch", self.micro_batch)
        if tokens[0] not in (None, rest) or tokens[1] not in (None, self.seq_len):
            raise InputError(
                "another number of tokens per step",
                expected=f"{self.micro_batch} sequences of {self.seq_len} tokens; micro_batch may divide that "
                "number, accumulation follows from it",
            )
        flow = given.pop("flow_blocks", None)
        if "flow" in given:
            flow = spread_layers(self.profile, int(given.pop("flow")))
        for knob, value in given.items():
            names = (*self._options, "flow_blocks", "flow")
            if knob not in self._options:
                raise InputError(
                    f'"{knob}" is not scored{did_you_mean(knob, names)}', expected="one of " + ", ".join(names)
                )
            if value not in self._options[knob]:
                shown = self._options[knob]
                expected = f"{shown[0]} to {shown[-1]}" if len(shown) > 12 else ", ".join(map(str, shown))
                raise InputError(f"{knob} = {value!r}", expected=expected)
        digits = {k: self._options[k].index(given[k]) + 1 if k in given else 0 for k in self._options}
        if flow is not None and set(flow) - set(self._layers):
            raise InputError(
                f"flow_blocks = {tuple(flow)}", expected=f"layers: {self._layers[0]} to {self._layers[-1]}"
            )
        digits["flow_blocks"] = 0 if flow is None else 1 + sum(1 << self._layers.index(i) for i in set(flow))
        return digits

    def _scored(self, name: str, digits: dict[str, int]) -> Score:
        knobs = {k: values[digits[k] - 1] for k, values in self._options.items() if digits[k]}
        if digits["flow_blocks"]:
            bits = digits["flow_blocks"] - 1
            knobs["flow_blocks"] = tuple(i for k, i in enumerate(self._layers) if bits >> k & 1)
        number = digits["flow_blocks"]
        for knob, values in reversed(self._options.items()):
            number = number * (len(values) + 1) + digits[knob]
        code = f"{name}-{self._text(number * CHECK + self._check(name, number))}"
        if code not in self._known:
            size = knobs.get("micro_batch", self.micro_batch)
            profile = rescale(self.profile, micro_batch=size)
            plan = make_plan(profile, **{**knobs, "accumulation": self.micro_batch // size})
            self._known[code] = simulate(profile, plan)
        return Score(name, knobs, self._known[code], self.autotuner, code)

    def _check(self, name: str, number: int) -> int:
        text = f"{self.model} {self.hardware} {self.micro_batch} {self.seq_len} {name} {number}"
        return zlib.crc32(text.encode()) % CHECK

    @staticmethod
    def _text(number: int) -> str:
        letters = ""
        while number:
            number, digit = divmod(number, len(ALPHABET))
            letters = ALPHABET[digit] + letters
        letters = letters.rjust(5, "0")
        return "-".join(letters[max(0, i - 5) : i] for i in range(len(letters), 0, -5)[::-1])


def _values(plan: Plan) -> dict[str, Any]:
    """Fields of a plan as they are compared: `auto` is simulated as `on`, and no limit of undo memory is one that no
    model reaches."""
    seen = {"speculate": resolve_speculation(plan).speculate, "undo_buckets": plan.undo_buckets or ALL_BUCKETS}
    return {k: getattr(plan, k) for k in Plan.knobs()} | seen


def leaderboard(codes: Iterable[str], challenge: Challenge | None = None) -> list[Score]:
    """Scores of the codes, best first; a person who sent several counts with the best. Every score is computed here.

    Raises:
        InputError: one of them is no code of this challenge.
    """
    challenge = challenge or Challenge()
    best: dict[str, Score] = {}
    for code in codes:
        if code.strip():
            score = challenge.read(code)
            if score.name not in best or score.percent > best[score.name].percent:
                best[score.name] = score
    return sorted(best.values(), key=lambda s: (-s.percent, s.name))
