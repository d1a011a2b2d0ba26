"""Drafts of one native call: the trees that `grow` grows in Python, and the best that float64 finds in all trees."""

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.heads.base import TargetShape
from model_runner.heads.hydra import HydraHeads, hydra_checkpoint
from model_runner.heads.loading import load_heads, save_heads
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.native.model import StoredEmbedding
from model_runner.native.packer import NativePacker
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import HydraProposer
from model_runner.speculative.proposer import ChoiceStep
from model_runner.weights.matrix import DenseMatrix
from tests.model_runner.kernels.drafting import (
    CASES,
    VOCABULARY,
    Case,
    choice_step,
    in_python,
    prepared,
    random_embedding,
    random_features,
    random_heads,
    target_step,
)
from tests.model_runner.oracles.draw import gumbel
from tests.model_runner.speculative.driving import check_tree

SIZES = (0, 1, 2, 3, 4, 6, 8, 16, 64)
WIDE = GrowthLimits(max_depth=3, branches=40, front=10_000, least=0.0, followed=0.0, candidates=40)
"""Nothing is left out."""
Floats = NDArray[np.float64]


def many_choices(count: int = 45) -> list[ChoiceStep]:
    return [choice_step(index, SIZES[index % len(SIZES)]) for index in range(count)]


def propose(
    heads: HydraHeads, case: Case, choices: list[ChoiceStep], limits: GrowthLimits | None = None
) -> list[DraftTree]:
    proposer = HydraProposer(heads, random_embedding(case), limits or GrowthLimits(case.depth))
    trees = proposer.propose(target_step(choices, random_features(case)))
    for tree, choice in zip(trees, choices, strict=True):
        check_tree(tree, choice.max_nodes)
    return trees


def assert_alike(tree: DraftTree, other: DraftTree) -> None:
    """Assert that trees are equal except for rounding."""
    assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
    assert tree.confidence == pytest.approx(other.confidence, rel=1e-3)


@pytest.mark.parametrize("kind", ["int8", "int8_rotated"])
@pytest.mark.parametrize("case", CASES)
def test_one_call_grows_the_trees_that_python_grows(kernels: Kernels, case: Case, kind: WeightKind) -> None:
    heads = prepared(kernels, random_heads(case), kind)
    choices = many_choices()
    trees = propose(heads, case, choices)
    for tree, other in zip(trees, propose(in_python(heads), case, choices), strict=True):
        assert_alike(tree, other)
    assert max(max(tree.depths(), default=0) for tree in trees) == case.depth
    assert max(map(len, trees)) > 4 or case.depth == 1


@pytest.mark.parametrize("case", CASES)
def test_a_tree_does_not_depend_on_company_or_threads(kernels: Kernels, kernels_library: Path, case: Case) -> None:
    choices = many_choices(100)  # so many that their logits are not all in memory at once
    heads = random_heads(case)
    together = propose(prepared(kernels, heads), case, choices)
    for threads in (1, 3):
        team = Kernels(kernels_library, threads, kernels.isa)
        assert propose(prepared(team, heads), case, choices[::-1]) == together[::-1]
    for index in (1, 4, 7, 8, 13, 99):
        assert propose(prepared(kernels, heads), case, [choices[index]]) == [together[index]]


class FloatHydra:
    """The definition of Hydra heads in float64."""

    def __init__(self, heads: HydraHeads, case: Case) -> None:
        self._weights = {name: weight.double().numpy() for name, weight in heads.state_dict().items()}
        self._embedding = random_embedding(case).weight.double().numpy()
        self._features = [feature.double().numpy() for feature in random_features(case).values()]
        self._num_layers = heads.shape.num_layers
        self.ids = list(range(heads.shape.draft_vocab)) if heads.draft_ids is None else heads.draft_ids.tolist()

    def logits(self, row: int, path: list[int]) -> Floats:
        """Logits after the tokens of the path, whose first token follows the one that the features belong to."""
        head = len(path) - 1
        hidden = np.concatenate([feature[row] for feature in self._features]) * self._weights["feature_scale"]
        joined = np.concatenate([hidden, *self._embedding[path]])
        state = self._product(f"hydra_mlp.{head}.0.res_connection", joined) + _silu(
            self._product(f"hydra_mlp.{head}.0.linear", joined)
        )
        for layer in range(1, self._num_layers):
            state = state + _silu(self._product(f"hydra_mlp.{head}.{layer}.linear", state))
        shared = "hydra_lm_head.weight" in self._weights
        return self._product("hydra_lm_head" if shared else f"hydra_lm_head.{head}", state)

    def _product(self, name: str, x: Floats) -> Floats:
        bias = self._weights.get(f"{name}.bias")
        product: Floats = self._weights[f"{name}.weight"] @ x
        return product if bias is None else product + bias

    def children(self, choice: ChoiceStep, path: list[int]) -> dict[int, float]:
        """The probability of every token after the path."""
        scores = self.logits(choice.rows[-1], path)
        if temperature := choice.sampling.temperature:
            log_probs = scores / temperature
            log_probs -= np.logaddexp.reduce(log_probs)
            key = choice.noise_key(len(path))
            scores = log_probs + [gumbel(key, token) for token in self.ids]
        return dict(zip(self.ids, np.exp(scores - np.logaddexp.reduce(scores)), strict=True))

    def full_tree(self, choice: ChoiceStep, depth: int) -> dict[tuple[int, ...], float]:
        """The probability of all paths of up to so many tokens."""
        tree: dict[tuple[int, ...], float] = {}
        front = {(): 1.0}
        for _ in range(depth):
            front = {
                (*path, token): above * probability
                for path, above in front.items()
                for token, probability in self.children(choice, [choice.tokens[-1], *path]).items()
            }
            tree |= front
        return tree


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(
    "case", [Case(37, draft_vocab=9, num_layers=2, shared_head=False), Case(40, draft_vocab=13, num_features=2)]
)
def test_the_nodes_are_the_best_of_all_trees(kernels: Kernels, case: Case) -> None:
    """Or nearly, as rows are rounded to 12 bits. The weights are such that they need not be rounded."""
    heads = random_heads(case)
    for weight in heads.parameters():
        if weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    oracle = FloatHydra(heads, case)
    choices = [choice_step(index, max_nodes) for index, max_nodes in enumerate((1, 2, 3, 5, 8, 13, 30, 30))]
    trees = propose(prepared(kernels, heads, "int8"), case, choices, WIDE)
    for choice, tree in zip(choices, trees, strict=True):
        assert len(tree) == choice.max_nodes
        probabilities = oracle.full_tree(choice, case.depth)
        paths = [tuple(tree.tokens[node] for node in tree.path(place)) for place in range(len(tree))]
        assert tree.survival() == pytest.approx([probabilities[path] for path in paths], abs=0.004)
        best = sorted(probabilities.values(), reverse=True)[: len(tree)]
        assert sum(probabilities[path] for path in paths) == pytest.approx(sum(best), abs=0.004)


