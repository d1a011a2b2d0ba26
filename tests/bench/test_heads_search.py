"""The worth of drafts: the best tree, found by trying all, and the noise that sampled tokens came from."""

import itertools

import pytest
import torch

from bench import draft_worth
from bench.draft_worth import NoisyJudge, worth
from bench.heads_search import Variant
from model_runner.features import LAST
from model_runner.heads.base import TargetShape
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.training.objective import RANKS
from model_runner.training.teacher import TargetWeights


def test_the_best_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_worth, "_STEP_MS", (1.0, 1.2, 1.3, 1.4, 2.0, 4.0, 8.0))
    heads = HydraHeads(HydraShape(8, 2, 1, 16, shared_head=True))
    ranks = torch.tensor([[0, 0]] * 5 + [[0, 1]] * 2 + [[1, 0]] * 3 + [[2, 2], [RANKS, -1], [0, -1]])
    paths = [*((first,) for first in range(3)), *itertools.product(range(3), range(3))]
    best = 1.0
    for size in range(1, 5):
        for tree in itertools.combinations(paths, size):
            if all(len(path) == 1 or path[:1] in tree for path in tree):
                hits = sum(tuple(row[: len(path)]) == path for path in tree for row in ranks.tolist())
                took = draft_worth._step_ms(1 + size) + draft_worth._draft_ms(heads, max(map(len, tree)))
                best = max(best, (1 + hits / len(ranks)) / took)
    found = worth(ranks, heads)
    assert found.speedup == pytest.approx(best)
    assert 0 < found.nodes <= 4


def test_heads_that_know_the_distribution_draw_what_the_target_drew() -> None:
    torch.manual_seed(0)
    vocab, hidden = 50, 16
    target = TargetWeights(
        TargetShape(hidden, vocab, 2), torch.nn.Embedding(vocab, hidden), torch.randn(vocab, hidden), 1.0, None
    )
    ids = torch.arange(0, vocab, 2)
    judge = NoisyJudge(target, ids, torch.float32)
    states = torch.randn(2000, hidden) * 0.5
    logits = states @ target.head.T
    tokens = logits.softmax(1).multinomial(1).squeeze(1)
    drafted = tokens % 2 == 0
    judge.temperature = 1.0
    first = judge.guessed_best(logits[:, ids], tokens, states)[:, 0]
    assert torch.equal(first, drafted)
    wrong = judge.guessed_best(torch.zeros(2000, len(ids)), tokens, states)[:, 0]
    assert 0.1 < wrong.float().mean() < 0.9 * drafted.float().mean()
    judge.temperature = 0.0
    assert torch.equal(
        judge.guessed_best(logits[:, ids], tokens, states)[:, 0], ids[logits[:, ids].argmax(1)] == tokens
    )


def test_variants_are_what_they_say() -> None:
    variant = Variant.parse("hydra layers=2 features=15,last lr=0.0005")
    assert Variant.parse(str(variant)) == variant
    assert (variant.layers, variant.lr, variant.needs) == (2, 0.0005, ("layers.15", LAST))
