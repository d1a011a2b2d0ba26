"""One turn of a conversation, as it is shown."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from nicegui import ui

from server.page.blocks import Blocks
from server.page.conversation import Turn
from server.page.inside.replay import can_look_inside
from server.page.pacing import now_and_then
from server.page.wording import ENDINGS, timing

if TYPE_CHECKING:
    from server.page.chat.view import ChatView

_NAMES = {"user": "You", "assistant": "Model", "tool": "Tool"}


class TurnView:
    """The text of a turn, what can be done with it, and its other versions."""

    def __init__(self, chat: "ChatView", turn: Turn, *, is_growing: bool) -> None:
        self._chat = chat
        self.turn = turn
        name = _NAMES.get(turn.role, turn.role)
        self.article = ui.element("article").classes(f"turn {turn.role}").props(f'aria-label="{name}" tabindex=-1')
        with self.article:
            ui.label(name).classes("role").props("role=heading aria-level=3")
            self._reasoning = self._make_reasoning() if turn.role == "assistant" else None
            self._body = ui.element("div").classes("body")
            with self._body:
                self._show_text()
            self._calls = ui.element("div").classes("calls")
            self._end = ui.element("div").classes("end-of-turn")
        if not is_growing:
            self.finish()

    def finish(self) -> None:
        """Show what comes below a turn that grows no more."""
        self._end.clear()
        self._show_calls()
        with self._end:
            if self.turn.problem:
                ui.label(self.turn.problem).classes("problem").props("role=alert")
            for notice in self.turn.notices:
                ui.label(f"Left out or changed: {notice}").classes("warning")
            self._show_actions()

    @asynccontextmanager
    async def growing(self) -> AsyncIterator[Callable[[str, str], None]]:
        """A function that shows more of the answer and of the reasoning before it, not too often."""
        text, thought = "", ""

        def add(piece: str, thought_piece: str) -> None:
            nonlocal text, thought
            text += piece
            thought += thought_piece
            more()

        def show() -> None:
            nonlocal text, thought
            if thought and self._reasoning is not None:
                self._reasoning.append(thought)
            if text:
                self._text.append(text)
            text = thought = ""

        async with now_and_then(show) as more:
            yield add

    def delete(self) -> None:
        """Show it no more."""
        self.article.delete()

    def _make_reasoning(self) -> Blocks:
        with ui.element("details").classes("reasoning") as details:
            with ui.element("summary"):
                ui.label("Reasoning")
            blocks = Blocks()
        if self.turn.reasoning:
            blocks.set_text(self.turn.reasoning)
        else:
            details.classes("empty")
        return blocks

    def _show_text(self) -> None:
        if self.turn.role == "assistant":
            self._text = Blocks()
            if self.turn.content:
                self._text.append(self.turn.content)
        else:
            ui.label(self.turn.content).classes("said")

    def _show_calls(self) -> None:
        self._calls.clear()
        for call in self.turn.tool_calls:
            what = call.get("function") or call.get("custom") or {}
            with self._calls, ui.element("figure").classes("code"):
                with ui.element("figcaption"):
                    ui.label(f"calls {what.get('name', '')}")
                with ui.element("pre"):
                    ui.label(_arguments_of(what)).classes("pre")

    def _show_actions(self) -> None:
        with ui.row().classes("actions"):
            self._show_versions()
            if self.turn.role == "assistant":
                self._action("content_copy", "Copy", lambda: self._chat.session.browser.copy(self.turn.content))
                self._action("refresh", "Answer again", lambda: self._chat.regenerate(self.turn))
                if can_look_inside(self._chat.session, self.turn):
                    self._action("troubleshoot", "Look inside", lambda: self._chat.look_inside(self.turn))
                ui.label(_facts_of(self.turn)).classes("quiet facts")
            else:
                self._action("edit", "Edit", self._edit)

    def _show_versions(self) -> None:
        versions = self._chat.conversation.versions(self.turn)
        if len(versions) < 2:
            return
        at = versions.index(self.turn)
        before = self._action("chevron_left", "Version before", lambda: self._chat.choose(versions[at - 1]))
        before.set_enabled(at > 0)
        ui.label(f"{at + 1} / {len(versions)}").classes("quiet")
        after = self._action("chevron_right", "Next version", lambda: self._chat.choose(versions[at + 1]))
        after.set_enabled(at + 1 < len(versions))

    def _action(self, icon: str, name: str, on_click: Callable[[], None]) -> ui.button:
        button = ui.button(icon=icon, on_click=on_click)
        return button.props(f'flat round dense size=sm aria-label="{name}" title="{name}"')

    def _show_again(self) -> None:
        self._body.clear()
        with self._body:
            self._show_text()

    def _edit(self) -> None:
        self._body.clear()
        with self._body:
            text = ui.textarea(value=self.turn.content).props('outlined autogrow autofocus aria-label="Edit"')
            text.classes("wide")
            with ui.row().classes("end"):
                ui.button("Cancel", on_click=self._show_again).props("flat no-caps")
                send = ui.button("Send", on_click=lambda: self._chat.edit(self.turn, text.value.strip()))
                send.props("no-caps unelevated")


def _arguments_of(called: dict[str, str]) -> str:
    """Readable, if they are JSON."""
    text = called.get("arguments") or called.get("input") or ""
    try:
        return msgspec.json.format(text)
    except msgspec.DecodeError:
        return text


def _facts_of(turn: Turn) -> str:
    """Of an answer, in a line."""
    facts = timing(turn.completion_tokens, turn.first_token_s, turn.seconds)
    if turn.cached_tokens:
        facts.append(f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached")
    if turn.finish_reason not in (None, "stop"):
        facts.append(ENDINGS.get(turn.finish_reason, ""))
    return " · ".join(fact for fact in facts if fact)
