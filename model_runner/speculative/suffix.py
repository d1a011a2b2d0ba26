"""SuffixDecoding: drafts what followed the longest match of the last tokens, in this choice and in earlier outputs."""

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
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep, share_out

DEPTH = 64
"""Maximum number of context tokens, including drafts."""


class SuffixLibrary:
    """The loaded library. Calls for the same automaton or choice must not run at the same time."""

    def __init__(self, path: Path) -> None:
        """Raises NoKernelsError if the library cannot be loaded."""
        self.functions = SUFFIX.load(path)


class SuffixAutomaton:
    """A suffix automaton of past outputs (see kernels/suffix/automaton.h)."""

    def __init__(self, library: SuffixLibrary, depth: int = DEPTH) -> None:
        self.functions = library.functions
        self.handle: CData = _not_null(self.functions.sw_create_automaton(depth))
        weakref.finalize(self, self.functions.sw_destroy_automaton, self.handle)


class Writer:
    """Adds one sequence to an automaton; several writers can take turns."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._struct = SUFFIX.new("SwWriter")

    def extend(self, tokens: "array[int]", *, counted: bool = True) -> None:
        """Add tokens; strings that end in uncounted tokens (context) do not count as occurrences."""
        automaton = self._automaton
        _check(automaton.functions.sw_extend(automaton.handle, self._struct, _pointer(tokens), len(tokens), counted))


class NativeChoice:
    """A running choice's own automaton, and the match of its last tokens in automata of past outputs."""

    def __init__(self, library: SuffixLibrary, tokens: Sequence[int], depth: int = DEPTH) -> None:
        """Starts at the last `depth` tokens, which still have to be added."""
        functions, context = library.functions, as_tokens(tokens[-depth:])
        self.handle: CData = _not_null(functions.sw_create_choice(depth, _pointer(context), len(context)))
        weakref.finalize(self, functions.sw_destroy_choice, self.handle)


class DraftCall:
    """A native call for several choices that adds their new tokens and drafts trees.

    The caller keeps choices and automata alive until `trees` returns.
    """

    def __init__(self, library: SuffixLibrary) -> None:
        self._propose = library.functions.sw_propose
        self._choices: list[tuple[Any, ...]] = []
        self._tokens: list[int] = []
        self._room = 0

    def add(
        self,
        choice: NativeChoice,
        taken_in: Sequence[int],
        new: Sequence[int] | None = None,
        past: Sequence[SuffixAutomaton] = (),
        *,
        is_whole: bool = False,
        max_nodes: int = 0,
    ) -> None:
        """Add a choice.

        Args:
            choice: the choice.
            taken_in: tokens for its own automaton, in order.
            new: tokens since the last call, or since the choice began; None drafts nothing, while the prompt is
                computed.
            past: at most two automata of past outputs to draft from, in addition to its own.
            is_whole: whether its own automaton has all its tokens now.
            max_nodes: maximum number of nodes.
        """
        handles = [automaton.handle for automaton in past]
        drafts, new = new is not None, new or ()
        self._choices.append((choice.handle, handles, len(taken_in), is_whole, drafts, len(new), max_nodes))
        self._tokens += taken_in
        self._tokens += new
        self._room += max_nodes

    def trees(self) -> list[DraftTree]:
        """A tree for each choice, in the order of addition."""
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
    """Convert tokens for the library."""
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
"""Tokens after which a salt's next output starts a new automaton; only the previous one is kept."""
_LIMIT = 1 << 18
"""Tokens in all automata together: about 20 MB."""


@dataclass(slots=True, eq=False)
class _Generation:
    """The outputs of one salt in some period."""

    salt: str
    automaton: SuffixAutomaton
    num_tokens: int = 0
    """Number of tokens, including those not added yet."""


@dataclass(slots=True)
class _Output:
    """An output that is being added to a generation."""

    generation: _Generation
    writer: Writer
    tokens: "array[int]"
    """The context, then the output."""
    num_context: int
    num_taken_in: int = 0

    def take_in(self, most: int) -> int:
        """Add at most `most` tokens; returns how many were added."""
        start, end = self.num_taken_in, min(self.num_taken_in + most, len(self.tokens))
        middle = min(max(start, self.num_context), end)
        self.writer.extend(self.tokens[start:middle], counted=False)
        self.writer.extend(self.tokens[middle:end])
        self.num_taken_in = end
        return end - start


