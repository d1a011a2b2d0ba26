"""The view into an answer: the same request again, with all that the server tells of its tokens."""

import asyncio
from typing import TYPE_CHECKING, Any

from nicegui import background_tasks, ui

from server.page.answers import Alternative
from server.page.api import ApiError
from server.page.chat.answering import PATH, body_of
from server.page.conversation import Turn
from server.page.inside.detail import Detail
from server.page.inside.replay import DRAWN, Replay, source_in_words
from server.page.inside.tokens import Colours, Tokens
from server.page.pacing import now_and_then

if TYPE_CHECKING:
    from server.page.chat.view import ChatView

_ALTERNATIVES = 5


class Inside:
    """Of one answer. It is asked for again with the same seed: so it shows that the same comes, too."""

    def __init__(self, chat: "ChatView", turn: Turn) -> None:
        self._chat = chat
        self._turn = turn
        self._replay = Replay(turn)
        self._num_shown = 0
        self._task: asyncio.Task[None] | None = None
        branch = self._branch if chat.session.has_field("continue_final_message") else None
        self._dialog = ui.dialog().props('maximized aria-label="Inside the answer"')
        with self._dialog, ui.card().classes("inside"):
            self._head()
            with ui.element("div").classes("halves"):
                with ui.element("div").classes("half"):
                    self._tokens = Tokens(self._show_token)
                self._detail = Detail(branch)
        self._dialog.on("hide", self._close)

    def open(self) -> None:
        """Show it, and ask."""
        self._dialog.open()
        self._again()

    def _head(self) -> None:
        with ui.row().classes("between"):
            ui.label("Inside the answer").classes("title").props("role=heading aria-level=2")
            close = ui.button(icon="close", on_click=self._dialog.close)
            close.props('flat round dense aria-label="Close" autofocus')
        self._verdict = ui.label().classes("verdict").props("role=status")
        with ui.row().classes("tools"):
            ui.label("Colour by").classes("quiet").props("id=colour-by")
            choices: dict[Colours, str] = {"probability": "probability"}
            if self._chat.session.has_field("return_token_sources"):
                choices["source"] = "where it came from"
            toggle = ui.toggle(choices, value="probability", on_change=lambda event: self._colour_by(event.value))
            toggle.classes("way")
            toggle.props('no-caps dense flat toggle-color=chosen role=group aria-labelledby="colour-by"')
            again = ui.button("Again with the same seed", icon="replay", on_click=self._again)
            again.props("flat no-caps dense")
        self._legend = ui.element("div").classes("legend")

    def _again(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._replay = Replay(self._turn)
        self._num_shown = 0
        self._tokens.clear_tokens()
        self._verdict.set_text("Asking for the same again …")
        self._task = background_tasks.create(self._run(self._replay), name="look inside")

    async def _run(self, replay: Replay) -> None:
        try:
            async with now_and_then(self._show_more) as more:
                await self._chat.session.with_key(lambda key: self._stream(replay, key, more))
        except ApiError as problem:
            self._verdict.set_text(str(problem))
            return
        self._verdict.set_text(replay.verdict)
        self._verdict.classes(add="good" if replay.difference is None else "bad", remove="good bad")
        self._show_legend(self._colours)

    async def _stream(self, replay: Replay, key: str, more: Any) -> None:
        session = self._chat.session
        body = body_of(self._turn, self._chat.conversation.messages_before(self._turn))
        body |= {"logprobs": True, "top_logprobs": _ALTERNATIVES}
        if session.has_field("return_token_sources"):
            body["return_token_sources"] = True
        async with session.api.stream(PATH, body, key) as chunks:
            async for chunk in chunks:
                replay.add(chunk)
                more()
                if replay.is_long_enough:
                    return

    def _show_more(self) -> None:
        tokens = self._replay.tokens[self._num_shown :]
        if tokens and not self._tokens.is_deleted:
            self._tokens.append(tokens)
            self._num_shown += len(tokens)

    def _show_token(self, index: int) -> None:
        tokens = self._replay.tokens
        if 0 <= index < len(tokens):
            self._detail.show(index, tokens[index], len(tokens))

    def _branch(self, index: int, instead: Alternative) -> None:
        prefix = self._replay.prefix(index, instead)
        if prefix is None:
            ui.notify("The text up to there is no whole characters, or not all of the answer.", type="warning")
            return
        self._dialog.close()
        self._chat.answer_from(self._turn, prefix)

    _colours: Colours = "probability"

    def _colour_by(self, colours: Colours) -> None:
        self._colours = colours
        self._tokens.colour_by(colours)
        self._show_legend(colours)

    def _show_legend(self, colours: Colours) -> None:
        self._legend.clear()
        replay = self._replay
        with self._legend:
            if colours == "probability":
                ui.label("certain").classes("quiet")
                ui.element("div").classes("scale").props("aria-hidden=true")
                ui.label("surprising").classes("quiet")
                if replay.perplexity is not None:
                    ui.label(f"Perplexity {replay.perplexity:.2f}").classes("quiet facts")
                return
            for source, count in replay.sources.items():
                number = 0 if source == DRAWN else self._tokens.number_of(source)
                with ui.row().classes("key"):
                    ui.element("span").classes(f"token source-{number}").props("aria-hidden=true")
                    share = count / len(replay.tokens)
                    ui.label(f"{source_in_words(source)}: {count:,} ({share:.0%})").classes("quiet")

    def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._dialog.delete()
