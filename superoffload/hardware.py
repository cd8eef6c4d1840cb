"""Hardware records: what the cost model needs to know about a machine, each number with its unit and source."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from superoffload.errors import unknown_name
from superoffload.record import Record


class Curve(Record):
    """Bandwidth over size, interpolated linearly in log2(size) and flat outside the measured range."""

    size_mb: tuple[float, ...]
    """Transfer sizes in decimal MB, ascending."""
    gb_per_s: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Curve:
        if len(self.size_mb) != len(self.gb_per_s) or not self.size_mb:
            raise ValueError("size_mb and gb_per_s need the same, non-zero length")
        if list(self.size_mb) != sorted(set(self.size_mb)) or min(self.size_mb) <= 0 or min(self.gb_per_s) <= 0:
            raise ValueError("sizes must be positive and ascending, bandwidths positive")
        return self

    def at(self, nbytes: float) -> float:
        """Bandwidth in GB/s of one transfer of `nbytes`."""
        x = math.log2(max(nbytes, 1.0) / 1e6)
        xs = [math.log2(s) for s in self.size_mb]
        if x <= xs[0]:
            return self.gb_per_s[0]
        for i in range(1, len(xs)):
            if x <= xs[i]:
                f = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
                return self.gb_per_s[i - 1] + f * (self.gb_per_s[i] - self.gb_per_s[i - 1])
        return self.gb_per_s[-1]

    @property
    def peak(self) -> float:
        return max(self.gb_per_s)


class Link(Record):
    """The GPU–CPU link."""

    down: Curve
    """GPU to CPU (gradients)."""
    up: Curve
    """CPU to GPU (weights)."""
    both_gb_per_s: float = Field(gt=0)
    """Sum of both directions when both run at once."""


class Gpu(Record):
    name: str
    memory_gb: float = Field(gt=0)
    peak_bf16_tflops: float = Field(ge=0)
    """Vendor's dense bf16 peak, the denominator of MFU; 0 where none is published (a CPU)."""
    matmul_bf16_tflops: float = Field(gt=0)
    """What a large bf16 matrix product reaches; the analytic estimate builds on it."""
    hbm_gb_per_s: float = Field(gt=0)


class Cpu(Record):
    name: str
    cores: int = Field(ge=1)
    memory_gb: float = Field(gt=0)
    dram_gb_per_s: float = Field(gt=0)
    """Cap of Adam and both DMA directions together."""
    adam_threads: tuple[int, ...]
    """Thread counts, ascending, at which Adam was measured."""
    adam_gb_per_s: tuple[float, ...]
    """Bandwidth of an fp32 AdamW step at those thread counts, 28 bytes per parameter counted."""
    cast_gb_per_s: float = Field(gt=0)
    """Separate fp32 to 16-bit cast pass on all cores, 6 bytes per element counted."""
    dma_write_cost: float = Field(default=1.0, ge=1)
    """DRAM bandwidth that a download takes away from everybody else, per byte that it writes: 1 where a DMA write
    costs what a read costs, more where it was measured to cost more."""

    @model_validator(mode="after")
    def _check(self) -> Cpu:
        if len(self.adam_threads) != len(self.adam_gb_per_s) or not self.adam_threads:
            raise ValueError("adam_threads and adam_gb_per_s need the same, non-zero length")
        if list(self.adam_threads) != sorted(set(self.adam_threads)):
            raise ValueError("adam_threads must be ascending")
        return self

    def adam_at(self, threads: int) -> float:
        """Adam's bandwidth in GB/s with `threads` threads: linear between measured counts, proportional below the
        first and flat above the last."""
        t, b = self.adam_threads, self.adam_gb_per_s
        if threads <= t[0]:
            return b[0] * threads / t[0]
        for i in range(1, len(t)):
            if threads <= t[i]:
                return b[i - 1] + (threads - t[i - 1]) / (t[i] - t[i - 1]) * (b[i] - b[i - 1])
        return b[-1]


class CastTimes(Record):
    """One bucket alone in one direction, from end to end, by who casts: nanoseconds per parameter."""

    gpu: float = Field(gt=0)
    cpu: float = Field(gt=0)
    fused: float = Field(gt=0)


class Casts(Record):
    """Where casts are made, measured: copy, casts and Adam step of one bf16 bucket, one after another. In a running
    engine links, GPU and Adam work on several buckets at once, so the simulator has the last word."""

    down: CastTimes
    """A gradient from the GPU through the Adam step."""
    up: CastTimes
    """The Adam step, and its weights to the GPU."""
    bucket_params: int = Field(ge=1)
    threads: int = Field(ge=1)


