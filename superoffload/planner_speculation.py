"""Speculation: whether a step may begin before its verdict, and for how many buckets there is undo memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superoffload import graph
from superoffload.memory import ledger
from superoffload.plan import Plan
from superoffload.planner_pace import GOOD_ENOUGH, Pace, first
from superoffload.planner_room import Room
from superoffload.units import GB, format_bytes, format_seconds


class SpeculationChoice:
    """Chooses for one profile: how many buckets could have undo memory before the placement is known, and how many of
    them shall once it is.

    Args:
        given: the fields that the user has set, which stay as they are.
    """

    def __init__(self, room: Room, pace: Pace, given: Mapping[str, Any]):
        self.room, self.pace, self.given = room, pace, given
        self.profile, self.hw = room.profile, room.profile.hardware
        self.reasons: dict[str, str] = {}
        if "undo_buckets" not in given:
            self.reasons["undo_buckets"] = "all: nothing is speculated"

    def before_placement(self, plan: Plan) -> Plan:
        """The most buckets that it can pay to give undo memory, and that some plan has host memory for."""
        if plan.speculate == "off" or "undo_buckets" in self.given:
            return plan
        plan = self._reached(plan)
        return plan if self.room.can_fit(plan) else self._fewer_undone(plan)

    def _reached(self, plan: Plan) -> Plan:
        """Give undo memory to no more buckets than Adam can reach before the verdict, in the longest backward."""
        backward = sum(b.backward_s + b.forward_s for b in self.profile.blocks)
        buckets = graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks)
        cost = graph.bucket_cost(plan, buckets.kinds[buckets.kind[0]][0])
        largest = plan.share(int(buckets.params.max()))
        one = largest * cost.adam_bytes / (self.hw.cpu.adam_at(plan.adam_threads) * GB)
        most = int(backward / one) + 2
        return plan.model_copy(update={"undo_buckets": most}) if most < len(buckets) else plan

    def _fewer_undone(self, plan: Plan) -> Plan:
        """Give undo memory to as many buckets as some plan has host memory for; wait where that is none."""

        def fits(n: int) -> bool:
            return self.room.can_fit(plan.model_copy(update={"undo_buckets": n}))

        total = plan.undo_buckets or len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks))
        most = first(lambda n: not fits(n), 1, total) - 1
        if most:
            return plan.model_copy(update={"undo_buckets": most})
        if "speculate" not in self.given:
            self.reasons["speculate"] = f"off: no plan has memory left for its undo {plan.undo}s"
            return plan.model_copy(update={"speculate": "off"})
        return plan

    def after_placement(self, plan: Plan) -> Plan:
        """Speculate where that shortens a step that commits, on as few buckets as that takes: each costs host memory,
        and one that Adam does not reach before the verdict gains nothing by it."""
        if plan.speculate == "off":
            return plan
        waiting = plan.model_copy(update={"speculate": "off", "undo_buckets": None})
        if "undo_buckets" not in self.given:
            plan = self._undo_buckets(plan)
        if "speculate" in self.given:
            return plan
        ahead, behind = self.pace.seconds(plan), self.pace.seconds(waiting)
        size = format_bytes(ledger(self.profile, plan).total("host") - ledger(self.profile, waiting).total("host"))
        times = f"a step that commits takes {format_seconds(ahead)}, one that waits {format_seconds(behind)}"
        why = ""
        if self.room.host_over(plan) > 0 >= self.room.host_over(waiting):
            why = f"off: its undo {plan.undo}s ({size}) do not fit the host's memory; {times}"
        elif behind <= ahead * GOOD_ENOUGH:
            why = f"off: {times}, which is not worth undo {plan.undo}s of {size}"
        if why:
            self.reasons["speculate"] = why
            if "undo_buckets" not in self.given:
                self.reasons["undo_buckets"] = "all: nothing is speculated"
            return waiting.model_copy(update={"undo_buckets": self.given.get("undo_buckets")})
        self.reasons["speculate"] = f"auto: {times}; the engine waits while most steps are clipped"
        return plan

    def _undo_buckets(self, plan: Plan) -> Plan:
        """The fewest buckets with undo memory that give the shortest step, within the host's memory."""
        total = len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks)) - plan.retained_buckets

        def at(n: int) -> Plan:
            return plan.model_copy(update={"undo_buckets": n if n < total else None})

        # `_fewer_undone` has shown one to fit some placement; where the chosen one has no room the caller sees it.
        most = total if self.room.host_over(at(total)) <= 0 else first(lambda n: self.room.host_over(at(n)) > 0,
                                                                       1, total) - 1  # fmt: skip
        tried = {n: self.pace.seconds(at(n)) for n in sorted({most * k // 8 for k in range(1, 9)} - {0})}
        if not tried:
            self.reasons["undo_buckets"] = f"1 of {total}: the host's memory has no room for more undo {plan.undo}s"
            return at(1)
        n = next(n for n, s in tried.items() if s <= min(tried.values()) * GOOD_ENOUGH)
        why = f"{'all' if n == total else n} of {total} on the CPU: a step of {format_seconds(tried[n])}"
        fewer = max((k for k in tried if k < n), default=None)
        why += f", {format_seconds(tried[fewer])} with {fewer}" if fewer else ""
        why += ", more would gain less than 0.3 %" if n < most else ""
        why += f"; host memory allows {most}" if most < total else ""
        self.reasons["undo_buckets"] = why
        return at(n)
