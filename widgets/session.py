"""State of a tuning session without any widget: profile, plan, trace, baseline, undo, autosave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from superoffload import draft as draft_module
from superoffload.activation_costs import knows_compiled
from superoffload.errors import InputError
from superoffload.graph import buckets_of
from superoffload.hardware import Hardware
from superoffload.layout import BucketCut
from superoffload.plan import Plan
from superoffload.profiler import Profile
from superoffload.tracing import Trace
from superoffload.widgets import view_models as vm
from superoffload.widgets.baseline import Baseline
from superoffload.widgets.elsewhere import SHAPE_FIELDS, profile_for, why_size_fixed
from superoffload.widgets.history import History
from superoffload.widgets.layer_policies import recomputing
from superoffload.widgets.session_file import SavedSession


class Session:
    """Plan edits on one model. Every change simulates anew, so `plan`, `profile` and `trace` always belong together.

    Args:
        profile: measured, or estimated from a preset.
        plan: start here; chosen by the cost model when omitted.
        hardware: look at another machine than the profile's.
        baseline: numbers to compare with: a trace, or a plan that is simulated on the same profile.
        autosave: file that every change is written to; None keeps the session in memory.
        draft_above: begin with a draft where the step has more operators than this.

    Raises:
        InputError: the plan and the profile do not belong together.
    """

    def __init__(
        self,
        profile: Profile,
        plan: Plan | None = None,
        hardware: Hardware | None = None,
        baseline: Trace | Plan | vm.Numbers | None = None,
        autosave: str | os.PathLike[str] | None = None,
        *,
        draft_above: int | None = None,
    ):
        self.given = profile
        self.uncalibrated: Profile | None = None
        """`given` as it was before a calibration corrected it."""
        self.hardware = hardware or profile.hardware
        self.profile = self._given_for(self.hardware, profile)
        self.autosave = Path(autosave) if autosave is not None else None
        self.save_error: str | None = None
        self.saver: Callable[[], None] = self.save
        """Called after every change; a dashboard may put it off until the hand rests."""
        self._buckets: tuple[tuple[float, tuple[int, ...]], BucketCut] | None = None
        self._draft_above = draft_above
        if plan is None:
            plan = self._make_plan()
        elif (plan.micro_batch, plan.seq_len) != (profile.micro_batch, profile.seq_len):
            self.profile = self._given_for(self.hardware, plan)
        self.plan = self.clamped(plan)
        self.trace = self._simulate()
        self._baseline = self._baseline_of(baseline)
        self._history = History(self.plan, self.hardware)
        self._draft_above = None

    # ---- what is shown -------------------------------------------------------------------------------------------

    @property
    def baseline(self) -> vm.Numbers | None:
        """What the headline numbers are compared with."""
        return self._baseline.numbers if self._baseline is not None else None

    @property
    def pinned(self) -> Trace | None:
        """The baseline's trace, where more than its numbers is known."""
        return self._baseline.trace if self._baseline is not None else None

    @property
    def buckets(self) -> BucketCut:
        """Buckets of the present plan, cut as the engine cuts them."""
        return self._cut(self.plan)

    def _cut(self, plan: Plan) -> BucketCut:
        # The cut depends on the parameters, the size and what flows alone, which no other edit changes.
        key = (plan.bucket_mb, plan.flow_blocks)
        if self._buckets is None or self._buckets[0] != key:
            self._buckets = (key, buckets_of(self.given, *key))
        return self._buckets[1]

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks that may flow and be recomputed: the transformer layers."""
        return tuple(i for i, b in enumerate(self.profile.blocks) if b.kind == "layer")

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The layers whose whole forward is computed again."""
        return tuple(i for i in self.layers if self.plan.activations_of(i) == "full")

    def recomputing(self, wanted: Iterable[int]) -> dict[str, Any]:
        """Fields of the plan with which these layers, and no others, are computed again."""
        return recomputing(self.plan, self.layers, wanted)

    @property
    def set_by_hand(self) -> frozenset[str]:
        """Knobs without a reason of the cost model."""
        return frozenset(k for k in Plan.knobs() if k not in self.plan.reasons)

    def why_fixed(self, field: str) -> str | None:
        """Why a field cannot be edited here, with the remedy; None where it can."""
        if field in SHAPE_FIELDS:
            return why_size_fixed(self.given)
        if field == "compile_blocks" and not (self.plan.compile_blocks or knows_compiled(self.profile.blocks)):
            return (
                "The layers were not measured compiled. Profile again: so.profile(model, batch, compile_blocks=True)."
            )
        return None

    # ---- edits ---------------------------------------------------------------------------------------------------

    def edit(self, **changes: Any) -> None:
        """Set fields of the plan by hand; all others stay as they are."""
        unknown = [k for k in changes if k not in Plan.knobs()]
        if unknown:
            raise InputError(f"unknown knob {unknown[0]!r}", expected=", ".join(Plan.knobs()))
        reasons = {k: v for k, v in self.plan.reasons.items() if k not in changes}
        self._become(self.plan.replace(**changes, reasons=reasons), self.hardware, "+".join(sorted(changes)))

    def choose(self, field: str) -> None:
        """Let the cost model choose one field again, given all the others."""
        others = {k: getattr(self.plan, k) for k in Plan.knobs() if k != field}
        chosen = self._make_plan(**_as_knobs(others))
        reasons = {**self.plan.reasons, field: chosen.reasons.get(field, "chosen by the cost model")}
        self._become(self.plan.replace(**{field: getattr(chosen, field)}, reasons=reasons), self.hardware)

    def choose_all(self) -> None:
        """Let the cost model choose every field."""
        self._become(self._make_plan(), self.hardware)

    def set_plan(self, plan: Plan, hardware: Hardware | None = None) -> None:
        """Replace the whole plan, and the machine with it where one is given."""
        self._become(plan, hardware or self.hardware)

    def set_hardware(self, hardware: Hardware) -> None:
        """Look at another machine: fields set by hand stay (within its limits), the others are chosen for it."""
        profile = self._given_for(hardware, self.plan)
        keep = {k: getattr(self.plan, k) for k in self.set_by_hand if k not in SHAPE_FIELDS}
        if "adam_threads" in keep:
            keep["adam_threads"] = min(keep["adam_threads"], hardware.cpu.cores)
        self._become(self._make_plan(profile, hardware, **_as_knobs(keep)), hardware)

    def replace_profile(self, profile: Profile, uncalibrated: Profile | None = None) -> None:
        """Go on with another profile of the same model at the same size: a corrected one, say. The plan stays, and a
        modelled baseline is modelled anew. The undo history stays too: its states are plans and machines.

        Args:
            uncalibrated: what `profile` was before it was corrected, where it was.
        """
        old = (self.given, self.profile, self.hardware, self.trace)
        hardware = profile.hardware if self.hardware == self.given.hardware else self.hardware
        try:
            self.given, self.hardware = profile, hardware
            self.profile = self._given_for(hardware, self.plan)
            self.trace = self._simulate()
        except BaseException:
            self.given, self.profile, self.hardware, self.trace = old
            raise
        if self._baseline is not None and (again := self._baseline.modelled) is not None:
            plan, on = again
            self._baseline = self._modelled_baseline(plan, profile.hardware if on.name == profile.hardware.name else on)
        self.uncalibrated = uncalibrated
        self._history.machine_is(old[0].hardware, profile.hardware)
        self.saver()

    def go_on_from(self, left: SavedSession) -> bool:
        """Take over the edits and the baseline of a session of the same model that was left, as one edit that Undo
        takes back; return whether there was anything to take over. What that session saw as its own machine is the
        profile's here.

        Raises:
            InputError: its plan cannot be shown here; nothing has changed then.
        """

        def here(hardware: Hardware) -> Hardware:
            return self.given.hardware if hardware == left.profile.hardware else hardware

        as_here = self.shows(left.plan) and here(left.hardware) == self.hardware
        if as_here and left.baseline is None:
            return False
        baseline = Baseline(left.baseline) if left.baseline is not None else None
        if left.baseline_plan is not None and left.baseline_hardware is not None:
            baseline = self._modelled_baseline(left.baseline_plan, here(left.baseline_hardware))
        if not as_here:
            self.set_plan(left.plan, here(left.hardware))
        self._baseline = baseline
        self.saver()
        return True

    def adopt(self, trace: Trace) -> None:
        """Show a trace that was made elsewhere, and take over its plan."""
        self._become(trace.plan, self.hardware, trace=trace)

    def pin(self, baseline: Trace | Plan | vm.Numbers | None = None) -> None:
        """Compare with this from now on; with the present trace when nothing is given."""
        if baseline is None:
            self.settle()
        self._baseline = self._baseline_of(baseline if baseline is not None else self.trace)
        self.saver()

    def unpin(self) -> None:
        self._baseline = None
        self.saver()

    def shows(self, plan: Plan) -> bool:
        """Whether this is the present plan, whoever chose it."""
        return plan.replace(reasons={}) == self.plan.replace(reasons={})

    # ---- undo ----------------------------------------------------------------------------------------------------

    @property
    def can_undo(self) -> bool:
        return self._history.can_undo

    @property
    def can_redo(self) -> bool:
        return self._history.can_redo

    def undo(self) -> None:
        """Go back one edit; nothing happens at the first."""
        if self.can_undo:
            self._go(-1)

    def redo(self) -> None:
        if self.can_redo:
            self._go(1)

    def _go(self, by: int) -> None:
        entry = self._history.neighbour(by)
        self._take(entry.plan, entry.hardware)
        self._history.move(by)
        self.saver()

    def _become(self, plan: Plan, hardware: Hardware, topic: str = "", trace: Trace | None = None) -> None:
        before = (self.plan, self.hardware)
        self._take(plan, hardware, trace)
        if (self.plan, self.hardware) == before:
            return
        self._history.add(self.plan, self.hardware, topic)
        self.saver()

    def _take(self, plan: Plan, hardware: Hardware, trace: Trace | None = None) -> None:
        """Change to another state as a whole: where something fails, nothing has changed."""
        old = (self.profile, self.hardware, self.plan, self.trace)
        try:
            if hardware != self.hardware or any(getattr(plan, f) != getattr(self.profile, f) for f in SHAPE_FIELDS):
                self.profile = self._given_for(hardware, plan)
            self.hardware = hardware
            self.plan = self.clamped(plan)
            self.trace = trace if trace is not None else self._simulate()
        except BaseException:
            self.profile, self.hardware, self.plan, self.trace = old
            raise

    # ---- the stages ----------------------------------------------------------------------------------------------

    def _simulate(self) -> Trace:
        if self._draft_above is not None:
            quick = draft_module.draft(self.profile, self.plan, self._draft_above)
            if quick is not None:
                return quick
        return self.exact()

    def exact(self, stop: threading.Event | None = None) -> Trace:
        """Simulate the present plan with all its buckets; nothing is changed, so that a thread may do it."""
        from superoffload.simulator import simulate

        return simulate(self.profile, self.plan, stop=stop)

    @contextmanager
    def drafting(self, above: int) -> Iterator[None]:
        """Within this, steps of more operators than `above` are drafts: while a hand is on a knob, the next value comes
        sooner than a large model is simulated. `settle` or `take_exact` ends it."""
        self._draft_above = above
        try:
            yield
        finally:
            self._draft_above = None

    @property
    def is_draft(self) -> bool:
        """Whether `trace` is a draft, cut into fewer buckets than the plan says."""
        return draft_module.KEY in self.trace.context

    def take_exact(self, trace: Trace, instead_of: Trace) -> bool:
        """Show the exact trace in place of its draft, unless something else is shown by now; return whether it is."""
        if self.trace is not instead_of:
            return False
        self.trace = trace
        return True

    def settle(self) -> None:
        """Make sure that `trace` is no draft."""
        if self.is_draft:
            self.trace = self.exact()

    def _make_plan(self, profile: Profile | None = None, hardware: Hardware | None = None, **knobs: Any) -> Plan:
        from superoffload.planner import make_plan

        return make_plan(profile or self.profile, hardware or self.hardware, check=False, **knobs)

    def fit_advice(self) -> str:
        """What the planner says about a plan that does not fit; empty where the plan fits."""
        from superoffload.planner import make_plan

        if self.trace.memory.fits:
            return ""
        try:
            make_plan(self.profile, self.hardware, **_as_knobs({k: getattr(self.plan, k) for k in Plan.knobs()}))
        except InputError as e:
            return str(e)
        return vm.overflow_line(self.trace.memory)

    def clamped(self, plan: Plan) -> Plan:
        """Keep counts within what the model and the machine have."""
        changes: dict[str, Any] = {}
        layers = {i for i, b in enumerate(self.profile.blocks) if b.kind == "layer"}
        flow = tuple(sorted(set(plan.flow_blocks) & layers))
        if flow != plan.flow_blocks:
            changes["flow_blocks"] = flow
        count = len(self._cut(plan))
        if plan.retained_buckets > count:
            changes["retained_buckets"] = count
        if plan.adam_threads > self.hardware.cpu.cores:
            changes["adam_threads"] = self.hardware.cpu.cores
        return plan.replace(**changes) if changes else plan

    def _given_for(self, hardware: Hardware, size: Plan | Profile) -> Profile:
        return profile_for(self.given, hardware, size.micro_batch, size.seq_len)

    def _baseline_of(self, what: Trace | Plan | vm.Numbers | None) -> Baseline | None:
        if isinstance(what, Plan):
            from superoffload.simulator import simulate

            what = simulate(self.profile, self.clamped(what))
        return Baseline.of(what, self.hardware) if what is not None else None

    def _modelled_baseline(self, plan: Plan, hardware: Hardware) -> Baseline:
        from superoffload.simulator import simulate

        return Baseline.of(simulate(self._given_for(hardware, plan), plan), hardware)

    # ---- autosave ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the session where it autosaves to. A full disk must not stop the tuning: the reason is kept."""
        if self.autosave is None:
            return
        try:
            self.saved().save(self.autosave)
            self.save_error = None
        except OSError as e:
            self.save_error = f"{self.autosave} could not be written: {e.strerror or e}"

    def saved(self) -> SavedSession:
        """The session as one record."""
        again = self._baseline.modelled if self._baseline is not None else None
        plan, hardware = again if again is not None else (None, None)
        return SavedSession(
            profile=self.given, uncalibrated=self.uncalibrated, hardware=self.hardware, plan=self.plan,
            baseline=self.baseline, baseline_plan=plan, baseline_hardware=hardware,
        )  # fmt: skip

    @classmethod
    def restore(cls, path: str | os.PathLike[str]) -> Session:
        """Open a session from its autosave file and go on saving there.

        Raises:
            InputError: no such file, or not a session.
        """
        s = SavedSession.load(path)
        session = cls(s.profile, s.plan, s.hardware, s.baseline, autosave=path)
        session.uncalibrated = s.uncalibrated
        if s.baseline_plan is not None and s.baseline_hardware is not None:
            session._baseline = session._modelled_baseline(s.baseline_plan, s.baseline_hardware)
        return session


def _as_knobs(fields: dict[str, Any]) -> dict[str, Any]:
    """Plan fields under the names that `make_plan` takes; the shape comes with the profile."""
    return {("flow" if k == "flow_blocks" else k): v for k, v in fields.items() if k not in SHAPE_FIELDS}
