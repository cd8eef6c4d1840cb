"""Profiles: seconds and bytes per block of one micro-batch on one machine, measured (`profiling.py`) or estimated from
the model's shape (`estimating.py`)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from superoffload.hardware import Hardware
from superoffload.record import Record


class Exchange(Record):
    """What Ulysses adds to a layer: an all-to-all before attention and one after it, forward and backward."""

    before_bytes: int = Field(ge=0)
    """Query, key and value of one micro-batch on one chip."""
    after_bytes: int = Field(ge=0)
    """Attention's result."""
    forward: tuple[float, float]
    """Shares of the layer's forward that have been done when each comes."""
    backward: tuple[float, float]
    """Shares of its backward: the gradient of the result comes first, then those of query, key and value."""


class BlockProfile(Record):
    """A block is a module whose weights move together: embedding, transformer layer, final norm and head."""

    name: str
    kind: Literal["embedding", "layer", "head", "other"]
    tensor_numels: tuple[int, ...]
    """Elements of each trainable parameter in order of definition. A parameter shared with an earlier block is
    listed only there."""
    dtype: str = "bfloat16"
    """Dtype of the weights on the GPU."""
    forward_s: float = Field(ge=0)
    """Seconds of one micro-batch's forward."""
    backward_s: float = Field(ge=0)
    """Seconds of one micro-batch's backward without recompute."""
    forward_flops: float = Field(ge=0)
    """Of one micro-batch: 2 per multiply-add."""
    input_bytes: int = Field(ge=0)
    """Bytes of the block's input for one micro-batch, kept when the block is recomputed."""
    activation_bytes: int = Field(ge=0)
    """Bytes kept for backward of one micro-batch when nothing is recomputed, input included."""
    working_bytes: int = Field(default=0, ge=0)
    """Largest transient of the block beyond those (logits of the head, for example)."""

    selective_bytes: int | None = Field(default=None, ge=0)
    """Bytes kept for backward under `activations = selective`, input included; None where nobody has looked."""
    selective_recompute_s: float | None = Field(default=None, ge=0)
    """Seconds of what it computes again."""
    full_recompute_s: float | None = Field(default=None, ge=0)
    """Seconds of what is computed again where everything is: the forward up to the last result that backward needs,
    which is not the last of all. None where nobody has looked; the whole forward is taken then."""

    compiled_forward_s: float | None = Field(default=None, ge=0)
    """Seconds of one micro-batch's forward under `compile_blocks`, the compiler's own time not included; None where
    nobody has looked."""
    compiled_backward_s: float | None = Field(default=None, ge=0)
    """Seconds of its backward without recompute."""
    compiled_bytes: int | None = Field(default=None, ge=0)
    """Bytes kept for that backward, input included."""
    compiled_working_bytes: int | None = Field(default=None, ge=0)
    """`working_bytes` of the compiled layer; None where nobody has looked, and those of the eager one are taken."""
    logits: int | None = Field(default=None, ge=0)
    """Logits of one micro-batch, in the head of a model whose loss the engine can compute in chunks
    (`Plan.loss_chunks`); None in every other block, and where nobody has looked."""
    chunked_activation_bytes: int | None = Field(default=None, ge=0)
    """`activation_bytes` of such a head with chunks: the gradient of its input is kept, and no logits. (The gradient of
    its weight is kept too, and not counted here.)"""
    chunked_working_bytes: int | None = Field(default=None, ge=0)
    """`working_bytes` with chunks, but for those of a chunk's logits (`loss_costs.CHUNK_LOGIT_BYTES` each)."""
    exchange: Exchange | None = None
    """None where a sequence is on one chip, and in blocks without attention."""

    @model_validator(mode="after")
    def _whole(self) -> BlockProfile:
        told = {x is None for x in (self.logits, self.chunked_activation_bytes, self.chunked_working_bytes)}
        if len(told) > 1:
            raise ValueError("logits, chunked_activation_bytes and chunked_working_bytes belong together")
        return self

    @property
    def params(self) -> int:
        return sum(self.tensor_numels)


class Profile(Record):
    """What one micro-batch of a model costs on one machine; where several chips share a sequence, on each of them."""

    schema_name: ClassVar[str] = "superoffload.profile"

    source: Literal["measured", "modelled"]
    model: str
    model_fingerprint: str
    """Hash over names, shapes and dtypes of the parameters; a config refuses another model by it."""
    micro_batch: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    """Of whole sequences."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Chips that share a sequence (Ulysses); everything else here is one chip's share."""
    blocks: tuple[BlockProfile, ...]
    """In forward order."""
    model_flops: float = Field(ge=0)
    """6·N·tokens plus causal attention for one micro-batch (no recompute)."""
    hardware: Hardware
    buffers_bytes: int = Field(default=0, ge=0)
    """Buffers and frozen parameters that stay on the GPU."""
    corrections: dict[str, float] = Field(default_factory=dict)
    """Factors by which calibration has multiplied the blocks' times (`corrected_blocks`); an estimate that is made anew
    for another batch on the same machine takes them over."""
    context: dict[str, str] = Field(default_factory=dict)
    """Versions, device and method of a measurement; the assumptions of an estimate."""

    @property
    def params(self) -> int:
        return sum(b.params for b in self.blocks)

    @property
    def tokens(self) -> int:
        """Of one micro-batch, on one chip."""
        return self.micro_batch * self.seq_len // self.sequence_parallel

    def _repr_html_(self) -> str:
        from superoffload.html_views import profile_html

        return profile_html(self)
