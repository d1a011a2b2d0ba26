"""The token inspector's panel: tokens, alternatives and the result of the replay."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nicegui import background_tasks, context, ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from server.client.openai_answers import Alternative
from server.page.answer import token_bytes
from server.page.api import ApiError
from server.page.conversation import Turn
from server.page.elements import icon_button
from server.page.inside.replay import Replayed, prompt_of, proof_of, replay
from server.page.inside.tokens import Token, TokenStatistics, percent, probability, source_name, spelled, surprise
from server.page.session import Session
from server.page.throttle import throttled

_MARKS = ("100 %", "10 %", "1 %", "0.1 % or less")
"""Labels of the colour scale, equally spaced in surprise."""


class InsideView:
    """The dialog that contains the panel. Nothing is requested while it is closed."""

    def __init__(self, session: Session, on_branch: Callable[[Turn, str], None]) -> None:
        """`on_branch` requests another answer that starts with the given text."""
        self._session = session
        self._on_branch = on_branch
        self._panel: _Panel | None = None
        self._dialog = ui.dialog().props('position=right full-height aria-label="Inside this answer"')
        self._dialog.on("hide", self._clear)
        context.client.on_delete(self._clear)

    def open(self, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> None:
        """Inspect the answer `turn` to these messages."""
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
    """The panel for one answer and its replay."""

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
        self._statistics = TokenStatistics()
        self._running: asyncio.Task[None] | None = None
        with ui.element("div").classes("inside by-probability"):
            self._root = context.slot.parent
            self._build()

    def begin(self) -> None:
        """Send the request again."""
        self.end()
        self._replayed = Replayed(self._turn)
        self._statistics = TokenStatistics()
        self._tokens.empty()
        self._detail.clear()
        self._sources.clear()
        self._source_labels: list[ui.label] = []
        self._summary.set_text("")
        self._notes.clear()
        self._verdict.set_text("Sending the same request again …").classes(remove="problem same")
        self._running = background_tasks.create(self._run(self._replayed), name="look inside an answer")

    def end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def _build(self) -> None:
        with ui.element("header"):
            ui.label("Inside this answer").classes("title grow").props("role=heading aria-level=2")
            ui.button("Repeat with the same seed", on_click=self.begin).props("outline dense no-caps")
            icon_button("close", "Close", self._on_close)
        with ui.element("div").classes("proof"):
            self._verdict = ui.label().props("role=status")
            self._notes = ui.element("ul")
        self._prompt = ui.label().classes("quiet summary")
        self._summary = ui.label().classes("quiet summary")
        with ui.element("div").classes("colours"):
            colours = ui.toggle({"probability": "Probability", "source": "Source"}, value="probability")
            colours.props('dense no-caps flat toggle-color=chosen role=group aria-label="Colour tokens by"')
            colours.classes("way").on_value_change(lambda event: self._colour_by(event.value))
            colours.set_visibility(self._session.has_field("return_token_sources"))
            _make_scale()
            capabilities = self._session.capabilities
            if capabilities is not None and capabilities.logprobs == "raw":
                ui.label("Raw probabilities, before temperature and filters.").classes("quiet by-probability-only")
            self._sources = ui.element("ul").classes("legend")
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
            self._prompt.set_text(await prompt_of(self._session, self._turn, self._messages))
            async with throttled(show) as more:
                await replay(self._session, self._messages, replayed, more)
        except ApiError as error:
            problem = str(error)
        if replayed is self._replayed and not self._root.is_deleted:
            self._finish(problem)

    def _show(self, fresh: Sequence[Token]) -> None:
        self._statistics.add(fresh)
        self._tokens.append(fresh, self._statistics)
        self._show_sources()
        self._summary.set_text(self._statistics.summary)

    def _show_sources(self) -> None:
        """Update the legend. Sources are only ever added."""
        for at, (said, colour) in enumerate(self._statistics.legend()):
            if at < len(self._source_labels):
                self._source_labels[at].set_text(said)
                continue
            with self._sources, ui.element("li"):
                ui.element("span").classes(f"token source-{colour}").props("aria-hidden=true")
                self._source_labels.append(ui.label(said))

    def _finish(self, problem: str) -> None:
        if problem:
            self._verdict.set_text(problem).classes("problem")
            return
        proof = proof_of(self._replayed, supports_seeds=self._session.has_field("seed"))
        self._verdict.set_text(proof.said).classes("same" if proof.is_same else "problem")
        with self._notes:
            for note in proof.notes:
                with ui.element("li"):
                    ui.label(note).classes("quiet")
        took = f"{self._replayed.seconds:.1f} s"
        summary = self._statistics.summary or "The server returned no token details"
        self._summary.set_text(f"{summary} · {took}")

    def _choose(self, place: int) -> None:
        tokens = self._replayed.tokens.all
        if 0 <= place < len(tokens):
            self._detail.show(tokens[place], len(tokens))

    def _obstacle(self, token: Token, alternative: Alternative) -> str:
        if not self._session.has_field("continue_final_message"):
            return "The server does not support continuing a given text."
        return self._replayed.tokens.obstacle(token, alternative, self._replayed.answer.content)

    def _branch(self, token: Token, alternative: Alternative) -> None:
        self._on_branch(self._turn, self._replayed.tokens.branch(token, alternative))


class TokenMap(Element, component="../static/tokens.js"):
    """The element that shows tokens as boxes, drawn by the browser."""

    def __init__(self, on_choose: Callable[[int], None]) -> None:
        """`on_choose` receives the index of a token."""
        super().__init__()
        self._rows: list[tuple[str, float, str, int]] = []
        self._is_there = False
        self.on("ready", self._begin)
        self.on("choose", self._choose)
        self._on_choose = on_choose

    def append(self, tokens: Sequence[Token], statistics: TokenStatistics) -> None:
        """Show more tokens. `statistics` includes them already."""
        rows = [_box_of(token, statistics) for token in tokens]
        self._rows += rows
        if self._is_there:
            self.run_method("append", rows)

    def empty(self) -> None:
        self._rows = []
        self.run_method("empty")

    def _begin(self) -> None:
        """Send all tokens, because the browser has created a new, empty element."""
        self._is_there = True
        self.run_method("append", self._rows)

    def _choose(self, event: GenericEventArguments) -> None:
        if isinstance(event.args, int):
            self._on_choose(event.args)


def _box_of(token: Token, statistics: TokenStatistics) -> tuple[str, float, str, int]:
    """A token's text, surprise, description and colour number."""
    said = [percent(probability(token.logprob)), *([source_name(token.source)] if token.source else [])]
    return token.text, round(surprise(token), 3), ", ".join(said), statistics.colour(token.source)


