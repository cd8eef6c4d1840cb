"""A progress bar on stderr, where tqdm is installed."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int, *, unit: str, initial: int = 0) -> Any:
    """A bar on a terminal; in a log file a line every ten seconds is enough. None without tqdm."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, initial=initial, unit=unit, file=sys.stderr, mininterval=interval, dynamic_ncols=True)
