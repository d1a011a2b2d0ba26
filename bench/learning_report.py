"""Tables and figures of the benchmark of `--learn`, turn by turn."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

GOAL = 1.2
"""Target ratio of tokens per step, with learning to without, in the last turn."""
FIRST_TOKEN_GOAL = 1.1
"""Maximum ratio of the time to first token, with learning to without."""
HEADINGS = (
    *("answers", "subject", "tokens/step", "learning", "ratio", "first token ms p50", "learning", "p95", "learning"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    text: str
    tokens: int
    accepted: int
    """Number of the tokens that were accepted drafts."""
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Answers to the same questions with and without learning."""

    first: int
    """Number of the first question."""
    subject: str
    plain: Sequence[Answer]
    learning: Sequence[Answer]

    @property
    def ratio(self) -> float:
        """Ratio of tokens per step, with learning to without."""
        return tokens_per_step(self.learning) / tokens_per_step(self.plain)

    def cells(self) -> list[str]:
        """The table's cells, in the order of HEADINGS."""
        per_step = [f"{tokens_per_step(answers):.2f}" for answers in (self.plain, self.learning)]
        times = [
            f"{1e3 * first_token_s(answers, share):.0f}"
            for share in (0.5, 0.95)
            for answers in (self.plain, self.learning)
        ]
        return [
            f"{self.first + 1}-{self.first + len(self.plain)}",
            self.subject,
            *per_step,
            f"{self.ratio:.2f}",
            *times,
        ]


def tokens_per_step(answers: Sequence[Answer]) -> float:
    """Tokens divided by steps. Each step yields one token in addition to the drafts that it accepts."""
    tokens = sum(answer.tokens for answer in answers)
    return tokens / (tokens - sum(answer.accepted for answer in answers))


def first_token_s(answers: Sequence[Answer], share: float) -> float:
    """Quantile `share` of the time to first token."""
    times = sorted(answer.first_token_s for answer in answers)
    return times[min(int(share * len(times)), len(times) - 1)]


def first_token_ratio(plain: Sequence[Answer], learning: Sequence[Answer]) -> float:
    """Ratio of the median time to first token, with learning to without."""
    return first_token_s(learning, 0.5) / first_token_s(plain, 0.5)


def different(plain: Sequence[Answer], learning: Sequence[Answer]) -> list[int]:
    """Indices of the answers that differ."""
    pairs = zip(plain, learning, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if (one.text, one.tokens) != (other.text, other.tokens)]


def table(results: Sequence[Turn]) -> Table:
    """One line for each turn."""
    lines = Table(*HEADINGS)
    for column in lines.columns[2:]:
        column.justify = "right"
    for turn in results:
        lines.add_row(*turn.cells())
    return lines


def conclusion(results: Sequence[Turn]) -> list[str]:
    """The overall results, compared with the goals."""
    plain = [answer for turn in results for answer in turn.plain]
    learning = [answer for turn in results for answer in turn.learning]
    gains = statistics.median(turn.ratio for turn in results)
    return [
        f"Tokens per step with learning: {results[-1].ratio:.2f} x in the last turn, {gains:.2f} x in the median turn; "
        f"the goal is {GOAL} x.",
        f"First tokens with learning: {first_token_ratio(plain, learning):.2f} x the median time; "
        f"the goal is at most {FIRST_TOKEN_GOAL} x.",
        f"Answers that differ: {len(different(plain, learning))} of {len(plain)}.",
    ]