@pytest.mark.parametrize("kind", ["int8", "int8_rotated"])
def test_hidden_states_may_be_much_larger_than_embeddings(kernels: Kernels, tmp_path: Path, kind: WeightKind) -> None:
    """In published heads, whose weights have learnt to be as much smaller."""
    case = Case(64, draft_vocab=53, num_features=2)
    heads, generator = random_heads(case), torch.Generator().manual_seed(3)
    size = 10 ** (torch.rand(2 * case.hidden, generator=generator) * 3)
    heads.feature_scale.fill_(1.0)
    for first in (mlp[0] for mlp in heads.hydra_mlp):  # type: ignore[index]
        for linear in (first.linear, first.res_connection):  # type: ignore[union-attr]
            linear.weight[:, : 2 * case.hidden] /= size  # type: ignore[operator, index]
    hidden = torch.randn(50, 2 * case.hidden, generator=generator) * size
    path = torch.randn(50, 2, case.hidden, generator=generator)
    config, tensors = hydra_checkpoint(heads, 8)
    save_heads(tmp_path, config, {n: t for n, t in tensors.items() if n != "feature_scale"}, dtype=torch.float32)
    loaded = load_heads(tmp_path, TargetShape(case.hidden, VOCABULARY, 8))
    assert isinstance(loaded, HydraHeads)
    expected = heads.head(2, hidden, path)
    joined = hidden * loaded.feature_scale
    torch.testing.assert_close(loaded.head(2, joined, path), expected, rtol=1e-4, atol=1e-4)
    error = (prepared(kernels, loaded, kind).head(2, joined, path) - expected).square().mean().sqrt()
    assert error < 0.05 * expected.std()


def test_the_embedding_is_scaled(kernels: Kernels) -> None:
    case = CASES[0]
    plain = random_embedding(case)
    scaled = StoredEmbedding(NativePacker(kernels, "int8"), DenseMatrix(plain.weight.detach()), 3.0)
    tripled = nn.Embedding.from_pretrained(plain.weight * 3)
    heads, step = prepared(kernels, random_heads(case)), target_step(many_choices(), random_features(case))
    trees = [HydraProposer(heads, embed, GrowthLimits(3)).propose(step) for embed in (plain, scaled, tripled)]
    assert trees[0] != trees[1] == trees[2]


def test_of_equals_the_first_tokens_are_taken(kernels: Kernels) -> None:
    case = Case(24, draft_vocab=2600)
    heads = random_heads(case)
    for parameter in heads.parameters():
        parameter.zero_()
    ids = heads.draft_ids
    assert ids is not None
    limits = GrowthLimits(1, branches=5, least=0.0, candidates=7)
    (tree,) = propose(prepared(kernels, heads), case, [choice_step(0, 5)], limits)
    assert tree.tokens == tuple(ids[:5].tolist())
    assert tree.confidence == pytest.approx([1 / 7] * 5)


