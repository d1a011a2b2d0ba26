"""The panel in which one looks inside an answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nicegui import background_tasks, context, ui

from server.client.openai_answers import Alternative
from server.page.api import ApiError
from server.page.conversation import Turn
from server.page.inside.detail import TokenDetail
from server.page.inside.figures import Figures
from server.page.inside.legend import ProbabilityLegend, SourceLegend
from server.page.inside.replay import replay
from server.page.inside.replayed import Replayed, proof_of
from server.page.inside.token_map import TokenMap
from server.page.inside.tokens import Token
from server.page.pacing import now_and_then
from server.page.session import Session


class InsideView:
    """Nothing is in it, and nothing asked for, unless it is open."""

    def __init__(self, session: Session, on_branch: Callable[[Turn, str], None]) -> None:
        """`on_branch` has an answer written anew, beginning with a text."""
        self._session = session
        self._on_branch = on_branch
        self._panel: _Panel | None = None
        self._dialog = ui.dialog().props('position=right full-height aria-label="Inside this answer"')
        self._dialog.on("hide", self._clear)
        context.client.on_delete(self._clear)

    def open(self, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> None:
        """Look inside this answer to these messages."""
        self._clear()
        with self._dialog:
            self._panel = _Panel(self._session, turn, messages, self._dialog.close, self._branch)
        self._dialog.open()
        self._panel.begin()

    def _branch(self, turn: Turn, text: str) -> None:
        self._dialog.close()
        self._on_branch(turn, text)

    def _clear(self) -> None:
        if self._panel is not None:
            self._panel.end()
            self._panel = None
            self._dialog.clear()


class _Panel:
    """One answer, and its replay."""

    def __init__(
        self,
        session: Session,
        turn: Turn,
        messages: Sequence[Mapping[str, Any]],
        on_close: Callable[[], object],
        on_branch: Callable[[Turn, str], None],
    ) -> None:
        self._session = session
        self._turn = turn
        self._messages = messages
        self._on_close = on_close
        self._on_branch = on_branch
        self._replayed = Replayed(turn)
        self._figures = Figures()
        self._running: asyncio.Task[None] | None = None
        with ui.element("div").classes("inside by-probability"):
            self._root = context.slot.parent
            self._build()

    def begin(self) -> None:
        """Send the request again."""
        self.end()
        self._replayed = Replayed(self._turn)
        self._figures = Figures()
        self._tokens.empty()
        self._detail.clear()
        self._sources.clear()
        self._summary.set_text("")
        self._notes.clear()
        self._verdict.set_text("The same request is sent again.").classes(remove="problem same")
        self._running = background_tasks.create(self._run(self._replayed), name="look inside an answer")

    def end(self) -> None:
        """Ask for no more."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def _build(self) -> None:
        with ui.element("header"):
            ui.label("Inside this answer").classes("title grow").props("role=heading aria-level=2")
            ui.button("Again with the same seed", on_click=self.begin).props("outline dense no-caps")
            ui.button(icon="close", on_click=self._on_close).props('flat round dense aria-label="Close"')
        with ui.element("div").classes("proof"):
            self._verdict = ui.label().props("role=status")
            self._notes = ui.element("ul")
        self._summary = ui.label().classes("quiet summary")
        with ui.element("div").classes("colours"):
            self._colours = ui.toggle({"probability": "Probability", "source": "Source"}, value="probability").classes(
                "way"
            )
            self._colours.props('dense no-caps flat toggle-color=chosen role=group aria-label="Colour tokens by"')
            self._colours.on_value_change(lambda event: self._colour_by(event.value))
            self._colours.set_visibility(self._session.has_field("return_token_sources"))
            ProbabilityLegend()
            capabilities = self._session.capabilities
            if capabilities is not None and capabilities.logprobs == "raw":
                ui.label("As the model has it, before temperature and filters.").classes("quiet by-probability-only")
            self._sources = SourceLegend()
        with ui.element("div").classes("both"):
            self._tokens = TokenMap(self._choose)
            self._detail = TokenDetail(self._obstacle, self._branch)

    def _colour_by(self, what: str) -> None:
        self._root.classes(add=f"by-{what}", remove="by-probability by-source")

    async def _run(self, replayed: Replayed) -> None:
        num_shown = 0

        def show() -> None:
            nonlocal num_shown
            fresh = replayed.tokens.all[num_shown:]
            if replayed is self._replayed and fresh and not self._root.is_deleted:
                num_shown += len(fresh)
                self._show(fresh)

        problem = ""
        try:
            async with now_and_then(show) as more:
                await replay(self._session, self._messages, replayed, more)
        except ApiError as error:
            problem = str(error)
        if replayed is self._replayed and not self._root.is_deleted:
            self._finish(problem)

    def _show(self, fresh: Sequence[Token]) -> None:
        self._figures.add(fresh)
        self._tokens.append(fresh, self._figures)
        self._sources.show(self._figures)
        self._summary.set_text(self._figures.summary)

    def _finish(self, problem: str) -> None:
        if problem:
            self._verdict.set_text(problem).classes("problem")
            return
        proof = proof_of(self._replayed, heeds_seeds=self._session.has_field("seed"))
        self._verdict.set_text(proof.said).classes("same" if proof.is_same else "problem")
        with self._notes:
            for note in proof.notes:
                with ui.element("li"):
                    ui.label(note).classes("quiet")
        took = f"{self._replayed.seconds:.1f} s"
        told = self._figures.summary or "The server tells nothing of its tokens"
        self._summary.set_text(f"{told} · {took}")

    def _choose(self, place: int) -> None:
        tokens = self._replayed.tokens.all
        if 0 <= place < len(tokens):
            self._detail.show(tokens[place], len(tokens))

    def _obstacle(self, token: Token, alternative: Alternative) -> str:
        if not self._session.has_field("continue_final_message"):
            return "The server cannot go on from a text that is given."
        return self._replayed.tokens.obstacle(token, alternative, self._replayed.answer.text)

    def _branch(self, token: Token, alternative: Alternative) -> None:
        self._on_branch(self._turn, self._replayed.tokens.branch(token, alternative))
