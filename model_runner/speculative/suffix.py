"""SuffixDecoding: what followed the longest stretch of the last tokens, here and in earlier answers."""

import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.kernels.interface import SUFFIX, CData, pointer
from model_runner.models.features import Feature
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep, share_out

DEPTH = 64
"""Tokens of context that are looked at, at most, those of a draft included."""


class SuffixLibrary:
    """The loaded library. One call at a time for each automaton and choice."""

    def __init__(self, path: Path) -> None:
        """Raises NoKernelsError if the library cannot be loaded."""
        self.functions = SUFFIX.load(path)


class SuffixAutomaton:
    """Of past outputs; see kernels/suffix/automaton.h."""

    def __init__(self, library: SuffixLibrary, depth: int = DEPTH) -> None:
        self.functions = library.functions
        self.handle: CData = _not_null(self.functions.sw_create_automaton(depth))
        weakref.finalize(self, self.functions.sw_destroy_automaton, self.handle)


class Writer:
    """Adds one sequence to an automaton; several can take turns."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._struct = SUFFIX.new("SwWriter")

    def extend(self, tokens: "array[int]", *, counted: bool = True) -> None:
        """Add tokens; if they are only context, strings that end in them are not counted as occurrences."""
        automaton = self._automaton
        _check(automaton.functions.sw_extend(automaton.handle, self._struct, _pointer(tokens), len(tokens), counted))


class NativeChoice:
    """A running choice's own automaton, and where its last tokens stand in those of past outputs."""

    def __init__(self, library: SuffixLibrary, tokens: Sequence[int], depth: int = DEPTH) -> None:
        """Begins after the last `depth` of the tokens, which are still to be taken in."""
        functions, context = library.functions, as_tokens(tokens[-depth:])
        self.handle: CData = _not_null(functions.sw_create_choice(depth, _pointer(context), len(context)))
        weakref.finalize(self, functions.sw_destroy_choice, self.handle)


class DraftCall:
    """What a step brought some choices, gathered for one native call, and the trees that it drafts for them.

    Whoever adds choices and automata keeps them alive until then.
    """

    def __init__(self, library: SuffixLibrary) -> None:
        self._propose = library.functions.sw_propose
        self._choices: list[tuple[Any, ...]] = []
        self._tokens: list[int] = []
        self._room = 0

    def add(self, choice: NativeChoice, taken_in: Sequence[int]) -> None:
        """A choice whose prompt is being computed: it takes in tokens, and nothing is drafted."""
        self._choices.append((choice.handle, (), len(taken_in)))
        self._tokens += taken_in

    def add_running(
        self,
        choice: NativeChoice,
        taken_in: Sequence[int],
        new: Sequence[int],
        past: Sequence[SuffixAutomaton],
        *,
        is_whole: bool,
        max_nodes: int,
    ) -> None:
        """A choice that is drafted for.

        Args:
            choice: from its own tokens, and ...
            taken_in: tokens for its own automaton, in order.
            new: what is known since this was called last, or since it began.
            past: ... from at most two automata of past outputs.
            is_whole: whether its own automaton has all its tokens now.
            max_nodes: of the tree.
        """
        handles = [automaton.handle for automaton in past]
        self._choices.append((choice.handle, handles, len(taken_in), is_whole, True, len(new), max_nodes))
        self._tokens += taken_in
        self._tokens += new
        self._room += max_nodes

    def trees(self) -> list[DraftTree]:
        """One for each choice that was added."""
        count, tokens = len(self._choices), as_tokens(self._tokens)
        num_nodes = np.empty(count, dtype=np.int32)
        columns = np.empty(self._room, np.int32), np.empty(self._room, np.int32), np.empty(self._room)
        outputs = (pointer(column, len(column)) for column in (num_nodes, *columns))
        _check(self._propose(SUFFIX.array("SwChoiceStep", self._choices), count, _pointer(tokens), *outputs))
        ends = [0, *num_nodes.cumsum().tolist()]
        token_of, parents, confidence = (tuple(column[: ends[-1]].tolist()) for column in columns)
        return [
            DraftTree(token_of[start:end], parents[start:end], confidence[start:end]) if start < end else NO_DRAFT
            for start, end in pairwise(ends)
        ]


