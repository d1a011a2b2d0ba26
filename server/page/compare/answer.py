"""An answer as it grows, and what can be said of it. No I/O in here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.client.openai_answers import Choice, TokenLogprob
from server.page.wording import ENDINGS, count, number, timing


@dataclass(slots=True)
class Answer:
    """One of those that are compared."""

    text: str = ""
    reasoning: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    """Where log-probabilities were asked for."""
    num_tokens: int = 0
    first_token_s: float | None = None
    """From the request on, like the next."""
    last_token_s: float | None = None
    finish_reason: str | None = None
    score: float | None = None
    cumulative_logprob: float | None = None
    notices: list[str] = field(default_factory=list)
    """What of the request the server left out or changed."""
    problem: str = ""
    """Why there is no answer, or no whole one."""

    def add(self, choice: Choice, at_s: float) -> None:
        """What a chunk adds to it, so many seconds after the request."""
        text, thought = choice.delta.text, choice.delta.thought
        if text or thought:
            self.first_token_s = at_s if self.first_token_s is None else self.first_token_s
            self.last_token_s = at_s
        self.text += text
        self.reasoning += thought
        if choice.logprobs is not None:
            self.tokens += choice.logprobs.content or ()
        self.num_tokens = max(self.num_tokens + len(choice.token_ids or ()), len(self.tokens))
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.score is not None:
            self.score = choice.score
        if choice.cumulative_logprob is not None:
            self.cumulative_logprob = choice.cumulative_logprob

    @property
    def mean_logprob(self) -> float | None:
        """Of its tokens; None where nobody asked for them."""
        return sum(token.logprob for token in self.tokens) / len(self.tokens) if self.tokens else None

    @property
    def ending(self) -> str:
        """Why it ended, in words; empty if it has not."""
        return ENDINGS.get(self.finish_reason or "", self.finish_reason or "")

    @property
    def facts(self) -> str:
        """All that was measured, in a line."""
        found = timing(self.num_tokens, self.first_token_s, self.last_token_s)
        if self.ending:
            found.append(self.ending)
        if self.mean_logprob is not None:
            found.append(f"mean log-probability {number(self.mean_logprob)}")
        return " · ".join(found)


def compared(text: str, first: str) -> str:
    """How far a text is the same as the first one, in words."""
    same = num_same(text, first)
    if text == first:
        return "The same as the first."
    if not same:
        return "Differs from the first from its beginning."
    return f"The same as the first for {count(same, 'character')}."


def num_same(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first elements two sequences have in common."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
