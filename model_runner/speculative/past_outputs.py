"""What earlier choices generated, kept apart by salt, as automata in which drafts can be found."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.speculative.suffix_automaton import SuffixAutomaton, Writer

_GENERATION = 1 << 16
"""Tokens after which a salt's next output opens a new automaton; it keeps the one before, and no third."""
_LIMIT = 1 << 18
"""Tokens in all automata together: about 35 MB."""


@dataclass(slots=True)
class _Generation:
    """The outputs of one salt in some period."""

    automaton: SuffixAutomaton
    num_tokens: int = 0


class PastOutputs:
    """First in, first out, by generations: nothing can be taken from an automaton, so old ones are dropped whole.

    A salt never sees what others generated: how fast an answer comes would tell. Over the limit, generations go from
    the salt that has gone longest without a new output.
    """

    def __init__(self, depth: int, generation: int = _GENERATION, limit: int = _LIMIT) -> None:
        """
        Args:
            depth: of the automata.
            generation: tokens of a full one.
            limit: tokens of all.
        """
        self._depth = depth
        self._generation = generation
        self._limit = limit
        self._salts: dict[str, list[_Generation]] = {}
        """Those that got an output last at the end; of each, the newest generation at the end."""
        self.num_tokens = 0

    def of_salt(self, salt: str) -> list[SuffixAutomaton]:
        """At most two, the older one first."""
        return [generation.automaton for generation in self._salts.get(salt, ())]

    def add(self, salt: str, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep some output, found by the context before it and by itself; only the output counts as having occurred."""
        if not tokens:
            return
        generations = self._salts.pop(salt, [])
        if not generations or generations[-1].num_tokens >= self._generation:
            generations.append(_Generation(SuffixAutomaton(self._depth)))
        self._salts[salt] = generations
        writer = Writer(generations[-1].automaton)
        writer.extend(context, counted=False)
        writer.extend(tokens)
        generations[-1].num_tokens += len(context) + len(tokens)
        self.num_tokens += len(context) + len(tokens)
        while len(self._salts[salt]) > 2:
            self._drop_oldest(salt)
        while self.num_tokens > self._limit:
            self._drop_oldest(next(iter(self._salts)))

    def _drop_oldest(self, salt: str) -> None:
        self.num_tokens -= self._salts[salt].pop(0).num_tokens
        if not self._salts[salt]:
            del self._salts[salt]
