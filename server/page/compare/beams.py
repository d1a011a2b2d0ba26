"""Beam search: the beams as a prefix tree."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nicegui import ui
from nicegui.element import Element

from server.page.answer import STOPPED, MeasuredAnswer, common_prefix_length, count, number, token_bytes
from server.page.compare.answering import Question, ask
from server.page.compare.presets import BEAM_PRESETS, Chooser, offered
from server.page.session import Session
from server.page.throttle import throttled

_WORD = re.compile(r"\s*\S+|\s+$")
_LEGEND = (
    "Text that beams share is shown once. The percentage at a branch is the probability of its first token. "
    "The best beam is highlighted."
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A token; a word if the server does not return tokens."""

    spelled: bytes
    """The bytes, possibly an incomplete character."""
    logprob: float | None = field(compare=False)
    """Not compared, because its last digits may differ between beams."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of the prefix tree: pieces that the same set of beams share."""

    pieces: tuple[Piece, ...]
    beams: tuple[int, ...]
    """Indices of the beams that contain these pieces; 0 is the best."""
    ending: tuple[int, ...]
    """Indices of the beams that end here: several if they are equal."""
    branches: tuple["Branch", ...]
    """Continuations, best beam first."""

    @property
    def text(self) -> str:
        return b"".join(piece.spelled for piece in self.pieces).decode(errors="replace")

    @property
    def share(self) -> float | None:
        """Probability of the first token; None if the server does not return it."""
        logprob = self.pieces[0].logprob if self.pieces else None
        return None if logprob is None else math.exp(logprob)


def pieces_of(answer: MeasuredAnswer) -> tuple[Piece, ...]:
    """The tokens of a beam, or its words."""
    if answer.tokens:
        return tuple(Piece(token_bytes(token), token.logprob) for token in answer.tokens)
    return tuple(Piece(word.encode(), None) for word in _WORD.findall(answer.content))


def tree_of(beams: Sequence[Sequence[Piece]]) -> Branch:
    """The prefix tree of beams, given best first. Its root has the pieces that all beams share, possibly none."""
    return _branch(dict(enumerate(beams)), 0)


def tree_json(branch: Branch, answers: Sequence[MeasuredAnswer]) -> dict[str, Any]:
    """The tree in the form that beam_tree.js draws."""
    share = branch.share
    return {
        "text": branch.text,
        "share": "" if share is None else "< 1 %" if share < 0.01 else f"{100 * share:.0f} %",
        "best": 0 in branch.beams,
        "through": count(len(branch.beams), "beam"),
        "ending": [_beam(at, answers[at]) for at in branch.ending],
        "branches": [tree_json(one, answers) for one in branch.branches],
    }


def _branch(beams: dict[int, Sequence[Piece]], start: int) -> Branch:
    """The branch of beams that share the pieces before `start`."""
    first = next(iter(beams.values()))
    end = start + min(common_prefix_length(first[start:], beam[start:]) for beam in beams.values())
    parts: dict[Piece, dict[int, Sequence[Piece]]] = {}
    for at, beam in beams.items():
        if len(beam) > end:
            parts.setdefault(beam[end], {})[at] = beam
    return Branch(
        pieces=tuple(first[start:end]),
        beams=tuple(beams),
        ending=tuple(at for at, beam in beams.items() if len(beam) == end),
        branches=tuple(_branch(part, end) for part in parts.values()),
    )


def _beam(at: int, answer: MeasuredAnswer) -> dict[str, str]:
    facts = []
    if answer.score is not None:
        facts.append(f"score {number(answer.score)}")
    if answer.cumulative_logprob is not None:
        facts.append(f"sum {number(answer.cumulative_logprob)}")
    if answer.completion_tokens:
        facts.append(count(answer.completion_tokens, "token"))
    if answer.ending:
        facts.append(answer.ending)
    return {"name": f"Beam {at + 1}", "facts": " · ".join(facts)}


class BeamSearch:
    """The mode for beam search, with one request. Until it ends, only the beams' common prefix is known."""

    def __init__(self, session: Session) -> None:
        self._session = session
        with ui.element("div").classes("one-setting"):
            self._chooser = Chooser(session, offered(BEAM_PRESETS, session.fields))
        self._state = ui.label(_LEGEND).classes("quiet")
        self._settled = ui.label().classes("settled")
        self._problem = ui.label().classes("problem").props("role=alert")
        self._tree = BeamTree()
        self._show_settled([])

    @property
    def problem(self) -> str:
        return self._chooser.problem

    async def answer(self, question: Question) -> None:
        settings = self._chooser.settings
        answers = [MeasuredAnswer() for _ in range(num_returned(settings))]
        self._problem.set_text("")
        self._tree.show(None)
        self._state.set_text("The beams have no common beginning yet.")
        question = replace(question, wants_logprobs=self._session.has_field("logprobs"))
        try:
            async with throttled(lambda: self._show_settled(answers)) as more:
                await ask(self._session, question, settings, answers, more)
        finally:
            self._finish(answers)

    def _show_settled(self, answers: list[MeasuredAnswer]) -> None:
        text = answers[0].content if answers else ""
        for answer in answers:
            text = text[: common_prefix_length(text, answer.content)]
        if text:
            self._state.set_text(f"Searching. All beams begin with these {count(len(text), 'character')}:")
        self._settled.set_text(text)
        self._settled.set_visibility(bool(text))

    def _finish(self, answers: list[MeasuredAnswer]) -> None:
        if self._tree.is_deleted:
            return
        self._show_settled([])
        found = [answer for answer in answers if answer.finish_reason not in (None, STOPPED)]
        self._problem.set_text(answers[0].problem or "")
        self._state.set_text(_LEGEND if found else "The search ended without a result.")
        if found:
            self._tree.show(tree_json(tree_of([pieces_of(answer) for answer in found]), found))


def num_returned(settings: Mapping[str, Any]) -> int:
    """The number of beams that a request with these settings returns."""
    search = settings.get("beam_search")
    number = search.get("num_return") if isinstance(search, Mapping) else None
    return number if isinstance(number, int) and number > 0 else 1


class BeamTree(Element, component="../static/beam_tree.js"):
    """The element that draws the tree, with keyboard navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("beams")

    def show(self, tree: Mapping[str, Any] | None) -> None:
        """Show a tree made by `tree_json`; None shows nothing."""
        self.run_method("show", tree)
