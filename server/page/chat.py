"""The chat view: shows a conversation and requests its answers."""

import asyncio
import re
import secrets
from functools import partial

from nicegui import app, background_tasks, context, ui

from server.client.openai_answers import Chunk
from server.page.answer import STOPPED
from server.page.api import ApiError
from server.page.browser import ConversationStore
from server.page.conversation import Conversation, Turn, name_of_call
from server.page.elements import Composer, icon_button
from server.page.inside.view import InsideView
from server.page.model_picker import ModelNotice
from server.page.pictures import PictureTray
from server.page.session import Session
from server.page.settings import SettingsPanel, new_seed
from server.page.throttle import throttled
from server.page.turn_view import TurnView

_SAVED_EVERY_S = 3.0
"""Interval of saving a growing answer, so that a closed page does not lose it."""
_FULL = "This conversation has reached the page's length limit. Start a new chat."
_NO_PICTURES = (
    "The browser does not have the images of this chat. Wait a moment if they are large, or start a new chat."
)
_LEFT = "The page was closed before the answer was complete."


class ChatView:
    """Shows a conversation, requests its answers and saves it in the browser."""

    def __init__(self, session: Session, settings: SettingsPanel) -> None:
        self.session = session
        self.settings = settings
        self.conversation = _new_conversation()
        self.store = ConversationStore(session.browser)
        self._shown: list[TurnView] = []
        self._growing: Turn | None = None
        self._answering: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        """Held while a conversation is loaded, which would take away a message sent meanwhile."""
        with ui.element("section").classes("chat").props('aria-label="Chat"'):
            log = ui.element("div").classes("log").props('role=log aria-label="Conversation" aria-live=off tabindex=0')
            with log, ui.element("div"):
                self._welcome = _make_welcome(session)
                self._turns = ui.element("div").classes("turns")
            self._status = ui.label().classes("unseen").props("role=status")
            self._tray = PictureTray(session)
            self.model_notice = ModelNotice(session)
            self._composer = Composer(self.ask, self.stop)
        self._tray.take_from(self._composer.row)
        with self._composer.row:
            self._make_export_menu()
        self._inside = InsideView(session, self.regenerate)
        context.client.on_delete(self.stop)

    def begin(self) -> None:
        """Start a new conversation."""
        self._set(_new_conversation())
        self.settings.show_system(None)
        self._composer.focus()

    async def reopen(self) -> None:
        """Show this tab's last conversation, or a new one."""
        current = self.session.stored.current
        if current is not None and any(one.id == current for one in self.session.stored.conversations):
            await self.open(current)
        else:
            self.begin()

    async def open(self, conversation_id: str) -> None:
        """Show a stored conversation."""
        async with self._one_at_a_time:
            if conversation_id != self.conversation.id:
                await self._load(conversation_id)
                self.session.browser.to_end()

    async def note_change(self, conversation_id: str) -> None:
        """Handle that another tab has written this conversation: reload it if it is shown and idle."""
        self.store.note_change(conversation_id)
        async with self._one_at_a_time:
            if conversation_id == self.conversation.id and self._growing is None:
                await self._load(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """Delete a conversation."""
        self.store.forget(conversation_id)
        if conversation_id == self.conversation.id:
            self.begin()

    def show(self) -> None:
        """Update the view to the conversation; elements of unchanged turns are reused."""
        path = self.conversation.path()
        pairs = zip(self._shown, path, strict=False)
        num_same = next((at for at, (view, turn) in enumerate(pairs) if view.turn is not turn), len(path))
        for view in self._shown[num_same:]:
            view.article.delete()
        del self._shown[num_same:]
        for turn in path[len(self._shown) :]:
            self._append(turn)
        self._welcome.set_visibility(not path)
        self._show_whose_turn()
        self._export.set_visibility(bool(path))

    async def ask(self, text: str) -> bool:
        """Send a message with the chosen pictures; returns whether it was accepted."""
        async with self._one_at_a_time:
            await self._tray.wait()
            pictures = self._tray.chosen
            if not (text or pictures) or not self._can_send():
                return False
            path = self.conversation.path()
            last = path[-1] if path else None
            if calls := self.conversation.open_calls():
                self._continue(self.conversation.add(last, "tool", text, tool_call_id=calls[0].get("id")))
            else:
                self._tray.clear()
                self._continue(self.conversation.add(last, "user", text, pictures=pictures))
            return True

    def choose(self, turn: Turn) -> None:
        """Show this version of a turn, unless an answer is being streamed."""
        if self._growing is None:
            self.conversation.choose(turn)
            self.show()
            self.session.browser.focus(next(view for view in self._shown if view.turn is turn).article)
            self._save_soon()

    def edit(self, turn: Turn, text: str) -> None:
        """Add a new version of a message, and request its answer."""
        if self._can_send():
            before = None if turn.parent is None else self.conversation.turns[turn.parent]
            kept = {"tool_call_id": turn.tool_call_id, "pictures": turn.pictures}
            self._continue(self.conversation.add(before, turn.role, text, **kept))

    def regenerate(self, turn: Turn, prefix: str | None = None) -> None:
        """Request another answer to the same message, optionally starting with `prefix`."""
        if turn.parent is not None and self._can_send():
            self.answer(self.conversation.turns[turn.parent], prefix)

    def look_inside(self, turn: Turn) -> None:
        """Show an answer's tokens and their alternatives."""
        self._inside.open(turn, self.conversation.messages_before(turn, self.session.pictures))

    def answer(self, asked: Turn, prefix: str | None = None) -> None:
        """Request an answer to this turn, always with a seed, so that it can be reproduced."""
        self.conversation.system = self.settings.system
        request = {"seed": new_seed(), **self.settings.request}
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
        """Stop the answer being streamed, and keep the part received."""
        if self._answering is not None:
            self._answering.cancel()
        self._growing = self._answering = None

    def _continue(self, said: Turn) -> None:
        """Request an answer to a message, unless other tool calls still need results."""
        if self.conversation.open_calls():
            self.show()
            self._save_soon()
        else:
            self.answer(said)
        self._composer.focus()

    async def _answer(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        self._composer.set_answering(True)
        self._status.set_text("The model is answering.")
        turn.problem = _LEFT
        try:
            await self._fill(conversation, turn, view)
            turn.problem = None
        except ApiError as problem:
            turn.problem = str(problem)
            self.settings.show_error(problem)
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
        ended_s = 0.0

        def add(chunk: Chunk, at_s: float) -> None:
            nonlocal ended_s
            ended_s = at_s
            turn.note(chunk)
            for choice in chunk.choices:
                if choice.index == 0:
                    turn.add(choice, at_s)
            more()

        save = partial(self.store.save_meanwhile, conversation)
        saving = app.timer(_SAVED_EVERY_S, save, immediate=False)
        try:
            async with throttled(view.grow) as more:
                messages = conversation.messages_before(turn, self.session.pictures)
                await self.session.stream_chat(turn.request_body(messages), add)
        finally:
            saving.cancel()
            turn.seconds = ended_s

    def _show_end(self, conversation: Conversation, turn: Turn, view: TurnView) -> None:
        if self._growing is None:
            self._composer.set_answering(False)
            self._status.set_text("The answer has failed." if turn.problem else "The answer is complete.")
        if conversation is self.conversation:
            view.finish()
            self._show_whose_turn()

    async def _load(self, conversation_id: str) -> None:
        """Show a stored conversation, unless a new one is started before the browser has sent it."""
        before = self.conversation
        try:
            found = await self.store.load(conversation_id)
        except ValueError as problem:
            with self._turns:
                ui.notify(f"Cannot show this conversation: {problem}.", type="negative")
            return
        if self.conversation is not before:
            return
        self._set(found)
        self.settings.show_system(found.system)
        for number, turn in enumerate(found.path()):
            await asyncio.sleep(0)  # let other tasks run
            if self.conversation is not found:
                return
            if len(self._shown) == number:
                self._append(turn)
        self.show()

    def _set(self, conversation: Conversation) -> None:
        self.stop()
        self.conversation = conversation
        self._turns.clear()
        self._shown.clear()
        self._welcome.set_visibility(not conversation.turns)
        self._show_whose_turn()
        self._export.set_visibility(False)
        self.session.browser.set_current(conversation.id)
        self.session.browser.follow()

    def _append(self, turn: Turn) -> None:
        self._tray.bring_back(turn.pictures)
        with self._turns:
            view = TurnView(self.session, self.conversation, turn, self, is_growing=turn is self._growing)
        self._shown.append(view)

    def _can_send(self) -> bool:
        if self._growing is not None:
            return False
        problem = _FULL if self.conversation.is_full else self.settings.problem
        if not problem and self.conversation.lacks_pictures(self.session.pictures):
            problem = _NO_PICTURES
        if problem:
            ui.notify(problem, type="negative")
        return not problem

    def _save_soon(self) -> None:
        background_tasks.create(self._save(self.conversation), name="save")

    def _show_whose_turn(self) -> None:
        calls = self.conversation.open_calls() if self._growing is None else []
        self._composer.ask_for(f"What {name_of_call(calls[0])} returned" if calls else "Type a message")

    async def _save(self, conversation: Conversation) -> None:
        if not await self.store.save(conversation):
            with self._turns:
                ui.notify(
                    "The browser's storage is full. Delete other conversations to save this one.", type="negative"
                )

    def _make_export_menu(self) -> None:
        self._export = icon_button("download", "Export").props("aria-haspopup=menu")
        self._export.move(target_index=0)
        with self._export, ui.menu().props("role=menu"):
            ui.menu_item("Markdown", self._export_markdown).props("role=menuitem")
            ui.menu_item("Request as JSON", self._export_request).props("role=menuitem")

    def _export_markdown(self) -> None:
        self._download(self.conversation.to_markdown(), "md", "text/markdown")

    def _export_request(self) -> None:
        self._download(self.conversation.to_messages(self.settings.request), "json", "application/json")

    def _download(self, content: str, ending: str, kind: str) -> None:
        name = re.sub(r"[^\w-]+", "-", self.conversation.title).strip("-").lower() or "conversation"
        ui.download.content(content, f"{name}.{ending}", kind)


def _new_conversation() -> Conversation:
    return Conversation(id=secrets.token_hex(8))


def _make_welcome(session: Session) -> ui.element:
    with ui.column().classes("welcome") as welcome:
        title = ui.label().classes("title")
        title.bind_text_from(session, "model", lambda name: f"Chat with {name}" if name else "This server has no model")
        ui.label("Your messages are stored in this browser and sent only to this server.").classes("quiet")
    return welcome
