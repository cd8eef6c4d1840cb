"""The tuned config: one JSON file that takes a plan from the notebook to the training run.

It holds everything a run needs except the data: which model, the plan, the optimizer, the length of the run; and,
for the reader, where the plan was made, what was predicted and what was measured. Loading never reinterprets: a
config for another model is refused (`check_model`), one from another machine says what differs (`differences`).
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from superoffload.errors import InputError
from superoffload.hardware import Hardware
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.record import Record
from superoffload.tracing import Trace

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class ModelRef(Record):
    """Which model, and where its weights come from."""

    name: str
    fingerprint: str
    """Hash over names, shapes and dtypes of the trainable parameters; empty accepts any model."""
    parameters: int = Field(ge=0)
    """Trainable parameters, tied ones once."""
    source: str
    """A preset name, a Hugging Face id, or a folder with config.json and safetensors or a GGUF file."""
    gguf_file: str | None = None
    """Name of the GGUF file inside `source`, where the weights are one."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the architecture with fresh weights from the training seed."""


class HardwareRef(Record):
    """The machine that the plan was made for."""

    name: str
    source: Literal["preset", "probed"]
    fingerprint: dict[str, str] = Field(default_factory=dict)
    """What identifies it: processors and their sizes, and for a probed machine driver and library versions."""

    @classmethod
    def of(cls, hardware: Hardware) -> HardwareRef:
        """Reference to `hardware`."""
        return cls(
            name=hardware.name,
            source=hardware.source,
            fingerprint={**hardware.fingerprint, **_identity(hardware)},
        )


class OptimizerConfig(Record):
    """AdamW as in torch: decoupled weight decay."""

    lr: float = Field(default=1e-5, ge=0, allow_inf_nan=False)
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; None does not clip. Clipping belongs to the optimizer: gradients leave
    the GPU during backward, so a call of `clip_grad_norm_` afterwards finds none."""


class TrainingConfig(Record):
    """The run: how long, in which precision, how often it writes."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the weights that forward and backward use; master weights and moments are always fp32."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; `linear` and `cosine` end at zero."""
    warmup_steps: int = Field(default=0, ge=0)
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    log_every: int = Field(default=1, ge=1)


class TunedConfig(Record):
    """What the Tuner exports, and what the engine, the CLI and the notebook load."""

    schema_name: ClassVar[str] = "superoffload.tuned_config"

    model: ModelRef
    hardware: HardwareRef
    plan: Plan
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    prediction: dict[str, Any] | None = None
    """Headline numbers of the simulated step (`source` says "modelled")."""
    measurement: dict[str, Any] | None = None
    """The same numbers of measured steps, where some were run."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Libraries that the config was made with."""

    @classmethod
    def create(
        cls,
        profile: Profile,
        plan: Plan,
        *,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        training: TrainingConfig | Mapping[str, Any] | None = None,
        model_source: ModelRef | str | None = None,
        trace: Trace | None = None,
        measured: Trace | None = None,
    ) -> TunedConfig:
        """Bind `plan` to the model and machine of `profile`.

        Args:
            profile: the profile that the plan was made from.
            plan: the plan; its micro-batch and sequence length go with it.
            optimizer: hyperparameters, a record or a mapping of its fields.
            training: length and precision of the run. The dtype defaults to that of the profile's blocks.
            model_source: where the weights come from; if omitted, where the profile's model was loaded from, else its
                name. A preset has no weights of its own and starts from random ones.
            trace: the simulated step, kept as the prediction.
            measured: measured steps, kept as the measurement.

        Raises:
            InputError: a mapping holds an unknown key or a bad value, or a trace is of the other kind.
        """
        if isinstance(model_source, ModelRef):
            ref = model_source.replace(name=profile.model, fingerprint=profile.model_fingerprint)
        else:
            source = model_source or profile.context.get("model_source") or profile.model
            ref = ModelRef(
                name=profile.model,
                fingerprint=profile.model_fingerprint,
                parameters=profile.params,
                source=source,
                gguf_file=profile.context.get("gguf_file") or None,
                init="random" if _is_preset(source) else "pretrained",
            )
        if trace is not None and trace.source != "modelled":
            raise InputError("trace= got a measured trace", expected="a simulated one", remedy="Pass it as measured=")
        if measured is not None and measured.source != "measured":
            raise InputError("measured= got a simulated trace", expected="a measured one", remedy="Pass it as trace=")
        if training is None or isinstance(training, Mapping):
            training = TrainingConfig.from_dict({"dtype": _dtype(profile), **(training or {})}, where="training")
        if optimizer is None or isinstance(optimizer, Mapping):
            optimizer = OptimizerConfig.from_dict(dict(optimizer or {}), where="optimizer")
        return cls(
            model=ref,
            hardware=HardwareRef.of(profile.hardware),
            plan=plan,
            optimizer=optimizer,
            training=training,
            prediction=headline(trace) if trace else None,
            measurement=headline(measured) if measured else None,
            versions=library_versions(),
        )

    def check_model(self, fingerprint: str, name: str = "this model") -> None:
        """Refuse another model than the one that was tuned. Raises InputError."""
        if self.model.fingerprint and fingerprint != self.model.fingerprint:
            raise InputError(
                f'the config was tuned for the model "{self.model.name}" (fingerprint {self.model.fingerprint[:12]}), '
                f'and "{name}" has other parameters (fingerprint {fingerprint[:12]})',
                expected="the same parameter names, shapes and dtypes",
                remedy="Load the model that the config names, or profile and plan this one and export a new config",
            )

    def differences(self, hardware: Hardware) -> list[str]:
        """Say, one sentence each, how `hardware` differs from the machine that the plan was made for, and what to
        do about it. Empty where nothing that the plan depends on differs."""
        found: list[str] = []
        here = _identity(hardware)
        for key, label in _IDENTITY_LABELS.items():
            then, now = self.hardware.fingerprint.get(key), here[key]
            if then is not None and then != now:
                found.append(f"The plan was made for {label} {then}, this machine has {now}.")
        if self.plan.adam_threads > hardware.cpu.cores:
            found.append(
                f"The plan gives Adam {self.plan.adam_threads} threads, this machine has {hardware.cpu.cores} cores: "
                "set adam_threads lower."
            )
        if found:
            found.append(
                f'Predicted numbers hold for "{self.hardware.name}" only. To tune for this machine, probe it '
                "(superoffload probe --out hw.json), then plan again with --hardware hw.json."
            )
        return found


