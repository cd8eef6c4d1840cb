"""Small parts that the panels share: style sheet, messages that show errors with their remedy, guarded callbacks."""

from __future__ import annotations

import asyncio
import html
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as W

from superoffload.errors import SuperOffloadError
from superoffload.widgets import view_models as vm
from superoffload.widgets.theme import KIND_COLOURS

STYLE = """<style>
.so-panel { --so-text: var(--jp-ui-font-color1, #1F2328); --so-muted: #59636E; --so-line: var(--jp-border-color2, #D8DCE2);
  --so-link: #0B5CAD; --so-good: #00664B; --so-bad: #A34400; --so-alert: #B3261E; --so-card: var(--jp-layout-color1, #fff);
  --jp-widgets-inline-height: 24px; --jp-widgets-margin: 1px; --jp-widgets-font-size: 12px;
  --jp-widgets-inline-label-width: 84px; color: var(--so-text); max-width: 1400px; overflow: hidden; }
[data-jp-theme-light="false"] .so-panel, .so-panel.so-dark { --so-muted: #A7B0BC; --so-link: #7CC4FF; --so-good: #5BD6B0; --so-bad: #FFB37A; --so-alert: #FF8A80; }
.so-panel .widget-html-content { line-height: 1.3; font-size: 12px; color: var(--so-text); }
.so-head { line-height: 1.15 !important; } .so-head b { font-size: 15px; font-weight: 600; } .so-head span { display: block; color: var(--so-muted); font-size: 11px; white-space: nowrap; }
.so-cards { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 6px; }
.so-card { border: 1px solid var(--so-line); border-radius: 6px; padding: 5px 9px 4px; background: var(--so-card); }
.so-card .n { font-size: 11px; color: var(--so-muted); white-space: nowrap; }
.so-card .v { font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.2; white-space: nowrap; }
.so-card .d { font-size: 11px; font-weight: 600; margin-left: 6px; white-space: nowrap; }
.so-card .l { font-size: 10.5px; color: var(--so-muted); white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.so-better { color: var(--so-good); } .so-worse { color: var(--so-bad); } .so-same { color: var(--so-muted); }
.so-why .widget-html-content { font-size: 10.5px; line-height: 13px; color: var(--so-muted); white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; height: 14px; }
.so-why { height: 15px !important; min-height: 15px; }
.so-why b { font-weight: 600; }
.so-knobs .widget-label { font-size: 12px; text-align: left !important; } .so-knobs select { height: 23px; min-width: 0; flex: 1 1 0; padding-top: 0; padding-bottom: 0; font-size: 12px; }
.so-knobs input[type=text] { height: 22px; font-size: 12px; } .so-knobs .widget-readout { min-width: 44px; font-size: 12px; }
.so-panel .so-auto { height: 15px; line-height: 15px; padding: 0 2px; margin: 0; border: 0; background: transparent; color: var(--so-link); text-decoration: underline; font-size: 10.5px; }
.so-msg { border-left: 4px solid var(--so-line); padding: 5px 10px; margin: 2px 0; border-radius: 3px; background: var(--jp-layout-color2, #F4F6F8);
  font-size: 12px; white-space: normal; overflow-wrap: anywhere; }
.so-msg.error { border-color: var(--so-alert); } .so-msg.warn { border-color: #E69F00; } .so-msg.good { border-color: #009E73; }
.so-msg b { font-weight: 600; } .so-msg pre { max-height: 180px; overflow: auto; font-size: 11px; margin: 4px 0 0; }
.so-foot { color: var(--so-muted); font-size: 11px; } .so-foot ul { margin: 2px 0; padding-left: 18px; }
.so-foot summary, .so-msg summary { cursor: pointer; }
.so-stalls { font-size: 11px; color: var(--so-text); line-height: 14px; padding: 1px 0 3px 6px; max-height: 58px; overflow: hidden; }
.so-panel .widget-html, .so-panel .widget-html-content { min-width: 0; }
.so-legend { display: flex; flex-wrap: wrap; gap: 0 11px; font-size: 10.5px; line-height: 15px; color: var(--so-text); padding: 0 0 2px 6px; }
.so-legend span::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px; vertical-align: -1px; background: var(--c); }
.so-legend .so-wait::before { background: repeating-linear-gradient(135deg, var(--so-muted) 0 1px, transparent 1px 4px); border: 1px solid var(--so-line); box-sizing: border-box; }
.so-code { font-family: var(--jp-code-font-family, monospace); font-size: 11.5px; background: var(--jp-layout-color2, #F4F6F8);
  padding: 5px 8px; border-radius: 4px; white-space: pre-wrap; overflow-wrap: anywhere; display: block; margin: 3px 0; user-select: all; }
.so-panel button:focus-visible, .so-panel .noUi-handle:focus-visible, .so-panel select:focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
</style>"""


