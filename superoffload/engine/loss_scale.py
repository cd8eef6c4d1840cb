"""Dynamic loss scaling for fp16: small gradients would vanish, so the loss is multiplied by a power of two, which the
update divides out again without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

INITIAL = 2.0**16
WINDOW = 1000
HYSTERESIS = 2
SMALLEST = 1.0


@dataclass(slots=True)
class LossScale:
    """The scale and what moves it; the rules and defaults are those of DeepSpeed, which the paper trains with.

    A step whose gradients overflow is skipped; the second one since the scale last grew (`HYSTERESIS`) and every one
    after it halves the scale. `WINDOW` steps without an overflow double it.
    """

    scale: float = INITIAL
    hysteresis: int = HYSTERESIS
    """Overflows left before the scale is halved, this one included."""
    steps: int = 0
    last_overflow: int = -1

    def update(self, *, overflow: bool) -> None:
        """Learn the verdict of one step."""
        if overflow:
            if self.hysteresis <= 1:
                self.scale = max(self.scale / 2, SMALLEST)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.steps
        elif (self.steps - self.last_overflow) % WINDOW == 0:
            self.scale *= 2
            self.hysteresis = HYSTERESIS
        self.steps += 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.hysteresis = float(state["scale"]), int(state["hysteresis"])
        self.steps, self.last_overflow = int(state["steps"]), int(state["last_overflow"])


class LossScaling:
    """Which steps an optimizer's loss scale goes for, and when it learns their verdict.

    `learn` is given what waits for the verdict of the last step and says whether that was skipped.
    """

    def __init__(self) -> None:
        self.rule: LossScale | None = None
        """None where no trained weight is float16."""
        self._scaled = False
        """Whether the loss of the step that is being gathered was scaled."""
        self._scales = True
        """Whether that of the last step was; before the first one, float16 weights are taken as a sign that it will."""
        self._unlearned = False
        """Whether the last step was scaled, and its verdict is not yet in the scale."""

    def scale(self, loss: torch.Tensor, skipped: Callable[[], bool]) -> torch.Tensor:
        """`loss` times the scale, which the update of its step divides out."""
        if self.rule is None:
            return loss
        self.learn(skipped)
        self._scaled = True
        return loss * self.rule.scale

    def expected(self, skipped: Callable[[], bool]) -> float:
        """What `scale` will multiply the loss of this forward by, where it is called."""
        if self.rule is None or not self._scales:
            return 1.0
        self.learn(skipped)
        return self.rule.scale

    def learn(self, skipped: Callable[[], bool]) -> None:
        """Let the scale follow the verdict of the last step, if its loss was scaled."""
        if self._unlearned and self.rule is not None:
            self.rule.update(overflow=skipped())
            self._unlearned = False

    @property
    def unscale(self) -> float:
        """What the gradients of the step that is being gathered are multiplied by."""
        return 1.0 / self.rule.scale if self._scaled and self.rule is not None else 1.0

    def stepped(self) -> None:
        """A step has taken the gradients."""
        self._unlearned, self._scales, self._scaled = self._scaled, self._scaled, False

    def forget(self) -> None:
        """The gradients are no step's."""
        self._scaled = False


__all__ = ["LossScale", "LossScaling"]
