"""Builds batches by hand, for tests below the runner."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_runner.batch import Batch


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one choice, the first at position `start`."""

    tokens: Sequence[int]
    start: int
    blocks: list[int]


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """A batch of the chunks with logits for every token."""
    positions = np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks])
    choice_of = np.repeat(np.arange(len(chunks)), [len(c.tokens) for c in chunks])
    blocks = [chunks[c].blocks[p // block_size] for c, p in zip(choice_of, positions, strict=True)]
    return Batch(
        tokens=torch.tensor([token for c in chunks for token in c.tokens]),
        positions=torch.from_numpy(positions),
        position_of=positions,
        choice_of=choice_of,
        block_tables=[c.blocks for c in chunks],
        block_of=torch.tensor(blocks),
        offset_of=torch.from_numpy(positions % block_size),
        logits_index=torch.arange(len(positions)),
        sample_rows=torch.tensor([], dtype=torch.int64),
        sampled=[],
        prompt_rows=[],
    )
