"""Elements that several views share."""

from collections.abc import Awaitable, Callable

from nicegui import ui
from nicegui.element import Element

from server.page.answer import Answer
from server.page.markdown import GrowingText


def icon_button(
    icon: str, name: str, on_click: Callable[[], object] | None = None, *, small: bool = False
) -> ui.button:
    """A round button without text; `name` is its label and its title."""
    button = ui.button(icon=icon, on_click=on_click).props("flat round dense")
    if small:
        button.props("size=sm")
    return name_button(button, name)


def name_button(button: ui.button, name: str) -> ui.button:
    """Say what a button does. A tooltip would not find its button where that is made in a hidden panel."""
    button.props["aria-label"] = button.props["title"] = name
    return button


class Blocks(Element, component="static/blocks.js"):
    """Markdown whose HTML grows at its end without being sent again. The browser sanitises each block."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("prose")
        self._growing = GrowingText()
        self._num_characters = 0
        self._blocks: list[str] = []
        self._is_there = False
        """Whether the browser has the element, which is false in a hidden panel."""
        self.on("ready", self._begin)

    def show(self, text: str) -> None:
        """Show this text: the one that is shown already with more at its end, or, if it is shorter, another one."""
        if self.is_deleted or len(text) == self._num_characters:
            return
        if len(text) < self._num_characters:
            self._growing, self._num_characters = GrowingText(), 0
        start = self._growing.num_final
        blocks = self._growing.feed(text[self._num_characters :])
        self._num_characters = len(text)
        self._blocks[start:] = blocks
        if self._is_there:
            self.run_method("show", start, blocks)

    def _begin(self) -> None:
        """The browser has a new, empty element, perhaps not for the first time."""
        self._is_there = True
        self.run_method("show", 0, self._blocks)


class AnswerText:
    """The reasoning and the text of an answer, which grow."""

    def __init__(self) -> None:
        with ui.element("details").classes("reasoning"):
            with ui.element("summary"):
                ui.label("Reasoning")
            self._reasoning = Blocks()
        with ui.element("div").classes("body"):
            self._text = Blocks()

    def show(self, answer: Answer) -> None:
        """Show what has come since the last time, or a new answer from its beginning."""
        self._reasoning.show(answer.reasoning)
        self._text.show(answer.content)


def show_outcome(answer: Answer) -> None:
    """Say why an answer is not as it was requested."""
    if answer.problem:
        ui.label(answer.problem).classes("problem").props("role=alert")
    for notice in answer.notices:
        ui.label(f"Left out or changed: {notice}").classes("warning")


class Composer:
    """The text field for the next message: Enter sends, Shift+Enter begins a line, Escape stops an answer."""

    def __init__(self, on_send: Callable[[str], Awaitable[bool]], on_stop: Callable[[], None]) -> None:
        """`on_send` returns whether it took the text, which stays here otherwise."""
        self._on_send = on_send
        with ui.element("div").classes("composer") as self.row:
            self._text = ui.textarea(placeholder="Say something").classes("grow")
            self._text.props('outlined autogrow dense rows=1 maxlength=300000 aria-label="Your message"')
            # Not while an input method composes a character, which Enter only ends.
            self._text.on(
                "keydown",
                lambda event: self._send(event.args),
                js_handler="(e) => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing)"
                " { e.preventDefault(); emit(e.target.value); } }",
            )
            self._text.on("keydown.escape", on_stop)
            self._send_button = ui.button(icon="arrow_upward", on_click=lambda: self._send(self._text.value))
            self._send_button.props('round unelevated aria-label="Send"')
            self._stop_button = ui.button(icon="stop", on_click=on_stop)
            self._stop_button.props('round unelevated aria-label="Stop"')
            self._stop_button.set_visibility(False)

    def focus(self) -> None:
        self._text.run_method("focus")

    def set_answering(self, answering: bool) -> None:
        """Offer to stop, or to send."""
        self._send_button.set_visibility(not answering)
        self._stop_button.set_visibility(answering)

    def ask_for(self, text: str) -> None:
        """Set the placeholder."""
        self._text.props["placeholder"] = text

    async def _send(self, text: str | None) -> None:
        text = (text or "").strip()
        if text and await self._on_send(text):
            self._text.set_value("")