def as_tokens(tokens: Sequence[int]) -> "array[int]":
    """As the library takes them."""
    return array("i", tokens)


def _pointer(tokens: "array[int]") -> CData:
    return SUFFIX.ffi.from_buffer("int32_t[]", tokens)


def _not_null(handle: CData) -> CData:
    if not handle:
        raise MemoryError("out of memory for a suffix automaton")
    return handle


def _check(code: int) -> None:
    if code:
        raise MemoryError("out of memory in a suffix automaton")


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


INTAKE = 4096
"""Tokens of running choices that are taken in in a step at most: 0.15 us each, so half a millisecond; and ..."""
PAST_INTAKE = 2048
"""... tokens of past outputs."""


class SuffixProposer:
    """Drafts trees from suffix automata: one of the choice's own tokens, and those of past outputs with its salt.

    SuffixDecoding (Oliaro et al., arXiv:2411.04975): the more tokens match, the more are drafted; branches grow by
    their probability, which comes from counts; of several matches in several automata that with the most expected
    tokens wins. The paper takes the ratio of counts; here what was never seen has its share of the probability as well,
    so that one occurrence is no certainty. All that is native, in one call for all choices (kernels/suffix).

    A choice whose own tokens are not all taken in yet is drafted for from past outputs alone.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self, library: SuffixLibrary) -> None:
        self._library = library
        self._choices: dict[int, _Choice] = {}
        self._past = PastOutputs(library)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._choices[choice.slot] = _Choice(choice, self._library)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        self._past.take_in(PAST_INTAKE)
        choices = [self._choices[choice.slot] for choice in step.choices]
        call = DraftCall(self._library)
        shares = share_out([choice.num_missing for choice in choices], INTAKE)
        for choice, share, brought in zip(choices, shares, step.choices, strict=True):
            choice.join(call, brought, share, self._past)
        return call.trees()

    def end(self, slot: int) -> None:
        """See Proposer.end. What came since `begin` is kept for later choices: all of it was generated, by this choice
        and not by the one that it may have been before preemption.
        """
        choice = self._choices.pop(slot)
        with suppress(MemoryError):  # it only makes later answers faster
            self._past.add(choice.salt, *choice.generated())


class _Choice:
    """One choice's tokens, and how many of them its native side knows."""

    def __init__(self, new: NewChoice, library: SuffixLibrary) -> None:
        self.salt = new.cache_salt
        self._tokens = new.tokens
        self._native = NativeChoice(library, new.tokens)
        self._num_given = self._num_followed = len(new.tokens)
        self._stops = frozenset(new.sampling.stop_token_ids)
        self._end: int | None = None
        """After the first stop token of the output."""
        self._num_taken_in = 0

    @property
    def num_missing(self) -> int:
        """How many tokens its own automaton misses."""
        return len(self._tokens) - self._num_taken_in

    def join(self, call: DraftCall, step: ChoiceStep, share: int, past: PastOutputs) -> None:
        """Have so many more tokens taken in, and a tree drafted if the step is one of those that want one."""
        taken_in = self._tokens[self._num_taken_in : self._num_taken_in + share]
        self._num_taken_in += share
        if step.num_new:
            call.add_running(
                self._native,
                taken_in,
                self._new_output(),
                past.of_salt(self.salt),
                is_whole=not self.num_missing,
                max_nodes=step.max_nodes,
            )
        else:
            call.add(self._native, taken_in)

    def generated(self) -> tuple[Sequence[int], Sequence[int]]:
        """The context before, and the output since this began; what was drawn beyond a stop token is no output."""
        self._new_output()
        tokens, first = self._tokens, self._num_given
        return tokens[max(first - DEPTH, 0) : first], tokens[first : self._end]

    def _new_output(self) -> Sequence[int]:
        """What came since this was called last."""
        start, self._num_followed = self._num_followed, len(self._tokens)
        new = self._tokens[start:]
        if self._end is None and not self._stops.isdisjoint(new):
            self._end = start + 1 + next(place for place, token in enumerate(new) if token in self._stops)
        return new
