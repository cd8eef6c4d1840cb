"""What other cells see of a Tuner, and may set: its plan, its trace and its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as W
import traitlets

from superoffload.config import ModelRef, OptimizerConfig, TrainingConfig, TunedConfig
from superoffload.errors import InputError
from superoffload.plan import Plan
from superoffload.tracing import Trace
from superoffload.widgets.elsewhere import SHAPE_FIELDS
from superoffload.widgets.opening import dtype_of
from superoffload.widgets.parts import Messages, escape
from superoffload.widgets.session import Session


class TunerTraits(W.VBox):  # type: ignore[misc]
    """Keeps the three traits in step with a session: `publish` after the session has changed, `adopted` when a cell has
    set one.

    Traits `plan`, `trace` and `config` always belong together.
    """

    plan = traitlets.Instance(Plan)
    trace = traitlets.Instance(Trace)
    config = traitlets.Instance(TunedConfig)

    def _keep(self, session: Session, source: ModelRef | str | None) -> None:
        """Before anything is shown: the session whose state the traits are."""
        self.session, self._source = session, source
        self.messages = Messages()
        self.measured: Trace | None = None
        """A measured trace of the present plan."""
        self._optimizer = OptimizerConfig()
        self._training = TrainingConfig.from_dict({"dtype": dtype_of(session.given)})
        self._syncing = False

    def adopted(self, new: Plan | Trace | TunedConfig) -> None:
        """A cell has set a trait, and the session has taken it over."""
        raise NotImplementedError

    @traitlets.validate("plan")
    def _check_plan(self, proposal: Mapping[str, Any]) -> Plan:
        plan: Plan = proposal["value"]
        if self._syncing:
            return plan
        clamped = self.session.clamped(plan)
        self.check_size(clamped)
        return clamped

    @traitlets.validate("config")
    def _check_config(self, proposal: Mapping[str, Any]) -> TunedConfig:
        config: TunedConfig = proposal["value"]
        if not self._syncing:
            config.check_model(self.session.given.model_fingerprint, self.session.given.model)
        return config

    def check_size(self, plan: Plan) -> None:
        """Refuse a plan for a micro-batch of which the profile cannot tell."""
        for field in SHAPE_FIELDS:
            fixed = self.session.why_fixed(field)
            if fixed and getattr(plan, field) != getattr(self.session.profile, field):
                raise InputError(f"{field} = {getattr(plan, field)} is not what was profiled", remedy=fixed)

    @traitlets.observe("plan", "trace", "config")
    def _set_from_outside(self, change: Mapping[str, Any]) -> None:
        if self._syncing:
            return
        new = change["new"]
        if isinstance(new, Plan):
            self.session.set_plan(new)
        elif isinstance(new, Trace):
            self.session.adopt(new)
        else:
            self._optimizer, self._training = new.optimizer, new.training
            self.session.set_plan(new.plan)
        self.adopted(new)

    def make_config(
        self, optimizer: OptimizerConfig | None = None, training: TrainingConfig | None = None
    ) -> TunedConfig:
        """The config of the present plan."""
        s = self.session
        return TunedConfig.create(
            s.profile,
            s.plan,
            optimizer=optimizer or self._optimizer,
            training=training or self._training,
            model_source=self._source,
            trace=s.trace if s.trace.source == "modelled" else None,
            measured=s.trace if s.trace.source == "measured" else self.measured,
        )

    def publish(self) -> None:
        """Set the three traits together: an observer of one finds the others already new."""
        self._syncing = True
        try:
            with self.hold_trait_notifications():
                self.plan, self.trace = self.session.plan, self.session.trace
                self.config = self.make_config()
        finally:
            self._syncing = False

    def notify_change(self, change: Any) -> None:
        """Tell observers. What another cell's observer raises is shown, and neither the observers of the other traits
        nor the figures suffer; where a cell sets a trait itself, that cell gets the error."""
        try:
            super().notify_change(change)
        except Exception as e:
            if not self._syncing:
                raise
            name = escape(change["name"])
            self.messages.error(e, f"A function that observes <code>{name}</code> of this Tuner failed. The plan has "
                                   "been changed all the same. Mend that function, or take it off with "
                                   f"<code>unobserve_all({name!r})</code>.")  # fmt: skip
