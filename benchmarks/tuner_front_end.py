"""Stands where the browser stands: hears a Tuner's messages as they go on the wire, and turns knobs by messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import comm
import ipywidgets as W
from comm.base_comm import BaseComm
from jupyter_client.session import Session

QUIET_S = 0.1
"""A burst of messages has ended when none has come for so long; longer than any delay within one."""
LAST_S = 30.0
"""Nothing that a knob sets off is waited for longer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message to the front end."""

    kind: str
    method: str
    widget: str
    """Comm id of the widget."""
    nbytes: int
    """As packed for the wire: signature, headers, content and binary buffers."""
    at_s: float
    cpu_s: float
    """Processor time of the main thread until then: what it did, and no background thread."""


@dataclass(slots=True)
class Burst:
    """What one message from the front end set off, until nothing came for `QUIET_S`."""

    wall_s: float = 0.0
    """From the incoming message to the last outgoing one."""
    cpu_s: float = 0.0
    messages: list[Message] = field(default_factory=list)
    begin_s: float = 0.0
    begin_cpu_s: float = 0.0

    @classmethod
    def of(cls, messages: list[Message], begin_s: float, begin_cpu_s: float) -> Burst:
        if not messages:
            return cls(begin_s=begin_s, begin_cpu_s=begin_cpu_s)
        last = messages[-1]
        return cls(last.at_s - begin_s, last.cpu_s - begin_cpu_s, messages, begin_s, begin_cpu_s)

    def until(self, at_s: float) -> Burst:
        """The part before a moment."""
        return Burst.of([m for m in self.messages if m.at_s < at_s], self.begin_s, self.begin_cpu_s)

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.messages)

    @property
    def largest(self) -> int:
        return max((m.nbytes for m in self.messages), default=0)


class FrontEnd:
    """Takes the place of the kernel's comms while `listening`."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self._session = Session(key=b"benchmark")
        self._parent = self._session.msg_header("comm_msg")

    @contextlib.contextmanager
    def listening(self) -> Iterator[FrontEnd]:
        """Widgets that are made within this are heard."""
        front_end = self

        class Heard(BaseComm):  # type: ignore[misc]
            def publish_msg(
                self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
            ) -> None:
                front_end._hear(msg_type, self.comm_id, data or {}, metadata, buffers or (), keys)

        before = comm.create_comm
        comm.create_comm = Heard
        try:
            yield self
        finally:
            comm.create_comm = before

    def _hear(self, kind: str, widget: str, data: Any, metadata: Any, buffers: Any, keys: dict[str, Any]) -> None:
        # Packed in the kernel's main thread, as ipykernel does it: that is part of what an update costs.
        content = {"data": data, "comm_id": widget, **keys}
        message = self._session.msg(kind, content, parent=self._parent, metadata=metadata)
        parts = self._session.serialize(message)
        nbytes = sum(map(len, parts)) + sum(memoryview(b).nbytes for b in buffers)
        method = data.get("method", "open")
        self.sent.append(Message(kind, method, widget, nbytes, time.perf_counter(), time.thread_time()))

    def send(self, widget: W.Widget, **state: Any) -> None:
        """The message that a browser sends when a person has changed this state."""
        data = {"method": "update", "state": state, "buffer_paths": []}
        widget.comm.handle_msg({"content": {"comm_id": widget.comm.comm_id, "data": data}, "buffers": []})

    def click(self, button: W.Button) -> None:
        """The message of a pressed button."""
        data = {"method": "custom", "content": {"event": "click"}}
        button.comm.handle_msg({"content": {"comm_id": button.comm.comm_id, "data": data}, "buffers": []})

    async def burst(self, widget: W.Widget, **state: Any) -> Burst:
        """Send a change, or press a button where there is none, and hear what follows at once."""
        first, begin, cpu = len(self.sent), time.perf_counter(), time.thread_time()
        if state:
            self.send(widget, **state)
        else:
            self.click(widget)
        return await self.hear(first, begin, cpu)

    async def hear(self, first: int, begin: float, cpu: float) -> Burst:
        """What has come since message `first`, until nothing comes."""
        until = begin + LAST_S
        while (now := time.perf_counter()) < until:
            last = self.sent[-1].at_s if len(self.sent) > first else begin
            if now - last > QUIET_S:
                break
            await asyncio.sleep(0.005)
        return Burst.of(self.sent[first:], begin, cpu)
