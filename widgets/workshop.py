"""What the workshop's notebooks show: a guess before the number, the link that can be dragged, a storm to switch on,
and the self-check. The numbers come from `superoffload.workshop`."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as W

from superoffload.errors import InputError
from superoffload.hardware import Hardware, probe
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.units import format_seconds
from superoffload.widgets import theme as themes
from superoffload.widgets.bridge import ThemeBridge
from superoffload.widgets.live import LiveFigure
from superoffload.widgets.parts import escape, style_sheet
from superoffload.widgets.workshop_figures import (
    bar_figure,
    line_figure,
    link_spec,
    storm_figure,
    storm_spec,
)
from superoffload.workshop import LINK_NAMES, LINKS_GB_PER_S, link_sweep, run_storm, storm_verdicts
from superoffload.workshop.checks import Verdict, check
from superoffload.workshop.storm import StepTimes

__all__ = ["Lesson", "LinkKnob", "Prediction", "StormSwitch", "bar_figure", "line_figure", "storm_figure"]

RUNS = Path("runs") / "workshop"


class Prediction(W.VBox):  # type: ignore[misc]
    """A question with a number to guess. `entered` says whether a person has touched it."""

    def __init__(self, question: str, *, unit: str, low: float, high: float, default: float, step: float | None = None):
        self.question, self.unit = question, unit
        self.entered = False
        self.box = W.BoundedFloatText(
            default, min=low, max=high, step=step or (high - low) / 100, description="Your guess",
            layout=W.Layout(width="190px"),
        )  # fmt: skip
        self.box.observe(self._touched, names="value")
        row = W.HBox([self.box, W.Label(unit)])
        super().__init__([style_sheet(), W.HTML(f"<b>{escape(question)}</b>"), row], layout=W.Layout(width="100%"))
        self.add_class("so-panel")
        self.add_class("so-guess")

    @property
    def value(self) -> float:
        return float(self.box.value)

    def _touched(self, _: Any) -> None:
        self.entered = True

    def __repr__(self) -> str:
        return f"Prediction({self.value:g} {self.unit})"


class Report:
    """Lines of text that a notebook shows as a list, and a terminal as they are."""

    def __init__(self, lines: Sequence[tuple[str, str]]):
        self.lines = tuple(lines)
        """Kind (`good`, `warn` or empty) and text."""

    def __repr__(self) -> str:
        return "\n".join(text for _, text in self.lines)

    def _repr_html_(self) -> str:
        colours = {"good": "#009E73", "warn": "#E69F00"}
        rows = [
            f'<div style="border-left:4px solid {colours.get(kind, "#8C8C8C")};padding:3px 10px;margin:2px 0">'
            f"{escape(text)}</div>"
            for kind, text in self.lines
        ]
        return "".join(rows)


class Lesson:
    """One notebook of the workshop: what is guessed and answered in it. Making it anew is the notebook's reset: guesses
    and answers are forgotten and the notebook's own folder is emptied.

    Args:
        number: as in the notebook's file name.
    """

    def __init__(self, number: str):
        self.number = number
        self.folder = RUNS / number
        shutil.rmtree(self.folder, ignore_errors=True)

    def predict(
        self, question: str, *, unit: str, low: float, high: float, default: float, step: float | None = None
    ) -> Prediction:
        """Ask for a guess from `low` to `high`. Run without a person, the default stands and is called so."""
        return Prediction(question, unit=unit, low=low, high=high, default=default, step=step)

    def reveal(self, guess: Prediction, truth: float, source: str) -> Report:
        """Lay the guess beside the number.

        Args:
            truth: in the guess's unit.
            source: where it comes from: ``"modelled, gh200"``.
        """
        who = "Your guess" if guess.entered else "Nobody guessed; the default"
        lines = [("", f"{guess.question}"), ("good", f"{truth:.4g} {guess.unit} ({source})")]
        if guess.unit == "%":
            off = f"{abs(guess.value - truth):.3g} points {'too high' if guess.value > truth else 'too low'}"
            near = abs(guess.value - truth) <= 3
        else:
            near = abs(guess.value - truth) <= 0.05 * abs(truth)
            if guess.value and truth and guess.value * truth > 0:
                ratio = max(guess.value / truth, truth / guess.value)
                off = f"{ratio:.3g} times too {'high' if guess.value > truth else 'low'}"
            else:
                off = f"{abs(guess.value - truth):.3g} {guess.unit} away"
        close = "close" if near else off
        lines.append(("good" if near else "warn", f"{who} of {guess.value:g} {guess.unit}: {close}"))
        return Report(lines)

    def check(self, *answers: Any) -> Report:
        """Check the exercises' answers, in their order; None is no answer yet."""
        verdicts = check(self.number, answers)
        right = sum(v.state == "right" for v in verdicts)
        lines = [_line(v) for v in verdicts]
        return Report([*lines, ("good" if right == len(verdicts) else "", f"{right} of {len(verdicts)} right")])

    def device(self) -> str | None:
        """`cuda` where torch reaches a GPU, `cpu` where it does not, None without torch; says which in a line."""
        if importlib.util.find_spec("torch") is None:
            print("torch is not installed: this cell is skipped (pip install 'superoffload[train]')")
            return None
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"here: {torch.cuda.get_device_name() if name == 'cuda' else 'the CPU, no GPU that torch reaches'}")
        return name

    def this_machine(self) -> Hardware | None:
        """The machine that the notebook runs on, measured (about 30 s the first time), where it has a GPU; else None,
        and a line that says so: a CPU alone has no link to measure."""
        if self.device() != "cuda":
            print("without a GPU there is nothing to measure here; the presets stand in")
            return None
        return probe()

    def place(self, name: str) -> Path:
        """A path in the notebook's own folder, which is made if need be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name


def _line(v: Verdict) -> tuple[str, str]:
    kind = {"right": "good", "not yet": "warn"}.get(v.state, "")
    return kind, f"exercise {v.exercise}: {v.state}" + (f" — {v.message}" if v.state != "open" else "")


class LinkKnob(W.VBox):  # type: ignore[misc]
    """Drag the link from PCIe to C2C: everything else of the machine stays, and the best plan follows.

    Every stop is planned and simulated when the widget is made (some seconds), so that dragging answers at once.

    Args:
        profile: the model on the machine whose link is changed.
        links_gb_per_s: the stops, each way.
    """

    FIELDS = ("retained_buckets", "flow_blocks", "activations", "cast_down", "cast_up", "speculate")

    def __init__(self, profile: Profile, links_gb_per_s: Sequence[float] = LINKS_GB_PER_S):
        self.points = link_sweep(profile, links_gb_per_s)
        options = [(f"{p.gb_per_s:g} GB/s {LINK_NAMES.get(p.gb_per_s, '')}".strip(), i) for i, p in
                   enumerate(self.points)]  # fmt: skip
        self.slider = W.SelectionSlider(
            options=options, value=0, description="Link each way", continuous_update=True,
            style={"description_width": "92px"}, layout=W.Layout(width="100%", max_width="640px"),
        )  # fmt: skip
        self._bridge = ThemeBridge()
        self._bridge.observe(lambda _: self._draw(), names="theme")
        self.text = W.HTML()
        self.figure = LiveFigure(link_spec(self.points, 0, theme=self._theme()))
        self.slider.observe(lambda _: self._draw(), names="value")
        super().__init__(
            [style_sheet(), self._bridge, self.slider, self.figure, self.text], layout=W.Layout(width="100%")
        )
        self.add_class("so-panel")
        self.add_class("so-link")
        self._draw()

    def _theme(self) -> themes.Theme:
        return themes.DARK if self._bridge.theme == "dark" else themes.LIGHT

    def _draw(self) -> None:
        at = int(self.slider.value)
        self.figure.show_spec(link_spec(self.points, at, theme=self._theme()))
        self.text.value = self.table_html(at)

    def table_html(self, at: int) -> str:
        """What the best plan is at stop `at`; bold where the slowest link's best plan differs."""
        point, first = self.points[at], self.points[0]
        cells = []
        for name in self.FIELDS:
            now, before = _shown(point.best.plan, name), _shown(first.best.plan, name)
            cells.append(f"<td>{f'<b>{escape(now)}</b>' if now != before else escape(now)}</td>")
        head = "".join(f'<th style="text-align:left;padding-right:14px">{escape(n)}</th>' for n in self.FIELDS)
        return (
            f"<p>At {point.gb_per_s:g} GB/s each way: {format_seconds(point.era.step_s)} a step with the PCIe-era plan "
            f"(the GPU computes {point.era.gpu_busy:.0%}), {format_seconds(point.best.step_s)} with the best plan "
            f"({point.best.gpu_busy:.0%}); modelled.</p>"
            f"<table><tr>{head}</tr><tr>{''.join(cells)}</tr></table>"
            f"<p>Bold: other than at {first.gb_per_s:g} GB/s.</p>"
        )

    def __repr__(self) -> str:
        return f"LinkKnob({len(self.points)} links, {self.points[0].best.model})"