class Wire(Record):
    """What joins the GPUs of several Superchips at one level: those of a board, or the boards of a network."""

    ring: Curve
    """What one chip sends in a reduce-scatter or an all-gather (the "bus bandwidth" of NCCL's tests), over the bytes
    that it sends. It receives as much at the same time."""
    all_to_all: Curve
    """The same in an all-to-all."""
    latency_s: float = Field(ge=0)
    """One more chip in a collective makes it that much longer."""
    mesh: bool = False
    """Whether each pair of chips has links of its own, so that some of the chips can use some of the links only. False
    behind a switch."""


class Interconnect(Record):
    """How the GPUs of several Superchips reach each other: `board` within a board, `network` between boards, where each
    chip has its own share of the board's adapters. docs/cost_model.md says what collectives cost on it."""

    chips: int = Field(ge=2, le=64)
    board_chips: int = Field(ge=1)
    """Chips of one board, numbered one after another."""
    board: Wire | None = None
    network: Wire | None = None

    @model_validator(mode="after")
    def _check(self) -> Interconnect:
        if self.chips % self.board_chips:
            raise ValueError(f"{self.chips} chips are no whole number of boards with {self.board_chips}")
        if (self.board is None) != (self.board_chips == 1):
            raise ValueError("board belongs to boards of several chips")
        if (self.network is None) != (self.chips == self.board_chips):
            raise ValueError("network belongs to several boards")
        return self


class Hardware(Record):
    """One GPU, its CPU and the link between them; and where there are several alike, what joins them."""

    schema_name: ClassVar[str] = "superoffload.hardware"

    name: str
    source: Literal["preset", "probed"]
    gpu: Gpu
    cpu: Cpu
    link: Link
    shared_memory: bool = False
    """True where GPU and CPU share one memory (a laptop without GPU, MI300A): no capacity is counted twice."""
    casts: Casts | None = None
    """Absent where nobody measured them (presets)."""
    interconnect: Interconnect | None = None
    """None: one chip alone. Everything else in this record is of one chip."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each number comes from, keyed by dotted field name."""
    fingerprint: dict[str, str] = Field(default_factory=dict)
    """What identifies a probed machine: GPU and CPU names, driver, versions, date."""


def preset_names() -> tuple[str, ...]:
    """Names that `preset` accepts, in the order in which they are documented."""
    from superoffload.hardware_presets import BUILDERS

    return tuple(BUILDERS)


def is_preset(name: str) -> bool:
    """Whether `preset` knows this name, of one chip or of several."""
    from superoffload.interconnect_presets import split_name

    return name in preset_names() or split_name(name) is not None


def preset(name: str) -> Hardware:
    """Return the named machine. Names are exact: "gh200" never matches "h200".

    Args:
        name: one of `preset_names()`, or of several chips "gh200-quad-x8": 2, 4, 8 or 16 of one that is known to be
            joined (`superoffload.interconnect_presets`).

    Raises:
        InputError: no preset has this name; the message lists the known ones.
    """
    from superoffload.hardware_presets import BUILDERS
    from superoffload.interconnect_presets import split_name

    several = split_name(name)
    if several is not None:
        return joined(BUILDERS[several[0]](), several[1])
    if name not in BUILDERS:
        remedy = "Give one of these names, or measure this machine with superoffload probe --out hw.json"
        raise unknown_name("hardware preset", name, BUILDERS, remedy)
    return BUILDERS[name]()


def joined(hardware: Hardware, chips: int) -> Hardware:
    """Several of a preset's chips with what joins them; `hardware` itself for one.

    Raises:
        InputError: nothing is known of how such chips are joined, or of so many.
    """
    from superoffload.interconnect_presets import arrange

    return hardware if chips == 1 else arrange(hardware, chips)


def resolve(hardware: str | Hardware) -> Hardware:
    """Return `hardware` itself, or the preset of that name."""
    return preset(hardware) if isinstance(hardware, str) else hardware


def probe(refresh: bool = False) -> Hardware:
    """Measure this machine: link curve both ways, CPU Adam against threads, casts, matrix product (about 30 s).

    Args:
        refresh: measure again even where a cached result of the same machine exists.
    """
    from superoffload.probing import probe_machine  # needs torch

    return probe_machine(refresh=refresh)
