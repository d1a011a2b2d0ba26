"""Read access to native suffix automata for tests."""

import ctypes
import shutil
import tempfile
from collections.abc import Iterable
from ctypes import byref, c_int32
from functools import cache
from pathlib import Path
from typing import NamedTuple

from model_runner.hub.repository import cache_folder
from model_runner.kernels import build
from model_runner.kernels.interface import SUFFIX
from model_runner.speculative.suffix import SuffixAutomaton, SuffixLibrary, SuffixProposer
from tests.conftest import COMPILER_FLAGS

_SOURCES = Path(build.__file__).parent / "suffix"
_FACE = Path(__file__).with_name("automaton_face.cpp")
_VISIT = ctypes.CFUNCTYPE(None, *[c_int32] * 4)


class Match(NamedTuple):
    """A string that occurs in an automaton."""

    state: int = 0
    length: int = 0


class _MatchStruct(ctypes.Structure):
    _fields_ = (("state", c_int32), ("length", c_int32))


@cache
def suffix_library() -> SuffixLibrary:
    return SuffixLibrary(build.build_suffix(cache_folder(), COMPILER_FLAGS))


def suffix_proposer() -> SuffixProposer:
    return SuffixProposer(suffix_library())


@cache
def _face() -> ctypes.CDLL:
    """A library that reads the automata of the other one."""
    with tempfile.TemporaryDirectory() as folder:
        for header in _SOURCES.glob("*.h"):
            shutil.copy(header, folder)
        shutil.copy(_FACE, Path(folder) / "suffix.cpp")
        face = ctypes.CDLL(str(build.build_suffix(cache_folder(), COMPILER_FLAGS, sources=Path(folder))))
    face.face_size.restype = ctypes.c_int64
    return face


class Reader:
    """Reads an automaton's contents."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton  # keeps the automaton alive

    def __len__(self) -> int:
        """Number of states."""
        size: int = _face().face_size(self._handle)
        return size

    @property
    def _handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(int(SUFFIX.ffi.cast("intptr_t", self._automaton.handle)))

    def advance(self, match: Match, token: int) -> Match:
        struct = _MatchStruct(*match)
        _face().face_advance(self._handle, byref(struct), token)
        return Match(struct.state, struct.length)

    def find(self, string: Iterable[int]) -> Match:
        """The longest suffix of the string that occurs."""
        match = Match()
        for token in string:
            match = self.advance(match, token)
        return match

    def shorter(self, match: Match) -> Match:
        struct = _MatchStruct(*match)
        _face().face_shorter(self._handle, byref(struct))
        return Match(struct.state, struct.length)

    def count(self, match: Match) -> int:
        count: int = _face().face_count(self._handle, byref(_MatchStruct(*match)))
        return count

    def num_following(self, match: Match) -> int:
        count: int = _face().face_num_following(self._handle, byref(_MatchStruct(*match)))
        return count

    def following(self, match: Match) -> list[tuple[int, int, Match]]:
        """The tokens that follow a string, how often each does, and the string with the token at its end."""
        found: list[tuple[int, int, Match]] = []

        def visit(token: int, count: int, state: int, length: int) -> None:
            found.append((token, count, Match(state, length)))

        _face().face_following(self._handle, byref(_MatchStruct(*match)), _VISIT(visit))
        return found