def _shown(plan: Plan, name: str) -> str:
    value = getattr(plan, name)
    return f"{len(value)} layers" if name == "flow_blocks" else str(value)


class StormSwitch(W.VBox):  # type: ignore[misc]
    """A run of steps with few clipped ones, and a storm in which every step is clipped, to be switched on and moved.

    Args:
        times: seconds per step of the plan.
        steps: length of the run.
    """

    MODES = ("off", "on", "auto")

    def __init__(self, times: StepTimes, *, steps: int = 400, machine: str = ""):
        if steps < 10:
            raise InputError(f"steps = {steps}", expected="at least 10")
        self.times, self.steps, self.machine = times, steps, machine
        style = {"style": {"description_width": "92px"}, "layout": W.Layout(width="100%", max_width="560px")}
        self.storm = W.Checkbox(False, description="Clipping storm", indent=False)
        self.length = W.IntSlider(steps // 4, 1, steps // 2, description="Storm, steps", **style)
        self.rate = W.FloatSlider(0.01, min=0.0, max=1.0, step=0.01, description="Else clipped", readout_format=".0%",
                                  **style)  # fmt: skip
        self._bridge = ThemeBridge()
        self._bridge.observe(lambda _: self._draw(), names="theme")
        self.text = W.HTML()
        self.figure = LiveFigure(self._spec())
        for control in (self.storm, self.length, self.rate):
            control.observe(lambda _: self._draw(), names="value")
        super().__init__(
            [style_sheet(), self._bridge, self.storm, self.length, self.rate, self.figure, self.text],
            layout=W.Layout(width="100%"),
        )
        self.add_class("so-panel")
        self.add_class("so-storm")
        self._draw()

    def verdicts(self) -> tuple[str, ...]:
        """The run as the controls have it."""
        storm = (self.steps // 3, self.length.value) if self.storm.value else None
        return storm_verdicts(self.steps, storm=storm, rate=self.rate.value)

    def totals(self) -> dict[str, float]:
        """Seconds of the whole run by mode."""
        return {m: sum(s.step_s for s in run_storm(self.times, self.verdicts(), m)) for m in self.MODES}

    def _spec(self) -> Any:
        theme = themes.DARK if self._bridge.theme == "dark" else themes.LIGHT
        verdicts = self.verdicts()
        titles = {"off": "waits always", "on": "speculates always", "auto": "auto"}
        runs = {titles[m]: run_storm(self.times, verdicts, m) for m in self.MODES}
        origin = f"modelled, {self.machine}" if self.machine else "modelled"
        return storm_spec(runs, title=f"{self.steps} steps through the engine's gate ({origin})", theme=theme)

    def _draw(self) -> None:
        self.length.disabled = not self.storm.value
        self.figure.show_spec(self._spec())
        totals, clipped = self.totals(), sum(v == "clip" for v in self.verdicts())
        self.text.value = (
            f"<p>{clipped} of {self.steps} steps are clipped. Beside waiting: speculating always takes "
            f"{totals['on'] / totals['off'] - 1:+.1%}, auto {totals['auto'] / totals['off'] - 1:+.1%}.</p>"
        )

    def __repr__(self) -> str:
        return f"StormSwitch({self.steps} steps)"