def style_sheet() -> W.HTML:
    """The panels' style sheet as a widget that takes no room."""
    return W.HTML(STYLE, layout=W.Layout(height="0px", margin="0", min_height="0px", overflow="hidden"))


def escape(text: object) -> str:
    return html.escape(str(text))


class Messages(W.HTML):  # type: ignore[misc]
    """What a person must read: the last error or notice, and the state that stays until it is solved."""

    def __init__(self) -> None:
        super().__init__()
        self._event, self._state = "", ""

    def error(self, error: BaseException) -> None:
        """Show an error with its cause and remedy; the traceback is folded away."""
        if isinstance(error, SuperOffloadError):
            body = f"<b>{escape(error.what)}.</b>"
            if error.expected:
                body += f" Expected {escape(error.expected)}."
            if error.remedy:
                body += f"<br>{escape(error.remedy)}."
        else:
            body = (
                f"<b>{escape(type(error).__name__)}: {escape(error)}</b><br>"
                "The last edit was not applied and the dashboard still works. Please report this with the details below."
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
        self._state = f'<div class="so-msg warn" role="alert">{escape(text)}</div>' if text else ""
        self._draw()

    def _draw(self) -> None:
        if self.value != self._state + self._event:
            self.value = self._state + self._event


class Guard:
    """Wraps callbacks so that whatever they raise is shown where the person looks, and nothing else stops working."""

    def __init__(self, messages: Messages):
        self.messages = messages

    def __call__(self, callback: Callable[..., Any]) -> Callable[..., None]:
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                self.messages.clear()
                callback(*args, **kwargs)
            except Exception as e:  # whatever it is: a console is not where a person looks
                self.messages.error(e)

        return guarded


class Latest:
    """Collects changes and hands over the newest of each once per turn of the event loop.

    While a slider is dragged, only values that can still be seen are worked on. Without a running loop (a script, a
    test) every change is handed over at once.
    """

    def __init__(self, run: Callable[[dict[str, Any]], None], delay_s: float = 0.02):
        self._run, self._delay = run, delay_s
        self._pending: dict[str, Any] = {}
        self._handle: asyncio.TimerHandle | None = None

    def put(self, **changes: Any) -> None:
        self._pending.update(changes)
        if self._handle is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            self._handle = loop.call_later(self._delay, self.flush)

    def flush(self) -> None:
        """Hand over what is pending now."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        changes, self._pending = self._pending, {}
        if changes:
            self._run(changes)


def cards_html(items: tuple[vm.HeadlineItem, ...]) -> str:
    """The head's numbers as a row of cards."""
    cards = []
    for i in items:
        delta = f'<span class="d so-{i.verdict}" title="difference to the pinned baseline">{escape(i.delta)}</span>' if i.delta else ""
        cards.append(
            f'<div class="so-card" title="{escape(i.help)}"><div class="n">{escape(i.name)}</div>'
            f'<div class="v">{escape(i.value)}{delta}</div><div class="l">{escape(i.label)}</div></div>'
        )
    return f'<div class="so-cards">{"".join(cards)}</div>'


def legend_html(kinds: Iterable[str], waits: bool, note: str = "") -> str:
    """The timeline's colours by name; a plotly legend would take three times the room."""
    chips = [f'<span style="--c:{KIND_COLOURS[k]}">{escape(vm.KIND_TITLES[k])}</span>' for k in kinds]
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