def _make_scale() -> None:
    with ui.element("div").classes("legend scale"):
        ui.element("div").classes("gradient").props("aria-hidden=true")
        with ui.element("div").classes("between"):
            for mark in _MARKS:
                ui.label(mark)


class TokenDetail:
    """The chosen token and its alternatives."""

    def __init__(
        self, obstacle: Callable[[Token, Alternative], str], on_branch: Callable[[Token, Alternative], None]
    ) -> None:
        """`obstacle` returns why no answer can continue from an alternative, or ""; `on_branch` requests one."""
        self._obstacle = obstacle
        self._on_branch = on_branch
        with ui.element("section").classes("detail").props('aria-label="The chosen token" tabindex=0'):
            with ui.element("div").props("role=status"):
                self._text = ui.label().classes("chosen")
                self._facts = ui.label().classes("quiet")
            self._alternatives = ui.element("div")
        self.clear()

    def clear(self) -> None:
        """Show that no token is selected."""
        self._text.set_text("")
        self._facts.set_text("Select a token to see its alternatives.")
        self._alternatives.clear()

    def show(self, token: Token, num_tokens: int) -> None:
        self._text.set_text(quoted(token.logprob))
        self._facts.set_text(_facts_of(token, num_tokens))
        self._alternatives.clear()
        with self._alternatives:
            self._show_alternatives(token)

    def _show_alternatives(self, token: Token) -> None:
        alternatives = token.logprob.top_logprobs
        if not alternatives:
            ui.label("The server returned no alternatives.").classes("quiet")
            return
        obstacles = {self._obstacle(token, one) for one in alternatives}
        if len(obstacles) == 1 and (everywhere := next(iter(obstacles))):
            ui.label(f"No answer can continue from here. {everywhere}").classes("quiet")
        else:
            ui.label("Select an alternative to continue the answer from it.").classes("quiet")
        with ui.element("ul").classes("alternatives"):
            for alternative in alternatives:
                with ui.element("li"):
                    self._show_alternative(token, alternative, is_said=len(obstacles) == 1)
            if token.rank is None:
                with ui.element("li"):
                    _own(token.logprob)
            with ui.element("li"), ui.element("div").classes("alternative"):
                _row("All others", token.rest)

    def _show_alternative(self, token: Token, alternative: Alternative, *, is_said: bool) -> None:
        if token_bytes(alternative) == token_bytes(token.logprob):
            _own(alternative)
        elif obstacle := self._obstacle(token, alternative):
            with ui.element("div").classes("alternative"):
                _row(quoted(alternative), probability(alternative))
            if not is_said:
                ui.label(obstacle).classes("quiet")
        else:
            button = ui.element("button").classes("alternative").props("type=button")
            button.props["aria-label"] = f"Continue from {quoted(alternative)}, {percent(probability(alternative))}"
            with button.on("click", partial(self._on_branch, token, alternative)):
                _row(quoted(alternative), probability(alternative))


def quoted(token: Alternative) -> str:
    """A token's text with visible whitespace."""
    text = spelled(token).replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return text or "∅"


def _facts_of(token: Token, num_tokens: int) -> str:
    facts = [f"Token {token.place + 1:,} of {num_tokens:,}", percent(probability(token.logprob))]
    num_alternatives = len(token.logprob.top_logprobs)
    if token.rank is not None:
        facts.append(f"rank {token.rank}")
    elif num_alternatives:
        facts.append(f"not among the {num_alternatives} most probable")
    if token.source is not None:
        facts.append(source_name(token.source))
    if spelled(token.logprob) != token.text:
        facts.append(f"the last part of {token.text}")
    return " · ".join(facts)


def _own(token: Alternative) -> None:
    with ui.element("div").classes("alternative own"):
        _row(f"{quoted(token)} (chosen)", probability(token))


def _row(name: str, share: float) -> None:
    ui.label(name).classes("name")
    ui.label(percent(share)).classes("share")
    ui.element("div").classes("bar").style(f"--share: {share:.4f}").props("aria-hidden=true")
