"""Typical acceptance, compared with Medusa's formula."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.contract import SamplingParams
from model_runner.draft_tree import NO_DRAFT, Fork
from model_runner.sampling.rows import SamplingState
from model_runner.speculative.verify import TypicalDraw
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.sampling import oracle
from tests.model_runner.sampling.harness import CPU, random_logits

from .worlds import CHAIN, TREE, Drawing, Said, Speakers, make_world

VOCAB = 30
ROWS = 600


def state_of(count: int) -> SamplingState:
    state = SamplingState(count, VOCAB, CPU)
    for seed in range(count):
        state.admit(seed, SamplingParams(seed=seed), ())
    return state


def test_accepts_what_the_formula_says_and_draws_the_rest_as_ever() -> None:
    scores = random_logits(ROWS, VOCAB, seed=1) * torch.linspace(0.1, 2, ROWS).unsqueeze(1)
    scores[::3, 10:] = -math.inf
    choice = np.random.default_rng(2)
    forks = [Fork(tuple(choice.permutation(VOCAB)[: choice.integers(0, 4)].tolist()), None) for _ in range(ROWS)]
    rows = state_of(ROWS).rows(range(ROWS))
    plain = TorchDraw(VOCAB, CPU)
    drawn = plain(scores, rows)
    tokens = TypicalDraw(forks, plain)(scores, rows)
    num_accepted = 0
    for row, fork in enumerate(forks):
        p = oracle.softmax(scores[row].double().numpy())
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        accepted = [x for x in fork.tokens if p[x] > min(0.09, 0.3 * math.exp(-entropy))]
        assert tokens[row] == (max(accepted, key=lambda x: p[x]) if accepted else drawn[row])
        num_accepted += bool(accepted)
    assert 100 < num_accepted < 500


def test_without_drafts_it_is_sampling_as_ever() -> None:
    world = make_world(4)
    said = [[Said(SamplingParams(seed=seed, top_p=0.8), mode) for seed in range(30)] for mode in ("match", "typical")]
    for of_mode in said:
        Speakers(world, of_mode).speak(20, lambda one: NO_DRAFT)
    assert [one.output for one in said[0]] == [one.output for one in said[1]]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_accepts_more_than_match_does(shape: tuple[int, ...]) -> None:
    world = make_world(4)
    accepted = []
    for mode in ("match", "typical"):
        said = [Said(replace(SamplingParams(), seed=seed), mode) for seed in range(200)]
        Speakers(world, said).speak(12, Drawing(world, shape, at_random=False))
        accepted.append(sum(one.num_accepted for one in said))
    assert accepted[1] > 1.1 * accepted[0]
