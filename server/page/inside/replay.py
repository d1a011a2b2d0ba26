"""The replay of an answer: its request is sent again for all details of the tokens, and the texts are compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.client.openai_answers import Chunk
from server.page.answer import STOPPED, MeasuredAnswer, count, num_same
from server.page.capabilities import Fields
from server.page.conversation import Turn
from server.page.inside.tokens import Tokens
from server.page.session import Session

_NUM_ALTERNATIVES = 5


class Replayed:
    """The answer to a request that was sent again."""

    def __init__(self, turn: Turn) -> None:
        """`turn` is the first answer."""
        self.turn = turn
        self.answer = MeasuredAnswer(content=turn.prefix or "")
        self.tokens = Tokens(turn.prefix or "")
        self.seconds = 0.0

    def add(self, chunk: Chunk, at_s: float) -> None:
        """Append a piece that came `at_s` seconds after the request."""
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
        """Whether it is as long as a first answer that broke off."""
        turn, answer = self.turn, self.answer
        is_as_long = len(answer.content) >= len(turn.content) and len(answer.reasoning) >= len(turn.reasoning)
        return broke_off(turn) and not turn.tool_calls and is_as_long

    def _cut(self) -> None:
        """Remove what came in one piece with the end, if the tokens are the text and nothing else."""
        if self.tokens.text.startswith(self.turn.content):
            self.tokens.cut(len(self.turn.content))
            self.answer.completion_tokens = len(self.tokens.all)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a replay."""

    is_same: bool
    said: str
    notes: Sequence[str] = ()
    """The fingerprints, or possible reasons for a difference."""


def broke_off(turn: Turn) -> bool:
    """Whether an answer was stopped or lost its server."""
    return turn.finish_reason == STOPPED or bool(turn.problem)


def proof_of(replayed: Replayed, *, heeds_seeds: bool) -> Proof:
    """Compare the texts, because only the replay has tokens."""
    turn, answer = replayed.turn, replayed.answer
    text, thought = answer.content, answer.reasoning
    if broke_off(turn) and not turn.tool_calls:
        text, thought = text[: len(turn.content)], thought[: len(turn.reasoning)]
    if thought != turn.reasoning:
        where = f"within the reasoning, after {count(num_same(thought, turn.reasoning), 'character')}"
    elif text != turn.content:
        where = _parting(replayed, num_same(text, turn.content))
    elif [_called(call) for call in replayed.answer.tool_calls] != [_called(call) for call in turn.tool_calls]:
        where = "in what it calls"
    else:
        return _same(replayed)
    return Proof(False, f"Not the same: it differs {where}.", _reasons(replayed, heeds_seeds))


def _same(replayed: Replayed) -> Proof:
    number = replayed.answer.completion_tokens
    tokens = f"{count(number, 'token')}, " if number else ""
    end = "up to where the answer broke off" if broke_off(replayed.turn) else "to the last character"
    first, second = replayed.turn.fingerprint, replayed.answer.fingerprint
    notes = []
    if first is not None and second is not None:
        notes = [f"Fingerprint {first}, both times." if first == second else f"Fingerprints {first} and {second}."]
    return Proof(True, f"The same again: {tokens}equal {end}.", notes)


def _parting(replayed: Replayed, num_equal: int) -> str:
    tokens, text = replayed.tokens, replayed.answer.content
    place = tokens.at(num_equal) if text[:num_equal] == tokens.text[:num_equal] else None
    return f"after {count(num_equal, 'character')}" if place is None else f"from token {place + 1} on"


def _called(call: Mapping[str, Any]) -> Any:
    """The part of a call that the model wrote, which its id is not."""
    return call.get("function") or call.get("custom")


def _reasons(replayed: Replayed, heeds_seeds: bool) -> list[str]:
    turn, found = replayed.turn, []
    first, second = turn.fingerprint, replayed.answer.fingerprint
    if first is None or second is None:
        found.append("The server gives no fingerprint: it may be another one, or have another version or settings.")
    elif first != second:
        found.append(
            f"The fingerprint was {first} and is {second}: it is another server, or one with another version, model "
            "or settings."
        )
    if not heeds_seeds:
        found.append("The server heeds no seeds.")
    speculation = (turn.request or {}).get("speculation")
    verified = speculation.get("verify") if isinstance(speculation, Mapping) else None
    if verified not in (None, "match"):
        found.append(f"Its drafts were verified by “{verified}”, which does not give the same answer again.")
    if first is not None and first == second and heeds_seeds and not found:
        found.append(f"The fingerprint is {first}, both times, with which the answer should be the same.")
    return found


def can_look_inside(session: Session, turn: Turn) -> bool:
    """Whether there is a request to send again, and the server returns log-probabilities."""
    has_text = bool(turn.content or turn.reasoning or turn.tool_calls)
    return has_text and turn.request is not None and session.has_field("logprobs")


async def replay(
    session: Session, messages: Sequence[Mapping[str, Any]], replayed: Replayed, on_more: Callable[[], None]
) -> None:
    """Fill `replayed`, for an answer that broke off up to there. Raises ApiError; what came until then is kept."""
    body = replayed.turn.request_body(messages) | {"logprobs": True}
    if session.has_field("top_logprobs"):
        body["top_logprobs"] = _num_alternatives(session.fields)
    body |= {name: True for name in ("return_token_ids", "return_token_sources") if session.has_field(name)}

    def add(chunk: Chunk, at_s: float) -> bool:
        replayed.add(chunk, at_s)
        on_more()
        return replayed.is_enough

    await session.stream_chat(body, add)


def _num_alternatives(described: Fields) -> int:
    alternatives = described["top_logprobs"].values.alternatives if described else []
    bounds = [int(one.maximum) for one in alternatives if one.maximum is not None]
    return min([_NUM_ALTERNATIVES, *bounds])
