"""Which tokens a draft vocabulary takes up, and which it lets go."""

import torch

from model_runner.learning.vocabulary import HALF_LIFE, TokenFrequencies, rows_for


def swaps(counts: TokenFrequencies, ids: list[int]) -> dict[int, int]:
    """Tokens that go, each with the one that comes."""
    rows, tokens = counts.swaps(torch.tensor(ids))
    return {ids[row]: token for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)}


def test_frequent_missing_tokens_replace_the_rarest() -> None:
    counts = TokenFrequencies(20)
    counts.add(torch.tensor([1] * 5 + [2] * 9 + [11] * 8 + [12] * 30 + [13] * 2))
    assert swaps(counts, [3, 2, 1, 7]) == {7: 12, 3: 11}  # of those that never occurred, the higher id goes first
    assert swaps(counts, [1, 2]) == {1: 12}
    assert swaps(counts, [2, 12, 11]) == {}
    assert swaps(counts, list(range(20))) == {}


def test_what_is_long_past_counts_little() -> None:
    counts = TokenFrequencies(10)
    counts.add(torch.full((60,), 1))
    for _ in range(6):
        counts.add(torch.full((HALF_LIFE,), 2))
    counts.add(torch.full((9,), 3))
    assert swaps(counts, [1, 2]) == {1: 3}
    early = TokenFrequencies(10)
    early.add(torch.tensor([1] * 60 + [3] * 9))
    assert swaps(early, [1, 2]) == {2: 3}


def test_new_rows_are_the_targets_where_training_has_changed_none() -> None:
    torch.manual_seed(0)
    known, wanted = torch.randn(300, 16), torch.randn(5, 16)
    torch.testing.assert_close(rows_for(wanted, known, known), wanted)


def test_new_rows_are_changed_as_training_changed_the_others() -> None:
    """Shrunk, turned and moved; the target's own rows would be far off."""
    torch.manual_seed(0)
    turn, shift = 0.5 * torch.randn(16, 16) / 4, torch.randn(16)
    known, wanted = torch.randn(300, 16) + 3.0, torch.randn(5, 16) + 3.0
    expected = wanted @ turn + shift
    found = rows_for(wanted, known, known @ turn + shift + 0.01 * torch.randn(300, 16))
    assert (found - expected).norm() < 0.1 * (wanted - expected).norm()
