"""Elements that several views share."""

from collections.abc import Awaitable, Callable

from nicegui import ui
from nicegui.element import Element

from server.page.answer import Answer
from server.page.markdown import GrowingText


def icon_button(
    icon: str, name: str, on_click: Callable[[], object] | None = None, *, small: bool = False
) -> ui.button:
    """A round button with an icon; `name` is its accessible label and its tooltip."""
    button = ui.button(icon=icon, on_click=on_click).props("flat round dense")
    if small:
        button.props("size=sm")
    return name_button(button, name)


def name_button(button: ui.button, name: str) -> ui.button:
    """Set a button's label and title. NiceGUI's tooltips do not work in panels that are hidden at first."""
    button.props["aria-label"] = button.props["title"] = name
    return button


class Blocks(Element, component="static/blocks.js"):
    """Growing Markdown: only changed blocks of HTML are sent. The browser sanitises each block."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("prose")
        self._growing = GrowingText()
        self._num_characters = 0
        self._blocks: list[str] = []
        self._is_there = False
        """Whether the browser has created the element; False in a hidden panel."""
        self.on("ready", self._begin)

    def show(self, text: str) -> None:
        """Show this text. A longer text must start with the shown one; a shorter text replaces it."""
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
        """Send all blocks, because the browser has created a new, empty element."""
        self._is_there = True
        self.run_method("show", 0, self._blocks)


class AnswerText:
    """The reasoning and the text of a growing answer."""

    def __init__(self) -> None:
        with ui.element("details").classes("reasoning"):
            with ui.element("summary"):
                ui.label("Reasoning")
            self._reasoning = Blocks()
        with ui.element("div").classes("body"):
            self._text = Blocks()

    def show(self, answer: Answer) -> None:
        """Show what was added since the last call, or a new answer from its start."""
        self._reasoning.show(answer.reasoning)
        self._text.show(answer.content)


def show_outcome(answer: Answer) -> None:
    """Show an answer's error and the request fields that were ignored or changed."""
    if answer.problem:
        ui.label(answer.problem).classes("problem").props("role=alert")
    for notice in answer.notices:
        ui.label(f"Ignored or changed: {notice}").classes("warning")


class Composer:
    """The text field for the next message: Enter sends, Shift+Enter starts a new line, Escape stops the answer."""

    def __init__(self, on_send: Callable[[str], Awaitable[bool]], on_stop: Callable[[], None]) -> None:
        """`on_send` returns whether it accepted the text, which may be empty; otherwise it stays in the field."""
        self._on_send = on_send
        with ui.element("div").classes("composer") as self.row:
            self._text = ui.textarea(placeholder="Type a message").classes("grow")
            self._text.props('outlined autogrow dense rows=1 maxlength=300000 aria-label="Your message"')
            # While an input method composes a character, Enter only confirms that character.
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
        """Show the stop button while the model answers, otherwise the send button."""
        self._send_button.set_visibility(not answering)
        self._stop_button.set_visibility(answering)

    def ask_for(self, text: str) -> None:
        """Set the placeholder."""
        self._text.props["placeholder"] = text

    async def _send(self, text: str | None) -> None:
        text = (text or "").strip()
        if await self._on_send(text):
            self._text.set_value("")
