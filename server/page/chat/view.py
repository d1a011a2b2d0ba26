"""The conversation that is looked at."""

import asyncio
import secrets
from functools import partial

from nicegui import background_tasks, context, ui

from server.page.api import ApiError
from server.page.chat.answering import Answering, with_seed
from server.page.chat.composer import Composer
from server.page.chat.export import ExportMenu
from server.page.chat.keeper import Keeper
from server.page.chat.turn_view import TurnView
from server.page.conversation import Conversation, Turn, name_of_call
from server.page.inside.view import InsideView
from server.page.pacing import repeated
from server.page.parameters.panel import SettingsPanel
from server.page.session import Session
from server.page.wording import STOPPED

_SAVED_EVERY_S = 3.0
"""While an answer grows: what is there outlives a page that is closed."""
_FULL = "This conversation is as long as the page can keep it. Begin a new chat."
_LEFT = "The page was closed before the answer had ended."


class ChatView:
    """Shows a conversation, asks the server for its answers, and keeps it in the browser."""

    def __init__(self, session: Session, settings: SettingsPanel) -> None:
        self.session = session
        self.settings = settings
        self.conversation = _new_conversation()
        self.keeper = Keeper(session.browser)
        self._shown: list[TurnView] = []
        self._growing: Turn | None = None
        self._answering: asyncio.Task[None] | None = None
        with ui.element("section").classes("chat").props('aria-label="Chat"'):
            log = ui.element("div").classes("log").props('role=log aria-label="Conversation" aria-live=off tabindex=0')
            with log, ui.element("div"):
                self._welcome = _make_welcome(session.model)
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

    def begin(self) -> None:
        """A new conversation."""
        self._set(_new_conversation())
        self.settings.show_system(None)
        self._composer.focus()

    async def reopen(self) -> None:
        """The one that this tab showed when it was loaded last; a new one if there is none."""
        current = self.session.memory.current
        if current is not None and any(one.id == current for one in self.session.memory.conversations):
            await self.open(current)
        else:
            self.begin()

    async def open(self, conversation_id: str) -> None:
        """One that the browser has."""
        if conversation_id != self.conversation.id:
            await self._load(conversation_id)
            self.session.browser.to_end()

    async def note_change(self, conversation_id: str) -> None:
        """Another tab has written this one."""
        self.keeper.note_change(conversation_id)
        if conversation_id == self.conversation.id and not self.is_answering:
            await self._load(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """For good."""
        self.keeper.forget(conversation_id)
        if conversation_id == self.conversation.id:
            self.begin()

    def show(self) -> None:
        """Bring what is shown in line with the conversation: turns that are there already stay as they are."""
        path = self.conversation.path()
        pairs = zip(self._shown, path, strict=False)
        num_same = next((at for at, (view, turn) in enumerate(pairs) if view.turn is not turn), len(path))
        for view in self._shown[num_same:]:
            view.delete()
        del self._shown[num_same:]
        for turn in path[len(self._shown) :]:
            self._append(turn)
        self._welcome.set_visibility(not path)
        self._show_whose_turn()
        self._export.set_visibility(bool(path))

    async def ask(self, text: str) -> bool:
        """Say this next, and have it answered; whether that could be done."""
        if self.is_answering or not self._can_send():
            return False
        path = self.conversation.path()
        last = path[-1] if path else None
        calls = self.conversation.open_calls()
        if calls:
            self._go_on(self.conversation.add(last, "tool", text, tool_call_id=calls[0].get("id")))
        else:
            self._go_on(self.conversation.add(last, "user", text))
        return True

    def edit(self, turn: Turn, text: str) -> None:
        """Another version of what was said, with an answer of its own."""
        if self.is_answering or not self._can_send():
            return
        before = None if turn.parent is None else self.conversation.turns[turn.parent]
        self._go_on(self.conversation.add(before, turn.role, text, tool_call_id=turn.tool_call_id))

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
            self.session.browser.focus(next(view for view in self._shown if view.turn is turn).article)
            self._save_soon()

    def answer(self, asked: Turn, prefix: str | None = None) -> None:
        """Have the server answer this turn."""
        self.conversation.system = self.settings.system
        request = with_seed(self.settings.request)
        turn = self.conversation.add(
            asked, "assistant", prefix or "", request=request, prefix=prefix, system=self.conversation.system
        )
        self._growing = turn
        self.show()
        answer = self._answer(self.conversation, turn, self._shown[-1])
        self._answering = background_tasks.create(answer, name="answer")
        self._save_soon()
        self.session.browser.to_end()

    def stop(self) -> None:
        """End the answer that is being written; it is kept as far as it came."""
        if self._answering is not None:
            self._answering.cancel()
        self._growing = self._answering = None

    def _go_on(self, said: Turn) -> None:
        """Have what was said answered, unless other calls wait for what they return."""
        if self.conversation.open_calls():
            self.show()
            self._save_soon()
        else:
            self.answer(said)
        self._composer.focus()

    async def _answer(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        self._composer.set_answering(True)
        self._status.set_text("The model answers.")
        turn.problem = _LEFT
        try:
            await self._fill(conversation, turn, view)
            turn.problem = None
        except ApiError as problem:
            turn.problem = str(problem)
            self.settings.blame(problem)
        except asyncio.CancelledError:
            turn.problem, turn.finish_reason = None, STOPPED
        finally:
            if self._growing is turn:
                self._growing = self._answering = None
            if not self._turns.is_deleted:
                self._show_end(conversation, turn, view)
        if not self._turns.is_deleted:
            await self._save(conversation)

    async def _fill(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        answering = Answering(self.session.api, turn, conversation.messages_before(turn))
        save = partial(self.keeper.save_meanwhile, conversation)
        async with view.growing() as add, repeated(save, _SAVED_EVERY_S):
            await self.session.with_key(lambda key: answering.run(key, add))

    def _show_end(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        if not self.is_answering:
            self._composer.set_answering(False)
            self._status.set_text("The answer has failed." if turn.problem else "The answer is complete.")
        if conversation is self.conversation:
            view.finish()
            self._show_whose_turn()

    async def _load(self, conversation_id: str) -> None:
        try:
            found = await self.keeper.load(conversation_id)
        except ValueError as problem:
            with self._turns:
                ui.notify(f"This conversation cannot be shown: {problem}.", type="negative")
            return
        self._set(found)
        self.settings.show_system(found.system)
        for number, turn in enumerate(found.path()):
            await asyncio.sleep(0)  # others have their turn between two of these
            if self.conversation is not found:
                return
            if len(self._shown) == number:
                self._append(turn)
        self.show()

    def _set(self, conversation: Conversation) -> None:
        """Show the beginning of this one."""
        self.stop()
        self.conversation = conversation
        self._turns.clear()
        self._shown.clear()
        self._welcome.set_visibility(not conversation.turns)
        self._show_whose_turn()
        self._export.set_visibility(False)
        self.session.browser.look(conversation.id)
        self.session.browser.follow()

    def _append(self, turn: Turn) -> None:
        with self._turns:
            self._shown.append(TurnView(self, turn, is_growing=turn is self._growing))

    def _can_send(self) -> bool:
        problem = _FULL if self.conversation.is_full else self.settings.problem
        if problem:
            ui.notify(problem, type="negative")
        return not problem

    def _save_soon(self) -> None:
        background_tasks.create(self._save(self.conversation), name="save")

    def _show_whose_turn(self) -> None:
        calls = [] if self.is_answering else self.conversation.open_calls()
        self._composer.ask_for(f"What {name_of_call(calls[0])} returned" if calls else "Say something")

    async def _save(self, conversation: Conversation) -> None:
        if not await self.keeper.save(conversation):
            with self._turns:
                ui.notify("The browser has no room for this conversation: delete others.", type="negative")


def _new_conversation() -> Conversation:
    return Conversation(id=secrets.token_hex(8))


def _make_welcome(model: str) -> ui.element:
    with ui.column().classes("welcome") as welcome:
        ui.label(f"Talk to {model}" if model else "This server has no model").classes("title")
        ui.label("What you write stays in this browser, and goes to this server only.").classes("quiet")
    return welcome
