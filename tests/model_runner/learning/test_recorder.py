"""Recorded rows belong to their tokens, are recorded once, and exclude choices that opted out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from model_runner.contract import AdmittedRequest, Pooling, SamplingParams
from model_runner.features import LAST
from model_runner.heads.base import Example
from model_runner.learning.recorder import Recorder
from model_runner.speculative.proposer import ChoiceStep, TargetStep

EARLY = "layers.1"
NOBODY = (-1.0, -1.0)
"""The features of a row that must not be recorded."""


def features_of(tokens: Sequence[int], first: int) -> torch.Tensor:
    """[n, 2]: of which token and position a row is."""
    return torch.tensor([(float(token), float(place)) for place, token in enumerate(tokens, first)]).view(-1, 2)


@dataclass
class Answering:
    """A choice as the runner has it. Its temperature tells it from the others."""

    slot: int
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=1.0 + self.slot)

    def admitted(self) -> AdmittedRequest:
        return AdmittedRequest("", tuple(self.tokens), self.num_prompt, self.num_computed, (), self.sampling)


@dataclass
class World:
    """A recorder, and steps of several choices with rows of others and of rejected drafts between theirs."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    pieces: list[Example] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder((EARLY, LAST), self.pieces.append)

    def begin(self, one: Answering) -> bool:
        self.recorder.begin(one.slot, one.admitted())
        return one.slot in self.recorder.slots

    def step(self, *shares: tuple[Answering, int, Sequence[int]]) -> None:
        """Each choice computes so many known tokens and gets new ones, all but the last of which were drafts."""
        rows_of_all: list[tuple[float, float]] = []
        choices = []
        for one, num_tokens, new in shares:
            rows_of_all += [NOBODY] * self.rng.randrange(3)
            rows = []
            start = one.num_computed
            one.tokens += new
            for row in features_of(one.tokens[start : start + num_tokens + len(new[:-1])], start).tolist():
                if len(rows) >= num_tokens:
                    rows_of_all += [NOBODY] * self.rng.randrange(3)
                rows.append(len(rows_of_all))
                rows_of_all.append(tuple(row))
            one.num_computed += len(rows)
            choices.append(self._choice_step(one, len(new), rows))
        features = torch.tensor(rows_of_all).view(-1, 2)
        self.recorder.observe(TargetStep(choices, {EARLY: features, LAST: -features}, torch.zeros(0)))

    def answer(self, one: Answering, num_tokens: int) -> None:
        """Compute the prompt at once and the output token by token."""
        self.step((one, one.num_prompt - one.num_computed, [1]))
        for token in range(2, num_tokens + 1):
            self.step((one, 1, [token]))

    @staticmethod
    def _choice_step(one: Answering, num_new: int, rows: list[int]) -> ChoiceStep:
        return ChoiceStep(one.slot, one.tokens, one.num_prompt, num_new, one.num_computed, rows, [], 0, one.sampling)


def tokens_of(piece: Example) -> list[int]:
    return piece.tokens.tolist()


