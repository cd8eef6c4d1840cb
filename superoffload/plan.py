"""The plan: every choice about where training state lives and when it moves. Making one is planner.py's work."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from superoffload.errors import InputError, NotSupported
from superoffload.record import Record

Cast = Literal["gpu", "cpu", "fused"]
Speculate = Literal["on", "off", "auto"]
Undo = Literal["record", "snapshot"]
Activations = Literal["none", "selective", "full", "offload_inputs", "offload_saved"]
Processor = Literal["gpu", "cpu"]
Master = Literal["plain", "split"]

CASTS: tuple[Cast, ...] = ("gpu", "cpu", "fused")
ACTIVATIONS: tuple[Activations, ...] = ("none", "selective", "full", "offload_inputs", "offload_saved")


class Plan(Record):
    """One way to run a training step. Field names are the knobs of the Tuner and the `--set` keys of the CLI."""

    schema_name: ClassVar[str] = "superoffload.plan"

    bucket_mb: Annotated[float, Field(gt=0, le=65536)] = 64.0
    """Bucket size in MiB of fp32 (64 = 16.8M parameters)."""
    retained_buckets: Annotated[int, Field(ge=0)] = 0
    """How many buckets, counted from the *last* that backward completes (the first layers), keep master weights and
    moments on the GPU: their gradients arrive last, so their CPU update could hide behind nothing."""
    flow_blocks: tuple[int, ...] = ()
    """Blocks whose 16-bit weights live in pinned CPU memory and are fetched before each use."""
    prefetch_blocks: Annotated[int, Field(ge=1)] = 1
    """How many flow blocks are fetched ahead of their use."""
    cast_down: Cast = "fused"
    """Who casts gradients 16-bit to fp32: `gpu` (fp32 crosses the link), `cpu` (16-bit crosses, separate pass on the
    CPU), `fused` (16-bit crosses, cast inside the Adam pass)."""
    cast_up: Cast = "fused"
    """Who casts new weights fp32 to 16-bit; same words."""
    master: Master = "plain"
    """How the CPU keeps the fp32 master of bf16 weights: `plain` beside the 16-bit copy (6 B/param), or `split` into
    that copy and a 16-bit remainder (4 B/param, the same bits): needs `cast_up = fused`."""
    speculate: Speculate = "auto"
    """`on`: Adam starts before the gradient norm is known. `off`: it waits. `auto`: the engine decides step by step."""
    undo: Undo = "record"
    """How a speculative step is taken back: `record` writes 3 bytes per parameter and lists what they cannot repair
    (3.6 B/param of host memory), `snapshot` copies master weights and moments before the step (12 B/param): exact by
    construction, never leaves a tile waiting for the verdict, what the record is tested against, and slower."""
    undo_buckets: Annotated[int | None, Field(ge=1)] = None
    """How many buckets, counted from the first that backward completes, a speculative step may update before the
    verdict: only these have undo memory. The others arrive too late to be reached before it, or wait for it. None: all
    whose state is on the CPU."""
    adam_threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of the Adam pool."""
    activations: Activations = "full"
    """What the layers' forward leaves for their backward. `none`: everything is kept. `selective`: the results of
    attention and of weight products are kept, the rest is recomputed. `full`: only the layers' inputs are kept, forward
    is recomputed. `offload_inputs`: as `full`, with the inputs in pinned host memory until backward needs them.
    `offload_saved`: nothing is recomputed, everything goes to pinned host memory."""
    activations_by_block: dict[int, Activations] = Field(default_factory=dict)
    """Layers with another policy than `activations`, by block number."""
    loss_chunks: Annotated[int, Field(ge=1)] = 1
    """The head's logits and loss are computed in that many chunks of tokens, so that only one chunk's logits exist at a
    time. 1: the model's own loss. More: for Hugging Face causal language models, which then return no logits where
    they train."""
    compile_blocks: bool = False
    """Each layer's forward goes through `torch.compile` (regional compilation): one graph for all alike layers. Kernels
    round in other places than eager ones do, and the first step takes the compiler's time. Not with `selective`."""
    micro_batch: Annotated[int, Field(ge=1)] = 1
    """Sequences per micro-batch."""
    seq_len: Annotated[int, Field(ge=1)] = 1
    """Tokens per sequence."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per optimizer step."""
    accumulate_on: Processor = "gpu"
    """Where the gradients of earlier micro-batches wait: `gpu` in `p.grad` (2 B/param in 16 bit), `cpu` in the held
    gradients on the host, which every later micro-batch then fetches, adds to and sends down again."""
    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Groups of Superchips that work on micro-batches of their own. Optimizer states, held gradients and homes of flow
    blocks are divided over all chips (ZeRO), the 16-bit weights of other blocks are on each. Planned and simulated
    only: the engine trains on one chip."""
    sequence_parallel: Annotated[int, Field(ge=1)] = 1
    """Chips of a group, each with that part of every sequence and, in attention, with that part of the heads of whole
    sequences (DeepSpeed-Ulysses). Planned and simulated only."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """One sentence with numbers for each field that the cost model chose; absent for a field set by hand."""

    @field_validator("flow_blocks")
    @classmethod
    def _each_once(cls, blocks: tuple[int, ...]) -> tuple[int, ...]:
        twice = sorted({b for b in blocks if blocks.count(b) > 1})
        if twice:
            raise ValueError(f"block {twice[0]} is named twice")
        return blocks

    @property
    def tokens_per_step(self) -> int:
        """Of all chips."""
        return self.micro_batch * self.seq_len * self.accumulation * self.data_parallel

    @property
    def chips(self) -> int:
        """Superchips that the plan uses."""
        return self.data_parallel * self.sequence_parallel

    def share(self, count: int) -> int:
        """What one chip has of `count` elements that are divided over all chips, padding included."""
        chips = self.data_parallel * self.sequence_parallel
        return count if chips == 1 else -(-count // chips)

    def activations_of(self, block: int) -> Activations:
        """The policy of a layer block."""
        return self.activations_by_block.get(block, self.activations)

    def may_undo(self, bucket: int) -> bool:
        """Whether a bucket of the CPU has undo memory."""
        return self.speculate != "off" and (self.undo_buckets is None or bucket < self.undo_buckets)

    @classmethod
    def knobs(cls) -> tuple[str, ...]:
        """Names of the fields a person may set."""
        return tuple(name for name in cls.model_fields if name != "reasons")

    def _repr_html_(self) -> str:
        from superoffload.html_views import plan_html

        return plan_html(self)


def check_master(plan: Plan) -> None:
    """Refuse a split master whose weights somebody else is to cast.

    Raises:
        InputError: with the field to change.
    """
    if plan.master == "split" and plan.cast_up != "fused":
        raise InputError(
            f'master = "split" with cast_up = "{plan.cast_up}"',
            expected='cast_up = "fused": the step itself writes the 16-bit weights, which are half of the master',
        )


def check_one_chip(plan: Plan) -> None:
    """Refuse to train under a plan for several Superchips.

    Raises:
        NotSupported: always for such a plan.
    """
    if plan.chips > 1:
        raise NotSupported(
            f"the plan is for {plan.chips} Superchips (data_parallel = {plan.data_parallel}, sequence_parallel = "
            f"{plan.sequence_parallel}), and this version trains on one: several can be planned and simulated only",
            expected="data_parallel = 1 and sequence_parallel = 1",
            remedy="Plan again for one chip",
        )


def check_compile(plan: Plan) -> None:
    """Refuse to keep single results of a compiled layer.

    Raises:
        InputError: with the field to change.
    """
    if plan.compile_blocks and "selective" in (plan.activations, *plan.activations_by_block.values()):
        raise InputError(
            "compile_blocks = True with activations = selective, which sees no operation of a compiled layer",
            expected="none, full, offload_inputs or offload_saved",
            remedy='Take activations = "none": a compiled layer already computes again what is cheap',
        )