class PastOutputs:
    """Past outputs in generations; the oldest are dropped first, and whole, because automata cannot shrink.

    A salt never sees outputs of others, because the speed of an answer would reveal them. Above the limit, generations
    are dropped from the salt without new outputs for the longest time.
    """

    def __init__(self, library: SuffixLibrary, generation: int = _GENERATION, limit: int = _LIMIT) -> None:
        """Starts without outputs.

        Args:
            library: creates automata.
            generation: tokens of a full generation.
            limit: tokens of all generations.
        """
        self._library = library
        self._generation = generation
        self._limit = limit
        self._waiting: deque[_Output] = deque()
        self._salts: dict[str, list[_Generation]] = {}
        """By salt, most recently used last; each with its newest generation last."""
        self.num_tokens = 0

    def of_salt(self, salt: str) -> list[SuffixAutomaton]:
        """The salt's automata, at most two, the older one first."""
        return [generation.automaton for generation in self._salts.get(salt, ())]

    def add(self, salt: str, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Queue an output, which can be found by the context before it and by itself; only the output is counted.

        It can be found once `take_in` has added it. If memory runs out, raises MemoryError and drops the output.
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
        """Add at most `most` tokens of the queued outputs, oldest first; returns how many were added.

        If memory runs out, raises MemoryError and drops the generation being written, because its automaton is
        incomplete.
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
"""Maximum number of running choices' tokens added per step: 0.15 us each, so half a millisecond."""
PAST_INTAKE = 2048
"""Maximum number of past outputs' tokens added per step."""


class SuffixProposer(Proposer):
    """Drafts trees from suffix automata of the choice's own tokens and of past outputs with its salt.

    SuffixDecoding (Oliaro et al., arXiv:2411.04975): the longer the match, the more is drafted. Branches grow by
    probabilities from counts. Of several matches, the one with the most expected tokens is used. The paper uses ratios
    of counts; here unseen tokens also get a share of the probability, so that one occurrence is not certain. One native
    call does all this for all choices (kernels/suffix).

    Until all its own tokens are added, a choice is drafted for from past outputs only.
    """

    def __init__(self, library: SuffixLibrary) -> None:
        self._library = library
        self._choices: dict[int, _Choice] = {}
        self._past = PastOutputs(library)

    def begin(self, choice: NewChoice) -> None:
        self._choices[choice.slot] = _Choice(choice, self._library)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        self._past.take_in(PAST_INTAKE)
        choices = [self._choices[choice.slot] for choice in step.choices]
        call = DraftCall(self._library)
        shares = share_out([choice.num_missing for choice in choices], INTAKE)
        for choice, share, brought in zip(choices, shares, step.choices, strict=True):
            choice.join(call, brought, share, self._past)
        return call.trees()

    def end(self, slot: int) -> None:
        """Keep the output since `begin` for later choices; earlier output was kept before preemption."""
        choice = self._choices.pop(slot)
        with suppress(MemoryError):  # past outputs only speed up later answers
            self._past.add(choice.salt, *choice.generated())


class _Choice:
    """The tokens of one choice, and how many of them its native side has."""

    def __init__(self, new: NewChoice, library: SuffixLibrary) -> None:
        self.salt = new.cache_salt
        self._tokens = new.tokens
        self._native = NativeChoice(library, new.tokens)
        self._num_given = self._num_followed = len(new.tokens)
        self._stops = frozenset(new.sampling.stop_token_ids)
        self._end: int | None = None
        """Position after the first stop token of the output."""
        self._num_taken_in = 0

    @property
    def num_missing(self) -> int:
        """Number of tokens that its own automaton lacks."""
        return len(self._tokens) - self._num_taken_in

    def join(self, call: DraftCall, step: ChoiceStep, share: int, past: PastOutputs) -> None:
        """Join a native call: add `share` tokens, and request a tree if the step wants one."""
        taken_in = self._tokens[self._num_taken_in : self._num_taken_in + share]
        self._num_taken_in += share
        if not step.num_new:
            call.add(self._native, taken_in)
            return
        new, past_ones = self._new_output(), past.of_salt(self.salt)
        call.add(self._native, taken_in, new, past_ones, is_whole=not self.num_missing, max_nodes=step.max_nodes)

    def generated(self) -> tuple[Sequence[int], Sequence[int]]:
        """The context and the output since `begin`, without tokens after a stop token."""
        self._new_output()
        tokens, first = self._tokens, self._num_given
        return tokens[max(first - DEPTH, 0) : first], tokens[first : self._end]

    def _new_output(self) -> Sequence[int]:
        """Tokens since the last call."""
        start, self._num_followed = self._num_followed, len(self._tokens)
        new = self._tokens[start:]
        if self._end is None and not self._stops.isdisjoint(new):
            self._end = start + 1 + next(place for place, token in enumerate(new) if token in self._stops)
        return new
