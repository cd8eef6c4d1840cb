"""One piece of work in a thread: the kernel goes on answering, and what the work tells reaches widgets on its loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

TELL_EVERY_S = 0.2
"""News of the work reaches the front end no oftener than this."""

Work = Callable[[threading.Event, Callable[..., None]], Any]
"""Called in the thread with (set when it shall stop, tell(...) for news)."""


def on_loop() -> Callable[[Callable[[], None]], Any]:
    """Hand a call to the kernel's loop, where widgets are used otherwise; without a loop call it at once."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        return lambda call: call()


class Background:
    """Runs one work at a time; the newest wins, and what an older one still says is not heard.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self.name = name
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop and has not ended yet."""
        return self.running and self._stop.is_set()

    def start(
        self, work: Work, done: Callable[[Any, Exception | None], None], news: Callable[..., None] | None = None
    ) -> None:
        """Begin `work`; one that is under way is told to stop.

        Args:
            work: gets an event that is set when it shall stop, and a function that passes its arguments to `news`.
            done: called on the loop with (result, None) or (None, error) when the work has ended.
            news: called on the loop with the newest of what the work tells.
        """
        self._stop.set()
        stop = self._stop = threading.Event()
        call = on_loop()
        told = 0.0

        def deliver(function: Callable[..., None], *args: Any) -> None:
            def heard() -> None:
                if self._stop is stop:
                    function(*args)

            with contextlib.suppress(RuntimeError):  # the kernel's loop is closed: nobody is there to hear
                call(heard)

        def tell(*args: Any) -> None:
            nonlocal told
            now = time.monotonic()
            if news is not None and now - told >= TELL_EVERY_S and not stop.is_set():
                told = now
                deliver(news, *args)

        def run() -> None:
            try:
                result = work(stop, tell)
            except Exception as error:  # shown where the person looks, with its remedy
                deliver(done, None, error)
            else:
                deliver(done, result, None)

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the work to end; `done` is called with what it then returns."""
        self._stop.set()

    def drop(self) -> None:
        """Ask the work to end, and hear no more of it."""
        self._stop.set()
        self._stop = threading.Event()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the work has ended: for scripts, not for a notebook."""
        if self._thread is not None:
            self._thread.join(timeout_s)
