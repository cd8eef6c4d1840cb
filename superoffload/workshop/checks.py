"""Checks of the notebooks' exercises. Each computes what is right, from the answer or beside it, so that none gives the
answer away and all follow the cost model when it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from superoffload import graph
from superoffload.config import TunedConfig
from superoffload.errors import DoesNotFit, InputError, SuperOffloadError
from superoffload.estimating import estimate
from superoffload.hardware import preset
from superoffload.links import link_at
from superoffload.measured import PAPER_ADAM_S
from superoffload.memory import ledger
from superoffload.plan import ACTIVATIONS, CASTS, Plan
from superoffload.plan_presets import pcie_era_plan
from superoffload.planner import make_plan
from superoffload.profile_scaling import retarget
from superoffload.profiler import Profile
from superoffload.simulator import simulate, step_seconds
from superoffload.units import ADAM_STREAM_BYTES, GB
from superoffload.what_if import edited
from superoffload.workshop import storm
from superoffload.workshop.checks_several import sent_by_a_layer, short_exchange, states_of_a_chip
from superoffload.workshop.experiments import (
    adam_gb_per_s,
    cast_steps,
    flow_cost,
    flow_efficiency,
)
from superoffload.workshop.score import Challenge, Score

Result = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one answer."""

    exercise: int
    state: str
    """`right`, `not yet`, or `open` where nothing was answered."""
    message: str


def check(lesson: str, answers: Sequence[Any]) -> tuple[Verdict, ...]:
    """Check the answers of a notebook, None being no answer.

    Args:
        lesson: the notebook's number, as in its file name.

    Raises:
        InputError: no exercises have this number, or there are more answers than exercises.
    """
    if lesson not in CHECKS:
        raise InputError(f'no exercises of notebook "{lesson}"', expected="one of " + ", ".join(CHECKS))
    checks = CHECKS[lesson]
    if len(answers) > len(checks):
        raise InputError(f"{len(answers)} answers", expected=f"{len(checks)} at most, in the order of the exercises")
    verdicts = []
    for number, answer in enumerate([*answers, *[None] * (len(checks) - len(answers))], 1):
        if answer is None:
            verdicts.append(Verdict(number, "open", "not answered yet"))
            continue
        try:
            right, message = checks[number - 1](answer)
        except SuperOffloadError as e:  # a plan that does not fit, an unknown knob: say so in its own words
            right, message = False, str(e)
        except (TypeError, ValueError, AttributeError, KeyError):
            right, message = False, f"{answer!r} is not of the form that the exercise asks for"
        verdicts.append(Verdict(number, "right" if right else "not yet", message))
    return tuple(verdicts)


@lru_cache(maxsize=32)
def _profile(model: str, hardware: str, micro_batch: int = 4, seq_len: int = 2048) -> Profile:
    return estimate(model, micro_batch=micro_batch, seq_len=seq_len, hardware=hardware)


@lru_cache(maxsize=16)
def _with_link(gb_per_s: float, model: str) -> Profile:
    return retarget(_profile(model, "gh200"), link_at("gh200", gb_per_s))


def _close(answer: float, truth: float, tolerance: float, what: str, hint: str) -> Result:
    off = float(answer) / truth - 1
    if abs(off) <= tolerance:
        return True, f"{what}: {truth:,.4g}"
    return False, f"{'too much' if off > 0 else 'too little'}. {hint}"


# -- 02: a PCIe-era plan on a Superchip --------------------------------------------------------------------------------


def _busy(answer: float) -> Result:
    at = _with_link(450.0, "paper-13b")
    truth = simulate(at, pcie_era_plan(at)).gpu_busy * 100
    if abs(float(answer) - truth) <= 1.0:
        return True, f"the GPU computes for {truth:.0f} % of the step and waits for the rest"
    return False, "Simulate the plan at 450 GB/s and read trace.gpu_busy; the answer is in percent"


