"""An answer that is had once more, and whether it is the same again. No I/O in here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.client.openai_answers import Chunk
from server.page.chat.answering import add_call
from server.page.compare.answer import Answer, num_same
from server.page.conversation import Turn
from server.page.inside.tokens import Tokens
from server.page.wording import STOPPED, count


class Replayed:
    """What came of a request that was sent again."""

    def __init__(self, turn: Turn) -> None:
        """`turn` is the answer that it had at first."""
        self.turn = turn
        self.answer = Answer(text=turn.prefix or "")
        self.tokens = Tokens(turn.prefix or "")
        self.calls: list[dict[str, Any]] = []
        self.fingerprint: str | None = None
        self.seconds = 0.0

    def add(self, chunk: Chunk, at_s: float) -> None:
        """More of it, so many seconds after the request."""
        self.seconds = at_s
        self.fingerprint = chunk.system_fingerprint or self.fingerprint
        for choice in chunk.choices:
            if choice.index == 0:
                self.answer.add(choice, at_s)
                self.tokens.add((choice.logprobs and choice.logprobs.content) or (), choice.token_sources)
                for part in choice.delta.tool_calls or ():
                    add_call(self.calls, part)
        if chunk.usage is not None:
            self.answer.num_tokens = chunk.usage.completion_tokens
        if self.is_enough:
            self._cut()

    @property
    def is_enough(self) -> bool:
        """Whether it is as long as the first one, which broke off."""
        turn, answer = self.turn, self.answer
        is_as_long = len(answer.text) >= len(turn.content) and len(answer.reasoning) >= len(turn.reasoning)
        return broke_off(turn) and not turn.tool_calls and is_as_long

    def _cut(self) -> None:
        """What came in one piece with the end is left out, where the tokens are the text and nothing else."""
        if self.tokens.text.startswith(self.turn.content):
            self.tokens.cut(len(self.turn.content))
            self.answer.num_tokens = len(self.tokens.all)


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether it was the same again."""

    is_same: bool
    said: str
    notes: Sequence[str] = ()
    """The fingerprints; where it was not the same, why that may be."""


def broke_off(turn: Turn) -> bool:
    """Whether an answer was stopped, or lost its server, before its end."""
    return turn.finish_reason == STOPPED or bool(turn.problem)


def proof_of(replayed: Replayed, *, heeds_seeds: bool) -> Proof:
    """Compares texts: what else there is of tokens is only in the replay."""
    turn, answer = replayed.turn, replayed.answer
    text, thought = answer.text, answer.reasoning
    if broke_off(turn) and not turn.tool_calls:
        text, thought = text[: len(turn.content)], thought[: len(turn.reasoning)]
    if thought != turn.reasoning:
        where = f"within the reasoning, after {count(num_same(thought, turn.reasoning), 'character')}"
    elif text != turn.content:
        where = _parting(replayed, num_same(text, turn.content))
    elif [_called(call) for call in replayed.calls] != [_called(call) for call in turn.tool_calls]:
        where = "in what it calls"
    else:
        return _same(replayed)
    return Proof(False, f"Not the same: it differs {where}.", _reasons(replayed, heeds_seeds))


def _same(replayed: Replayed) -> Proof:
    number = replayed.answer.num_tokens
    tokens = f"{count(number, 'token')}, " if number else ""
    end = "up to where the answer broke off" if broke_off(replayed.turn) else "to the last character"
    first, second = replayed.turn.fingerprint, replayed.fingerprint
    notes = []
    if first is not None and second is not None:
        notes = [f"Fingerprint {first}, both times." if first == second else f"Fingerprints {first} and {second}."]
    return Proof(True, f"The same again: {tokens}equal {end}.", notes)


def _parting(replayed: Replayed, num_equal: int) -> str:
    tokens, text = replayed.tokens, replayed.answer.text
    place = tokens.at(num_equal) if text[:num_equal] == tokens.text[:num_equal] else None
    return f"after {count(num_equal, 'character')}" if place is None else f"from token {place + 1} on"


def _called(call: Mapping[str, Any]) -> Any:
    """What of a call is the model's own: its id is not."""
    return call.get("function") or call.get("custom")


def _reasons(replayed: Replayed, heeds_seeds: bool) -> list[str]:
    turn, found = replayed.turn, []
    first, second = turn.fingerprint, replayed.fingerprint
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
