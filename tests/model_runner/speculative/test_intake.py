"""Long texts are processed in parts: each step does a bounded amount of work, and in the end everything is known."""

import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.batch import SampleRows
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.speculative import lookahead, prediction, suffix
from model_runner.speculative.lookahead import LookaheadProposer
from model_runner.speculative.prediction import PredictionProposer
from model_runner.speculative.proposer import NewChoice, Proposer, TargetStep, share_out
from model_runner.speculative.suffix import PastOutputs, SuffixProposer
from tests.model_runner.speculative.automata import Reader, suffix_library, suffix_proposer
from tests.model_runner.speculative.driving import choice_step, new_choice
from tests.model_runner.work import lines_run

Make = Callable[[], Proposer]
MAKERS: dict[Make, ModuleType] = {
    LookaheadProposer: lookahead,
    PredictionProposer: prediction,
    suffix_proposer: suffix,
}
makers = pytest.mark.parametrize("make", MAKERS)
INTAKE = 32
"""Tokens taken in per step in these tests."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MAKERS.values():
        monkeypatch.setattr(module, "INTAKE", INTAKE)
    monkeypatch.setattr(suffix, "PAST_INTAKE", INTAKE)


def text(size: int) -> list[int]:
    """A text that repeats parts of itself, and ends with a repetition."""
    rng = random.Random(1)
    parts = [[rng.randrange(40) for _ in range(12)] for _ in range(8)]
    tokens = [token for _ in range(-(-size // 12)) for token in rng.choice(parts)][:size]
    return [*tokens[: size - 8], *parts[0][:8]]


def step_of(choices: Sequence[NewChoice], num_new: int = 1, max_nodes: int = 0) -> TargetStep:
    sample = SampleRows(0, 0, NO_DRAFT) if num_new else None
    return TargetStep([choice_step(choice, num_new, max_nodes, sample) for choice in choices], {}, torch.zeros(0, 1))


def take_steps(proposer: Proposer, choices: Sequence[NewChoice], count: int) -> None:
    """Run steps without new tokens and without drafts."""
    for _ in range(count):
        proposer.propose(step_of(choices))


def last_draft(proposer: Proposer, choice: NewChoice) -> DraftTree:
    return proposer.propose(step_of([choice], max_nodes=6))[0]


# -- sharing out -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20)), st.integers(0, 60))
def test_the_shares_are_all_that_there_is_and_who_misses_the_least_comes_first(missing: list[int], most: int) -> None:
    shares = share_out(missing, most)
    assert sum(shares) == min(sum(missing), most)
    assert all(0 <= share <= wanted for share, wanted in zip(shares, missing, strict=True))
    served = {wanted for share, wanted in zip(shares, missing, strict=True) if share}
    short = {wanted for share, wanted in zip(shares, missing, strict=True) if share < wanted}
    assert max(served, default=0) <= min(short, default=20)


# -- what a step does --------------------------------------------------------------------------------------------------


@makers
def test_no_step_does_more_for_a_longer_text(make: Make) -> None:
    """A prompt that the prefix cache had, a long prediction, and an output resumed after preemption, at once."""
    most = []
    for size in (4, 40):
        tokens = text(size * INTAKE)
        choices = [
            new_choice(tokens, slot=0, prediction=tokens),
            new_choice(tokens, len(tokens) // 2, slot=1, prediction=tokens[: len(tokens) // 2]),
        ]
        proposer = make()

        def begin(proposer: Proposer = proposer, choices: Sequence[NewChoice] = choices) -> None:
            for choice in choices:
                proposer.begin(choice)

        def take_step(proposer: Proposer = proposer, choices: Sequence[NewChoice] = choices) -> None:
            proposer.propose(step_of(choices, max_nodes=6))

        most.append(max(lines_run(begin), *(lines_run(take_step) for _ in range(2))))
    assert most[1] <= 1.5 * most[0]


def test_what_a_finished_answer_teaches_is_taken_in_bit_by_bit() -> None:
    most = []
    for size in (4, 40):
        proposer, tokens = suffix_proposer(), [1, 2, 3]
        choice = new_choice(tokens, stops=[99])
        proposer.begin(choice)
        answer = text(size * INTAKE)
        for start in range(0, len(answer), INTAKE):
            tokens += answer[start : start + INTAKE]
            take_steps(proposer, [choice], 1)
        ends = [lines_run(lambda proposer=proposer: proposer.end(0))]
        other = new_choice([1, 2], slot=1)
        proposer.begin(other)
        ends += [
            lines_run(lambda proposer=proposer, other=other: take_steps(proposer, [other], 1)) for _ in range(size // 2)
        ]
        most.append(max(ends))
    assert most[1] <= 1.5 * most[0]


def test_a_prediction_of_one_token_only_is_sought_at_few_places() -> None:
    most = []
    for size in (4, 40):
        tokens = [1, 2, 3]
        choice = new_choice(tokens, prediction=[7] * (size * INTAKE))
        proposer = PredictionProposer()
        proposer.begin(choice)
        take_steps(proposer, [choice], size)
        tokens += [7, 9, 7, 7]
        most.append(lines_run(lambda proposer=proposer, choice=choice: take_steps(proposer, [choice], 1)))
    assert most[1] <= 1.5 * most[0]


# -- what is known -----------------------------------------------------------------------------------------------------


@makers
def test_a_choice_that_has_caught_up_drafts_as_if_all_had_been_taken_in_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(10 * INTAKE)
    choice = new_choice(tokens, 5 * INTAKE, prediction=tokens[: 5 * INTAKE])
    slow = make()
    slow.begin(choice)
    take_steps(slow, [choice], 10)
    monkeypatch.setattr(MAKERS[make], "INTAKE", 10**9)
    quick = make()
    quick.begin(choice)
    take_steps(quick, [choice], 1)
    assert last_draft(slow, choice) == last_draft(quick, choice) != NO_DRAFT


@makers
def test_a_prompt_is_taken_in_while_it_is_computed(make: Make) -> None:
    tokens = text(10 * INTAKE)
    trees = []
    for num_steps in (10, 20):
        choice = new_choice(tokens)
        proposer = make()
        proposer.begin(choice)
        for _ in range(num_steps):
            assert proposer.propose(step_of([choice], num_new=0)) == [NO_DRAFT]
        trees.append(last_draft(proposer, choice))
    assert trees[0] == trees[1]
    assert trees[0] != NO_DRAFT or make is PredictionProposer  # there is no prediction


@pytest.mark.parametrize("make", [PredictionProposer, suffix_proposer])
def test_a_choice_that_has_not_caught_up_has_no_draft(make: Make) -> None:
    tokens = text(10 * INTAKE)
    choice = new_choice(tokens, prediction=tokens)
    proposer = make()
    proposer.begin(choice)
    assert [bool(last_draft(proposer, choice)) for _ in range(10)] == [False] * 9 + [True]


@makers
def test_who_has_caught_up_goes_on_drafting_beside_who_has_not(make: Make) -> None:
    trees = []
    for others in ([], [new_choice(text(100 * INTAKE), slot=slot) for slot in (1, 2)]):
        known = text(INTAKE)
        choice = new_choice(known, INTAKE // 2, prediction=known[INTAKE // 2 :] * 2)
        proposer = make()
        for one in (choice, *others):
            proposer.begin(one)
        of_steps = []
        for step in range(6):
            known.append(step)
            steps = step_of([*others, choice], max_nodes=6)
            of_steps.append(proposer.propose(steps)[-1])
        trees.append(of_steps)
    assert trees[0] == trees[1]


# -- past outputs ------------------------------------------------------------------------------------------------------


def count(past: PastOutputs, string: Sequence[int]) -> int:
    reader = Reader(*past.of_salt(""))
    match = reader.find(string)
    return reader.count(match) if match.length == len(string) else 0


@pytest.mark.parametrize("piece", [1, 3, 5, 1000])
def test_an_output_occurs_once_all_of_it_is_taken_in(piece: int) -> None:
    past = PastOutputs(suffix_library())
    past.add("", (1, 2, 3), (4, 5, 1, 2, 3))
    past.add("", (), (2, 3, 4))
    taken = []
    while taken[-1:] != [0]:
        taken.append(past.take_in(piece))
    assert sum(taken) == past.num_tokens == 11
    assert max(taken) <= piece
    strings = ([4], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3])
    assert [count(past, string) for string in strings] == [2, 1, 2, 1, 2]


def test_outputs_that_were_dropped_are_not_taken_in() -> None:
    past = PastOutputs(suffix_library(), generation=10, limit=30)
    for number in range(6):
        past.add(f"{number}", (), [number] * 10)
    assert past.take_in(1000) == past.num_tokens == 30
    assert [bool(past.of_salt(f"{number}")) for number in range(6)] == [False] * 3 + [True] * 3


class ShortOfMemory:
    """The suffix library, which can run out of memory on request in the middle of a write."""

    def __init__(self) -> None:
        self._functions = suffix_library().functions
        self.is_short = False

    @property
    def functions(self) -> "ShortOfMemory":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def sw_create_automaton(self, depth: int) -> Any:
        return None if self.is_short else self._functions.sw_create_automaton(depth)

    def sw_extend(self, automaton: Any, writer: Any, tokens: Any, count: int, counted: bool) -> int:
        self._functions.sw_extend(automaton, writer, tokens, count // 2 if self.is_short else count, counted)
        return int(self.is_short)


def test_what_was_half_written_when_memory_ran_out_is_dropped() -> None:
    library = ShortOfMemory()
    past = PastOutputs(library)  # type: ignore[arg-type]
    past.add("other", (), range(10, 14))
    past.add("", (), range(6))
    past.add("", (), range(3, 9))
    past.take_in(4)
    library.is_short = True
    with pytest.raises(MemoryError):
        past.take_in(1000)
    library.is_short = False
    assert [len(past.of_salt(salt)) for salt in ("", "other")] == [0, 1]
    assert past.take_in(1000) == 0
    assert past.num_tokens == 4
    past.add("", (), (1, 2, 1, 2))
    past.take_in(1000)
    assert [count(past, string) for string in ([1], [1, 2], [2, 1], [3])] == [2, 2, 1, 0]


def test_an_output_for_which_there_is_no_memory_is_not_kept() -> None:
    """The choice still ends normally, and what was stored before is found."""
    library = ShortOfMemory()
    proposer = SuffixProposer(library)  # type: ignore[arg-type]
    proposer._past = PastOutputs(library, generation=4)  # type: ignore[arg-type]
    for number, is_short in enumerate((False, True)):
        tokens = [7]
        proposer.begin(new_choice(tokens))
        tokens += [number, number, 8, 9]
        library.is_short = is_short
        proposer.end(0)
    library.is_short = False
    proposer._past.take_in(1000)
    assert proposer._past.num_tokens == 5
    assert [count(proposer._past, string) for string in ([0, 8], [1, 8])] == [1, 0]