_IDENTITY_LABELS = {
    "gpu": "the GPU",
    "gpu_memory_gb": "a GPU memory (in GB) of",
    "cpu": "the CPU",
    "cpu_cores": "CPU cores:",
    "cpu_memory_gb": "a CPU memory (in GB) of",
}


def _identity(hardware: Hardware) -> dict[str, str]:
    return {
        "gpu": hardware.gpu.name,
        "gpu_memory_gb": f"{hardware.gpu.memory_gb:.0f}",
        "cpu": hardware.cpu.name,
        "cpu_cores": str(hardware.cpu.cores),
        "cpu_memory_gb": f"{hardware.cpu.memory_gb:.0f}",
    }


def _is_preset(source: str) -> bool:
    from superoffload.model import spec_names

    return source in spec_names()


def _dtype(profile: Profile) -> str:
    sizes: dict[str, int] = {}
    for block in profile.blocks:
        sizes[block.dtype] = sizes.get(block.dtype, 0) + block.params
    return max(sizes, key=lambda d: sizes[d]) if sizes else "bfloat16"


def headline(trace: Trace) -> dict[str, Any]:
    """The numbers of `trace` that a config keeps: plain JSON values, with the source of the numbers."""
    return {
        "source": trace.source,
        "hardware": trace.hardware,
        "step_s": trace.step_s,
        "tokens_per_s": trace.tokens_per_s,
        "model_tflops": trace.model_tflops,
        "mfu": trace.mfu,
        "gpu_busy": trace.gpu_busy,
        "gpu_gb": trace.memory.summary()["gpu_gb"],
        "host_gb": trace.memory.summary()["host_gb"],
        "pinned_gb": trace.memory.summary()["pinned_gb"],
    }


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a config means, without importing them."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    from superoffload import __version__

    found = {"python": platform.python_version(), "superoffload": __version__}
    for name in ("numpy", "pydantic", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
