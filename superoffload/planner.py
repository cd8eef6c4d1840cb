"""Make a plan: what the user sets is kept, everything else is chosen by the cost model, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from superoffload import graph, simulator
from superoffload.errors import InputError, did_you_mean
from superoffload.fitting import does_not_fit, spread_layers
from superoffload.hardware import Hardware
from superoffload.memory import ledger
from superoffload.plan import ACTIVATIONS, CASTS, Activations, Cast, Plan
from superoffload.planner_room import Room, spread_by_state
from superoffload.profiler import Profile, rescale, retarget
from superoffload.units import DTYPE_BYTES, FP32_BYTES, GB, MIB, format_bytes, format_seconds

MIN_BUCKETS = 16
"""A model is cut into at least this many buckets, so that links and Adam work side by side."""
GOOD_ENOUGH = 1.003
"""A cheaper choice wins where it costs less than 0.3 % of a step."""
SEARCH_BUCKETS = 96
"""Buckets in the simulations of a search; the chosen plan is simulated with its own."""
_ALIASES = ("flow", "buckets")


def make_plan(profile: Profile, hardware: str | Hardware | None = None, *, check: bool = True, **knobs: Any) -> Plan:
    """Choose every knob that is not given and say why.

    Args:
        profile: Measured or estimated.
        hardware: Plan for this machine instead of the profile's (`profiler.retarget` says what that means).
        check: Refuse a plan that does not fit into the memory.
        knobs: Any field of Plan except `reasons`. `flow` may stand for `flow_blocks`: block indices, or how many
            layers, evenly spread. `buckets` may stand for `bucket_mb`: how many buckets the model is cut into.

    Returns:
        A plan whose `reasons` hold one sentence for each chosen field and none for those given.

    Raises:
        InputError: an unknown knob or an impossible value.
        DoesNotFit: the plan needs more memory than there is; the message names the largest item and the nearest plan
            that fits, `ledger` holds the accounting and `nearest` that plan.
    """
    if hardware is not None:
        profile = retarget(profile, hardware)
    given = _given(profile, knobs)
    profile = rescale(profile, micro_batch=given.get("micro_batch"), seq_len=given.get("seq_len"))
    plan = _Chooser(profile, given).choose()
    graph.check_plan(profile, plan)
    if check:
        account = ledger(profile, plan)
        if not account.fits:
            raise does_not_fit(profile, plan, account)
    return plan


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
        given["flow_blocks"] = spread_layers(profile, flow) if isinstance(flow, int) else tuple(flow)
    if "buckets" in given:
        count = given.pop("buckets")
        if not isinstance(count, int) or count < 1:
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
        self.room = Room(profile, given)
        self.fp32 = all(b.dtype == "float32" for b in profile.blocks)

    def choose(self) -> Plan:
        fields: dict[str, Any] = {
            "micro_batch": self.profile.micro_batch,
            "seq_len": self.profile.seq_len,
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
        ):
            if name not in self.given:
                self.reasons[name] = why
        plan = Plan(**fields)
        if "accumulate_on" not in self.given and plan.accumulation > 1:
            plan = self._accumulate_on(plan)
        if "master" not in self.given:
            plan = self._master(plan)
        alone = self.hw.shared_memory and not self.hw.gpu.peak_bf16_tflops
        if alone and "speculate" not in self.given:
            plan = plan.model_copy(update={"speculate": "off"})
            self.reasons["speculate"] = "off: the CPU is the only processor here, so Adam can run under nothing"
        plan = self._casts(plan)
        if "speculate" not in self.given and not alone and not self.room.can_fit(plan):
            plan = plan.model_copy(update={"speculate": "off"})
            self.reasons["speculate"] = f"off: no plan has memory left for its undo {plan.undo}s"
            alone = True
        plan = self._placement(plan)
        if "speculate" not in self.given and not alone:
            plan = self._speculation(plan)
        return plan.model_copy(update={"reasons": dict(self.reasons)})

    def _accumulate_on(self, plan: Plan) -> Plan:
        """Hold the gradients of earlier micro-batches on the host where the GPU has no room for them."""
        there = plan.model_copy(update={"accumulate_on": "cpu"})
        if self.room.can_fit(self.room.waiting(plan)) or not self.room.can_fit(self.room.waiting(there)):
            return plan
        size = format_bytes(self._weights())
        self.reasons["accumulate_on"] = f"cpu: the GPU has no room for gradients of {size} between micro-batches"
        return there

    def _master(self, plan: Plan) -> Plan:
        """Split the master only where nothing else makes the model fit."""
        half = sum(b.params for b in self.profile.blocks if b.dtype == "bfloat16")
        if not half:
            self.reasons["master"] = "plain: only bfloat16 weights can be half of their master"
            return plan
        split = plan.model_copy(update={"master": "split", "cast_up": "fused"})
        if "cast_up" in self.given and plan.cast_up != "fused":
            self.reasons["master"] = f'plain: cast_up = "{plan.cast_up}" needs it'
        elif not self.room.can_fit(self.room.waiting(plan)) and self.room.can_fit(self.room.waiting(split)):
            self.reasons["master"] = (
                f"split: no plan with a plain one fits; it saves {format_bytes(2 * half)} of host memory at most"
            )
            return split
        else:
            self.reasons["master"] = "plain: the host's memory does not ask for a split one, 2 bytes per parameter less"
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
        most = min(max(cpu.adam_threads), cpu.cores)
        threads = next((t for t in range(1, most + 1) if cpu.adam_at(t) >= 0.97 * best), most)
        self.reasons["adam_threads"] = (
            f"{threads} of {cpu.cores} cores: Adam draws {cpu.adam_at(threads):.0f} GB/s with them and "
            f"{best:.0f} GB/s at best; the others stay with PyTorch"
        )
        return threads

    def _coarse(self, plan: Plan, buckets: int = SEARCH_BUCKETS) -> Plan:
        """The same plan with at most so many buckets, for quick simulations."""
        size = max(plan.bucket_mb, self.profile.params * FP32_BYTES / MIB / buckets)
        if size == plan.bucket_mb:
            return plan
        total = len(graph.buckets_of(self.profile, size, plan.flow_blocks))
        whole = len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks))
        retained = min(total, round(plan.retained_buckets * total / whole))
        return plan.model_copy(update={"bucket_mb": size, "retained_buckets": retained})

    def _seconds(self, plan: Plan) -> float:
        return simulator.step_seconds(self.profile, self._coarse(plan))

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
            tried = {cast: self._seconds(plan.model_copy(update={name: cast})) for cast in CASTS}
            best = min(tried.values())
            order: tuple[Cast, ...] = ("fused", "gpu", "cpu")  # fewer bytes first where times are alike
            cast = next(c for c in order if tried[c] <= best * GOOD_ENOUGH)
            plan = plan.model_copy(update={name: cast})
            curve, word = (self.hw.link.down, "down") if name == "cast_down" else (self.hw.link.up, "up")
            link = {n: self.profile.params * n / (curve.peak * GB) for n in (2, 4)}
            self.reasons[name] = (
                f"{cast}: a step of {format_seconds(tried[cast])}, "
                + ", ".join(f"{format_seconds(tried[c])} with {c}" for c in order if c != cast)
                + f" (all states on the CPU); 16-bit takes {format_seconds(link[2])} {word} the link, float32 "
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

    def _placement(self, plan: Plan) -> Plan:
        """Choose activations, flow and retained together: they compete for the GPU's memory."""
        policies = (plan.activations,) if "activations" in self.given else open_policies(self.profile)
        found: list[tuple[float, Plan, dict[str, str]]] = []
        slower: list[str] = []
        for policy in policies:
            reasons: dict[str, str] = {}
            candidate = plan.model_copy(update={"activations": policy})
            if found and self._gpu_seconds(candidate) >= min(f[0] for f in found):
                slower.append(policy)
                continue
            candidate = self._flow(candidate, reasons)
            candidate = self._retained(candidate, reasons)
            candidate = self._prefetch(candidate, reasons)
            if len(policies) == 1 or ledger(self.profile, candidate).fits:
                found.append((self._seconds(candidate), candidate, reasons))
        if not found:  # nothing fits: report on the policy that needs least of both memories
            reasons = {}
            candidate = self._flow(plan.model_copy(update={"activations": "full"}), reasons)
            found.append((float("inf"), self._retained(candidate, reasons), reasons))
        shortest = min(f[0] for f in found)
        seconds, best, reasons = next(f for f in found if f[0] <= shortest * GOOD_ENOUGH)
        self.reasons.update(reasons)
        if "activations" not in self.given:
            too_large = [p for p in policies if p not in slower and all(f[1].activations != p for f in found)]
            self.reasons["activations"] = self._why_activations(best, seconds, found, slower, too_large)
        return best

    def _gpu_seconds(self, plan: Plan) -> float:
        """What the GPU alone needs for a step: no plan with this policy is faster."""
        return graph.build(self.profile, simulator.resolve_speculation(plan)).load("gpu")

    def _why_activations(
        self,
        best: Plan,
        seconds: float,
        found: list[tuple[float, Plan, dict[str, str]]],
        slower: Sequence[str],
        too_large: Sequence[str],
    ) -> str:
        kept = sum(b.activation_bytes for b in self.profile.blocks)
        why = f"{best.activations}: " + (f"a step of {format_seconds(seconds)}" if seconds < float("inf") else "")
        why += " without flow blocks" if any(f[1].flow_blocks for f in found) and not best.flow_blocks else ""
        for other, plan, _ in found:
            if plan is not best:
                blocks = f" and {len(plan.flow_blocks)} flow blocks" if plan.flow_blocks else ""
                why += f", {format_seconds(other)} with {plan.activations}{blocks}"
        if slower:
            why += f"; {' and '.join(slower)}: the GPU alone would take as long"
        if too_large == ["none"]:
            why += f"; keeping everything ({format_bytes(kept)}) does not fit the memory"
        elif too_large:
            why += f"; does not fit the memory: {', '.join(too_large)} (everything is {format_bytes(kept)})"
        else:
            why += f"; everything is {format_bytes(kept)}"
        return why.replace(": ; ", ": ")

    def _flow(self, plan: Plan, reasons: dict[str, str]) -> Plan:
        """Let as few layers flow as the GPU's memory demands."""
        if "flow_blocks" in self.given:
            return plan

        def least_gpu(plan: Plan) -> Plan:
            return plan if "retained_buckets" in self.given else self.room.relieving_host(plan)

        least = least_gpu(plan)
        if self.room.gpu_over(least) <= 0:
            reasons["flow_blocks"] = f"none: weights of {format_bytes(self._weights())} fit beside the activations"
            return plan
        on_host, on_gpu = self.room.layers_by_state(least)
        layers = len(on_host) + len(on_gpu)

        def flowing(count: int) -> tuple[int, ...]:
            return spread_by_state(on_host, on_gpu, count)

        def over(count: int) -> int:
            return self.room.gpu_over(least_gpu(plan.model_copy(update={"flow_blocks": flowing(count)})))

        # Beyond those with state on the host each one costs host memory, which more retained ones have to make up for.
        most = next((n for n in (len(on_host), layers) if n and over(n) <= 0), None)
        if most is None:
            reasons["flow_blocks"] = "none: even with all layers flowing the memory would not do"
            return plan
        count = _first(lambda n: over(n) <= 0, 1, most)
        reasons["flow_blocks"] = (
            f"{count} of {layers} layers: without them the GPU lacks {format_bytes(self.room.gpu_over(least))}"
        )
        return plan.model_copy(update={"flow_blocks": flowing(count)})

    def _speculation(self, plan: Plan) -> Plan:
        """Speculate where that shortens a step that commits, and what undoes it fits the host's memory."""
        waiting = plan.model_copy(update={"speculate": "off"})
        ahead, behind = self._seconds(plan), self._seconds(waiting)
        size = format_bytes(ledger(self.profile, plan).total("host") - ledger(self.profile, waiting).total("host"))
        times = f"a step that commits takes {format_seconds(ahead)}, one that waits {format_seconds(behind)}"
        if self.room.host_over(plan) > 0 >= self.room.host_over(waiting):
            self.reasons["speculate"] = f"off: its undo {plan.undo}s ({size}) do not fit the host's memory; {times}"
            return waiting
        if behind <= ahead * GOOD_ENOUGH:
            self.reasons["speculate"] = f"off: {times}, which is not worth undo {plan.undo}s of {size}"
            return waiting
        self.reasons["speculate"] = f"auto: {times}; the engine waits while most steps are clipped"
        return plan

    def _weights(self) -> int:
        return sum(b.params * DTYPE_BYTES[b.dtype] for b in self.profile.blocks)

    def _retained(self, plan: Plan, reasons: dict[str, str]) -> Plan:
        """Keep the fewest buckets on the GPU that leave no exposed optimizer time, within the memory of both."""
        if "retained_buckets" in self.given:
            return plan
        if self.hw.shared_memory and not self.hw.gpu.peak_bf16_tflops:
            reasons["retained_buckets"] = "0: the CPU is the only processor here"
            return plan
        total = len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks))

        def at(n: int) -> Plan:
            return plan.model_copy(update={"retained_buckets": n})

        most = (
            total
            if self.room.gpu_over(at(total)) <= 0
            else _first(lambda n: self.room.gpu_over(at(n)) > 0, 0, total) - 1
        )
        least = self.room.relieving_host(at(0)).retained_buckets
        if most < 0 or least > most:
            reasons["retained_buckets"] = "0: no number of retained buckets makes GPU and host memory fit"
            return plan
        known: dict[int, float] = {}

        def seconds(n: int) -> float:
            if n not in known:
                known[n] = self._seconds(at(n))
            return known[n]

        coarse = sorted({least + (most - least) * k // 8 for k in range(9)})
        best = min(coarse, key=seconds)
        i = coarse.index(best)
        low, high = coarse[max(0, i - 1)], coarse[min(len(coarse) - 1, i + 1)]
        while high - low > 2:  # the time falls, then rises slowly with the GPU's own Adam
            a, b = low + (high - low) // 3, high - (high - low) // 3
            low, high = (low, b) if seconds(a) <= seconds(b) else (a, high)
        goal = min(known.values()) * GOOD_ENOUGH
        below = max((n for n, s in known.items() if s > goal and n < min(k for k, v in known.items() if v <= goal)),
                    default=least - 1)  # fmt: skip
        first = min(n for n, s in known.items() if s <= goal)
        n = _first(lambda k: seconds(k) <= goal, below + 1, first)
        why = f"a step of {format_seconds(seconds(n))}"
        why += f", {format_seconds(seconds(least))} with {least}" if n > least else ""
        why += ", more would gain less than 0.3 %" if n < most else ""
        bound = f"; GPU memory allows {most}" if most < total else ""
        need = f"; host memory needs at least {least}" if least else ""
        reasons["retained_buckets"] = f"{n} of {total}: {why}{bound}{need}"
        return at(n)

    def _prefetch(self, plan: Plan, reasons: dict[str, str]) -> Plan:
        """Fetch as few flow blocks ahead as give the shortest step."""
        if "prefetch_blocks" in self.given:
            return plan
        if not plan.flow_blocks:
            reasons["prefetch_blocks"] = "1: nothing flows"
            return plan
        tried: dict[int, float] = {}
        for n in (1, 2, 3):
            ahead = plan.model_copy(update={"prefetch_blocks": n})
            if n == 1 or ledger(self.profile, ahead).fits:
                tried[n] = self._seconds(ahead)
        n = next(n for n, s in tried.items() if s <= min(tried.values()) * GOOD_ENOUGH)
        times = ", ".join(f"{format_seconds(s)} with {k}" for k, s in tried.items() if k != n)
        reasons["prefetch_blocks"] = f"{n}: a step of {format_seconds(tried[n])}" + (f", {times}" if times else "")
        return plan.model_copy(update={"prefetch_blocks": n})


def open_policies(profile: Profile) -> tuple[Activations, ...]:
    """Activation policies that can be chosen here, simplest first. `offload_saved` is for people: its time is
    modelled from the link alone, and no machine has confirmed it yet."""
    layers = [b for b in profile.blocks if b.kind == "layer"]
    unknown = any(b.selective_bytes is None or b.selective_recompute_s is None for b in layers)
    return tuple(
        p for p in ACTIVATIONS if p != "offload_saved"
        and not (p == "selective" and unknown) and not (p.startswith("offload") and profile.hardware.shared_memory)
    )  # fmt: skip


def coarse(profile: Profile, plan: Plan, buckets: int) -> Plan:
    """The same plan with at most so many buckets, for quick simulations."""
    return _Chooser(profile, {})._coarse(plan, buckets)


def _first(test: Callable[[int], bool], low: int, high: int) -> int:
    """Smallest n in [low, high] for which the monotone `test` holds; `high` is known to pass."""
    while low < high:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle + 1
    return low
