"""The native library of suffix automata: memory and inputs."""

import gc
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.draft_tree import DraftTree
from model_runner.kernels.build import NoKernelsError, build_suffix
from model_runner.speculative import methods
from model_runner.speculative.draft_kv import BlockGenerations, TargetBlocks
from model_runner.speculative.proposer import TargetStep
from model_runner.speculative.suffix import (
    DraftCall,
    NativeChoice,
    PastOutputs,
    SuffixAutomaton,
    SuffixLibrary,
    Writer,
    as_tokens,
)
from tests.model_runner.speculative.automata import Reader, suffix_library, suffix_proposer
from tests.model_runner.speculative.driving import choice_step, draft, new_choice

TEXT = as_tokens([random.Random(place).randrange(1000) for place in range(10_000)])


def drop_an_automaton() -> None:
    Writer(SuffixAutomaton(suffix_library())).extend(TEXT)


def drop_a_choice() -> None:
    call = DraftCall(suffix_library())
    choice = NativeChoice(suffix_library(), TEXT)
    call.add(choice, TEXT)
    call.trees()


def fill_past_outputs() -> None:
    past = PastOutputs(suffix_library(), generation=2000, limit=4000)
    for number in range(10):
        past.add(f"{number % 3}", (), TEXT[:1000])
        past.take_in(1000)


@pytest.mark.parametrize("use", [drop_an_automaton, drop_a_choice, fill_past_outputs])
def test_memory_is_freed(use: Callable[[], None]) -> None:
    """Leaving any of it would take some 300 MB. A sanitizer keeps what was freed for a while, but no more than that."""
    sizes = []
    for _ in range(2):
        for _ in range(400):
            use()
        gc.collect()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    assert sizes[1] - sizes[0] < 100 << 20


def test_an_automaton_lives_as_long_as_it_is_used() -> None:
    past, automata = PastOutputs(suffix_library(), generation=10, limit=20), []
    for number in range(10):
        past.add("", (), [number] * 10)
        past.take_in(10)
        automata += past.of_salt("")[-1:]
    for number, automaton in enumerate(automata):
        reader = Reader(automaton)
        assert reader.count(reader.find([number])) == 10


def test_what_stands_where_a_dropped_automaton_stood_is_another() -> None:
    """A choice's position in one automaton says nothing about another, even at the same address."""
    choice = NativeChoice(suffix_library(), [])

    def ask(text: list[int], new: list[int]) -> DraftTree:
        automaton = SuffixAutomaton(suffix_library())
        Writer(automaton).extend(as_tokens(text))
        call = DraftCall(suffix_library())
        call.add(choice, [], new, [automaton], is_whole=False, max_nodes=1)
        return call.trees()[0]

    for _ in range(10):
        ask([1, 2], [1])  # moves it to the state of 1
        tree = ask([5, 6, 9], [6])  # here it is the state of 5, because 5, 6 has never occurred
        assert tree.tokens == (9,)
        assert tree.confidence == (1 / (1 + 2.6),)


# -- what it is given --------------------------------------------------------------------------------------------------

tokens = st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.lists(tokens, min_size=1, max_size=20))
def test_tokens_are_any_of_32_bits(text: list[int]) -> None:
    automaton = SuffixAutomaton(suffix_library())
    Writer(automaton).extend(as_tokens(text))
    reader = Reader(automaton)
    assert [reader.count(reader.find([token])) for token in text] == [text.count(token) for token in text]


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1])
def test_larger_ones_are_refused(token: int) -> None:
    proposer, known = suffix_proposer(), [1, 2]
    choice = new_choice(known)
    proposer.begin(choice)
    known.append(token)
    with pytest.raises(OverflowError):
        draft(proposer, choice, 4)


def test_a_token_that_very_many_may_follow() -> None:
    text = [token for other in range(1, 5000) for token in (0, other)]
    automaton = SuffixAutomaton(suffix_library())
    Writer(automaton).extend(as_tokens(text))
    reader = Reader(automaton)
    assert [(token, count) for token, count, _ in reader.following(reader.find([0]))] == [
        (other, 1) for other in range(1, 5000)
    ]


def test_a_step_without_choices() -> None:
    assert suffix_proposer().propose(TargetStep([], {}, torch.zeros(0, 1))) == []


def test_no_tree_has_more_nodes_than_were_asked_for() -> None:
    """Choices of all sizes share one call: none may write where the next one's nodes go."""
    proposer = suffix_proposer()
    choices = [new_choice([1, 2, 3, 4, 5] * 20, slot=slot) for slot in range(40)]
    for choice in choices:
        proposer.begin(choice)
    steps = [choice_step(choice, 1, choice.slot) for choice in choices]
    trees = proposer.propose(TargetStep(steps, {}, torch.zeros(0, 1)))
    assert [tree.tokens for tree in trees] == [((1, 2, 3, 4, 5) * 8)[:slot] for slot in range(40)]


# -- machines that cannot have it --------------------------------------------------------------------------------------


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "suffix.so").write_text("no library")
    for name in ("suffix.so", "missing.so"):
        with pytest.raises(NoKernelsError, match="cannot be loaded"):
            SuffixLibrary(tmp_path / name)


def test_without_a_compiler_it_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler"):
        build_suffix(tmp_path, environment={"PATH": "/nowhere"})


def test_then_there_is_no_such_method(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def build(folder: Path) -> Path:
        raise NoKernelsError("no C++ compiler was found")

    def names() -> set[str]:
        """Names of the methods; the model is not run here."""
        return set(methods.make_proposers(TargetBlocks(8, 16, 4, BlockGenerations(8)), None, 16))

    everywhere = names()
    monkeypatch.setattr(methods, "suffix_library", build)
    assert everywhere - names() == {"suffix"}
    assert "suffix is not available: no C++ compiler was found" in caplog.text
