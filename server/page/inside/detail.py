"""What there is to know of one token."""

from collections.abc import Callable
from functools import partial

from nicegui import ui

from server.client.openai_answers import Alternative
from server.page.inside.figures import percent, source_name
from server.page.inside.tokens import Token, probability, raw, spelled


class TokenDetail:
    """Its probability, and what could have stood in its place."""

    def __init__(
        self, obstacle: Callable[[Token, Alternative], str], on_branch: Callable[[Token, Alternative], None]
    ) -> None:
        """`obstacle` says why an answer cannot go on from an alternative, empty if it can; `on_branch` has it do so."""
        self._obstacle = obstacle
        self._on_branch = on_branch
        with ui.element("section").classes("detail").props('aria-label="The chosen token" tabindex=0'):
            with ui.element("div").props("role=status"):
                self._text = ui.label().classes("chosen")
                self._facts = ui.label().classes("quiet")
            self._alternatives = ui.element("div")
        self.clear()

    def clear(self) -> None:
        """None is chosen."""
        self._text.set_text("")
        self._facts.set_text("Choose a token to see what could have stood in its place.")
        self._alternatives.clear()

    def show(self, token: Token, num_tokens: int) -> None:
        """What there is to know of it; the answer has `num_tokens`."""
        self._text.set_text(quoted(token.logprob))
        self._facts.set_text(_facts_of(token, num_tokens))
        self._alternatives.clear()
        with self._alternatives:
            self._show_alternatives(token)

    def _show_alternatives(self, token: Token) -> None:
        alternatives = token.logprob.top_logprobs
        if not alternatives:
            ui.label("The server tells of no alternatives.").classes("quiet")
            return
        obstacles = {self._obstacle(token, one) for one in alternatives}
        if len(obstacles) == 1 and (everywhere := next(iter(obstacles))):
            ui.label(f"No answer can go on from here. {everywhere}").classes("quiet")
        else:
            ui.label("Choose another, and the answer goes on from it.").classes("quiet")
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
        if raw(alternative) == raw(token.logprob):
            _own(alternative)
        elif obstacle := self._obstacle(token, alternative):
            with ui.element("div").classes("alternative"):
                _row(quoted(alternative), probability(alternative))
            if not is_said:
                ui.label(obstacle).classes("quiet")
        else:
            button = ui.element("button").classes("alternative").props("type=button")
            button.props["aria-label"] = f"Go on from {quoted(alternative)}, {percent(probability(alternative))}"
            with button.on("click", partial(self._on_branch, token, alternative)):
                _row(quoted(alternative), probability(alternative))


def quoted(token: Alternative) -> str:
    """With its blanks and line breaks to be seen."""
    text = spelled(token).replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return text or "∅"


def _facts_of(token: Token, num_tokens: int) -> str:
    facts = [f"Token {token.place + 1:,} of {num_tokens:,}", percent(probability(token.logprob))]
    told = len(token.logprob.top_logprobs)
    if token.rank is not None:
        facts.append(f"rank {token.rank}")
    elif told:
        facts.append(f"not among the {told} most probable")
    if token.source is not None:
        facts.append(source_name(token.source))
    if spelled(token.logprob) != token.text:
        facts.append(f"the last part of {token.text}")
    return " · ".join(facts)


def _own(token: Alternative) -> None:
    with ui.element("div").classes("alternative own"):
        _row(f"{quoted(token)}, as it is", probability(token))


def _row(name: str, share: float) -> None:
    ui.label(name).classes("name")
    ui.label(percent(share)).classes("share")
    ui.element("div").classes("bar").style(f"--share: {share:.4f}").props("aria-hidden=true")
