"""How much room a plan leaves in the two memories, and which plans can have any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from superoffload import graph
from superoffload.fitting import evenly
from superoffload.loss_costs import enough_chunks
from superoffload.memory import ledger
from superoffload.plan import Activations, Plan, Processor
from superoffload.profiler import Profile
from superoffload.units import DTYPE_BYTES


class Room:
    """Answers for one profile.

    Args:
        given: names of the fields that the user has set, which stay as they are.
    """

    def __init__(self, profile: Profile, given: Collection[str]):
        self.profile, self.given = profile, given
        self.weights = sum(b.params * DTYPE_BYTES[b.dtype] for b in profile.blocks)
        """Bytes of the weights as the GPU reads them."""

    def frugal(self, plan: Plan, activations: Activations = "full") -> Plan:
        """`plan` with `activations`, the loss in chunks, and on the GPU only the buckets that the host has no room for,
        where these fields are open."""
        least: dict[str, Any] = {"activations": activations, "retained_buckets": 0}
        plan = plan.model_copy(update={k: v for k, v in least.items() if k not in self.given})
        if "loss_chunks" not in self.given:
            plan = plan.model_copy(update={"loss_chunks": enough_chunks(self.profile, plan)})
        return plan if "retained_buckets" in self.given else self.relieving_host(plan)

    def waiting(self, plan: Plan) -> Plan:
        """`plan` with as little memory for speculation's undo records as it may have."""
        if "speculate" in self.given and plan.speculate != "off" and "undo_buckets" not in self.given:
            return plan.model_copy(update={"undo_buckets": 1})
        return plan if "speculate" in self.given else plan.model_copy(update={"speculate": "off", "undo_buckets": None})

    def relieving_host(self, plan: Plan) -> Plan:
        """The plan with the fewest retained buckets that leave the host's memory enough; all of them if none do."""
        total = len(graph.buckets_of(self.profile, plan.bucket_mb, plan.flow_blocks))

        def at(n: int) -> Plan:
            return plan.model_copy(update={"retained_buckets": n})

        over = self.host_over(at(0))
        if over <= 0:
            return at(0)
        most = self.host_over(at(total))
        if most > 0:
            return at(total)
        # The first guess is in proportion, which is right but for the last, smaller bucket. Where only some buckets
        # have undo memory it may be far off, so the strides double until the answer lies between two of them.
        low, high, n, stride = 0, total, -(-over * total // (over - most)), 1
        while high - low > 1:
            n = n if low < n < high else (low + high) // 2
            if self.host_over(at(n)) > 0:
                low, n = n, n + stride
            else:
                high, n = n, n - stride
            stride *= 2
        return at(high)

    def can_fit(self, plan: Plan) -> bool:
        """Whether some choice of the open fields makes the plan fit, `speculate` as it is."""
        # Inputs of layers lie on the GPU, or on the host: what is short of the one may not be of the other.
        policies: tuple[Activations, ...] = ("full", "offload_inputs")
        if "activations" in self.given or self.profile.hardware.shared_memory:
            policies = policies[:1]
        holders = self.holders(plan)
        return any(
            self._can_fit(plan.model_copy(update={"accumulate_on": h}), policy) for policy in policies for h in holders
        )

    def all_on_host(self, plan: Plan) -> Plan:
        """`plan` with as much on the host as the open fields allow: states, weights, accumulated gradients."""
        layers = tuple(i for i, b in enumerate(self.profile.blocks) if b.kind == "layer")
        most: dict[str, Any] = {"retained_buckets": 0, "flow_blocks": layers, "accumulate_on": self.holders(plan)[-1]}
        return plan.model_copy(update={k: v for k, v in most.items() if k not in self.given})

    def holders(self, plan: Plan) -> tuple[Processor, ...]:
        """Where gradients of earlier micro-batches may be held."""
        if "accumulate_on" in self.given or plan.accumulation == 1 or self.profile.hardware.shared_memory:
            return (plan.accumulate_on,)
        return ("gpu", "cpu")

    def _can_fit(self, plan: Plan, activations: Activations) -> bool:
        def fits(flow: tuple[int, ...]) -> bool:
            frugal = self.frugal(plan.model_copy(update={"flow_blocks": flow}), activations)
            return self.gpu_over(frugal) <= 0 and self.host_over(frugal) <= 0

        if fits(plan.flow_blocks):
            return True
        if "flow_blocks" in self.given:
            return False
        on_host, on_gpu = self.layers_by_state(self.frugal(plan, activations))
        return fits(tuple(on_host)) or fits(tuple(sorted([*on_host, *on_gpu])))

    def layers_by_state(self, stationary: Plan) -> tuple[list[int], list[int]]:
        """Layers with state on the host, and those that are retained whole. The former flow first, since what CPU Adam
        writes there is their home; that of a retained one would be host memory on top."""
        buckets = graph.buckets_of(self.profile, stationary.bucket_mb)
        on_host = buckets.blocks_of_first(len(buckets) - stationary.retained_buckets)
        layers = [i for i, b in enumerate(self.profile.blocks) if b.kind == "layer"]
        return [i for i in layers if i in on_host], [i for i in layers if i not in on_host]

    def flowing(self, stationary: Plan, count: int) -> tuple[int, ...]:
        """`count` layers that flow where the others stay as in `stationary`, those with state on the host first."""
        return spread_by_state(*self.layers_by_state(stationary), count)

    def gpu_over(self, plan: Plan) -> int:
        """Bytes over the GPU's capacity (the whole memory's where it is shared); negative where there is room."""
        account = ledger(self.profile, plan)
        if account.gpu_capacity_bytes:
            return account.total("gpu") - account.gpu_capacity_bytes
        return account.total("host") - account.host_capacity_bytes

    def host_over(self, plan: Plan) -> int:
        account = ledger(self.profile, plan)
        return account.total("host") - account.host_capacity_bytes


def spread_by_state(on_host: Sequence[int], on_gpu: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` blocks, evenly spread over those with state on the host, and only then over the others."""
    more = count - len(on_host)
    return evenly(on_host, count) if more <= 0 else tuple(sorted([*on_host, *evenly(on_gpu, more)]))
