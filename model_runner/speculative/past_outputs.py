"""What earlier choices generated, kept apart by salt, as automata in which drafts can be found."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.speculative.native_suffix import SuffixAutomaton, SuffixLibrary, Writer, as_tokens

_GENERATION = 1 << 16
"""Tokens after which a salt's next output opens a new automaton; it keeps the one before, and no third."""
_LIMIT = 1 << 18
"""Tokens in all automata together: about 20 MB."""


@dataclass(slots=True, eq=False)
class _Generation:
    """The outputs of one salt in some period."""

    salt: str
    automaton: SuffixAutomaton
    num_tokens: int = 0
    """Those that are not taken in yet included."""


@dataclass(slots=True)
class _Output:
    """An output on its way into a generation."""

    generation: _Generation
    writer: Writer
    tokens: "array[int]"
    """The context before it, then the output."""
    num_context: int
    num_taken_in: int = 0

    def take_in(self, most: int) -> int:
        """Write so many more tokens, or all that are left; returns how many these were."""
        start, end = self.num_taken_in, min(self.num_taken_in + most, len(self.tokens))
        middle = min(max(start, self.num_context), end)
        self.writer.extend(self.tokens[start:middle], counted=False)
        self.writer.extend(self.tokens[middle:end])
        self.num_taken_in = end
        return end - start


class PastOutputs:
    """First in, first out, by generations: nothing can be taken from an automaton, so old ones are dropped whole.

    A salt never sees what others generated: how fast an answer comes would tell. Over the limit, generations go from
    the salt that has gone longest without a new output.
    """

    def __init__(self, library: SuffixLibrary, generation: int = _GENERATION, limit: int = _LIMIT) -> None:
        """
        Args:
            library: makes the automata.
            generation: tokens of a full one.
            limit: tokens of all.
        """
        self._library = library
        self._generation = generation
        self._limit = limit
        self._waiting: deque[_Output] = deque()
        self._salts: dict[str, list[_Generation]] = {}
        """Those that got an output last at the end; of each, the newest generation at the end."""
        self.num_tokens = 0

    def of_salt(self, salt: str) -> list[SuffixAutomaton]:
        """At most two, the older one first."""
        return [generation.automaton for generation in self._salts.get(salt, ())]

    def add(self, salt: str, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep some output, found by the context before it and by itself; only the output counts as having occurred.

        It is found once `take_in` has come to it. Raises MemoryError, and keeps nothing of it, if there is no memory.
        """
        if not tokens:
            return
        generations = self._salts.get(salt, [])
        newest = generations[-1] if generations else None
        if newest is None or newest.num_tokens >= self._generation:
            newest = _Generation(salt, SuffixAutomaton(self._library))
            generations = [*generations, newest]
        self._waiting.append(_Output(newest, Writer(newest.automaton), as_tokens([*context, *tokens]), len(context)))
        self._salts.pop(salt, None)
        self._salts[salt] = generations
        newest.num_tokens += len(context) + len(tokens)
        self.num_tokens += len(context) + len(tokens)
        while len(self._salts[salt]) > 2:
            self._drop(self._salts[salt][0])
        while self.num_tokens > self._limit:
            self._drop(next(iter(self._salts.values()))[0])

    def take_in(self, most: int) -> int:
        """Take in at most so many tokens of the outputs that wait, oldest first; returns how many these were.

        Raises MemoryError if memory runs out. The generation that grew then is dropped: its automaton is half-written.
        """
        left = most
        while left and self._waiting:
            output = self._waiting[0]
            try:
                left -= output.take_in(left)
            except MemoryError:
                self._drop(output.generation)
                raise
            if output.num_taken_in == len(output.tokens):
                self._waiting.popleft()
        return most - left

    def _drop(self, dropped: _Generation) -> None:
        generations = self._salts[dropped.salt]
        generations.remove(dropped)
        self.num_tokens -= dropped.num_tokens
        self._waiting = deque(output for output in self._waiting if output.generation is not dropped)
        if not generations:
            del self._salts[dropped.salt]
