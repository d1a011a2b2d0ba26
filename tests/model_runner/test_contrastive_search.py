"""The hidden states that contrastive search compares with."""

import pytest
import torch

from model_runner.scoring.contrastive_search import HiddenStates


@pytest.mark.parametrize("sizes", [[2100], [1] * 40, [7, 1, 30, 500, 1, 1]])
def test_similarity_is_the_highest_cosine_and_bits_do_not_depend_on_chunks(sizes: list[int]) -> None:
    torch.manual_seed(1)
    hidden, candidates = torch.randn(sum(sizes), 72), torch.randn(5, 72)
    chunked, whole = HiddenStates(1024), HiddenStates(1024)
    for start, size in zip([sum(sizes[:i]) for i in range(len(sizes))], sizes, strict=True):
        chunked.put(start, hidden[start : start + size])
    whole.put(0, hidden)
    for count in {1, sum(sizes) // 2, sum(sizes)}:
        found = chunked.similarity(candidates, count)
        cosines = torch.cosine_similarity(candidates.double()[:, None], hidden.double()[None, :count], dim=-1)
        assert found == pytest.approx(cosines.amax(1).tolist(), abs=1e-6)
        assert found == whole.similarity(candidates, count)


def test_a_token_that_is_computed_again_takes_its_place() -> None:
    states = HiddenStates(1024)
    states.put(0, torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    states.put(1, torch.tensor([[0.0, -3.0], [5.0, 0.0]]))
    assert states.similarity(torch.tensor([[0.0, 4.0]]), 3) == [0.0]
    assert states.similarity(torch.tensor([[0.0, -4.0]]), 3) == [1.0]
    assert states.similarity(torch.zeros(1, 2), 3) == [0.0]
