"""Trees that grow depth by depth, compared with the best part of the full tree."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.speculative.growing import FrontierNode, GrowthLimits, grow
from model_runner.speculative.proposer import ChoiceStep
from model_runner.speculative.verify import confidence_of_drawn
from tests.model_runner.oracles.draw import gumbel
from tests.model_runner.speculative.driving import check_tree

VOCABULARY = 50
IDS = np.arange(VOCABULARY) * 3 + 1
LIMITS = [
    GrowthLimits(4),
    GrowthLimits(1),
    GrowthLimits(3, branches=2, front=1, least=0.0, followed=0.0, candidates=9),
    GrowthLimits(5, branches=5, front=4, least=0.01, followed=0.05),
    GrowthLimits(3, branches=4, front=100, least=0.0, followed=0.0),
]
SIZES = (0, 1, 2, 3, 5, 8, 16, 100)
Path = tuple[int, ...]


def logits_after(path: Path) -> Tensor:
    """Logits of a network that differ after every path; sometimes one token is almost certain."""
    generator = torch.Generator().manual_seed(hash(path))
    return torch.randn(VOCABULARY, generator=generator) * (1 + 2 * (hash(path) % 3))


def choice_step(index: int, max_nodes: int, temperature: float, *, draws: bool = False) -> ChoiceStep:
    return ChoiceStep(
        slot=index,
        tokens=tuple(range(index + 2)),
        num_prompt=1,
        num_new=1,
        num_computed=index + 1,
        rows=(index,),
        blocks=(),
        max_nodes=max_nodes,
        sampling=SamplingParams(temperature=temperature, seed=index),
        draws=draws,
    )


class Network:
    """Returns logits, and records the nodes that it was asked for."""

    def __init__(self, steps: Sequence[ChoiceStep]) -> None:
        self.asked: list[tuple[int, Path]] = []
        self._paths: dict[tuple[int, int], Path] = {}
        self.first = torch.stack([logits_after((step.slot,)) for step in steps])

    def __call__(self, frontier: Sequence[FrontierNode]) -> Tensor:
        rows = []
        for leaf in frontier:
            above = self._paths.get((leaf.choice, leaf.parent), (leaf.step.slot,))
            path = self._paths[leaf.choice, leaf.node] = (*above, leaf.token)
            self.asked.append((leaf.choice, path[1:]))
            rows.append(logits_after(path))
        return torch.stack(rows)


def children_of(step: ChoiceStep, path: Path, limits: GrowthLimits) -> list[tuple[int, float]]:
    """Tokens and confidences, best first, by the definition."""
    logits = logits_after((step.slot, *path)).double().tolist()
    columns = sorted(range(VOCABULARY), key=lambda column: -logits[column])[: limits.candidates]
    scores = {int(IDS[column]): logits[column] / (step.sampling.temperature or 1.0) for column in columns}
    if step.sampling.temperature:
        key = step.noise_key(len(path) + 1)
        scores = {token: score + gumbel(key, token) for token, score in scores.items()}
    total = sum(math.exp(score) for score in scores.values())
    best = sorted(scores, key=lambda token: -scores[token])[: limits.branches]
    if step.draws:
        return [(token, confidence_of_drawn(elders)) for elders, token in enumerate(best)]
    return [(token, math.exp(scores[token]) / total) for token in best]


def everything(step: ChoiceStep, limits: GrowthLimits) -> dict[Path, float]:
    """The probability of all nodes that a tree may have, whatever its size: parents first, elder siblings first."""
    nodes: dict[Path, float] = {}
    front: dict[Path, float] = {(): 1.0}
    for _ in range(limits.max_depth):
        grown = {
            (*path, token): above * confidence
            for path, above in front.items()
            for token, confidence in children_of(step, path, limits)
            if above * confidence >= limits.least
        }
        nodes |= grown
        followed = sorted((path for path in grown if grown[path] >= limits.followed), key=lambda path: -grown[path])
        front = {path: grown[path] for path in followed[: limits.front]}
    return nodes


def paths_of(tree: DraftTree) -> list[Path]:
    return [tuple(tree.tokens[node] for node in tree.path(place)) for place in range(len(tree))]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
def test_the_best_of_everything_is_kept(limits: GrowthLimits, draws: bool) -> None:
    heats = (1.0, 0.5) if draws else (0.0, 1.0, 0.3)
    steps = [
        choice_step(index, SIZES[index % len(SIZES)], heats[index % len(heats)], draws=draws) for index in range(60)
    ]
    network = Network(steps)
    for step, tree in zip(steps, grow(steps, network.first, network, IDS, limits), strict=True):
        check_tree(tree, step.max_nodes)
        nodes = everything(step, limits)
        best = sorted(nodes, key=lambda path: -nodes[path])[: step.max_nodes]
        assert paths_of(tree) == best
        assert tree.survival() == pytest.approx([nodes[path] for path in best])


@pytest.mark.parametrize("limits", LIMITS)
def test_only_what_may_lead_to_one_of_the_best_is_run(limits: GrowthLimits) -> None:
    """A node is extended only if it is above the last node that would be kept down to its depth."""
    steps = [choice_step(index, SIZES[index % len(SIZES)], index % 2) for index in range(60)]
    network = Network(steps)
    grow(steps, network.first, network, IDS, limits)
    num_pruned = 0
    for index, step in enumerate(steps):
        asked = {path for choice, path in network.asked if choice == index}
        nodes = everything(step, limits)
        for path in asked:
            known = sorted((nodes[other] for other in nodes if len(other) <= len(path)), reverse=True)
            assert len(known) < step.max_nodes or nodes[path] > known[step.max_nodes - 1]
        unlimited = Network([step])
        grow([replace(step, max_nodes=10_000)], unlimited.first, unlimited, IDS, limits)
        num_pruned += len(unlimited.asked) - len(asked)
        assert asked <= {path for _, path in unlimited.asked}
        if step.max_nodes == 1:
            assert not asked
    assert num_pruned > 0 or limits.max_depth == 1


def test_a_tree_does_not_depend_on_company() -> None:
    steps = [choice_step(index, 6, (0.0, 1.0, 0.3)[index % 3]) for index in range(9)]
    network = Network(steps)
    trees = grow(steps, network.first, network, IDS, LIMITS[0])
    for step, tree in zip(steps, trees, strict=True):
        alone = Network([step])
        assert grow([step], alone.first, alone, IDS, LIMITS[0]) == [tree]


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_drafts_nothing(number: float, temperature: float) -> None:
    steps = [choice_step(index, 6, temperature) for index in range(3)]
    network = Network(steps)
    healthy = grow(steps, network.first, network, IDS, LIMITS[0])
    network.first[1, 7] = number
    assert grow(steps, network.first, network, IDS, LIMITS[0]) == [healthy[0], NO_DRAFT, healthy[2]]


def test_the_tiniest_temperature_is_the_greediest() -> None:
    hot, cold = (choice_step(3, 6, temperature) for temperature in (0.0, 1e-320))
    network = Network([hot])
    (greedy,), (tiny,) = (grow([step], network.first, network, IDS, GrowthLimits(1)) for step in (hot, cold))
    assert tiny.tokens == greedy.tokens[:1]
    assert tiny.confidence == (1.0,)
    assert tiny.parents == (ROOT,)
