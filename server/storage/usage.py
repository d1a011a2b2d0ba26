"""Usage of clients, by model and day."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEPT_DAYS = 400
"""Days of usage that are kept."""
_COUNTS = "requests, prompt_tokens, cached_tokens, completion_tokens"


@dataclass(frozen=True, slots=True)
class UsageKey:
    """A client, a model and a day."""

    client: str
    model: str
    day: str
    """In UTC, as YYYY-MM-DD."""


@dataclass(frozen=True, slots=True)
class Used:
    """Usage as it is charged to keys: guidance prompts count as prompts, and all beams as completions."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens`."""
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Used") -> "Used":
        return Used(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


class UsageTable:
    """The table of usage, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, used: Mapping[UsageKey, Used]) -> None:
        """Add usage, and delete days older than KEPT_DAYS."""
        self._connection.executemany(
            f"INSERT INTO usage (client, model, day, {_COUNTS}) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (client, model, day) DO UPDATE SET requests = requests + excluded.requests, "
            "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "cached_tokens = cached_tokens + excluded.cached_tokens, "
            "completion_tokens = completion_tokens + excluded.completion_tokens",
            [
                (
                    key.client,
                    key.model,
                    key.day,
                    one.requests,
                    one.prompt_tokens,
                    one.cached_tokens,
                    one.completion_tokens,
                )
                for key, one in used.items()
            ],
        )
        if used:
            newest = max(key.day for key in used)
            self._connection.execute("DELETE FROM usage WHERE day < date(?, ?)", (newest, f"-{KEPT_DAYS} days"))

    def of_client(self, client: str, first_day: str, last_day: str) -> Sequence[tuple[UsageKey, Used]]:
        """A client's usage by day, then by model. Both days are included."""
        found = self._connection.execute(
            f"SELECT model, day, {_COUNTS} FROM usage WHERE client = ? AND day BETWEEN ? AND ? ORDER BY day, model",
            (client, first_day, last_day),
        )
        return [(UsageKey(client, model, day), Used(*counts)) for model, day, *counts in found]

    def tokens_of_day(self, day: str) -> Mapping[str, int]:
        """Tokens of prompts and answers on a day, by client."""
        total = "SELECT client, sum(prompt_tokens + completion_tokens) FROM usage WHERE day = ? GROUP BY client"
        return dict(self._connection.execute(total, (day,)).fetchall())
