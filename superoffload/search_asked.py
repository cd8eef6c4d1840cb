"""What a search is asked for, checked: budgets, tokens per step, and the batch that it starts from."""

from __future__ import annotations

from typing import Any, Literal

from superoffload.errors import InputError
from superoffload.profiler import Profile


def within(profile: Profile, gpu_budget_gb: float | None, host_budget_gb: float | None) -> Profile:
    """The profile on a machine with no more memory than the budgets."""
    hw = profile.hardware
    if gpu_budget_gb is not None and hw.shared_memory:
        raise InputError(
            f"gpu_budget_gb = {gpu_budget_gb:g}, but on {hw.name} GPU and CPU share one memory",
            remedy="Give host_budget_gb",
        )
    for name, budget, has in (
        ("gpu_budget_gb", gpu_budget_gb, hw.gpu.memory_gb),
        ("host_budget_gb", host_budget_gb, hw.cpu.memory_gb),
    ):
        if budget is not None and not 0 < budget <= has:
            raise InputError(f"{name} = {budget:g}", expected=f"above 0, at most {has:.4g}, which {hw.name} has")
    gpu = hw.gpu if gpu_budget_gb is None else hw.gpu.replace(memory_gb=gpu_budget_gb)
    cpu = hw.cpu if host_budget_gb is None else hw.cpu.replace(memory_gb=host_budget_gb)
    return profile.replace(hardware=hw.replace(gpu=gpu, cpu=cpu))


def sequences_per_step(
    profile: Profile, tokens: int | Literal["free"] | None, given: dict[str, Any], groups: int = 1
) -> int | None:
    """Sequences per step, None where they are free; of several groups of chips (`data_parallel`) those of each."""
    if tokens == "free":
        return None
    micro_batch, accumulation = given.get("micro_batch"), given.get("accumulation")
    if tokens is None:
        return int((micro_batch or profile.micro_batch) * (accumulation or 1))
    if not isinstance(tokens, int) or tokens < 1 or tokens % (profile.seq_len * groups):
        times = f"{groups} x " if groups > 1 else ""
        raise InputError(
            f"tokens = {tokens!r}", expected=f'a multiple of {times}seq_len = {profile.seq_len}, or "free"'
        )
    sequences = tokens // profile.seq_len // groups
    for name, value in (("micro_batch", micro_batch), ("accumulation", accumulation)):
        if value is not None and sequences % value:
            raise InputError(f"{name} = {value} with tokens = {tokens}", expected=f"a divisor of {sequences} sequences")
    if micro_batch and accumulation and micro_batch * accumulation != sequences:
        raise InputError(
            f"micro_batch = {micro_batch} and accumulation = {accumulation} with tokens = {tokens}",
            remedy="Leave one of the three out",
        )
    return sequences


def given_chips(profile: Profile, asked: int | None, given: dict[str, Any]) -> dict[str, int]:
    """How the planner's own plan uses the chips that the search may use: as given, else as the profile shares its
    sequences.

    Raises:
        InputError: more chips than there are, or fields that do not make up that many.
    """
    hw = profile.hardware
    there = hw.interconnect.chips if hw.interconnect else 1
    chips = there if asked is None else asked
    if not 1 <= chips <= there:
        raise InputError(
            f"chips = {chips}", expected=f"1 to {there}, which {hw.name} has",
            remedy=None if hw.interconnect else 'Estimate for several: so.hardware.preset("gh200-quad-x8"), --chips 8',
        )  # fmt: skip
    group, groups = given.get("sequence_parallel"), given.get("data_parallel")
    if group is not None and groups is not None and asked is None:
        return {"sequence_parallel": group, "data_parallel": groups}
    if group is None and groups is None:
        group = profile.sequence_parallel if chips % profile.sequence_parallel == 0 else 1
    if group is None:
        group = max(1, chips // (groups or 1))
    if groups is None:
        groups = max(1, chips // group)
    if group * groups != chips:
        told = ", ".join(f"{k} = {given[k]}" for k in ("data_parallel", "sequence_parallel") if k in given)
        raise InputError(f"chips = {chips} with {told}", expected="chips = data_parallel x sequence_parallel")
    return {"sequence_parallel": group, "data_parallel": groups}


def start_batch(profile: Profile, sequences: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """The start plan's batch as far as it is not given: the profile's micro-batch, or a smaller one that divides."""
    if sequences is None:
        return {}
    accumulation = given.get("accumulation")
    micro_batch = given.get("micro_batch") or (
        sequences // accumulation
        if accumulation
        else next(n for n in range(min(profile.micro_batch, sequences), 0, -1) if sequences % n == 0)
    )
    found = {"micro_batch": micro_batch, "accumulation": sequences // micro_batch}
    return {name: value for name, value in found.items() if name not in given}
