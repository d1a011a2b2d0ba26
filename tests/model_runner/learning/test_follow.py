"""Which tokens a draft vocabulary takes up, and which it lets go."""

import torch

from model_runner.learning.vocabulary import HALF_LIFE, TokenCounts


def swaps(counts: TokenCounts, ids: list[int]) -> dict[int, int]:
    """Tokens that go, each with the one that comes."""
    rows, tokens = counts.swaps(torch.tensor(ids))
    return {ids[row]: token for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)}


def test_frequent_missing_tokens_replace_the_rarest() -> None:
    counts = TokenCounts(20)
    counts.add(torch.tensor([1] * 5 + [2] * 9 + [11] * 8 + [12] * 30 + [13] * 2))
    assert swaps(counts, [3, 2, 1, 7]) == {7: 12, 3: 11}  # of those that never occurred, the higher id goes first
    assert swaps(counts, [1, 2]) == {1: 12}
    assert swaps(counts, [2, 12, 11]) == {}
    assert swaps(counts, list(range(20))) == {}


def test_what_is_long_past_counts_little() -> None:
    counts = TokenCounts(10)
    counts.add(torch.full((60,), 1))
    for _ in range(6):
        counts.add(torch.full((HALF_LIFE,), 2))
    counts.add(torch.full((9,), 3))
    assert swaps(counts, [1, 2]) == {1: 3}
    early = TokenCounts(10)
    early.add(torch.tensor([1] * 60 + [3] * 9))
    assert swaps(early, [1, 2]) == {2: 3}
