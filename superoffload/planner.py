"""Make a plan: what the user sets is kept, everything else is chosen by the cost model, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from superoffload import graph, simulator
from superoffload.activation_costs import knows_compiled
from superoffload.collectives import check_chips
from superoffload.errors import InputError, did_you_mean
from superoffload.fitting import does_not_fit, spread_layers
from superoffload.hardware import Hardware
from superoffload.memory import ledger
from superoffload.plan import CASTS, Cast, Plan
from superoffload.planner_loss import place
from superoffload.planner_pace import GOOD_ENOUGH, Pace
from superoffload.planner_room import Room
from superoffload.planner_speculation import SpeculationChoice
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile
from superoffload.topology import callers_cores
from superoffload.units import FP32_BYTES, GB, MIB, format_bytes, format_seconds

MIN_BUCKETS = 16
"""A model is cut into at least this many buckets, so that links and Adam work side by side."""
MOST_SEQUENCES = 32
"""A micro-batch that is chosen has at most as many sequences."""
HOPELESS = 1.05
"""Once a larger micro-batch takes 5 % longer than a smaller one, a still larger one is not tried."""
_ALIASES = ("flow", "buckets", "tokens")


def make_plan(profile: Profile, hardware: str | Hardware | None = None, *, check: bool = True, **knobs: Any) -> Plan:
    """Choose every knob that is not given and say why.

    Args:
        profile: Measured or estimated.
        hardware: Plan for this machine instead of the profile's (`profile_scaling.retarget` says what that means).
        check: Refuse a plan that does not fit into the memory.
        knobs: Any field of Plan except `reasons`. `flow` may stand for `flow_blocks`: block indices, or how many
            layers, evenly spread. `buckets` may stand for `bucket_mb`: how many buckets the model is cut into. `tokens`
            may stand for `accumulation`, or for it and `micro_batch`: tokens of a whole step, a multiple of `seq_len`
            (times `data_parallel`); without `micro_batch` the fastest is chosen. On hardware of several chips
            `data_parallel` takes all that `sequence_parallel`, 1 unless given, leaves.

    Returns:
        A plan whose `reasons` hold one sentence for each chosen field and none for those given.

    Raises:
        InputError: an unknown knob or an impossible value.
        DoesNotFit: the plan needs more memory than there is; the message names the largest item and the nearest plan
            that fits, `ledger` holds the accounting and `nearest` that plan.
    """
    if hardware is not None:
        profile = retarget(profile, hardware)
    if knobs.get("tokens") is not None:
        return _of_tokens(profile, dict(knobs), check=check)
    given = _given(profile, knobs)
    chips = arranged(profile, given)
    check_chips(profile.hardware, Plan(**chips))
    profile = rescale(
        profile,
        micro_batch=given.get("micro_batch"),
        seq_len=given.get("seq_len"),
        sequence_parallel=chips["sequence_parallel"],
    )
    plan = _Chooser(profile, given).choose()
    graph.check_plan(profile, plan)
    if check:
        account = ledger(profile, plan)
        if not account.fits:
            raise does_not_fit(profile, plan, account)
    return plan


def _of_tokens(profile: Profile, knobs: dict[str, Any], *, check: bool) -> Plan:
    """Choose micro-batch and accumulation of a step of so many tokens."""
    tokens = knobs.pop("tokens")
    if knobs.get("accumulation") is not None:
        raise InputError("tokens and accumulation are both given", remedy="Give only tokens")
    for name in ("seq_len", "micro_batch"):
        if knobs.get(name) is not None and not (_whole(knobs[name]) and knobs[name] >= 1):
            raise InputError(f"{name} = {knobs[name]!r}", expected="a whole number of at least 1")
    seq_len = knobs.get("seq_len") or profile.seq_len
    if not _whole(tokens) or tokens < 1 or tokens % seq_len:
        raise InputError(f"tokens = {tokens!r}", expected=f"a multiple of the sequence length, {seq_len}")
    groups = arranged(profile, knobs)["data_parallel"]
    if tokens % (seq_len * groups):
        raise InputError(
            f"tokens = {tokens} with data_parallel = {groups}", expected=f"a multiple of {groups} x {seq_len} tokens"
        )
    sequences = tokens // seq_len // groups
    if (given := knobs.get("micro_batch")) is not None:
        if sequences % given:
            raise InputError(
                f"tokens = {tokens} with micro_batch = {given}", expected=f"a multiple of {given} x {seq_len} tokens"
            )
        plan = make_plan(profile, check=check, **knobs, accumulation=sequences // given)
        why = f"{plan.accumulation}: for {tokens:,} tokens a step"
        return plan.model_copy(update={"reasons": {**plan.reasons, "accumulation": why}})
    tried: dict[int, tuple[float, Plan]] = {}
    for batch in (2**k for k in range(MOST_SEQUENCES.bit_length()) if not sequences % 2**k):
        fields = {**knobs, "micro_batch": batch, "accumulation": sequences // batch}
        plan = make_plan(profile, check=False, **fields)
        sized = rescale(profile, micro_batch=batch, seq_len=seq_len, sequence_parallel=plan.sequence_parallel)
        if not ledger(sized, plan).fits:
            break
        tried[batch] = (simulator.step_seconds(sized, plan), plan)
        if tried[batch][0] > HOPELESS * min(seconds for seconds, _ in tried.values()):
            break
    if not tried:
        plan = make_plan(profile, check=check, **knobs, micro_batch=1, accumulation=sequences)
        alone = {"micro_batch": "1: no plan fits", "accumulation": f"{sequences}: for {tokens:,} tokens a step"}
        return plan.model_copy(update={"reasons": {**plan.reasons, **alone}})
    shortest = min(seconds for seconds, _ in tried.values())
    batch = next(b for b, (seconds, _) in tried.items() if seconds <= shortest * GOOD_ENOUGH)
    seconds, plan = tried[batch]
    others = ", ".join(f"{format_seconds(s)} with {b}" for b, (s, _) in tried.items() if b != batch)
    too_large = 2 * max(tried)
    stopped = tried[max(tried)][0] > HOPELESS * shortest
    why = f"{batch}: a step of {format_seconds(seconds)}" + (f", {others}" if others else "")
    if not stopped and too_large <= MOST_SEQUENCES and not sequences % too_large:
        why += f"; {too_large} do not fit the memory"
    reasons = {"micro_batch": why, "accumulation": f"{plan.accumulation}: for {tokens:,} tokens a step"}
    return plan.model_copy(update={"reasons": {**plan.reasons, **reasons}})


def arranged(profile: Profile, given: dict[str, Any]) -> dict[str, int]:
    """How the chips are used: as given; else those that share the profile's sequences share the plan's, and all others
    have sequences of their own."""
    there = profile.hardware.interconnect.chips if profile.hardware.interconnect else 1
    group = given.get("sequence_parallel") or profile.sequence_parallel
    return {"sequence_parallel": group, "data_parallel": given.get("data_parallel") or max(1, there // group)}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _given(profile: Profile, knobs: dict[str, Any]) -> dict[str, Any]:
    """Check names, replace aliases, validate values."""
    names = (*Plan.knobs(), *_ALIASES)
    for name in knobs:
        if name not in names:
            raise InputError(
                f'unknown knob "{name}"{did_you_mean(name, names)}', expected="one of " + ", ".join(sorted(names))
            )
    given = {k: v for k, v in knobs.items() if v is not None}
    for alias, field in (("flow", "flow_blocks"), ("buckets", "bucket_mb")):
        if alias in given and field in given:
            raise InputError(f"{alias} and {field} are both given", remedy=f"Give only {field}")
    if "flow" in given:
        flow = given.pop("flow")
        if not _whole(flow) and not isinstance(flow, Iterable):
            raise InputError(f"flow = {flow!r}", expected="how many layers, or which")
        given["flow_blocks"] = tuple(flow) if isinstance(flow, Iterable) else spread_layers(profile, flow)
    if "buckets" in given:
        count = given.pop("buckets")
        if not _whole(count) or count < 1:
            raise InputError(f"buckets = {count!r}", expected="a whole number of at least 1")
        given["bucket_mb"] = max(profile.params * FP32_BYTES / MIB / count, 2**-5)
    batch = {"micro_batch": profile.micro_batch, "seq_len": profile.seq_len}
    plan = Plan.from_dict({**batch, **given}, where="the plan")
    return {k: getattr(plan, k) for k in given}


class _Chooser:
    """Choose the open fields one after another; `self.reasons` grows with them."""

    def __init__(self, profile: Profile, given: dict[str, Any]):
        self.profile, self.given, self.hw = profile, given, profile.hardware
        self.reasons: dict[str, str] = {}
        self.room, self.pace = Room(profile, given), Pace(profile)
        self.fp32 = all(b.dtype == "float32" for b in profile.blocks)

    def choose(self) -> Plan:
        fields: dict[str, Any] = {
            "micro_batch": self.profile.micro_batch,
            "seq_len": self.profile.seq_len,
            **arranged(self.profile, self.given),
            **self.given,
        }
        for name, choose in (("bucket_mb", self._bucket_mb), ("adam_threads", self._threads)):
            if name not in self.given:
                fields[name] = choose()
        for name, why in (
            ("micro_batch", "as profiled"),
            ("seq_len", "as profiled"),
            ("accumulation", "1: every micro-batch is a step"),
            ("undo", "record: 3.6 bytes of host memory per parameter, where a snapshot takes 12"),
            ("activations_by_block", "none: all layers alike"),
            ("accumulate_on", "gpu: no gradient crosses the link before the last micro-batch"),
            *self._why_chips(fields),
        ):
            if name not in self.given:
                self.reasons[name] = why
        plan = Plan(**fields)
        if "master" not in self.given:
            plan = self._master(plan)
        alone = self.hw.shared_memory and not self.hw.gpu.peak_bf16_tflops
        if alone and "speculate" not in self.given:
            plan = plan.model_copy(update={"speculate": "off"})
            self.reasons["speculate"] = "off: the CPU is the only processor here, so Adam can run under nothing"
        plan = self._casts(plan)
        speculation = SpeculationChoice(self.room, self.pace, self.given)
        plan = speculation.before_placement(plan)
        plan, placed = place(self.room, self.pace, self.given, plan)
        plan = speculation.after_placement(plan)
        if "compile_blocks" not in self.given:
            self.reasons["compile_blocks"] = self._why_not_compiled(plan)
        return plan.model_copy(update={"reasons": {**self.reasons, **placed, **speculation.reasons}})

    def _why_chips(self, fields: dict[str, Any]) -> Iterable[tuple[str, str]]:
        groups, group = fields["data_parallel"], fields["sequence_parallel"]
        if self.hw.interconnect is None:
            return ("data_parallel", "1: one chip"), ("sequence_parallel", "1: one chip")
        there = self.hw.interconnect.chips
        return (
            ("data_parallel", f"{groups}: {there} chips, of which {group} share{'s' * (group == 1)} a sequence"),
            ("sequence_parallel", f"{group}: as profiled"),
        )

    def _why_not_compiled(self, plan: Plan) -> str:
        """Compiling is for a person to choose: it changes bits. Say what it would gain."""
        why = "off: compiling changes the bits of the results and takes time at the start"
        if not knows_compiled(self.profile.blocks):
            return f"{why}; the profile does not say what it would gain"
        policies = ("none", plan.activations, "full") if "activations" not in self.given else (plan.activations,)
        for policy in policies:
            if policy == "selective":
                continue
            other = plan.model_copy(
                update={
                    "compile_blocks": True,
                    "activations": policy,
                    "activations_by_block": {},
                    "retained_buckets": 0,
                }
            )
            if self.room.gpu_over(other) > 0:
                continue
            with_it, without = self.pace.gpu_seconds(other), self.pace.gpu_seconds(plan)
            how = f" and activations = {policy}" if policy != plan.activations else ""
            return (
                f"{why}; the GPU's own work in a step is modelled at {format_seconds(with_it)} with it{how}, "
                f"{format_seconds(without)} without"
            )
        return f"{why}; with these activations it cannot be used, or does not fit the memory"

    def _master(self, plan: Plan) -> Plan:
        """Split the master where the host's memory is scarce: it takes no time, but a plain one is simpler to use."""
        half = sum(b.params for b in self.profile.blocks if b.dtype == "bfloat16")
        if not half:
            self.reasons["master"] = "plain: only bfloat16 weights can be half of their master"
            return plan
        split, saved = plan.model_copy(update={"master": "split", "cast_up": "fused"}), 2 * plan.share(half)
        if "cast_up" in self.given and plan.cast_up != "fused":
            self.reasons["master"] = f'plain: cast_up = "{plan.cast_up}" needs it'
        elif not self.room.can_fit(self.room.waiting(plan)) and self.room.can_fit(self.room.waiting(split)):
            self.reasons["master"] = (
                f"split: no plan with a plain one fits; it saves {format_bytes(saved)} of host memory at most"
            )
            return split
        elif (lacking := self.room.host_over(self.room.all_on_host(plan))) > 0 and self.room.can_fit(
            self.room.waiting(split)
        ):
            self.reasons["master"] = (
                f"split: with a plain one the host would lack {format_bytes(lacking)} for all that may lie there, of "
                f"which it saves {format_bytes(saved)} at most"
            )
            return split
        else:
            self.reasons["master"] = "plain: the host has room for all that may lie there"
        return plan

    def _bucket_mb(self) -> float:
        total = self.profile.params * FP32_BYTES / MIB
        size = 64.0
        while size > 0.25 and total / size < MIN_BUCKETS:
            size /= 2
        copy = size * MIB / FP32_BYTES * (FP32_BYTES if self.fp32 else 2)
        down = self.hw.link.down
        why = "the paper's size" if size == 64 else f"the largest that still cuts the model into {MIN_BUCKETS} buckets"
        self.reasons["bucket_mb"] = (
            f"{size:g} MiB, {why}: a {format_bytes(copy)} gradient copy reaches {down.at(copy) / down.peak:.0%} of the "
            f"link's {down.peak:.3g} GB/s down"
        )
        return size

    def _threads(self) -> int:
        cpu = self.hw.cpu
        best = max(cpu.adam_gb_per_s)
        most = max(1, min(max(cpu.adam_threads), cpu.cores - callers_cores(cpu.cores)))
        threads = next((t for t in range(1, most + 1) if cpu.adam_at(t) >= 0.97 * best), most)
        self.reasons["adam_threads"] = (
            f"{threads} of {cpu.cores} cores: Adam draws {cpu.adam_at(threads):.0f} GB/s with them and "
            f"{best:.0f} GB/s at best; the others stay with PyTorch, which launches from them"
        )
        return threads

    def _casts(self, plan: Plan) -> Plan:
        for name in ("cast_down", "cast_up"):
            if name in self.given:
                continue
            if name == "cast_up" and plan.master == "split":
                self.reasons[name] = "fused: a split master's weights are written by the Adam step"
                continue
            if self.fp32:
                self.reasons[name] = "fused: weights and gradients are float32, so nothing is cast"
                continue
            tried = {cast: self.pace.seconds(plan.model_copy(update={name: cast})) for cast in CASTS}
            best = min(tried.values())
            order: tuple[Cast, ...] = ("fused", "gpu", "cpu")  # fewer bytes first where times are alike
            cast = next(c for c in order if tried[c] <= best * GOOD_ENOUGH)
            plan = plan.model_copy(update={name: cast})
            curve, word = (self.hw.link.down, "down") if name == "cast_down" else (self.hw.link.up, "up")
            link = {n: plan.share(self.profile.params) * n / (curve.peak * GB) for n in (2, 4)}
            others = (
                f"{format_seconds(tried[c])} with {c}{', no gain to speak of' if tried[c] < tried[cast] else ''}"
                for c in order
                if c != cast
            )
            again = ", all layers recomputed" if plan.activations == "full" else ""
            self.reasons[name] = (
                f"{cast}: a step of {format_seconds(tried[cast])}, {', '.join(others)}"
                f" (all states on the CPU{again}); 16-bit takes {format_seconds(link[2])} {word} the link, float32 "
                f"{format_seconds(link[4])}{self._measured_casts(name)}"
            )
        return plan

    def _measured_casts(self, name: str) -> str:
        casts = self.hw.casts
        if casts is None:
            return ""
        times, scale = (casts.down if name == "cast_down" else casts.up), casts.bucket_params / 1e9
        each = ", ".join(f"{format_seconds(getattr(times, c) * scale)} with {c}" for c in ("fused", "gpu", "cpu"))
        return f"; one bucket alone was measured to take {each}"
