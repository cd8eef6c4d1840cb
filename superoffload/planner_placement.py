"""Where things lie: activations, flow blocks and retained buckets, chosen together since they compete for the GPU's
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superoffload import graph
from superoffload.activation_costs import block_cost
from superoffload.fitting import evenly
from superoffload.memory import ledger
from superoffload.plan import ACTIVATIONS, Activations, Plan
from superoffload.planner_pace import CLOSE, GOOD_ENOUGH, Pace, first
from superoffload.planner_room import Room, spread_by_state
from superoffload.profiler import Profile
from superoffload.units import format_bytes, format_seconds

WORTH_HOLDING = 1.02
"""Where a step with gradients accumulated on the GPU takes at most 2 % longer than the GPU alone would, holding them
on the host is not tried."""
WORTH_MIXING = 1.01
"""A policy that would save less than 1 % of a step for all layers is not tried for some."""
Candidate = tuple[float, Plan, dict[str, str]]
"""Seconds per step, the plan, reasons of the fields that its placement has chosen."""


class Placement:
    """Chooses for one profile and one plan whose other fields are chosen.

    Args:
        given: the fields that the user has set, which stay as they are.
    """

    def __init__(self, room: Room, pace: Pace, given: Mapping[str, Any], plan: Plan):
        self.room, self.pace, self.given, self.plan = room, pace, given, plan
        self.profile, self.hw = room.profile, room.profile.hardware
        self._found: list[Candidate] = []
        """With one policy for all layers, in the order of policies; those that fit."""
        self._slower: list[str] = []
        self._chosen = "activations" not in given
        self._names = open_policies(self.profile, compiled=plan.compile_blocks) if self._chosen else (plan.activations,)
        for policy in self._names:
            candidate = plan.model_copy(update={"activations": policy})
            if self._found and self.pace.gpu_seconds(candidate) >= self.seconds:
                self._slower.append(policy)
                continue
            self._found += self._placed(candidate, anyway=not self._chosen)

    @property
    def fits(self) -> bool:
        return bool(self._found) and ledger(self.profile, self._found[0][1]).fits

    @property
    def seconds(self) -> float:
        """Of the shortest step with one policy for all layers."""
        return min((f[0] for f in self._found), default=float("inf"))

    def finish(self, **reasons: str) -> tuple[Plan, dict[str, str]]:
        """The best plan, with some layers under another policy where that is better still.

        Args:
            reasons: that are known already.

        Returns:
            The plan, and the reasons of what was chosen.
        """
        found = list(self._found)
        if not found:  # nothing fits: report on the policy that needs least of both memories
            why: dict[str, str] = {}
            candidate = self._flow(self.plan.model_copy(update={"activations": "full"}), why)
            candidate = self._prefetch(self._retained(candidate, why), why)
            found.append((float("inf"), candidate, why))
        elif self._chosen and "activations_by_block" not in self.given:
            found = self._closer(found + self._mixed())
        shortest = min(f[0] for f in found)
        seconds, best, why = next(f for f in found if f[0] <= shortest * GOOD_ENOUGH)
        reasons |= why
        if self._chosen:
            whole = [f for f in found if not f[1].activations_by_block] or found
            too_large = [
                p for p in self._names if p not in self._slower and all(f[1].activations != p for f in self._found)
            ]
            base = min((f for f in whole if f[1].activations == best.activations), key=lambda f: f[0],
                       default=(seconds, best, why))  # fmt: skip
            reasons["activations"] = self._why_activations(base[1], base[0], whole, self._slower, too_large)
        return best, reasons

    def _closer(self, found: list[Candidate]) -> list[Candidate]:
        """The same plans, those that are close to the shortest simulated with more buckets."""
        close = min(f[0] for f in found) * CLOSE
        if sum(f[0] <= close for f in found) < 2:
            return found
        return [(self.pace.closer(f[1]) if f[0] <= close else f[0], *f[1:]) for f in found]

    def _placed(self, plan: Plan, *, anyway: bool = False) -> list[Candidate]:
        """The plan with everything else placed, accumulated gradients held on whichever side makes it faster; nothing
        where it does not fit, or what comes nearest if one is wanted `anyway`."""
        candidates: list[Candidate] = []
        spare: list[Candidate] = []
        for held in self.room.holders(plan):
            if candidates and candidates[0][0] <= self.pace.gpu_seconds(plan) * WORTH_HOLDING:
                break
            reasons: dict[str, str] = {}
            candidate = self._flow(plan.model_copy(update={"accumulate_on": held}), reasons)
            candidate = self._prefetch(self._retained(candidate, reasons), reasons)
            fits = ledger(self.profile, candidate).fits
            (candidates if fits else spare).append((self.pace.seconds(candidate), candidate, reasons))
        if not candidates:
            return spare[:1] if anyway else []
        seconds, best, reasons = min(candidates, key=lambda c: c[0])
        if best.accumulate_on == "cpu" and "accumulate_on" not in self.given:
            other = next((s for s, c, _ in candidates if c.accumulate_on == "gpu"), None)
            reasons["accumulate_on"] = f"cpu: leaves the GPU {format_bytes(self.room.weights)}" + (
                f", a step of {format_seconds(seconds)} instead of {format_seconds(other)}" if other else
                ", without which no plan with these activations fits"
            )  # fmt: skip
        return [(seconds, best, reasons)]

    def _mixed(self) -> list[Candidate]:
        """The fastest plan, with some layers under a faster policy that does not fit for all of them."""
        seconds, base, _ = min(self._found, key=lambda f: f[0])
        mixed: list[Candidate] = []
        for fast in self._names:
            whole = self.plan.model_copy(update={"activations": fast})
            fits = any(f[1].activations == fast for f in self._found)
            if not fits and self.pace.gpu_seconds(whole) < seconds / WORTH_MIXING:
                mixed += self._with_some(fast, seconds, base.activations)
        return mixed

    def _with_some(self, fast: Activations, seconds: float, slow: Activations) -> list[Candidate]:
        """Plans with some layers under `fast` and the others under `slow`, which alone takes `seconds`: quarters of the
        layers first, then ever closer to the best."""
        layers = [i for i, b in enumerate(self.profile.blocks) if b.kind == "layer"]
        mixed: list[Candidate] = []
        tried: dict[int, float] = {0: seconds}
        step = len(layers) // 4
        counts = [step, 2 * step, 3 * step] if step else []
        while counts:
            for n in counts:
                by_block = dict.fromkeys(evenly(layers, n), fast)
                placed = self._placed(
                    self.plan.model_copy(update={"activations": slow, "activations_by_block": by_block})
                )
                tried[n] = placed[0][0] if placed else float("inf")
                shown = ", ".join(
                    f"a step of {format_seconds(s)} with {k}" for k, s in sorted(tried.items()) if s < float("inf")
                )
                for *_, reasons in placed:
                    reasons["activations_by_block"] = f"{n} of {len(layers)} layers {fast}: {shown}"
                mixed += placed
            best = min(tried, key=lambda n: (tried[n], n))
            step //= 2
            near = (best - step, best + step) if step else ()
            counts = [n for n in near if 0 < n < len(layers) and n not in tried]
        return mixed

    def _why_activations(
        self,
        best: Plan,
        seconds: float,
        found: list[Candidate],
        slower: Sequence[str],
        too_large: Sequence[str],
    ) -> str:
        kept = sum(block_cost(b, "none", compiled=best.compile_blocks).kept for b in self.profile.blocks)
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
            reasons["flow_blocks"] = f"none: weights of {format_bytes(self.room.weights)} fit beside the activations"
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
        count = first(lambda n: over(n) <= 0, 1, most)
        reasons["flow_blocks"] = (
            f"{count} of {layers} layers: without them the GPU lacks {format_bytes(self.room.gpu_over(least))}"
        )
        return plan.model_copy(update={"flow_blocks": flowing(count)})

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
            else first(lambda n: self.room.gpu_over(at(n)) > 0, 0, total) - 1
        )
        least = self.room.relieving_host(at(0)).retained_buckets
        if most < 0 or least > most:
            reasons["retained_buckets"] = "0: no number of retained buckets makes GPU and host memory fit"
            return plan
        known: dict[int, float] = {}

        def seconds(n: int) -> float:
            if n not in known:
                known[n] = self.pace.seconds(at(n))
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
        above = min(n for n, s in known.items() if s <= goal)
        n = first(lambda k: seconds(k) <= goal, below + 1, above)
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
                tried[n] = self.pace.seconds(ahead)
        n = next(n for n, s in tried.items() if s <= min(tried.values()) * GOOD_ENOUGH)
        times = ", ".join(f"{format_seconds(s)} with {k}" for k, s in tried.items() if k != n)
        reasons["prefetch_blocks"] = f"{n}: a step of {format_seconds(tried[n])}" + (f", {times}" if times else "")
        return plan.model_copy(update={"prefetch_blocks": n})


def open_policies(profile: Profile, *, compiled: bool) -> tuple[Activations, ...]:
    """Activation policies that can be chosen here, simplest first. `offload_saved` is for people: its time is
    modelled from the link alone, and no machine has confirmed it yet.

    Args:
        compiled: the layers are, of which `selective` sees no operation.
    """
    layers = [b for b in profile.blocks if b.kind == "layer"]
    unknown = any(b.selective_bytes is None or b.selective_recompute_s is None for b in layers)
    return tuple(
        p for p in ACTIVATIONS if p != "offload_saved" and not (p == "selective" and (unknown or compiled))
        and not (p.startswith("offload") and profile.hardware.shared_memory)
    )  # fmt: skip
