"""Beams as a tree of what they have in common. No I/O in here."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.page.compare.answer import Answer, num_same
from server.page.wording import count, number

_WORD = re.compile(r"\s*\S+|\s+$")


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, or a word where the server tells no tokens."""

    spelled: bytes
    """A token may be a part of a character only."""
    logprob: float | None = field(compare=False)
    """That of the same token may differ in its last digits from beam to beam."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What some beams have in common, from where they part with others to where they part with each other."""

    pieces: tuple[Piece, ...]
    beams: tuple[int, ...]
    """The numbers of those that go through it, 0 being the best."""
    ending: tuple[int, ...]
    """Those of them that end with it: one, or several that are the same."""
    branches: tuple["Branch", ...]
    """How it goes on, the best beam's way first."""

    @property
    def text(self) -> str:
        return b"".join(piece.spelled for piece in self.pieces).decode(errors="replace")

    @property
    def share(self) -> float | None:
        """The probability of its first token after what stands before it; None where the server tells none."""
        logprob = self.pieces[0].logprob if self.pieces else None
        return None if logprob is None else math.exp(logprob)


def pieces_of(answer: Answer) -> tuple[Piece, ...]:
    """The tokens of a beam, or its words."""
    if answer.tokens:
        return tuple(Piece(_spelled(token.token, token.bytes), token.logprob) for token in answer.tokens)
    return tuple(Piece(word.encode(), None) for word in _WORD.findall(answer.text))


def tree_of(beams: Sequence[Sequence[Piece]]) -> Branch:
    """Of beams, the best first. The first branch is what all have in common; it may be empty."""
    return _branch(dict(enumerate(beams)), 0)


def described(branch: Branch, answers: Sequence[Answer]) -> dict[str, Any]:
    """A tree as it is shown: texts only, and which of its branches the best beam goes through."""
    share = branch.share
    return {
        "text": branch.text,
        "share": "" if share is None else _percent(share),
        "best": 0 in branch.beams,
        "through": count(len(branch.beams), "beam"),
        "ending": [_beam(at, answers[at]) for at in branch.ending],
        "branches": [described(one, answers) for one in branch.branches],
    }


def _branch(beams: dict[int, Sequence[Piece]], start: int) -> Branch:
    """Of beams that have the pieces before `start` in common."""
    first = next(iter(beams.values()))
    end = start + min(num_same(first[start:], beam[start:]) for beam in beams.values())
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


def _beam(at: int, answer: Answer) -> dict[str, str]:
    facts = []
    if answer.score is not None:
        facts.append(f"score {number(answer.score)}")
    if answer.cumulative_logprob is not None:
        facts.append(f"sum {number(answer.cumulative_logprob)}")
    if answer.num_tokens:
        facts.append(count(answer.num_tokens, "token"))
    if answer.ending:
        facts.append(answer.ending)
    return {"name": f"Beam {at + 1}", "facts": " · ".join(facts)}


def _spelled(token: str, spelled: list[int] | None) -> bytes:
    return token.encode() if spelled is None else bytes(spelled)


def _percent(share: float) -> str:
    return "< 1 %" if share < 0.01 else f"{100 * share:.0f} %"
