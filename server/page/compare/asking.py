"""What is asked, and how the answers come."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.client.openai_answers import Chunk
from server.page.api import ApiError
from server.page.chat.answering import PATH
from server.page.compare.answer import Answer
from server.page.described import Fields
from server.page.parameters.catalog import has_fields
from server.page.session import Session
from server.page.wording import STOPPED

_log = logging.getLogger("samewise.page")
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Question:
    """What all answers that are compared have in common."""

    system: str
    prompt: str
    seed: int
    max_tokens: int
    wants_logprobs: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, {"role": "user", "content": self.prompt}]


async def ask(
    session: Session,
    question: Question,
    settings: Mapping[str, Any],
    answers: Sequence[Answer],
    on_more: Callable[[], None],
) -> None:
    """Fill the answers with the choices of one request. Problems, and that it was stopped, are noted in them."""
    body = body_of(question, settings, session.fields) | {"model": session.model}
    try:
        await session.with_key(lambda key: _stream(session, body, key, answers, on_more))
    except ApiError as problem:
        for answer in answers:
            answer.problem = str(problem)
    except Exception:  # noqa: BLE001  (a bug, which must not end the other answers)
        _log.exception("The page cannot compare answers")
        for answer in answers:
            answer.problem = "The page has failed, and its log tells why."
    except asyncio.CancelledError:
        for answer in answers:
            answer.finish_reason = answer.finish_reason or STOPPED
        raise


def body_of(question: Question, settings: Mapping[str, Any], described: Fields) -> dict[str, Any]:
    """Of a request. The settings come before what all answers have in common."""
    limit = _LIMITS[0] if described else _LIMITS[1]  # the older name is known to more servers
    body: dict[str, Any] = {"seed": question.seed, "messages": question.messages, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if question.wants_logprobs:
        body["logprobs"] = True
    if has_fields(described, ["return_token_ids"]):
        body["return_token_ids"] = True
    if not any(name in settings for name in _LIMITS):
        body[limit] = question.max_tokens
    return body | dict(settings)


async def _stream(
    session: Session, body: Mapping[str, Any], key: str, answers: Sequence[Answer], on_more: Callable[[], None]
) -> None:
    started = time.monotonic()
    async with session.api.stream(PATH, body, key) as chunks:
        async for chunk in chunks:
            _add(chunk, answers, time.monotonic() - started)
            on_more()


def _add(chunk: Chunk, answers: Sequence[Answer], at_s: float) -> None:
    for choice in chunk.choices:
        if choice.index < len(answers):
            answers[choice.index].add(choice, at_s)
    answers[0].notices += [f"{notice.path}: {notice.reason}" for notice in chunk.warnings]
    if chunk.usage is not None and len(answers) == 1:
        answers[0].num_tokens = chunk.usage.completion_tokens
