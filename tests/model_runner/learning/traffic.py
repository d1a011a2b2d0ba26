"""Made-up traffic of a tiny target: what follows a token is always the same, and the target knows it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from model_runner.features import LAST
from model_runner.heads.base import Example
from model_runner.training.teacher import TargetWeights

FEATURE = "layers.0"
PIECE = 40


def cycle_of(tokens: Sequence[int]) -> Callable[[int], int]:
    """Each of the tokens is followed by the next one, the last one by the first."""
    following = dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))
    return following.__getitem__


def pieces(
    target: TargetWeights, tokens: Sequence[int], count: int, seed: int, *, is_random: bool = False
) -> list[Example]:
    """Pieces that begin anywhere in a cycle; random ones are of tokens that have nothing to do with each other."""
    follow = cycle_of(tokens)
    source = np.random.default_rng(seed)
    embedded = target.embedding(torch.arange(target.shape.vocab_size)).numpy()
    head = target.head.numpy()
    made = []
    for _ in range(count):
        sequence = [int(source.choice(tokens))]
        while len(sequence) < PIECE + 1:
            sequence.append(int(source.choice(tokens)) if is_random else follow(sequence[-1]))
        row = np.array(sequence[:-1])
        known = np.array(sequence[1:])
        made.append(
            Example(
                row,
                num_prompt=1,
                temperature=0.0,
                features={
                    FEATURE: (embedded[row] + source.normal(0, 0.01, embedded[row].shape)).astype(np.float16),
                    LAST: (3 * head[known]).astype(np.float16),
                },
            )
        )
    return made
