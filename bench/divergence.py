"""How far a configuration's distributions are from others: at every place of texts, over the whole vocabulary."""

import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from model_runner.assemble import assemble
from model_runner.batch import Batch
from model_runner.config import RunnerConfig


def log_probabilities(config: RunnerConfig, texts: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Of what follows each token of each text, [tokens, vocab] float32: each text in one step, one after the other."""
    parts, info = assemble(config)
    for text in texts:
        positions = np.arange(len(text))
        batch = Batch(
            tokens=np.array(text, dtype=np.int64),
            positions=positions,
            choice_of=np.zeros_like(positions),
            block_tables=[array("i", range(-(-len(text) // info.block_size)))],
            block_of=positions // info.block_size,
            offset_of=positions % info.block_size,
            logits_index=positions,
            samples=[],
            prompt_rows=[],
        )
        yield parts.target.forward(batch).log_softmax(-1)


def divergence(reference: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """Kullback and Leibler's, of the other from the reference, in nats: the mean over all places [tokens, vocab]."""
    of_texts = [
        (one.exp() * (one - another)).sum(-1).mean().item() for one, another in zip(reference, other, strict=True)
    ]
    return statistics.mean(of_texts)