def _one_change(answer: dict[str, Any]) -> Result:
    at = _with_link(450.0, "paper-13b")
    if len(answer) != 1:
        return False, "Change exactly one field, for example {'activations': 'none'}"
    plan = pcie_era_plan(at, **answer)
    if not ledger(at, plan).fits:
        return False, "That plan does not fit the memory (trace.memory.fits)"
    total = len(graph.buckets_of(at, plan.bucket_mb))
    tried: list[dict[str, Any]] = [{"speculate": "on"}, *({"activations": a} for a in ACTIVATIONS)]
    tried += [{way: cast} for way in ("cast_down", "cast_up") for cast in CASTS]
    tried += [{"retained_buckets": total * k // 8} for k in range(1, 9)]
    plans = [p for p in (pcie_era_plan(at, **knob) for knob in tried) if ledger(at, p).fits]
    best, mine = min(step_seconds(at, p) for p in plans), step_seconds(at, plan)
    if mine <= best * 1.005:
        return True, f"from {step_seconds(at, pcie_era_plan(at)):.2f} to {mine:.2f} s with one field"
    return False, f"{mine:.2f} s; another single field does better. What does the GPU wait for?"


def _slowest_link(answer: float) -> Result:
    def best(rate: float) -> float:
        at = _with_link(float(rate), "paper-13b")
        return step_seconds(at, make_plan(at))

    goal = 1.05 * best(450.0)
    if best(answer) > goal:
        return False, f"at {answer:g} GB/s the best step is still more than 5 % longer than at 450"
    if best(0.8 * answer) <= goal:
        return False, f"a link of {0.8 * answer:.3g} GB/s would do too"
    return True, f"from about {answer:g} GB/s on, this model under its best plan does not ask for a faster link"


# -- 03: weight-stationary or weight-flow ------------------------------------------------------------------------------


def _tokens_to_hide(answer: float) -> Result:
    hw = preset("h100-pcie5")
    one = flow_efficiency(1, hw.link.up.peak, hw.gpu.matmul_bf16_tflops)
    return _close(answer, 1 / one, 0.02, "tokens per micro-batch", "Solve min(1, tokens * bw / peak) = 1 for tokens")


def _fewest_flow(answer: int) -> Result:
    p = _profile("paper-25b", "gh200")

    def fits(n: int) -> bool:
        return ledger(p, make_plan(p, check=False, activations="none", retained_buckets=0, flow=n)).fits

    if not fits(answer):
        return False, "That still does not fit: trace.memory.overflow() says what is short"
    if answer and fits(answer - 1):
        return False, "It fits; one layer less fits too"
    return True, f"{answer} of 30 layers flow and nothing is recomputed"


def _tokens_on_blackwell(answer: int) -> Result:
    if answer not in [2**k for k in range(7, 16)]:
        return False, "A power of two from 128 to 32,768"
    if flow_cost("gb200", answer) >= 0.02:
        return False, "With so few tokens the step is still 2 % longer or more"
    if flow_cost("gb200", answer // 2) < 0.02:
        return False, "Half as many tokens would do"
    return True, f"{answer:,} tokens per micro-batch: the GPU is faster, so the same link needs more of them"


# -- 04: buckets and the 330:1 gap -------------------------------------------------------------------------------------


def _bytes_ratio(answer: float) -> Result:
    hw = preset("gh200")
    truth = hw.gpu.hbm_gb_per_s / max(hw.cpu.adam_gb_per_s)
    return _close(answer, truth, 0.05, "HBM over Adam on Grace", "gpu.hbm_gb_per_s over what Adam draws at best")


def _all_on_host(p: Profile, **knobs: Any) -> Plan:
    fused = {"cast_down": "fused", "cast_up": "fused", "speculate": "on"}
    return pcie_era_plan(p, **{**fused, **knobs})


def _fewest_retained(answer: int) -> Result:
    p = _profile("llama-7b", "gh200", 1)
    total = len(graph.buckets_of(p, 64.0))

    def at(n: int) -> float:
        return step_seconds(p, _all_on_host(p, retained_buckets=n))

    goal = 1.01 * min(at(total * k // 40) for k in range(41))
    if at(answer) > goal:
        return False, "The step is still more than 1 % longer than the shortest one"
    if at(max(0, answer - max(4, total // 50))) <= goal:
        return False, "Fewer would do"
    return True, f"{answer} of {total}: the fewer tokens, the less backward there is to hide Adam under"


def _enough_tokens(answer: int) -> Result:
    def exposed(n: int) -> bool:
        p = _profile("llama-7b", "gh200", n)
        total = len(graph.buckets_of(p, 64.0))
        best = min(step_seconds(p, _all_on_host(p, retained_buckets=total * k // 40)) for k in range(21))
        return step_seconds(p, _all_on_host(p)) > 1.02 * best

    if exposed(answer):
        return False, "With so few sequences a retained bucket still shortens the step by more than 2 %"
    if answer > 1 and not exposed(answer - 1):
        return False, "One sequence less would do"
    return True, f"{answer} sequences of 2,048 tokens"


# -- 05: speculation-then-validation -----------------------------------------------------------------------------------


def _speculation_gain(answer: float) -> Result:
    p = _profile("llama-7b", "gh200")
    t = storm.step_times(p, _all_on_host(p))
    return _close(answer, t.wait_s / t.commit_s, 0.02, "waiting over speculating", "times.wait_s over times.commit_s")


def _break_even(answer: float) -> Result:
    p = _profile("llama-7b", "h200-pcie5")
    truth = storm.break_even_clip_rate(storm.step_times(p, _all_on_host(p)))
    if abs(float(answer) - truth) <= 0.02:
        return True, f"above {truth:.0%} clipped steps waiting would be faster"
    return False, "Solve commit * (1 - p) + clip * p = wait for p, with the times of h200-pcie5"


def _closing(answer: int) -> Result:
    p = _profile("llama-7b", "gh200")
    run = storm.run_storm(storm.step_times(p, _all_on_host(p)), ["commit"] * 300 + ["clip"] * 300)
    truth = sum(s.speculated > 0 for s in run[300:])
    if answer == truth:
        return True, f"after {truth} clipped steps the gate closes"
    return False, "Play a long calm and then a storm through run_storm, and count the storm's steps that speculated"


# -- 06: casting -------------------------------------------------------------------------------------------------------


def _bytes_down(answer: float) -> Result:
    truth = _profile("llama-7b", "gh200").params * 4 / GB
    return _close(answer, truth, 0.02, "GB of gradients down the link", "One float32 for each parameter")


def _crossing(answer: float) -> Result:
    at = _with_link(float(answer), "llama-7b")
    cpu, gpu = (step_seconds(at, pcie_era_plan(at, cast_down=c, cast_up=c)) for c in ("cpu", "gpu"))
    if abs(gpu / cpu - 1) <= 0.03:
        return True, f"{cpu:.2f} s either way at {answer:g} GB/s"
    return False, f"at {answer:g} GB/s: {cpu:.2f} s with casts on the CPU, {gpu:.2f} s on the GPU"


def _best_pair(answer: tuple[str, str]) -> Result:
    steps = cast_steps(_profile("llama-7b", "gh200-quad"))
    if steps[tuple(answer)] <= 1.003 * min(steps.values()):  # type: ignore[index]
        return True, f"{steps[tuple(answer)]:.3f} s; {max(steps.values()):.3f} s is the worst of the nine"  # type: ignore[index]
    return False, f"{steps[tuple(answer)]:.3f} s; another pair is faster"  # type: ignore[index]


# -- 07: GraceAdam -----------------------------------------------------------------------------------------------------


def _deepspeed_rate(answer: float) -> Result:
    truth = adam_gb_per_s(4e9, PAPER_ADAM_S["DeepSpeed CPU-Adam"][4e9])
    return _close(answer, truth, 0.02, "GB/s", "4e9 parameters at 28 bytes, over the seconds of the table")


def _adam_seconds(answer: float) -> Result:
    hw = preset("h200-pcie5")
    params = _profile("paper-13b", "h200-pcie5").params
    truth = params * ADAM_STREAM_BYTES / (hw.cpu.adam_at(16) * GB)
    return _close(answer, truth, 0.02, "seconds", "28 bytes for each of profile.params, over hardware.cpu.adam_at(16)")


def _fewest_threads(answer: int) -> Result:
    cpu = preset("h200-pcie5").cpu
    goal = 0.9 * max(cpu.adam_gb_per_s)
    if cpu.adam_at(answer) < goal:
        return False, f"{answer} threads draw {cpu.adam_at(answer):.0f} GB/s"
    if cpu.adam_at(answer - 1) >= goal:
        return False, "One thread less would do"
    return True, f"{answer} of {cpu.cores} cores; the others stay with PyTorch"


# -- 08: tune and export -----------------------------------------------------------------------------------------------

BUDGET_GB, SMALL_BUDGET_GB = 24.0, 11.0


def _within_budget(knobs: dict[str, Any], budget_gb: float, slower: float) -> Result:
    """Whether a plan needs at most so much GPU memory, and takes at most (1 + slower) times as long as the planner's
    own for `BUDGET_GB`."""
    p = _profile("llama-3-8b", "gh200")
    plan = make_plan(p, **knobs)
    if plan.tokens_per_step != p.tokens:
        return False, f"{plan.tokens_per_step:,} tokens a step; it has {p.tokens:,}"
    trace = simulate(p, plan)
    small = p.hardware.replace(gpu=p.hardware.gpu.replace(memory_gb=BUDGET_GB))
    used = trace.memory.total("gpu") / GB
    more = trace.step_s / step_seconds(p, make_plan(p, hardware=small)) - 1
    text = (
        f"{used:.1f} GB of the GPU, {budget_gb:g} allowed; a step {more:+.1%} beside the planner's for {BUDGET_GB:g} GB"
    )
    return used <= budget_gb and more <= slower, text


def _budget(answer: dict[str, Any]) -> Result:
    return _within_budget(answer, BUDGET_GB, float("inf"))


def _budget_and_speed(answer: dict[str, Any]) -> Result:
    return _within_budget(answer, SMALL_BUDGET_GB, 0.15)


def _exported(answer: str) -> Result:
    path = Path(answer)
    config = TunedConfig.load(path)
    if config.model.name != "llama-3-8b" or config.hardware.name != "gh200":
        return False, f"it is for {config.model.name} on {config.hardware.name}"
    if not config.optimizer.max_grad_norm:
        return False, "It does not clip: give the optimizer a max_grad_norm"
    if config.prediction is None:
        return False, "It carries no prediction: hand the trace over when the config is made"
    return True, f"{path.name} trains with {config.plan.tokens_per_step:,} tokens a step"


# -- 10: the capstone --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _challenge() -> Challenge:
    return Challenge()


def _score(answer: Any) -> Score:
    if isinstance(answer, Score):
        return _challenge().read(answer.code)
    return _challenge().read(answer) if isinstance(answer, str) else _challenge().score(**answer)


def _better_by(percent: float) -> Callable[[Any], Result]:
    def judge(answer: Any) -> Result:
        gained = _score(answer).percent
        return gained > percent, f"{gained:+.2f} % beside the planner's own plan"

    return judge


MORE_PERCENT, SLOWER_PERCENT, SMALLER = 3.5, 5.0, 0.6
"""Of the capstone's exercises: how much faster than the planner's own plan, and how much slower with what part of its
GPU memory."""


def _smaller(answer: Any) -> Result:
    score = _score(answer)
    used, allowed = score.trace.memory.total("gpu") / GB, SMALLER * score.autotuner.memory.total("gpu") / GB
    return (
        used <= allowed and score.percent >= -SLOWER_PERCENT,
        f"{used:.1f} GB of the GPU, of {allowed:.1f} allowed; {score.percent:+.2f} % beside the planner's own plan",
    )


# -- 01: quickstart ----------------------------------------------------------------------------------------------------


def _states(answer: float) -> Result:
    truth = _profile("llama-7b", "gh200").params * 12 / GB
    return _close(answer, truth, 0.02, "GB of master weights and moments", "12 bytes for each of big.params")


def _tokens_at_eight(answer: float) -> Result:
    p = _profile("llama-7b", "gh200", micro_batch=8)
    truth = simulate(p, make_plan(p)).tokens_per_s
    return _close(answer, truth, 0.01, "tokens/s", "Plan anew at micro-batch 8")


def _least_memory(answer: float) -> Result:
    p = _profile("llama-7b", "gh200")

    def lacks(gb: float) -> bool:
        try:
            make_plan(p, hardware=edited(p.hardware, gpu_memory_gb=gb))
        except DoesNotFit:
            return True
        return False

    if lacks(float(answer)):
        return False, f"in {answer:g} GB no plan fits"
    if not lacks(0.8 * answer):
        return False, f"{0.8 * answer:.3g} GB would do too"
    return True, f"about {answer:.3g} GB of the GPU, for {p.params * 16 / GB:.0f} GB of weights, gradients and state"


CHECKS: dict[str, tuple[Callable[[Any], Result], ...]] = {
    "01": (_states, _tokens_at_eight, _least_memory),
    "02": (_busy, _one_change, _slowest_link),
    "03": (_tokens_to_hide, _fewest_flow, _tokens_on_blackwell),
    "04": (_bytes_ratio, _fewest_retained, _enough_tokens),
    "05": (_speculation_gain, _break_even, _closing),
    "06": (_bytes_down, _crossing, _best_pair),
    "07": (_deepspeed_rate, _adam_seconds, _fewest_threads),
    "08": (_budget, _budget_and_speed, _exported),
    "09": (states_of_a_chip, sent_by_a_layer, short_exchange),
    "10": (_better_by(0.0), _better_by(MORE_PERCENT), _smaller),
}
"""Number of the notebook -> its exercises in order."""
