"""Checkpoints of a training run: a folder that any transformers user can load, plus what resuming needs.

``step-00000050/`` holds the model (config.json, model.safetensors, tokenizer), ``optimizer.safetensors`` (master
weights, moments, step counts) and ``trainer_state.json``. It is written under a temporary name and renamed, so a folder
of this name is complete.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from superoffload.errors import InputError
from superoffload.model_source import quiet

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "trainer_state.json"
FOLDER = "checkpoints"
KEEP = 2
"""Older checkpoints of a run are removed once a newer one is complete."""


def save_checkpoint(
    run: Path, step: int, model: nn.Module, tokenizer: Any, optimizer: Any, state: dict[str, Any]
) -> Path:
    """Write the checkpoint of `step` into ``run/checkpoints`` and return its folder.

    Args:
        state: JSON values: position in the data, schedule; the random state is added here.
    """
    parent = run / FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    optimizer.synchronize()
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=".writing-"))
    try:
        save_model(model, tokenizer, temporary)
        optimizer.save(temporary / OPTIMIZER)
        body = {"schema": "superoffload.trainer_state", "schema_version": 1, "step": step, **state, "random": _random()}
        (temporary / STATE).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            with path.open("rb") as f:
                os.fsync(f.fileno())
        temporary.chmod(0o755)
        final = parent / f"step-{step:08d}"
        if final.exists():  # the same step, from before a resume
            shutil.rmtree(final)
        os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in _complete(parent)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model as transformers does.

    The engine keeps all weights in one allocation, which a saver could take for shared weights: what is written is a
    copy per parameter, the same one for tied parameters.
    """
    copies: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, t in state.items():
        if id(t) not in copies:
            copies[id(t)] = t.detach().to("cpu", copy=True).contiguous()
        tensors[name] = copies[id(t)]
    with quiet():
        model.save_pretrained(folder, state_dict=tensors)
        tokenizer.save_pretrained(folder)


def latest_checkpoint(run: Path) -> Path:
    """The newest complete checkpoint of a run folder, or `run` itself where it is one. Raises InputError for none."""
    if (run / STATE).is_file():
        return run
    found = _complete(run / FOLDER)
    if not found:
        raise InputError(
            f"{run} holds no checkpoint to resume from",
            expected=f"{FOLDER}/step-…/{STATE}",
            remedy="Give the folder of a run that has saved, or start anew without --resume",
        )
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint. Raises InputError where the file is not one."""
    try:
        body = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"cannot read {checkpoint / STATE}: {e}") from None
    if not isinstance(body, dict) or body.get("schema") != "superoffload.trainer_state":
        raise InputError(f"{checkpoint / STATE} is not a trainer state")
    return body


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Read the model's weights in place."""
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("model*.safetensors"))
    tensors = {k: v for f in files for k, v in load_file(f).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = dict(model.named_parameters())  # names a tied parameter once: the others are missing from the file
    lost = [name for name in missing if name in own]
    if lost or unexpected or not files:
        raise InputError(
            f"the weights in {checkpoint} are not those of this model", expected=", ".join(lost[:3]) or "its parameters"
        )


def _complete(parent: Path) -> list[Path]:
    return sorted(p for p in parent.glob("step-*") if (p / STATE).is_file())


def _random() -> dict[str, str]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in found.items()}


def restore_random(state: dict[str, str]) -> None:
    """Set the random states that the checkpoint was written with."""
    for key, text in state.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if key == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(value)
