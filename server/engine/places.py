"""Queue places for running and waiting choices, shared between clients by weight."""

from collections import Counter
from math import ceil


class Places:
    """Counts the places that clients hold, and decides who may take more.

    A free place is open to any client. When all are taken, a client may still take places up to its share, and no place
    is taken away from another. The share is the limit times the client's weight divided by the weights of all clients
    that hold places. So n clients of equal weight hold at most 1 + 1/2 + ... + 1/n times the limit.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._held: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        """Weights of the clients that hold places."""

    def refusal(self, client: str, weight: float, number: int, limit: int) -> str:
        """Why the client cannot take this many more places, as full sentences; empty if it can."""
        if self.num_taken + number <= limit:
            return ""
        share = ceil(limit * (weight / sum({**self._weights, client: weight}.values())))
        if self._held[client] + number <= share:
            return ""
        return (
            f"{self.num_taken} choices are running or waiting; {number} more would exceed the limit of {limit}. "
            f"This client holds {self._held[client]} of them, and its share is {share}."
        )

    def take(self, client: str, weight: float, number: int) -> None:
        """Count `number` more places for the client."""
        if number:
            self.num_taken += number
            self._held[client] += number
            self._weights[client] = weight

    def give_back(self, client: str, number: int = 1) -> None:
        """Count `number` fewer places for the client."""
        self.num_taken -= number
        self._held[client] -= number
        if not self._held[client]:
            del self._held[client]
            self._weights.pop(client, None)
