"""Replays an answer: sends its request again with log-probabilities, and compares the texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.client.openai_answers import Chunk
from server.page.answer import STOPPED, MeasuredAnswer, common_prefix_length, count
from server.page.api import PromptSize
from server.page.capabilities import Fields
from server.page.conversation import Turn
from server.page.inside.tokens import Tokens
from server.page.session import Session

_NUM_ALTERNATIVES = 5


class Replayed:
    """The answer to a repeated request."""

    def __init__(self, turn: Turn) -> None:
        """`turn` is the original answer."""
        self.turn = turn
        self.answer = MeasuredAnswer(content=turn.prefix or "")
        self.tokens = Tokens(turn.prefix or "")
        self.seconds = 0.0

    def add(self, chunk: Chunk, at_s: float) -> None:
        """Append a chunk received `at_s` seconds after the request."""
        self.seconds = at_s
        for choice in chunk.choices:
            if choice.index == 0:
                self.answer.add(choice, at_s)
                self.tokens.add((choice.logprobs and choice.logprobs.content) or (), choice.token_sources)
        self.answer.note(chunk)
        if self.is_enough:
            self._cut()

    @property
    def is_enough(self) -> bool:
        """Whether the replay has reached the length of an original answer that was cut short."""
        turn, answer = self.turn, self.answer
        is_as_long = len(answer.content) >= len(turn.content) and len(answer.reasoning) >= len(turn.reasoning)
        return was_cut_short(turn) and not turn.tool_calls and is_as_long

    def _cut(self) -> None:
        """Remove tokens after the original's end, if the tokens contain only the answer's text."""
        if self.tokens.text.startswith(self.turn.content):
            self.tokens.cut(len(self.turn.content))
            self.answer.completion_tokens = len(self.tokens.all)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of comparing a replay with the original answer."""

    is_same: bool
    said: str
    notes: Sequence[str] = ()
    """Fingerprints, or possible reasons for a difference."""


def describe_prompt(size: PromptSize) -> str:
    """The tokens of a prompt with images, each image in one piece."""
    num_of_images = [image.num_tokens for image in size.images]
    images = [f"image {index}, {count(number, 'token')}" for index, number in enumerate(num_of_images, 1)]
    return " · ".join([f"Prompt: {count(size.count - sum(num_of_images), 'token')} of text", *images])


async def prompt_of(session: Session, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> str:
    """The description of an answer's prompt; empty if it has no images, or the server cannot tell."""
    fields = {} if session.capabilities is None else session.capabilities.endpoints.get("/tokenize", {})
    if not any(isinstance(message["content"], list) for message in messages) or not fields:
        return ""
    body = {name: value for name, value in turn.request_body(messages).items() if name in fields}
    size = await session.with_key(lambda key: session.api.prompt_size(body, key))
    return describe_prompt(size) if size is not None and size.images else ""


def was_cut_short(turn: Turn) -> bool:
    """Whether an answer was stopped or ended with an error."""
    return turn.finish_reason == STOPPED or bool(turn.problem)


def proof_of(replayed: Replayed, *, supports_seeds: bool) -> Proof:
    """Compare the replay's text with the original's, which has no tokens."""
    turn, answer = replayed.turn, replayed.answer
    text, thought = answer.content, answer.reasoning
    if was_cut_short(turn) and not turn.tool_calls:
        text, thought = text[: len(turn.content)], thought[: len(turn.reasoning)]
    if thought != turn.reasoning:
        where = f"within the reasoning, after {count(common_prefix_length(thought, turn.reasoning), 'character')}"
    elif text != turn.content:
        where = _parting(replayed, common_prefix_length(text, turn.content))
    elif [_called(call) for call in replayed.answer.tool_calls] != [_called(call) for call in turn.tool_calls]:
        where = "in its tool calls"
    else:
        return _same(replayed)
    return Proof(False, f"Not the same: differs {where}.", _reasons(replayed, supports_seeds))


def _same(replayed: Replayed) -> Proof:
    number = replayed.answer.completion_tokens
    tokens = f"{count(number, 'token')}, " if number else ""
    end = "up to where the answer broke off" if was_cut_short(replayed.turn) else "to the last character"
    first, second = replayed.turn.fingerprint, replayed.answer.fingerprint
    notes = []
    if first is not None and second is not None:
        notes = [f"Same fingerprint: {first}." if first == second else f"Fingerprints: {first}, then {second}."]
    return Proof(True, f"The same again: {tokens}equal {end}.", notes)


def _parting(replayed: Replayed, num_equal: int) -> str:
    tokens, text = replayed.tokens, replayed.answer.content
    place = tokens.at(num_equal) if text[:num_equal] == tokens.text[:num_equal] else None
    return f"after {count(num_equal, 'character')}" if place is None else f"from token {place + 1} on"


def _called(call: Mapping[str, Any]) -> Any:
    """The part of a tool call that the model wrote (not its id)."""
    return call.get("function") or call.get("custom")


def _reasons(replayed: Replayed, supports_seeds: bool) -> list[str]:
    turn, found = replayed.turn, []
    first, second = turn.fingerprint, replayed.answer.fingerprint
    if first is None or second is None:
        found.append("The server returns no fingerprint. The server, its version or its settings may have changed.")
    elif first != second:
        found.append(
            f"The fingerprint changed from {first} to {second}: the server, its version, model or settings changed."
        )
    if not supports_seeds:
        found.append("The server does not support seeds.")
    speculation = (turn.request or {}).get("speculation")
    verified = speculation.get("verify") if isinstance(speculation, Mapping) else None
    if verified not in (None, "match"):
        found.append(f"The request sets speculation.verify to “{verified}”, which does not reproduce answers.")
    if first is not None and first == second and supports_seeds and not found:
        found.append(f"The fingerprint is the same ({first}), so the answer should be the same: please report this.")
    return found


def can_look_inside(session: Session, turn: Turn) -> bool:
    """Whether the answer can be replayed: its request is known and the server returns log-probabilities."""
    has_text = bool(turn.content or turn.reasoning or turn.tool_calls)
    return has_text and turn.request is not None and session.has_field("logprobs")


async def replay(
    session: Session, messages: Sequence[Mapping[str, Any]], replayed: Replayed, on_more: Callable[[], None]
) -> None:
    """Send the request again and fill `replayed`, at most to the original's length if that was cut short.

    Raises ApiError; `replayed` then keeps the part received.
    """
    body = replayed.turn.request_body(messages) | {"logprobs": True}
    if session.has_field("top_logprobs"):
        body["top_logprobs"] = _num_alternatives(session.fields)
    body |= {name: True for name in ("return_token_ids", "return_token_sources") if session.has_field(name)}

    def add(chunk: Chunk, at_s: float) -> bool:
        replayed.add(chunk, at_s)
        on_more()
        return replayed.is_enough

    await session.stream_chat(body, add)


def _num_alternatives(descriptions: Fields) -> int:
    alternatives = descriptions["top_logprobs"].values.alternatives if descriptions else []
    bounds = [int(one.maximum) for one in alternatives if one.maximum is not None]
    return min([_NUM_ALTERNATIVES, *bounds])
