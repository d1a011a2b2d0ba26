"""Rejection sampling keeps the joint distribution of outputs; each of the classic mistakes breaks it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.draft_tree import ROOT, DraftDistribution, DraftTree, Fork
from model_runner.sampling.noise import Stream, noise_key
from model_runner.sampling.rows import SamplingRows, SamplingState
from model_runner.speculative import speculator, verify
from model_runner.speculative.growing import FrontierNode, GrowthLimits, grow
from model_runner.speculative.proposer import ChoiceStep
from model_runner.speculative.verify import RejectionDraw, blind_confidence
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.sampling.harness import ALPHA, CPU, chi_square_p

from .trimming import Trimmed
from .worlds import CHAIN, PROMPT, TREE, VOCAB, Drafter, Drawing, Said, Speakers, World, crowd, make_world, outcomes

COUNT = 10_000
FEW = 5_000
LENGTH = 3
SETTINGS = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2)
PLAIN = SamplingParams()


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(1)


def fit(world: World, params: SamplingParams, count: int, draft: Drafter) -> float:
    """How well the joint distribution of three tokens fits the exact one."""
    said = crowd(params, "rejection", count)
    Speakers(world, said).speak(LENGTH, draft)
    assert sum(one.num_accepted for one in said) > count / 2
    return chi_square_p(outcomes(said, LENGTH), world.joint(params, LENGTH))


@pytest.mark.parametrize("at_random", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_joint_distribution_of_three_tokens(world: World, shape: Sequence[int], at_random: bool) -> None:
    assert fit(world, SETTINGS, COUNT, Drawing(world, shape, at_random=at_random)) > ALPHA


def test_drawn_drafts_are_accepted_more_often_than_chosen_ones(world: World) -> None:
    accepted = []
    for at_random in (False, True):
        said = crowd(PLAIN, "rejection", 2000)
        Speakers(world, said).speak(1, Drawing(world, CHAIN[:1], at_random=at_random))
        accepted.append(sum(one.num_accepted for one in said) / 2000)
    p, q = world.next_token(PLAIN, ()), torch.softmax(world.draft[PROMPT].double(), -1).numpy()
    overlap = np.minimum(p[:-1], q).sum()
    assert accepted[0] == pytest.approx(p[q.argmax()], abs=0.05)
    assert accepted[1] == pytest.approx(overlap, abs=0.05)
    assert accepted[1] > accepted[0] + 0.05


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_noise_shared_with_the_drafts_is_found_out(
    world: World, shape: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(rows: SamplingRows, row: int, stream: Stream | None = None) -> int:
        return noise_key(rows.sampling[row].seed, 0, Stream.TARGET, rows.positions[row])

    monkeypatch.setattr(SamplingRows, "key", shared)
    assert fit(world, PLAIN, FEW, Drawing(world, shape, at_random=True)) < ALPHA


def test_a_guess_that_is_not_normalised_after_a_rejection_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify._normalised

    def forgetful(weights: Tensor, otherwise: Tensor) -> Tensor:
        return weights if weights is otherwise else right(weights, otherwise)

    monkeypatch.setattr(verify, "_normalised", forgetful)
    assert fit(world, PLAIN, FEW, Drawing(world, TREE, at_random=True)) < ALPHA


@pytest.mark.parametrize(("shape", "least"), [(CHAIN, 0.4), (TREE, 0.2)], ids=["chain", "tree"])
def test_drafts_that_compete_for_a_controller(world: World, shape: Sequence[int], least: float) -> None:
    assert fit(world, PLAIN, FEW, Trimmed(Drawing(world, shape, at_random=True), least)) > ALPHA


@pytest.mark.parametrize(("shape", "least"), [(CHAIN, 0.4), (TREE, 0.2)], ids=["chain", "tree"])
def test_pruning_by_drawn_probability_is_found_out(
    world: World, shape: Sequence[int], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "blind_confidence", lambda tree: tree.confidence)
    assert fit(world, PLAIN, FEW, Trimmed(Drawing(world, shape, at_random=True), least)) < ALPHA


class Growing:
    """Drafts as proposers with a network grow them."""

    def __init__(self, world: World, limits: GrowthLimits) -> None:
        self._draft = world.draft
        self._limits = limits
        self.forms: set[tuple[int, ...]] = set()

    def __call__(self, said: Said) -> DraftTree:
        tails = {ROOT: said.tail}

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            tails.update({leaf.node: (tails[leaf.parent][1], leaf.token) for leaf in frontier})
            return self._logits([tails[leaf.node] for leaf in frontier])

        step = ChoiceStep(0, said.tokens, len(PROMPT), 1, len(said.tokens) - 1, (0,), (), 6, said.params, draws=True)
        (tree,) = grow([step], self._logits([said.tail]), extend, None, self._limits)
        self.forms.add(tree.parents)
        return tree

    def _logits(self, tails: Sequence[tuple[int, int]]) -> Tensor:
        return self._draft[tuple(torch.tensor(tails).T)]


@pytest.mark.parametrize("branches", [1, 2], ids=["chain", "tree"])
def test_drafts_of_networks_are_drawn(world: World, branches: int) -> None:
    draft = Growing(world, GrowthLimits(max_depth=2, branches=branches))
    assert fit(world, SETTINGS, FEW, draft) > ALPHA
    assert draft.forms == {(ROOT, 0) if branches == 1 else (ROOT, 0, ROOT, 0, 2)}


def test_drafts_that_were_drawn_from_something_else_are_found_out(world: World) -> None:
    draft = Growing(world, GrowthLimits(max_depth=2))

    def lying(said: Said) -> DraftTree:
        evenly = DraftDistribution(torch.arange(VOCAB - 1), torch.ones(VOCAB - 1))
        tree = draft(said)
        return replace(tree, drawn_from=dict.fromkeys(tree.drawn_from or {}, evenly))

    assert fit(world, PLAIN, FEW, lying) < ALPHA


def test_what_the_budget_sees_does_not_depend_on_the_tokens() -> None:
    parents = (ROOT, ROOT, 0, 1, 0, ROOT)
    trees = [DraftTree((1, 2, 3, 4, 5, 6), parents, (value,) * 6) for value in (0.1, 0.9)]
    assert blind_confidence(trees[0]) == blind_confidence(trees[1])
    first, second, *below, third = blind_confidence(trees[0])
    assert first == below[0] == below[1] > second == below[2] > third


def drawn(scores: Tensor, fork: Fork, seeds: int) -> list[int]:
    """Tokens drawn at one position with seeds from 0."""
    state = SamplingState(seeds, scores.shape[-1], CPU)
    for seed in range(seeds):
        state.admit(seed, SamplingParams(seed=seed), ())
    tokens = RejectionDraw([fork] * seeds, TorchDraw(len(scores), CPU))(
        scores.expand(seeds, -1), state.rows(range(seeds))
    )
    return [tokens[row] for row in range(seeds)]


def test_a_draft_that_the_target_rules_out_never_stands() -> None:
    scores = torch.tensor([0.0, -torch.inf, 1.0])
    for weights in (None, [0.0, 1.0, 0.0], [0.1, 0.8, 0.1]):
        distribution = weights and DraftDistribution(torch.arange(3), torch.tensor(weights))
        tokens = drawn(scores, Fork((1,), distribution or None), 2000)
        assert set(tokens) == {0, 2}


def test_a_rejection_that_only_rounding_can_cause_leaves_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "uniform", lambda key, index: 1.0)
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    probs = torch.softmax(scores.double(), -1)
    tokens = drawn(scores, Fork((2,), DraftDistribution(torch.arange(VOCAB), probs)), 4000)
    assert chi_square_p(tokens, probs.numpy()) > ALPHA
    certain = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert set(drawn(certain, Fork((1,), None), 10)) == {1}


def test_weights_need_not_sum_to_one() -> None:
    scores = torch.tensor([0.3, 0.0, -0.5])
    forks = [Fork((0, 2), DraftDistribution(torch.tensor([2, 0]), torch.tensor([1.0, 3.0]) * by)) for by in (0.25, 7)]
    assert drawn(scores, forks[0], 500) == drawn(scores, forks[1], 500)


def test_a_crowd_equals_each_alone(world: World) -> None:
    shapes = itertools.cycle((CHAIN, TREE, ()))
    drafts = [Drawing(world, shape, at_random=index % 2 == 0) for index, shape in zip(range(60), shapes, strict=False)]
    together, alone = crowd(SETTINGS, "rejection", 60), crowd(SETTINGS, "rejection", 60)
    Speakers(world, together).speak(12, lambda one: drafts[one.params.seed](one))
    for one in alone:
        Speakers(world, [one]).speak(12, drafts[one.params.seed])
    assert [one.tokens for one in together] == [one.tokens for one in alone]
