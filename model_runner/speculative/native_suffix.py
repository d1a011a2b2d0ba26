"""The library of suffix automata (kernels/suffix): automata in native memory, and drafts from them."""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from itertools import pairwise
from pathlib import Path

import numpy as np

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.kernels.build import NoKernelsError

DEPTH = 64
"""Tokens of context that are looked at, at most, those of a draft included."""


class _WriterStruct(ctypes.Structure):
    """SwWriter."""

    _fields_ = (("last", c_int32), ("end_state", c_int32), ("end_length", c_int32))


_SIGNATURES = {
    "sw_create_automaton": (c_void_p, [c_int32]),
    "sw_destroy_automaton": (None, [c_void_p]),
    "sw_extend": (c_int32, [c_void_p, POINTER(_WriterStruct), c_void_p, c_int64, c_int32]),
    "sw_create_choice": (c_void_p, [c_int32, c_void_p, c_int64]),
    "sw_destroy_choice": (None, [c_void_p]),
    "sw_propose": (c_int32, [c_void_p, c_int64, *[c_void_p] * 5]),
}
_STEP_FIELDS = 8
"""Numbers of 64 bits that an SwChoiceStep is."""


class SuffixLibrary:
    """The loaded library. One call at a time for each automaton and choice."""

    def __init__(self, path: Path) -> None:
        """Raises NoKernelsError if the library cannot be loaded."""
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoKernelsError(f"the native library suffix cannot be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments


class SuffixAutomaton:
    """Of past outputs; see kernels/suffix/automaton.h."""

    def __init__(self, library: SuffixLibrary, depth: int = DEPTH) -> None:
        self.functions = library.functions
        self.handle: int = _not_null(self.functions.sw_create_automaton(depth))
        weakref.finalize(self, self.functions.sw_destroy_automaton, self.handle)


class Writer:
    """Adds one sequence to an automaton; several can take turns."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._struct = _WriterStruct()

    def extend(self, tokens: "array[int]", *, counted: bool = True) -> None:
        """Add tokens; if they are only context, strings that end in them are not counted as occurrences."""
        automaton, (address, count) = self._automaton, tokens.buffer_info()
        _check(automaton.functions.sw_extend(automaton.handle, self._struct, address, count, counted))


class NativeChoice:
    """A running choice's own automaton, and where its last tokens stand in those of past outputs."""

    def __init__(self, library: SuffixLibrary, tokens: Sequence[int], depth: int = DEPTH) -> None:
        """Begins after the last `depth` of the tokens, which are still to be taken in."""
        functions, context = library.functions, as_tokens(tokens[-depth:])
        self.handle: int = _not_null(functions.sw_create_choice(depth, *context.buffer_info()))
        weakref.finalize(self, functions.sw_destroy_choice, self.handle)


class DraftCall:
    """What a step brought some choices, gathered for one native call, and the trees that it drafts for them.

    Whoever adds choices and automata keeps them alive until then.
    """

    def __init__(self, library: SuffixLibrary) -> None:
        self._propose = library.functions.sw_propose
        self._choices: list[int] = []
        self._tokens: list[int] = []
        self._room = 0

    def add(self, choice: NativeChoice, taken_in: Sequence[int]) -> None:
        """A choice whose prompt is being computed: it takes in tokens, and nothing is drafted."""
        self._choices += (choice.handle, 0, 0, len(taken_in), 0, 0, 0, 0)
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
        handles = [automaton.handle for automaton in past] + [0, 0]
        self._choices += (choice.handle, *handles[:2], len(taken_in), is_whole, 1, len(new), max_nodes)
        self._tokens += taken_in
        self._tokens += new
        self._room += max_nodes

    def trees(self) -> list[DraftTree]:
        """One for each choice that was added."""
        choices, tokens = array("q", self._choices), as_tokens(self._tokens)
        count = len(choices) // _STEP_FIELDS
        num_nodes = np.empty(count, dtype=np.int32)
        columns = np.empty(self._room, np.int32), np.empty(self._room, np.int32), np.empty(self._room)
        outputs = (column.ctypes.data for column in (num_nodes, *columns))
        _check(self._propose(choices.buffer_info()[0], count, tokens.buffer_info()[0], *outputs))
        ends = [0, *num_nodes.cumsum().tolist()]
        token_of, parents, confidence = (tuple(column[: ends[-1]].tolist()) for column in columns)
        return [
            DraftTree(token_of[start:end], parents[start:end], confidence[start:end]) if start < end else NO_DRAFT
            for start, end in pairwise(ends)
        ]


def as_tokens(tokens: Sequence[int]) -> "array[int]":
    """As the library takes them."""
    return array("i", tokens)


def _not_null(handle: int | None) -> int:
    if handle is None:
        raise MemoryError("out of memory for a suffix automaton")
    return handle


def _check(code: int) -> None:
    if code:
        raise MemoryError("out of memory in a suffix automaton")