def taught(piece: Example, one: Answering) -> range:
    """The positions of the output that the piece teaches, all of whose rows are as they were computed."""
    own = tokens_of(piece)
    assert own == one.tokens[piece.start : piece.start + len(own)]
    assert piece.num_prompt == max(one.num_prompt - piece.start, 1)
    expected = features_of(own, piece.start).half().numpy()
    rows = piece.features
    assert set(rows) == {EARLY, LAST}
    assert np.array_equal(rows[EARLY], expected)
    assert np.array_equal(rows[LAST], -expected)
    return range(piece.start + piece.num_prompt, piece.start + len(own))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_choices(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    lengths = [rng.choice([1, 5, 63, 64, 65, 300]) for _ in range(7)]
    every = [Answering(slot, [rng.randrange(2000) for _ in range(count)], count) for slot, count in enumerate(lengths)]
    wanted = {one.slot: one.num_prompt + rng.choice([3, 40, 700]) for one in every}
    waiting, running = list(every), []
    was_whole = {one.slot: True for one in every}
    while waiting or running:
        if waiting and rng.random() < 0.3:
            one = waiting.pop()
            one.num_computed = rng.choice([0, rng.randrange(len(one.tokens))])  # in the prefix cache
            was_whole[one.slot] &= world.begin(one) and len(one.tokens) == one.num_prompt
            running.append(one)
        shares = []
        for one in running:
            left = len(one.tokens) - one.num_computed
            num_tokens = min(left, rng.choice([7, 64, 100, 400]))
            new = [rng.randrange(2000) for _ in range(rng.randint(1, 4))] if num_tokens == left else []
            shares.append((one, num_tokens, new))
        world.step(*shares)
        for one in list(running):
            is_done = len(one.tokens) >= wanted[one.slot]
            if is_done or rng.random() < 0.005:
                running.remove(one)
                world.recorder.end(one.slot)
                waiting = waiting if is_done else [one, *waiting]
    assert len(world.pieces) > 3
    for one in every:
        places = [
            place
            for piece in world.pieces
            if piece.temperature == one.sampling.temperature
            for place in taught(piece, one)
        ]
        assert len(set(places)) == len(places)
        if was_whole[one.slot]:
            assert places == list(range(one.num_prompt, one.num_prompt + len(places)))
            assert len(places) > one.num_computed - one.num_prompt - 8


def test_only_the_end_of_a_long_prompt_is_recorded() -> None:
    world, one = World(), Answering(0, list(range(200)), 200)
    assert world.begin(one)
    world.answer(one, 20)
    world.recorder.end(0)
    (piece,) = world.pieces
    assert (piece.start, piece.num_prompt) == (136, 64)
    assert taught(piece, one) == range(200, 219)  # the last token was never computed


def test_a_long_answer_comes_in_pieces_that_share_one_token() -> None:
    world, one = World(), Answering(0, [7] * 10, 10)
    world.begin(one)
    world.answer(one, 600)
    assert [piece.start for piece in world.pieces] == [0, 255]
    world.recorder.end(0)
    assert [(piece.start, piece.num_prompt) for piece in world.pieces] == [(0, 10), (255, 1), (510, 1)]
    assert [place for piece in world.pieces for place in taught(piece, one)] == list(range(10, 609))


def test_a_choice_that_comes_back_goes_on_where_nothing_was_computed_yet() -> None:
    world, one = World(), Answering(0, [7] * 10, 10)
    world.begin(one)
    world.answer(one, 20)
    world.recorder.end(0)
    one.num_computed = 0  # its blocks are gone
    world.begin(one)
    world.step((one, 17, []))
    world.step((one, 13, [5]))
    for _ in range(20):
        world.step((one, 1, [6]))
    world.recorder.end(0)
    first, second = (taught(piece, one) for piece in world.pieces)
    assert (first, second) == (range(10, 29), range(30, 50))


def test_a_few_choices_are_recorded_at_a_time() -> None:
    world = World()
    assert [world.begin(Answering(slot, [1, 2], 2)) for slot in range(6)] == [True] * 4 + [False] * 2
    world.recorder.end(5)
    world.recorder.end(2)
    assert world.begin(Answering(6, [1, 2], 2))
    world.recorder.forget()
    assert not world.recorder.slots


def test_short_answers_are_of_no_use() -> None:
    world = World()
    for slot, count in ((0, 8), (1, 9)):
        one = Answering(slot, [1, 2], 2)
        world.begin(one)
        world.answer(one, count)
        world.recorder.end(slot)
    assert [len(tokens_of(piece)) for piece in world.pieces] == [10]


def test_numbers_beyond_half_precision_are_clipped() -> None:
    world, one = World(), Answering(0, [1], 1)
    recorder = Recorder((LAST,), world.pieces.append)
    recorder.begin(0, one.admitted())
    choice = ChoiceStep(0, list(range(11)), 1, 10, 10, list(range(10)), [], 0, one.sampling)
    recorder.observe(TargetStep([choice], {LAST: torch.tensor([[1e9, -1e9, torch.inf, 1.0]] * 10)}, torch.zeros(0)))
    recorder.end(0)
    rows = world.pieces[0].features[LAST]
    assert rows[3].tolist() == [65504.0, -65504.0, 65504.0, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "mine"},
        {"learn": False},
        {"guides": "another"},
        {"sampling": SamplingParams(pooling=Pooling("mean"))},
        {"sampling": SamplingParams(beam_candidates=4)},
        {"sampling": SamplingParams(penalty_alpha=0.5, top_k=4, temperature=0.0)},
    ],
)
def test_who_is_not_learnt_from(change: dict[str, object]) -> None:
    world, one = World(), Answering(0, [1, 2], 2)
    world.recorder.begin(0, replace(one.admitted(), **change))  # type: ignore[arg-type]
    assert 0 not in world.recorder.slots
    world.answer(one, 30)
    world.recorder.end(0)
    assert not world.pieces
    assert world.begin(one)
