"""Hydra heads in training: where they learn, and what they take over from trained ones."""

import numpy as np
import pytest
import torch

from model_runner.features import LAST, Feature
from model_runner.heads.base import Example, TargetShape
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.training.hydra import REACHED, HydraObjective, fresh_hydra, take_over
from model_runner.training.objective import Guess, Judge, answer_rows
from model_runner.training.teacher import TargetWeights

HIDDEN, VOCAB, DEPTH = 12, 40, 3
IDS = torch.arange(0, VOCAB, 2)
CPU = torch.device("cpu")


@pytest.fixture
def target() -> TargetWeights:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN).requires_grad_(requires_grad=False)
    return TargetWeights(TargetShape(HIDDEN, VOCAB, 8), embedding, torch.randn(VOCAB, HIDDEN), 1.0, None)


def examples(features: tuple[Feature, ...]) -> list[Example]:
    source = np.random.default_rng(0)
    lengths = (9, 2, 30, 17)
    return [
        Example(
            source.integers(0, VOCAB, length + 3),
            3,
            0.0,
            {need: (source.normal(size=(length + 3, HIDDEN)) * 90).astype(np.float16) for need in (*features, LAST)},
        )
        for length in lengths
    ]


def heads(
    target: TargetWeights, num_layers: int, ids: torch.Tensor, *features: Feature, depth: int = DEPTH
) -> HydraHeads:
    made = fresh_hydra(target, ids, depth, num_layers, features, examples(features))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def test_a_head_learns_where_the_ones_before_it_were_nearly_right(target: TargetWeights) -> None:
    judge = Judge(target, IDS.clone(), CPU, torch.float32)
    features = ("layers.5",)
    objective = HydraObjective(heads(target, 1, IDS, *features), judge, examples(features))
    judge.replace(torch.tensor([2, 9]), torch.tensor([33, 7]))
    rows = answer_rows(examples(features), (*features, LAST), CPU)
    in_training = list(objective.guesses(examples(features)))
    objective.heads.eval()
    everywhere = list(objective.guesses(examples(features)))
    reached = torch.ones(len(rows.tokens), dtype=torch.bool)
    for depth, (trained, full) in enumerate(zip(in_training, everywhere, strict=True), 1):
        assert full.rows.tolist() == (rows.left >= depth).nonzero().flatten().tolist()
        expected = full.rows[reached[full.rows]]
        assert torch.equal(trained.rows, expected)
        best = judge.draft_ids[full.logits.topk(REACHED).indices]
        now = torch.zeros_like(reached)
        now[full.rows] = (best == full.tokens.unsqueeze(1)).any(1)
        reached &= now
    assert 0 < len(in_training[1].rows) < len(everywhere[1].rows)


def test_the_loss_is_the_mean_over_all_guesses_of_tokens_that_can_be_guessed(target: TargetWeights) -> None:
    judge = Judge(target, IDS, CPU, torch.float32)
    guesses = [
        Guess(torch.arange(n), torch.randn(n, len(IDS)), torch.randint(VOCAB, (n,)), torch.randn(n, HIDDEN))
        for n in (7, 1, 4)
    ]
    each = [
        torch.nn.functional.cross_entropy(
            guess.logits[row : row + 1], (guess.teacher[row] @ target.head[IDS].T).softmax(0)[None]
        )
        for guess in guesses
        for row in range(len(guess.tokens))
        if guess.tokens[row] % 2 == 0
    ]
    torch.testing.assert_close(judge.loss(guesses), torch.stack(each).mean())


def test_larger_heads_begin_with_what_smaller_ones_know(target: TargetWeights) -> None:
    ids = IDS[torch.randperm(len(IDS))]  # as where tokens were replaced
    trained = heads(target, 2, ids, "layers.5", depth=2)
    more = torch.arange(VOCAB - 3)
    fresh = heads(target, 3, more, "layers.2", "layers.5", LAST)
    last = {name: value.clone() for name, value in fresh.state_dict().items() if name.startswith("hydra_mlp.2")}
    rows_of_others = fresh.hydra_lm_head.weight[1::2].clone()  # type: ignore[union-attr, index]
    take_over(fresh, trained)
    features = {need: torch.randn(6, HIDDEN) * 50 for need in ("layers.2", "layers.5", LAST)}
    path = torch.randn(6, 2, HIDDEN)
    for index in (1, 2):
        logits = fresh.head(index, fresh.join(features), path[:, :index])
        expected = trained.head(index, trained.join(features), path[:, :index])
        known = torch.isin(ids, more)
        torch.testing.assert_close(logits[:, ids[known]], expected[:, known], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in last.items())
    assert torch.equal(fresh.hydra_lm_head.weight[1::2], rows_of_others)  # type: ignore[union-attr, index]


def test_heads_that_would_lose_something_are_refused(target: TargetWeights) -> None:
    fresh = heads(target, 2, IDS, "layers.5")
    for other in (heads(target, 3, IDS, "layers.5"), heads(target, 1, IDS, "layers.4")):
        with pytest.raises(ValueError, match="the initial heads use"):
            take_over(fresh, other)
    apart = HydraHeads(HydraShape(HIDDEN, 2, 1, len(IDS), shared_head=False, features=("layers.5",)), IDS)
    with pytest.raises(ValueError, match="an output matrix each"):
        take_over(fresh, apart)
