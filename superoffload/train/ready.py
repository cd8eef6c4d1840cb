"""Whether a run could begin here, asked before a process is started for it: nothing is loaded or fetched."""

from __future__ import annotations

import torch

from superoffload import model_source
from superoffload.config import TunedConfig
from superoffload.doctor import memory_bytes
from superoffload.errors import InputError
from superoffload.memory import Ledger
from superoffload.plan import check_one_chip
from superoffload.train.data import locate
from superoffload.units import format_bytes


def check_ready(config: TunedConfig, data: str, memory: Ledger | None = None) -> None:
    """Raise an error with its remedy where ``superoffload train`` would fail at once, or bring this machine down.

    Args:
        config: what would be trained.
        data: as on the command line.
        memory: what the plan needs (modelled), compared with the memory of this machine.

    Raises:
        InputError: no such model or data, or too little memory.
        NotSupported: the plan is for several chips.
        MissingDependency: transformers is not installed.
    """
    check_one_chip(config.plan)
    if not data:
        raise InputError(
            "there is no text to train on", expected="a text file or folder, or a Hugging Face data set (owner/name)",
            remedy="To try it, write the word sample: a text that ships with the package",
        )  # fmt: skip
    locate(data)
    model_source.locate(config.model)
    if memory is not None:
        _check_memory(memory, memory_bytes()[0], torch.cuda.is_available())


def _check_memory(memory: Ledger, has: int, gpu: bool) -> None:
    """Refuse a plan that this machine's main memory (`has` bytes, 0 where unknown) cannot hold: the system would end
    processes to make room, the notebook's among them. Without a GPU, main memory holds all."""
    need = memory.total("host") + (0 if gpu else memory.total("gpu"))
    if has and need > has:
        all_of_it = "" if gpu else ", that of the GPU included, since there is none here"
        raise InputError(
            f"this machine has {format_bytes(has)} of main memory, and the plan needs {format_bytes(need)} of it "
            f"(modelled{all_of_it})",
            remedy="Write the config and train on the machine that it was planned for, or plan a smaller model",
        )


__all__ = ["check_ready"]
