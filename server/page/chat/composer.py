"""Where one writes what to say next."""

from collections.abc import Awaitable, Callable

from nicegui import ui
from nicegui.events import GenericEventArguments


class Composer:
    """Enter sends, Shift+Enter begins a line, Escape stops an answer."""

    def __init__(self, on_send: Callable[[str], Awaitable[bool]], on_stop: Callable[[], None]) -> None:
        """`on_send` says whether it took the text, which stays here otherwise."""
        self._on_send = on_send
        with ui.element("div").classes("composer") as self.row:
            self._text = ui.textarea(placeholder="Say something").classes("grow")
            self._text.props('outlined autogrow dense rows=1 maxlength=300000 aria-label="Your message"')
            # Not while an input method composes a character, which Enter only ends.
            self._text.on(
                "keydown",
                self._send,
                js_handler="(e) => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing)"
                " { e.preventDefault(); emit(e.target.value); } }",
            )
            self._text.on("keydown.escape", on_stop)
            self._send_button = ui.button(icon="arrow_upward", on_click=lambda: self._send_text(self._text.value))
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
        """Say what is to be written."""
        self._text.props["placeholder"] = text
        self._text.update()

    async def _send(self, event: GenericEventArguments) -> None:
        await self._send_text(event.args)

    async def _send_text(self, text: str | None) -> None:
        text = (text or "").strip()
        if text and await self._on_send(text):
            self._text.set_value("")
