"""How long Python may keep a training loop waiting for its lock, the GIL, beside another thread that runs Python.

Every operation of torch gives the lock away and takes it back. A thread that computes in Python (a progress bar, a data
loader, a widget's callback) gets it meanwhile and keeps it for `sys.getswitchinterval()`, 5 ms unless somebody says
otherwise, while launching an operation takes some 10 µs: one such thread makes a step a hundred times slower. With
turns of 0.02 ms threads lose some 5 % of their own speed to switching (two loops that count, Python 3.11), and where
there is no such thread nothing changes. Shorter ones gain nothing: what takes longer then is to wake a thread (a call
that gives the lock away takes 0.17 ms beside such a loop, and 0.27 at 0.1 ms).
"""

from __future__ import annotations

import sys
import threading

SWITCH_INTERVAL_S = 2e-5

_lock = threading.RLock()  # a garbage collection inside may remove another one
_open = 0
_before = 0.0
"""What `ShortTurns` has shortened, in seconds; 0 where nothing is."""


class ShortTurns:
    """Shortens Python's switch interval until it is removed, for the whole process, as Python has only one.

    Several may be open; the last one that is removed puts the interval back. One that is short enough already is left
    alone, and so is one that somebody sets meanwhile.
    """

    def __init__(self) -> None:
        global _open, _before
        self._removed = False
        with _lock:
            _open += 1
            now = sys.getswitchinterval()
            if _open == 1 and now > SWITCH_INTERVAL_S:
                _before = now
                sys.setswitchinterval(SWITCH_INTERVAL_S)

    def remove(self) -> None:
        """Put the interval back. A second call does nothing."""
        global _open, _before
        with _lock:
            if self._removed:
                return
            self._removed = True
            _open -= 1
            if _open or not _before:
                return
            # Python keeps whole microseconds: what it gives back may differ from what it was given.
            if abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6:
                sys.setswitchinterval(_before)
            _before = 0.0


__all__ = ["SWITCH_INTERVAL_S", "ShortTurns"]
