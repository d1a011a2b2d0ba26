"""The conversation that is looked at."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

from nicegui import background_tasks, context, ui

from server.page.api import ApiError
from server.page.chat.answering import Answering, with_seed
from server.page.chat.composer import Composer
from server.page.chat.export import ExportMenu
from server.page.chat.turn_view import TurnView
from server.page.conversation import Conversation, Turn, name_of_call
from server.page.inside.view import InsideView
from server.page.pacing import repeated
from server.page.parameters.panel import SettingsPanel
from server.page.session import Session

_KEPT_EVERY_S = 3.0
"""In the browser, while an answer grows: what is there outlives a page that is closed."""


class ChatView:
    """Shows a conversation, asks the server for its answers, and keeps it in the browser."""

    def __init__(self, session: Session, settings: SettingsPanel) -> None:
        self.session = session
        self.settings = settings
        self.conversation = _new_conversation()
        self._views: dict[int, TurnView] = {}
        self._growing: Turn | None = None
        self._answering: asyncio.Task[None] | None = None
        self._on_saved: list[Callable[[], Awaitable[None]]] = []
        with ui.element("section").classes("chat").props('aria-label="Chat"'):
            with ui.element("div").classes("log").props('role=log aria-label="Conversation" aria-live=off tabindex=0'):
                self._turns = ui.element("div").classes("turns")
            self._status = ui.label().classes("unseen").props("role=status")
            self._composer = Composer(self.ask, self.stop)
        with self._composer.row:
            self._export = ExportMenu(self)
        self._inside = InsideView(session, self.answer_from)
        context.client.on_delete(self.stop)

    @property
    def is_answering(self) -> bool:
        return self._growing is not None

    def on_saved(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Called whenever the conversation was kept."""
        self._on_saved.append(handler)

    def begin(self) -> None:
        """A new conversation."""
        self.stop()
        self.conversation = _new_conversation()
        self.show()
        self._composer.focus()
        self.session.browser.follow()

    async def reopen(self) -> None:
        """The one that this tab showed when it was loaded last; a new one if there is none."""
        current = self.session.memory.current
        if current is not None and any(one.id == current for one in self.session.memory.conversations):
            await self.open(current)
        else:
            self.begin()

    async def open(self, conversation_id: str) -> None:
        """One that the browser has."""
        text = await self.session.browser.load(conversation_id)
        try:
            found = Conversation.from_json(text or "")
        except ValueError:
            ui.notify("This conversation cannot be read any more.", type="negative")
            return
        self.stop()
        self.conversation = found
        self.settings.system = found.system
        self.show()
        self.session.browser.follow()
        self.session.browser.to_end()

    def show(self) -> None:
        """All turns anew."""
        self.session.browser.look(self.conversation.id)
        self._turns.clear()
        path = self.conversation.path()
        with self._turns:
            if not path:
                _welcome(self.session.model)
            self._views = {turn.id: TurnView(self, turn, is_growing=turn is self._growing) for turn in path}
        self._show_whose_turn()
        self._export.set_visibility(bool(path))

    async def ask(self, text: str) -> bool:
        """Say this next, and have it answered; whether that could be done."""
        if self.is_answering or not self._can_send():
            return False
        path = self.conversation.path()
        last = path[-1] if path else None
        calls = self.conversation.open_calls()
        if not calls:
            self.answer(self.conversation.add(last, "user", text))
        else:
            result = self.conversation.add(last, "tool", text, tool_call_id=calls[0].get("id"))
            if len(calls) == 1:
                self.answer(result)
            else:
                self.show()
                self._keep()
        return True

    def edit(self, turn: Turn, text: str) -> None:
        """Another version of what was said, with an answer of its own."""
        if self.is_answering or not self._can_send():
            return
        before = None if turn.parent is None else self.conversation.turns[turn.parent]
        self.answer(self.conversation.add(before, turn.role, text))

    def regenerate(self, turn: Turn) -> None:
        """Another answer to the same."""
        if turn.parent is not None and not self.is_answering and self._can_send():
            self.answer(self.conversation.turns[turn.parent])

    def answer_from(self, turn: Turn, prefix: str) -> None:
        """Another answer to the same, which begins with this text."""
        if turn.parent is not None and not self.is_answering and self._can_send():
            self.answer(self.conversation.turns[turn.parent], prefix)

    def look_inside(self, turn: Turn) -> None:
        """Show the tokens of an answer, and what could have stood in their places."""
        self._inside.open(turn, self.conversation.messages_before(turn))

    def choose(self, turn: Turn) -> None:
        """Look at this version."""
        if not self.is_answering:
            self.conversation.choose(turn)
            self.show()
            self._keep()

    def answer(self, asked: Turn, prefix: str | None = None) -> None:
        """Have the server answer this turn."""
        self.conversation.system = self.settings.system
        request = with_seed(self.settings.request)
        turn = self.conversation.add(
            asked, "assistant", prefix or "", request=request, prefix=prefix, system=self.conversation.system
        )
        self._growing = turn
        self.show()
        answer = self._answer(self.conversation, turn, self._views[turn.id])
        self._answering = background_tasks.create(answer, name="answer")
        self._keep()
        self.session.browser.to_end()

    def stop(self) -> None:
        """End the answer that is being written; it is kept as far as it came."""
        if self._answering is not None:
            self._answering.cancel()
        self._growing = self._answering = None

    async def _answer(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        self._composer.set_answering(True)
        self._status.set_text("The model answers.")
        try:
            await self._fill(conversation, turn, view)
        except ApiError as problem:
            turn.problem = str(problem)
            self.settings.blame(problem)
        except asyncio.CancelledError:
            turn.finish_reason = "stopped"
        if self._growing is turn:
            self._growing = self._answering = None
        if self._turns.is_deleted:
            return
        if not self.is_answering:
            self._composer.set_answering(False)
            self._status.set_text("The answer has failed." if turn.problem else "The answer is complete.")
        if conversation is self.conversation:
            view.finish()
            self._show_whose_turn()
        await self._save(conversation)

    async def _fill(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        answering = Answering(self.session.api, turn, conversation.messages_before(turn))
        keep = partial(self.session.browser.keep, conversation.id, conversation.to_json)
        async with view.growing() as add, repeated(keep, _KEPT_EVERY_S):
            await self.session.with_key(lambda key: answering.run(key, add))

    def _can_send(self) -> bool:
        if self.settings.problem:
            ui.notify(self.settings.problem, type="negative")
        return not self.settings.problem

    def _keep(self) -> None:
        background_tasks.create(self._save(self.conversation), name="save")

    def _show_whose_turn(self) -> None:
        calls = [] if self.is_answering else self.conversation.open_calls()
        self._composer.ask_for(f"What {name_of_call(calls[0])} returned" if calls else "Say something")

    async def _save(self, conversation: Conversation) -> None:
        conversation.updated = time.time()
        if not await self.session.browser.save(conversation.id, conversation.to_json()):
            with self._turns:
                ui.notify("The browser has no room for this conversation: delete others.", type="negative")
        for handler in self._on_saved:
            await handler()


def _new_conversation() -> Conversation:
    return Conversation(id=secrets.token_hex(8))


def _welcome(model: str) -> None:
    with ui.column().classes("welcome"):
        ui.label(f"Talk to {model}" if model else "This server has no model").classes("title")
        ui.label("What you write stays in this browser, and goes to this server only.").classes("quiet")
