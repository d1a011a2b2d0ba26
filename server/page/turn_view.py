"""The element for one turn of a conversation: its text, actions and versions."""

from collections.abc import Mapping
from typing import Protocol

import msgspec
from nicegui import ui

from server.page.answer import ENDINGS, timing
from server.page.conversation import Conversation, Turn
from server.page.elements import AnswerText, icon_button, show_outcome
from server.page.inside.replay import can_look_inside
from server.page.pictures import show_picture
from server.page.session import Session

_NAMES = {"user": "You", "assistant": "Model", "tool": "Tool"}


class TurnActions(Protocol):
    """Callbacks for the buttons of a turn."""

    def choose(self, turn: Turn) -> None: ...
    def edit(self, turn: Turn, text: str) -> None: ...
    def regenerate(self, turn: Turn) -> None: ...
    def look_inside(self, turn: Turn) -> None: ...


class TurnView:
    """The element that shows one turn."""

    def __init__(
        self, session: Session, conversation: Conversation, turn: Turn, actions: TurnActions, *, is_growing: bool
    ) -> None:
        self.turn = turn
        self._session = session
        self._conversation = conversation
        self._actions = actions
        name = _NAMES.get(turn.role, turn.role)
        self.article = ui.element("article").classes(f"turn {turn.role}").props(f'aria-label="{name}" tabindex=-1')
        with self.article:
            ui.label(self._speaker(name)).classes("role").props("role=heading aria-level=3")
            if turn.role == "assistant":
                self._answer = AnswerText()
                self.grow()
            else:
                self._body = ui.element("div").classes("body")
                self._show_said()
            self._calls = ui.element("div").classes("calls")
            self._end = ui.element("div").classes("end-of-turn")
        if not is_growing:
            self.finish()

    def _speaker(self, name: str) -> str:
        """The name of the role; of several models, the name of the one that answers."""
        model = (self.turn.request or {}).get("model") if self._session.has_several else None
        return str(model or name)

    def grow(self) -> None:
        """Show the text that was added since the last call."""
        self._answer.show(self.turn)

    def finish(self) -> None:
        """Show the tool calls, errors and actions of a complete turn."""
        self._end.clear()
        self._show_calls()
        with self._end:
            show_outcome(self.turn)
            self._show_actions()

    def _show_said(self) -> None:
        self._body.clear()
        with self._body:
            if self.turn.pictures:
                with ui.element("div").classes("thumbnails"):
                    for picture in self.turn.pictures:
                        show_picture(self._session, picture)
            ui.label(self.turn.content).classes("said")

    def _show_calls(self) -> None:
        self._calls.clear()
        for call in self.turn.tool_calls:
            called = call.get("function") or call.get("custom") or {}
            with self._calls, ui.element("figure").classes("code"):
                with ui.element("figcaption"):
                    ui.label(f"calls {called.get('name', '')}")
                with ui.element("pre"):
                    ui.label(_arguments_of(called)).classes("pre")

    def _show_actions(self) -> None:
        turn, actions = self.turn, self._actions
        with ui.row().classes("actions"):
            self._show_versions()
            if turn.role == "assistant":
                icon_button("content_copy", "Copy", lambda: self._session.browser.copy(turn.content), small=True)
                icon_button("refresh", "Answer again", lambda: actions.regenerate(turn), small=True)
                if can_look_inside(self._session, turn):
                    icon_button("troubleshoot", "Look inside", lambda: actions.look_inside(turn), small=True)
                ui.label(_facts_of(turn)).classes("quiet facts")
            else:
                icon_button("edit", "Edit", self._edit, small=True)

    def _show_versions(self) -> None:
        versions, choose = self._conversation.versions(self.turn), self._actions.choose
        if len(versions) < 2:
            return
        at = versions.index(self.turn)
        before = icon_button("chevron_left", "Previous version", lambda: choose(versions[at - 1]), small=True)
        before.set_enabled(at > 0)
        ui.label(f"{at + 1} / {len(versions)}").classes("quiet")
        after = icon_button("chevron_right", "Next version", lambda: choose(versions[at + 1]), small=True)
        after.set_enabled(at + 1 < len(versions))

    def _edit(self) -> None:
        self._body.clear()
        with self._body:
            text = ui.textarea(value=self.turn.content).props('outlined autogrow autofocus aria-label="Edit"')
            text.classes("wide")
            with ui.row().classes("end"):
                ui.button("Cancel", on_click=self._show_said).props("flat no-caps")
                send = ui.button("Send", on_click=lambda: self._actions.edit(self.turn, text.value.strip()))
                send.props("no-caps unelevated")


def _arguments_of(called: Mapping[str, str]) -> str:
    """A call's arguments as text, indented if they are JSON."""
    text = called.get("arguments") or called.get("input") or ""
    try:
        return msgspec.json.format(text)
    except msgspec.DecodeError:
        return text


def _facts_of(turn: Turn) -> str:
    facts = timing(turn.completion_tokens, turn.first_token_s, turn.seconds)
    if turn.cached_tokens:
        facts.append(f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached")
    if turn.finish_reason not in (None, "stop"):
        facts.append(ENDINGS.get(turn.finish_reason, ""))
    return " · ".join(fact for fact in facts if fact)
