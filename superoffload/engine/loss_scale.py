"""Dynamic loss scaling for fp16: small gradients would vanish, so the loss is multiplied by a power of two, which the
update divides out again without rounding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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


__all__ = ["LossScale"]
