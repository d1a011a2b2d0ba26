"""The part of a target's vocabulary that heads guess from (FR-Spec, arXiv:2502.14856)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from model_runner.training.examples import Example


def choose_draft_ids(examples: Iterable[Example], size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ascending [min(size, vocab_size)] int64.

    Among tokens equally frequent the lowest ids are taken: byte-pair vocabularies number tokens from frequent to rare.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.num_prompt :], minlength=vocab_size)
    frequent = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(frequent))


def positions_in(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] the place of each token in the draft vocabulary, -1 for those outside."""
    places = torch.full((vocab_size,), -1, dtype=torch.int64)
    places[draft_ids] = torch.arange(len(draft_ids))
    return places
