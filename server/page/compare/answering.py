"""A comparison's question, its requests, and the element that shows an answer."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nicegui import ui

from server.client.openai_answers import Chunk
from server.page.answer import STOPPED, MeasuredAnswer, common_prefix_length, count
from server.page.api import ApiError
from server.page.capabilities import Fields, has_fields
from server.page.elements import AnswerText, icon_button, show_outcome
from server.page.session import Session

_log = logging.getLogger("samewise.page")
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Question:
    """The input that all compared answers share."""

    system: str
    prompt: str
    seed: int
    max_tokens: int
    wants_logprobs: bool

    def request_body(self, settings: Mapping[str, Any], descriptions: Fields) -> dict[str, Any]:
        """The request for an answer. `settings` override the question's fields."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"seed": self.seed, "messages": [*before, {"role": "user", "content": self.prompt}]}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.wants_logprobs:
            body["logprobs"] = True
        if has_fields(descriptions, ["return_token_ids"]):
            body["return_token_ids"] = True
        if not any(name in settings for name in _LIMITS):
            body[_LIMITS[0] if descriptions else _LIMITS[1]] = self.max_tokens  # more servers support the older name
        return body | dict(settings)


class ComparisonMode(Protocol):
    """A mode of the comparison: how one question is answered several times."""

    @property
    def problem(self) -> str:
        """The error that prevents asking; empty if there is none."""

    async def answer(self, question: Question) -> None:
        """Request and show the answers. Cancelling stops them."""


async def ask(
    session: Session,
    question: Question,
    settings: Mapping[str, Any],
    answers: Sequence[MeasuredAnswer],
    on_more: Callable[[], None],
) -> None:
    """Fill the answers with one request's choices. An error or a stop is recorded in each answer."""
    body = {"model": session.model} | question.request_body(settings, session.fields)

    def add(chunk: Chunk, at_s: float) -> None:
        for choice in chunk.choices:
            if choice.index < len(answers):
                answers[choice.index].add(choice, at_s)
        if len(answers) > 1:
            chunk.usage = None  # it counts all choices together
        answers[0].note(chunk)
        on_more()

    problem = ""
    try:
        await session.stream_chat(body, add)
    except ApiError as error:
        problem = str(error)
    except Exception:  # noqa: BLE001  (a bug must not end the other answers)
        _log.exception("Internal error while comparing answers")
        problem = "Internal error of the page. See the server's log for details."
    except asyncio.CancelledError:
        for answer in answers:
            answer.finish_reason = answer.finish_reason or STOPPED
        raise
    for answer in answers:
        answer.problem = problem or None


class AnswerView:
    """The element of one answer."""

    def __init__(self, session: Session, name: str) -> None:
        self.answer = MeasuredAnswer()
        self._session = session
        with ui.element("article").classes("answer").props(f'aria-label="{name}"'):
            self._text = AnswerText()
            self._end = ui.element("div").classes("end-of-answer")

    def begin(self) -> MeasuredAnswer:
        """Show a new answer."""
        self.answer = MeasuredAnswer()
        self.show()
        self._end.clear()
        return self.answer

    def show(self) -> None:
        """Show what was added since the last call."""
        self._text.show(self.answer)

    def finish(self, first: MeasuredAnswer | None) -> None:
        """Show errors and measurements below the answer. `first` is the answer to compare it with, if any."""
        answer = self.answer
        if self._end.is_deleted:
            return
        self._end.clear()
        with self._end:
            show_outcome(answer)
            if first is not None and first.content and answer.content:
                ui.label(comparison(answer.content, first.content)).classes("compared")
            ui.label(answer.facts).classes("quiet")
            if answer.content:
                icon_button("content_copy", "Copy", lambda: self._session.browser.copy(answer.content), small=True)


def comparison(text: str, first: str) -> str:
    """In words, how much of a text equals the first one."""
    same = common_prefix_length(text, first)
    if text == first:
        return "Same as the first."
    if not same:
        return "Differs from the first from the start."
    return f"Same as the first for {count(same, 'character')}."
