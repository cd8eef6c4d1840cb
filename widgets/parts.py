"""Small parts that the panels share: style sheet, messages that show errors with their remedy, guarded callbacks."""

from __future__ import annotations

import asyncio
import html
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ipywidgets as W

from superoffload.errors import SuperOffloadError
from superoffload.quickly import without_collecting
from superoffload.widgets import timeline_views as tv
from superoffload.widgets import view_models as vm
from superoffload.widgets.page_figure import DARK_PAGE, dark_rules
from superoffload.widgets.theme import KIND_COLOURS

MOST_PAUSE_S = 0.25
"""A pause between two works of a drag is no longer than this, however long the work took."""
STYLE = Path(__file__).with_name("style.css")


def style_sheet() -> W.HTML:
    """The panels' style sheet as a widget that takes no room."""
    # The kernel draws the figures, and may be busy when a dark page shows the first one: they must be readable until it
    # learns of the theme.
    panels = (f"{DARK_PAGE} .so-panel .js-plotly-plot", ".so-panel.so-dark .js-plotly-plot")
    css = STYLE.read_text(encoding="utf-8") + dark_rules(*panels)
    return W.HTML(
        f"<style>{css}</style>", layout=W.Layout(height="0px", margin="0", min_height="0px", overflow="hidden")
    )


def put(widget: W.HTML, value: str) -> None:
    """Set a widget's text where it differs: what is equal sends nothing."""
    if widget.value != value:
        widget.value = value


def escape(text: object) -> str:
    return html.escape(str(text))


def loop_runs() -> bool:
    """Whether an event loop runs here, as in a notebook; a script has none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Messages(W.HTML):  # type: ignore[misc]
    """What a person must read: the last error or notice, and the state that stays until it is solved."""

    def __init__(self) -> None:
        super().__init__()
        self._event, self._state = "", ""

    def error(self, error: BaseException, blame: str = "") -> None:
        """Show an error with its cause and remedy; the traceback is folded away.

        Args:
            blame: trusted HTML: whose error it is, where it is not one of the dashboard.
        """
        if isinstance(error, SuperOffloadError):
            body = f"<b>{escape(error.what)}.</b>"
            if error.expected:
                body += f" Expected {escape(error.expected)}."
            if error.remedy:
                body += f"<br>{escape(error.remedy)}."
        else:
            body = f"<b>{escape(type(error).__name__)}: {escape(error)}</b><br>" + (
                blame
                or "This is a defect of the dashboard, which goes on working. Please report it with the details below."
            )
        trace = "".join(traceback.format_exception(error))
        body += f"<details><summary>Details</summary><pre>{escape(trace)}</pre></details>"
        self._event = f'<div class="so-msg error" role="alert">{body}</div>'
        self._draw()

    def notice(self, body_html: str, kind: str = "good") -> None:
        """Show something that went well; `body_html` is trusted HTML."""
        self._event = f'<div class="so-msg {kind}" role="status">{body_html}</div>'
        self._draw()

    def clear(self) -> None:
        """Forget the last event; the lasting state stays."""
        self._event = ""
        self._draw()

    def state(self, text: str) -> None:
        """Show a lasting problem (the plan does not fit), or none."""
        sentence = escape(text[:1].upper() + text[1:])
        self._state = f'<div class="so-msg warn" role="alert">{sentence}</div>' if text else ""
        self._draw()

    def _draw(self) -> None:
        self.set_trait("value", self._state + self._event)


class Guard:
    """Wraps callbacks so that whatever they raise is shown where the person looks, and nothing else stops working."""

    def __init__(self, messages: Messages):
        self.messages = messages

    def __call__(self, callback: Callable[..., Any], *, keep: bool = False) -> Callable[..., None]:
        """Wrap `callback`. It begins by clearing the last message, unless it is not a person's doing (`keep`)."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                # A collection goes through all that the kernel holds, plotly and torch included: a tenth of a second
                # and more, in the middle of a drag.
                with without_collecting():
                    if not keep:
                        self.messages.clear()
                    callback(*args, **kwargs)
            except Exception as e:  # whatever it is: a console is not where a person looks
                self.messages.error(e)

        return guarded


class Latest:
    """Collects changes and hands over the newest of each some time later.

    While a slider is dragged, only values that can still be seen are worked on: the work takes no more than half of the
    kernel's time, so that messages are heard between. Without a running loop (a script, a test) every change is handed
    over at once.

    Args:
        run: called with the newest value of each name that was put.
        delay_s: from the first change to the call: long enough for all that one gesture sends. Changes that come while
            work goes on wait for it anyway.
        at_rest: count the delay from the last change instead.
    """

    def __init__(self, run: Callable[[dict[str, Any]], None], delay_s: float = 0.01, *, at_rest: bool = False):
        self._run, self._delay, self._at_rest = run, delay_s, at_rest
        self._worked: tuple[float, float] = (0.0, 0.0)
        """When the last work ended, on the monotonic clock, and how long it took."""
        self._pending: dict[str, Any] = {}
        self._handle: asyncio.TimerHandle | None = None

    def put(self, **changes: Any) -> None:
        self._pending.update(changes)
        if self._handle is not None:
            if not self._at_rest:
                return
            self._handle.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            ended, took = self._worked
            pause = min(took, MOST_PAUSE_S) - (time.monotonic() - ended)
            self._handle = loop.call_later(max(self._delay, pause), self.flush)

    @property
    def pending(self) -> frozenset[str]:
        """What has been changed and not handed over yet."""
        return frozenset(self._pending)

    def flush(self) -> None:
        """Hand over what is pending now."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        changes, self._pending = self._pending, {}
        if changes:
            begin = time.monotonic()
            self._run(changes)
            ended = time.monotonic()
            self._worked = ended, ended - begin


def cards_html(items: tuple[vm.HeadlineItem, ...]) -> str:
    """The head's numbers as a row of cards."""
    cards = []
    for i in items:
        delta = (
            f'<span class="d so-{i.verdict}" title="difference to the pinned baseline">{escape(i.delta)}</span>'
            if i.delta
            else ""
        )
        cards.append(
            f'<div class="so-card" title="{escape(i.help)}"><div class="n">{escape(i.name)}</div>'
            f'<div class="v">{escape(i.value)}{delta}</div><div class="l">{escape(i.label)}</div></div>'
        )
    return f'<div class="so-cards">{"".join(cards)}</div>'


def legend_html(kinds: Iterable[str], waits: bool, note: str = "") -> str:
    """The timeline's colours by name; a plotly legend would take three times the room."""
    chips = [f'<span style="--c:{KIND_COLOURS[k]}">{escape(tv.KIND_TITLES[k])}</span>' for k in kinds]
    if waits:
        chips.append('<span class="so-wait">Waits</span>')
    if note:
        chips.append(f"<b>{escape(note)}</b>")
    return f'<div class="so-legend">{"".join(chips)}</div>'


def button(text: str, tooltip: str, on_click: Callable[..., Any], width: str = "auto") -> W.Button:
    """A small button."""
    b = W.Button(description=text, tooltip=tooltip, layout=W.Layout(width=width, flex="0 0 auto"))
    b.on_click(on_click)
    return b
