"""The public interface: what it holds, that it does not change by accident, that every function works twice."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import superoffload as so

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def described(name: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return [f"{name}: module"]
    if inspect.isclass(value):
        if issubclass(value, BaseModel):
            methods = [n for n, m in vars(value).items() if not n.startswith("_") and callable(getattr(value, n))]
            fields = [f"  {n}: required" if f.is_required() else f"  {n}" for n, f in value.model_fields.items()]
            return [f"{name}: record", *fields, *(f"  {m}()" for m in sorted(methods) if m not in value.model_fields)]
        if issubclass(value, Exception):
            return [f"{name}: error ({', '.join(b.__name__ for b in value.__bases__)})"]
        return [f"{name}: class {inspect.signature(value)}"]
    return [f"{name}: {type(value).__name__} {inspect.signature(value)}" if callable(value) else f"{name}: value"]


def interface() -> str:
    return "".join(line + "\n" for name in sorted(so.__all__) for line in described(name, getattr(so, name)))


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch", reason="OffloadAdamW and profile are part of the interface")


def test_interface_equals_its_snapshot() -> None:
    """A deliberate change is accepted with UPDATE_PUBLIC_API=1 pytest tests/unit/test_public_api.py."""
    if os.environ.get("UPDATE_PUBLIC_API"):
        SNAPSHOT.write_text(interface())
    assert interface() == SNAPSHOT.read_text()


def test_every_public_name_is_documented() -> None:
    for name in so.__all__:
        value = getattr(so, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_no_submodule_shares_a_name_with_a_public_function() -> None:
    """The import system would replace the function by the module."""
    submodules = {m.name for m in pkgutil.iter_modules(so.__path__)}
    functions = {n for n in so.__all__ if not inspect.ismodule(getattr(so, n))}
    assert not submodules & functions


def test_every_public_function_works_twice_in_a_fresh_process(tmp_path: Path) -> None:
    code = """
import torch
import superoffload as so
for _ in range(2):
    hw = so.hardware.preset("gh200")
    assert so.model.spec("llama-7b").name == "llama-7b"
    profile = so.estimate("llama-7b", micro_batch=1, seq_len=128, hardware=hw)
    plan = so.make_plan(profile)
    trace = so.simulate(profile, plan)
    cfg = so.TunedConfig.create(profile, plan, trace=trace)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    measured = so.profile(model, torch.randn(2, 3, 8), hardware=hw, repeats=1)
    assert measured.source == "measured" and measured.params == 144
    with so.OffloadAdamW(model, lr=0.1) as opt:
        before = model[0].weight.detach().clone()
        model(torch.randn(2, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        assert not torch.equal(before, model[0].weight)
assert not [n for n in so.__all__ if type(getattr(so, n)).__name__ == "module" and n not in ("hardware", "model")]
print("done")
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r'no attribute "make_plans"; did you mean "make_plan"\?'):
        _ = so.make_plans


def test_dir_lists_the_interface() -> None:
    assert set(so.__all__) <= set(dir(so))
