"""The knobs: one control per field of the plan, with the reason of its present value below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as W

from superoffload.fitting import evenly
from superoffload.loss_costs import can_chunk
from superoffload.plan import CASTS, Plan
from superoffload.widgets.block_text import format_blocks
from superoffload.widgets.parts import escape
from superoffload.widgets.session import Session

BUCKET_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
LOSS_CHUNKS = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES = tuple(2**i for i in range(7, 20))
ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)
CAST_TITLES = {"gpu": "on the GPU (fp32 crosses)", "cpu": "separate CPU pass", "fused": "fused into CPU Adam"}
SPECULATE_TITLES = {"auto": "auto", "on": "on: before the norm", "off": "off: waits for norm"}
MASTER_TITLES = {"plain": "plain: 6 B/param with its copy", "split": "split: 4 B/param"}
UNDO_TITLES = {"record": "record 3.6 B", "snapshot": "snapshot 12 B"}
ACTIVATION_TITLES = {
    "none": "keep all",
    "selective": "keep products",
    "full": "recompute all",
    "offload_inputs": "inputs to CPU",
    "offload_saved": "all to CPU",
}
ACTIVATION_HELP = {
    "none": "Everything that backward reads stays on the GPU.",
    "selective": "Results of attention and of weight products stay on the GPU; norms and the like are computed again.",
    "full": "Only each layer's input stays on the GPU; its forward is computed again.",
    "offload_inputs": "Each layer's input waits in CPU memory, its forward is computed again: for long sequences.",
    "offload_saved": "Everything that backward reads waits in CPU memory; nothing is computed again.",
}
BESIDE_HELP = {
    "compile_blocks": "Fuses the operations of each layer: fewer bytes move and less is kept. Results round elsewhere "
    "than with eager kernels, and the first step takes the compiler's time.",
    "undo_buckets": "Undo buckets: how many, from the first that backward completes, have undo memory, so that Adam "
    "may take them before the norm is known.",
    "loss_chunks": "Loss chunks: logits and loss are computed for so many parts of the tokens, one after another.",
}
"""Of the small controls that share a line."""
ACCUMULATE_TITLES = {"gpu": "the GPU, in p.grad", "cpu": "the CPU, fetched to add"}


class Knob(W.VBox):  # type: ignore[misc]
    """A control, the button that hands it back to the cost model, and one line of why.

    Args:
        beside: a small control of another field that shares the line, by that field; its reason is its tooltip, and the
            button hands both back.
    """

    def __init__(self, field: str, control: W.Widget, choose: Callable[[str], None], **beside: W.Widget):
        self.field, self.control, self.beside = field, control, beside
        self.why = W.HTML(layout=W.Layout(flex="1 1 0", min_width="0", margin="0", overflow="hidden"))
        self.why.add_class("so-why")
        self.auto = W.Button(
            description="auto", tooltip=f"Let the cost model choose {' and '.join([field, *beside])}",
            layout=W.Layout(width="auto"),
        )  # fmt: skip
        self.auto.add_class("so-auto")
        self.auto.on_click(lambda _: [choose(f) for f in (field, *beside)])
        below = W.HBox([self.why, self.auto], layout=W.Layout(width="100%", height="15px", align_items="center"))
        below.add_class("so-below")
        control.layout.width, control.layout.margin, control.layout.min_width = "100%", "0", "0"
        line = W.Layout(width="100%", overflow="hidden", align_items="center")
        row = W.HBox([control, *beside.values()], layout=line) if beside else control
        super().__init__([row, below], layout=W.Layout(width="100%", margin="0 0 1px 0", overflow="hidden"))

    def explain(self, plan: Plan, fixed: str | None) -> None:
        """Show where the value comes from."""
        reason = plan.reasons.get(self.field)
        text = fixed or reason or "set by hand"
        lead = "" if fixed or not reason or reason.startswith("auto") else "<b>auto</b> "
        self.why.value = f'<span title="{escape(text)}">{lead}{escape(text)}</span>'
        by_hand = not fixed and not all(plan.reasons.get(f) for f in (self.field, *self.beside))
        self.auto.layout.display = None if by_hand else "none"
        if bool(self.control.disabled) != bool(fixed):
            self.control.disabled = bool(fixed)


class Controls(W.VBox):  # type: ignore[misc]
    """All knobs of a plan; calls ``on_edit(field=value)`` when a person turns one, and ``on_choose(field)``."""

    def __init__(self, session: Session, on_edit: Callable[..., None], on_choose: Callable[[str], None]):
        self._session, self._on_edit, self._quiet = session, on_edit, False
        layers = sum(b.kind == "layer" for b in session.profile.blocks)
        slider = {"style": {"description_width": "88px"}, "continuous_update": True}
        drop = {"style": {"description_width": "88px"}}

        def layout() -> W.Layout:
            return W.Layout(width="100%", margin="0")

        self.flow = W.IntSlider(0, 0, layers, description="Flow blocks", layout=layout(), **slider)
        self.flow_which = W.Text(
            description="which", placeholder="none", continuous_update=False,
            layout=W.Layout(width="180px", margin="0"), style={"description_width": "88px"},
            tooltip="Block numbers: 1-4, 9. The same as clicking the layer map.",
        )  # fmt: skip
        self.recomputed = W.Text(
            placeholder="recompute", continuous_update=False, layout=W.Layout(width="108px", margin="0 0 0 4px"),
            tooltip="Recomputed layers: block numbers, 1-4, 9. The same as clicking the marks below the layer map.",
        )  # fmt: skip
        self.retained = W.IntSlider(0, 0, 1, description="Retained", layout=layout(), **slider)
        self.bucket = W.SelectionSlider(options=[1.0], description="Bucket MiB", layout=layout(), **slider)
        self.down = W.Dropdown(
            options=[(CAST_TITLES[c], c) for c in CASTS], description="Cast down", layout=layout(), **drop
        )
        self.up = W.Dropdown(
            options=[(CAST_TITLES[c], c) for c in CASTS], description="Cast up", layout=layout(), **drop
        )
        self.speculate = W.Dropdown(
            options=[(t, v) for v, t in SPECULATE_TITLES.items()], description="Speculation", layout=layout(), **drop
        )
        self.master = W.Dropdown(
            options=[(t, v) for v, t in MASTER_TITLES.items()], description="Master", layout=layout(), **drop
        )
        self.undo = W.Dropdown(
            options=[(t, v) for v, t in UNDO_TITLES.items()], description="Undo", layout=layout(), **drop
        )
        self.undo_count = W.Dropdown(options=[("all", 1)], layout=W.Layout(flex="0 0 92px", margin="0 0 0 6px"))
        self.threads = W.IntSlider(1, 1, 1, description="Adam threads", layout=layout(), **slider)
        self.activations = W.Dropdown(
            options=[(t, v) for v, t in ACTIVATION_TITLES.items()], description="Activations", layout=layout(), **drop
        )
        self.chunks = W.Dropdown(options=[("loss whole", 1)], layout=W.Layout(flex="0 0 92px", margin="0 0 0 6px"))
        self.compiled = W.Checkbox(
            description="compile", indent=False, layout=W.Layout(flex="0 0 72px", margin="0 0 0 6px")
        )
        self.batch = W.SelectionSlider(options=[1], description="Micro-batch", layout=layout(), **slider)
        self.sequence = W.SelectionSlider(options=[1], description="Sequence", layout=layout(), **slider)
        self.accumulation = W.SelectionSlider(options=[1], description="Accumulate", layout=layout(), **slider)
        self.accumulate_on = W.Dropdown(
            options=[(t, v) for v, t in ACCUMULATE_TITLES.items()], description="Held on", layout=layout(), **drop
        )
        self.knobs = {
            k.field: k
            for k in (
                Knob("flow_blocks", self.flow, on_choose),
                Knob("retained_buckets", self.retained, on_choose),
                Knob("bucket_mb", self.bucket, on_choose),
                Knob("cast_down", self.down, on_choose),
                Knob("cast_up", self.up, on_choose),
                Knob("master", self.master, on_choose),
                Knob("speculate", self.speculate, on_choose),
                Knob("undo", self.undo, on_choose, undo_buckets=self.undo_count),
                Knob("adam_threads", self.threads, on_choose),
                Knob("activations", self.activations, on_choose, compile_blocks=self.compiled),
                Knob("micro_batch", self.batch, on_choose),
                Knob("seq_len", self.sequence, on_choose, loss_chunks=self.chunks),
                Knob("accumulation", self.accumulation, on_choose),
                Knob("accumulate_on", self.accumulate_on, on_choose),
            )
        }
        rows = list(self.knobs.values())
        which = W.HBox([self.flow_which, self.recomputed], layout=W.Layout(width="100%", overflow="hidden"))
        super().__init__([rows[0], which, *rows[1:]], layout=W.Layout(width="292px", flex="0 0 292px"))
        self.add_class("so-knobs")
        for field, knob in self.knobs.items():
            for name, control in {field: knob.control, **knob.beside}.items():
                control.observe(lambda change, f=name: self._edited(f, change["new"]), names="value")
        self.flow_which.observe(lambda change: self._edited("which", change["new"]), names="value")
        self.recomputed.observe(lambda change: self._edited("recomputed", change["new"]), names="value")
        self.show_plan()

    def _edited(self, field: str, value: Any) -> None:
        if self._quiet:
            return
        if field == "flow_blocks":
            layers = self._session.layers
            value = evenly(layers, min(value, len(layers)))
        elif field == "which":
            field = "flow_blocks"
            # Parsed by the callee's guard: a typing error is shown like any other error.
            self._on_edit(**{field: value})
            return
        elif field == "undo_buckets" and value == self._on_cpu:
            value = None  # all, also when there are more of them some day
        self._on_edit(**{field: value})

    def show_plan(self, pending: frozenset[str] = frozenset()) -> None:
        """Set every control to the session's plan, its limits to the model and machine, and explain the values.

        Controls of `pending` fields keep their value: a hand is on them, the session does not know it yet, and a slider
        put back for a moment would swallow the next key.
        """
        s, p = self._session, self._session.plan
        on_cpu = self._on_cpu = max(1, len(s.buckets) - p.retained_buckets)
        setters: dict[str, Callable[[], None]] = {
            "retained_buckets": lambda: _range(self.retained, p.retained_buckets, 0, len(s.buckets)),
            "bucket_mb": lambda: _options(self.bucket, BUCKET_MB, p.bucket_mb, lambda v: f"{v:g}"),
            "cast_down": lambda: _set(self.down, p.cast_down),
            "cast_up": lambda: _set(self.up, p.cast_up),
            "master": lambda: _set(self.master, p.master),
            "speculate": lambda: _set(self.speculate, p.speculate),
            "undo": lambda: _set(self.undo, p.undo),
            "undo_buckets": lambda: _options(
                self.undo_count,
                tuple(max(1, on_cpu * k // 8) for k in (1, 2, 4, 8)),
                min(p.undo_buckets or on_cpu, on_cpu),
                lambda n: f"first {n}" if n < on_cpu else "all",
            ),
            "adam_threads": lambda: _range(self.threads, p.adam_threads, 1, s.hardware.cpu.cores),
            "activations": self._show_activations,
            "loss_chunks": lambda: _options(
                self.chunks, LOSS_CHUNKS, p.loss_chunks, lambda n: f"loss in {n}" if n > 1 else "loss whole"
            ),
            "compile_blocks": lambda: _set(self.compiled, p.compile_blocks),
            "micro_batch": lambda: _options(self.batch, MICRO_BATCHES, p.micro_batch, str),
            "seq_len": lambda: _options(self.sequence, SEQUENCES, p.seq_len, lambda v: f"{v:,}"),
            "accumulation": lambda: _options(self.accumulation, ACCUMULATIONS, p.accumulation, str),
            "accumulate_on": lambda: _set(self.accumulate_on, p.accumulate_on),
        }
        self._quiet = True
        try:
            if "flow_blocks" not in pending:
                _set(self.flow, len(p.flow_blocks))
                _set(self.flow_which, format_blocks(p.flow_blocks))
            if "recomputed" not in pending:
                _set(self.recomputed, format_blocks(s.recomputed))
            for field, put in setters.items():
                if field not in pending:
                    put()
            for field, knob in self.knobs.items():
                knob.explain(p, s.why_fixed(field))
                for name, control in knob.beside.items():
                    fixed = s.why_fixed(name)
                    control.disabled = bool(fixed)
                    _set_tooltip(control, f"{BESIDE_HELP[name]} {fixed or p.reasons.get(name, 'Set by hand')}")
            # One screen holds what does something; these do nothing otherwise.
            for field, matters in (
                ("undo", p.speculate != "off"),
                ("accumulate_on", p.accumulation > 1),
                ("master", p.cast_up == "fused" and any(b.dtype == "bfloat16" for b in s.profile.blocks)),
                ("cast_up", p.master == "plain"),
            ):
                self.knobs[field].layout.display = None if matters else "none"
            divisible = p.loss_chunks > 1 or can_chunk(s.profile.blocks)
            self.chunks.layout.display = None if divisible else "none"
        finally:
            self._quiet = False

    def _show_activations(self) -> None:
        plan = self._session.plan
        _set(self.activations, plan.activations)
        others = plan.activations_by_block
        help_text = ACTIVATION_HELP[plan.activations]
        if others:
            help_text += " Other blocks: " + ", ".join(f"{b} {policy}" for b, policy in sorted(others.items())) + "."
        _set_tooltip(self.activations, help_text)


def _set_tooltip(control: W.Widget, text: str) -> None:
    if control.tooltip != text:
        control.tooltip = text


def _set(control: W.Widget, value: Any) -> None:
    if control.value != value:
        control.value = value


def _range(slider: W.IntSlider, value: int, low: int, high: int) -> None:
    """Widen the limits, set the value, narrow the limits, one message each: a browser whose slider has, for a moment,
    a value beyond its limits clamps it and sends it back as an edit."""
    high = max(high, low)
    slider.min, slider.max = min(slider.min, low), max(slider.max, high)
    _set(slider, value)
    slider.min, slider.max = low, high


def _options(slider: W.SelectionSlider, usual: tuple[Any, ...], value: Any, title: Callable[[Any], str]) -> None:
    """Offer the usual values and the present one, whatever it is."""
    wanted = tuple((title(v), v) for v in sorted({*usual, value}))
    if tuple(slider.options) != wanted:
        slider.options = wanted
    _set(slider, value)