@pytest.mark.parametrize("candidates", [1, 2, 39, 40, 41, 63, 64, 65, 2600])
def test_the_candidates_are_the_highest_logits(kernels: Kernels, candidates: int) -> None:
    """Wherever in the vocabulary they stand: the logits are each head's biases."""
    case = Case(24, depth=1, draft_vocab=2600, shared_head=False)
    for seed in range(5):
        heads = random_heads(case)
        for parameter in heads.parameters():
            parameter.zero_()
        bias = torch.randn(2600, generator=torch.Generator().manual_seed(seed))
        clusters = bias.sort().values if seed == 0 else bias.sort(descending=True).values if seed == 1 else bias
        logits: nn.Linear = heads.hydra_lm_head[0]  # type: ignore[index, assignment]
        logits.bias.copy_(clusters)
        limits = GrowthLimits(1, branches=candidates, least=0.0, candidates=candidates)
        (tree,) = propose(prepared(kernels, heads), case, [choice_step(0, candidates)], limits)
        values, columns = clusters.double().topk(candidates)
        assert heads.draft_ids is not None
        assert tree.tokens == tuple(heads.draft_ids[columns].tolist())
        assert tree.confidence == pytest.approx(values.softmax(-1).tolist(), rel=1e-12)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_drafts_nothing_and_harms_no_other(kernels: Kernels, number: float) -> None:
    case, choices = CASES[2], [choice_step(index, 4) for index in range(6)]
    heads, features = prepared(kernels, random_heads(case)), random_features(case)
    trees = {}
    for native in (heads, in_python(heads)):
        proposer = HydraProposer(native, random_embedding(case), GrowthLimits(3))
        healthy = proposer.propose(target_step(choices, features))
        broken = {need: feature.clone() for need, feature in features.items()}
        broken["layers.1"][choices[2].rows[-1], 5] = number
        trees = proposer.propose(target_step(choices, broken))
        assert trees == [*healthy[:2], NO_DRAFT, *healthy[3:]]
        assert all(map(len, healthy))


def test_drawn_drafts_say_what_they_were_drawn_from(kernels: Kernels) -> None:
    """Together with choices that use the native call."""
    case = CASES[0]
    heads = prepared(kernels, random_heads(case))
    choices = [choice_step(index, 6, draws=index % 2 == 1, temperature=1.0) for index in range(5)]
    trees = propose(heads, case, choices)
    assert [tree.drawn_from is not None for tree in trees] == [choice.draws for choice in choices]
    alone = [propose(heads, case, [choice])[0] for choice in choices]
    assert [(tree.tokens, tree.parents, tree.confidence) for tree in trees] == [
        (tree.tokens, tree.parents, tree.confidence) for tree in alone
    ]


def test_without_a_choice_that_wants_a_draft_there_is_none(kernels: Kernels) -> None:
    heads = prepared(kernels, random_heads(CASES[0]))
    assert propose(heads, CASES[0], []) == []
    assert propose(heads, CASES[0], [choice_step(index, 0) for index in range(3)]) == [NO_DRAFT] * 3


def test_heads_come_later_and_are_replaced(kernels: Kernels) -> None:
    case, choices = CASES[0], many_choices()
    first, second = (prepared(kernels, random_heads(case, seed)) for seed in range(2))
    shallow = Case(case.hidden, depth=2, draft_vocab=99)
    third = prepared(kernels, random_heads(shallow))
    step = target_step(choices, random_features(case))
    proposer = HydraProposer(None, random_embedding(case), GrowthLimits(case.depth), case.features)
    assert proposer.needs == set(case.features)
    assert proposer.propose(step) == [NO_DRAFT] * len(choices)
    for heads, its_case in ((first, case), (second, case), (third, shallow), (first, case)):
        proposer.replace_heads(heads)
        assert proposer.propose(step) == propose(heads, its_case, choices)
    assert propose(first, case, choices) != propose(second, case, choices)
    proposer.replace_heads(in_python(third))
    for tree, other in zip(proposer.propose(step), propose(third, shallow, choices), strict=True):
        assert_alike(tree, other)


def test_heads_that_take_other_features_are_refused(kernels: Kernels) -> None:
    case = CASES[0]
    heads, others = (prepared(kernels, random_heads(Case(case.hidden, num_features=count))) for count in (1, 2))
    proposer = HydraProposer(heads, random_embedding(case), GrowthLimits(3))
    with pytest.raises(ValueError, match=r"layers\.1"):
        proposer.replace_heads(others)
    both = HydraProposer(heads, random_embedding(case), GrowthLimits(3), others.needs)
    both.replace_heads(others)


def test_heads_are_prepared_while_others_draft(kernels: Kernels) -> None:
    """In another thread, without a trace in what is drafted meanwhile."""
    case, choices = CASES[2], many_choices(9)
    first, second = (prepared(kernels, random_heads(case, seed)) for seed in range(2))
    expected = [propose(heads, case, choices) for heads in (first, second)]
    proposer = HydraProposer(first, random_embedding(case), GrowthLimits(3))
    step = target_step(choices, random_features(case))
    beside: list[HydraHeads] = []

    def prepare() -> None:
        beside.extend(prepared(kernels, random_heads(case, 1)) for _ in range(3))

    thread = threading.Thread(target=prepare)
    thread.start()
    while thread.is_alive():
        assert proposer.propose(step) == expected[0]
    thread.join()
    assert len(beside) == 3
    for heads in beside:
        proposer.replace_heads(heads)
        assert proposer.propose(step) == expected[1]
