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
