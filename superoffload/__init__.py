"""SuperOffload: profile a model, tune how its training state is split between GPU and CPU, train with that plan.

Importing the package loads nothing but this file. Names are fetched when first used, so that the planner runs
without torch and `import superoffload` costs a millisecond::

    import superoffload as so

    profile = so.estimate("llama-7b", micro_batch=4, seq_len=2048, hardware="gh200")
    plan = so.make_plan(profile)
    trace = so.simulate(profile, plan)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = frozenset({"hardware", "model"})
"""Submodules that are part of the public interface under their own name."""

_HOME = {
    # the data flow, in its order
    "profile": "profiling",
    "estimate": "estimating",
    "make_plan": "planner",
    "search": "autotune",
    "simulate": "simulator",
    "measured_steps": "measured_step",
    "load_measured": "measured_step",
    "calibrate": "calibration",
    "OffloadAdamW": "engine",
    "chunked_cross_entropy": "engine",
    # torch's profiler
    "to_tensorboard": "integrations.tensorboard",
    "read_profile": "profiler_events",
    # records
    "Hardware": "hardware",
    "ModelSpec": "model",
    "BlockProfile": "profiler",
    "Profile": "profiler",
    "Plan": "plan",
    "Ledger": "memory",
    "SearchResult": "search_result",
    "Trace": "tracing",
    "MeasuredStep": "measured_step",
    "Calibration": "calibration",
    "ProfilerSummary": "profiler_events",
    "TunedConfig": "config",
    "ModelRef": "config",
    "OptimizerConfig": "config",
    "TrainingConfig": "config",
    # errors
    "SuperOffloadError": "errors",
    "InputError": "errors",
    "DoesNotFit": "errors",
    "NotSupported": "errors",
    "EngineError": "errors",
    "MissingDependency": "errors",
}
"""Public name -> submodule that defines it. No submodule may share a name with a public function: the import system
would replace the function in this namespace by the module."""

if TYPE_CHECKING:
    from superoffload import hardware, model
    from superoffload.autotune import search
    from superoffload.calibration import Calibration, calibrate
    from superoffload.config import ModelRef, OptimizerConfig, TrainingConfig, TunedConfig
    from superoffload.engine import OffloadAdamW, chunked_cross_entropy
    from superoffload.errors import (
        DoesNotFit,
        EngineError,
        InputError,
        MissingDependency,
        NotSupported,
        SuperOffloadError,
    )
    from superoffload.estimating import estimate
    from superoffload.hardware import Hardware
    from superoffload.integrations.tensorboard import to_tensorboard
    from superoffload.measured_step import MeasuredStep, load_measured, measured_steps
    from superoffload.memory import Ledger
    from superoffload.model import ModelSpec
    from superoffload.plan import Plan
    from superoffload.planner import make_plan
    from superoffload.profiler import BlockProfile, Profile
    from superoffload.profiler_events import ProfilerSummary, read_profile
    from superoffload.profiling import profile
    from superoffload.search_result import SearchResult
    from superoffload.simulator import simulate
    from superoffload.tracing import Trace

__all__ = [
    "BlockProfile",
    "Calibration",
    "DoesNotFit",
    "EngineError",
    "Hardware",
    "InputError",
    "Ledger",
    "MeasuredStep",
    "MissingDependency",
    "ModelRef",
    "ModelSpec",
    "NotSupported",
    "OffloadAdamW",
    "OptimizerConfig",
    "Plan",
    "Profile",
    "ProfilerSummary",
    "SearchResult",
    "SuperOffloadError",
    "Trace",
    "TrainingConfig",
    "TunedConfig",
    "__version__",
    "calibrate",
    "chunked_cross_entropy",
    "estimate",
    "hardware",
    "load_measured",
    "make_plan",
    "measured_steps",
    "model",
    "profile",
    "read_profile",
    "search",
    "simulate",
    "to_tensorboard",
]

_EXTRAS = {"torch": "train", "transformers": "train", "safetensors": "train", "datasets": "train"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        from superoffload.errors import did_you_mean

        raise AttributeError(f'module "{__name__}" has no attribute "{name}"{did_you_mean(name, __all__)}')
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as e:
        extra = _EXTRAS.get(e.name or "")
        if extra is None:
            raise
        from superoffload.errors import MissingDependency

        raise MissingDependency(
            f'superoffload.{name} needs "{e.name}", which is not installed',
            remedy=f"Install it: pip install 'superoffload[{extra}]'",
        ) from e
    globals()[name] = value  # later accesses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
