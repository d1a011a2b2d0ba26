"""The layers that DoLa asks, and what it makes of their answers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from model_runner.contract import DoLa
from model_runner.scoring.transforms import candidate_layers, divergence


@pytest.mark.parametrize(
    ("layers", "num_layers", "tied", "expected"),
    [
        ("low", 32, False, range(0, 16, 2)),  # the paper's, for LLaMA 7B ...
        ("high", 32, False, range(16, 32, 2)),
        ("low", 80, False, range(0, 20, 2)),  # ... and 65B
        ("high", 80, False, range(60, 80, 2)),
        ("low", 30, True, range(2, 15, 2)),
        ("high", 30, True, range(15, 30, 2)),
        ("low", 41, False, range(0, 20, 2)),
        ("high", 41, False, range(21, 41, 2)),
        ("low", 1, False, (0,)),
        ("low", 1, True, (0,)),
        ("low", 3, True, (2,)),
        ("high", 1, True, (0,)),
        ((0, 7), 8, True, (0, 7)),
    ],
)
def test_the_candidates(layers: "DoLa.layers", num_layers: int, tied: bool, expected: Sequence[int]) -> None:
    assert list(candidate_layers(DoLa(layers), num_layers, ties_embeddings=tied)) == list(expected)


def test_there_is_always_a_candidate() -> None:
    for num_layers in range(1, 100):
        for tied in (False, True):
            for half in ("low", "high"):
                found = candidate_layers(DoLa(half), num_layers, ties_embeddings=tied)
                assert found
                assert all(0 <= layer < num_layers for layer in found)


def test_the_divergence_is_jensen_and_shannons() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5
    logits[0, :100] = -torch.inf
    p, q = logits[:3].log_softmax(-1), logits[3:].log_softmax(-1)
    expected = [jensenshannon(one, other) ** 2 for one, other in zip(p.exp().numpy(), q.exp().numpy(), strict=True)]
    np.testing.assert_allclose(divergence(p, q).numpy(), expected, rtol=1e-9)
    for row in range(3):
        assert torch.equal(divergence(p[row : row + 1], q[row : row + 1])[0], divergence(p, q)[row])
