"""Matches of a history's end, against the Z-algorithm and against growing token by token; and their cost."""

import random
from collections.abc import Sequence

import pytest

from model_runner.contract import Breaker, Dry, SamplingParams
from model_runner.sampling import end_matches
from model_runner.sampling.end_matches import EndMatches
from model_runner.sampling.history import Repetitions
from model_runner.sampling.slot import SlotState
from tests.model_runner.work import lines_run

VOCAB = 100


def common_suffixes(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens before it are the same as at the end, place by place."""
    num, backwards = len(tokens), tokens[::-1]
    common = [0] * num
    left = right = 0
    for place in range(1, num):
        known = min(right - place, common[place - left]) if place < right else 0
        while place + known < num and backwards[known] == backwards[place + known]:
            known += 1
        common[place] = known
        if place + known > right:
            left, right = place, place + known
    return [common[num - place] if place else 0 for place in range(num)]


def repetitive(rng: random.Random, size: int, num_tokens: int) -> list[int]:
    """Runs, short periods, copies of longer stretches, and new tokens between them."""
    tokens = [rng.randrange(num_tokens)]
    while len(tokens) < size:
        kind = rng.random()
        if kind < 0.2:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randrange(1, size)]
        elif kind < 0.5:
            tokens += tokens[-rng.randrange(1, 9) :] * rng.randrange(1, 12)
        else:
            tokens.append(rng.randrange(num_tokens))
    return tokens[:size]


@pytest.mark.parametrize("short", [1, 2, 3, 4, 8, 64])
def test_the_lengths_are_those_of_the_algorithm_that_looks_at_every_place(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_matches, "_SHORT", short)
    rng = random.Random(short)
    for number in range(300):
        history = repetitive(rng, 1 + number % 60 * max(short // 8, 1), rng.choice((1, 2, 3, 9)))
        assert EndMatches(history).lengths.tolist() == common_suffixes(history)
    assert EndMatches([]).lengths.tolist() == []


SIZE = 20_000
TEXTS = {
    "random": random.Random(1).choices(range(VOCAB), k=SIZE),
    "two tokens": random.Random(2).choices(range(2), k=SIZE),
    "one token": [7] * SIZE,
    "a period": [place % 50 for place in range(SIZE)],
    "a short period": [place % 3 for place in range(SIZE)],
    "runs": [token for length in range(SIZE // 80) for token in [7] * (78 + length % 3) + [8]],
    "one token, and the end parted off": [7] * (SIZE - 101) + [8] + [7] * 100,
    "copied once": random.Random(3).choices(range(VOCAB), k=SIZE // 2) * 2,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_long_history_is_right_however_it_repeats_itself(text: str) -> None:
    history = TEXTS[text]
    grown = EndMatches(history[:-200])
    for token in history[-200:]:
        grown.add(token)
    assert EndMatches(history).lengths.tolist() == grown.lengths.tolist() == common_suffixes(history)


EVERYTHING = SamplingParams(
    no_repeat_ngram_size=4,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    dry=Dry(0.8, breakers=(Breaker((90, 91)), Breaker((92,), (93,)))),
)


@pytest.mark.parametrize("num_prompt", [SIZE, SIZE // 2])
@pytest.mark.parametrize("text", TEXTS)
def test_few_tokens_of_a_long_history_are_looked_at_one_by_one(text: str, num_prompt: int) -> None:
    """Else a long prompt, or an output resumed after preemption, would hold everybody up."""
    history = TEXTS[text]
    assert lines_run(lambda: SlotState(EVERYTHING, VOCAB, history[:num_prompt], history[num_prompt:])) < SIZE / 2


def test_a_fork_looks_at_no_token_of_its_history() -> None:
    """Beams fork at every step."""
    history = TEXTS["copied once"]
    slot = SlotState(EVERYTHING, VOCAB, history[: SIZE // 2])
    slot.commit(history[SIZE // 2])
    grown = SlotState(EVERYTHING, VOCAB, history[: SIZE // 2], history[SIZE // 2 :])
    assert lines_run(lambda: slot.fork(EVERYTHING, 0)) < 100
    assert lines_run(lambda: grown.fork(EVERYTHING, SIZE // 2)) < 100
    assert lines_run(lambda: SlotState(EVERYTHING, VOCAB, history)) > 200


def tables(slot: SlotState) -> list[list[tuple[int, float]]]:
    """The slot's matches for the next token, by token."""
    found = (slot.banned(), slot.dry_penalty(), slot.repetition_penalty(), slot.output_penalty())
    return [[] if pairs is None else sorted(zip(*(part.tolist() for part in pairs), strict=True)) for pairs in found]


@pytest.mark.parametrize("text", TEXTS)
def test_a_history_taken_up_is_that_which_grew(text: str) -> None:
    history = TEXTS[text][-400:]
    grown = SlotState(EVERYTHING, VOCAB, history[:200])
    for token in history[200:]:
        grown.commit(token)
    taken_up = SlotState(EVERYTHING, VOCAB, history[:200], history[200:])
    for token in [*history[-9:], 1, 2, *history[:9]]:
        assert tables(grown) == tables(taken_up)
        grown.commit(token)
        taken_up.commit(token)
    assert grown.num_output == taken_up.num_output == 220


def test_a_breaker_is_sought_no_further_back_than_repetitions_reach() -> None:
    """Earlier tokens change nothing."""
    story = random.Random(4).choices(range(90), k=SIZE)
    breakers = (Breaker((90,)), Breaker((91,), tuple(range(5))))
    assert lines_run(lambda: Repetitions(story, -1, breakers)) < 500

    def prolonged(history: list[int]) -> dict[int, int]:
        tokens, lengths = Repetitions(history, -1, breakers).prolonged(20)
        return dict(zip(tokens.tolist(), lengths.tolist(), strict=True))

    assert prolonged([*story, *story[:30]]) == {story[30]: 30}
    assert prolonged([*story[:15], 90, *story[15:], *story[:15], 90, *story[15:30]]) == {}
