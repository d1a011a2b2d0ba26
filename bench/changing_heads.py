"""In a learner's place: heads that change every few steps, for no better ones."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from model_runner.learning.link import Begin, LearnerReport, Piece
from model_runner.learning.store import pack_learnt
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.heads.loading import load_heads
from model_runner.models.loading import load_config

STEPS = 3
"""From one change to the next."""
_VERSIONS = 2
_NOISE = 0.2
"""Of the weights' own deviation."""


class ChangingHeads:
    """Implements LearnerLink: takes pieces and gives the heads that it is begun with, each time with other noise."""

    def __init__(self, begin: Begin, prepare: Callable[[bytes], Heads]) -> None:
        """Raises ValueError if there are no heads to begin with."""
        if begin.heads is None:
            raise ValueError("there are no heads that could change; name some")
        self.is_open = True
        self.num_dropped = 0
        self.report: LearnerReport | None = None
        target = TargetShape.of(load_config(Path(begin.model)))
        checkpoints = [_noisy(Path(begin.heads), target, seed) for seed in range(_VERSIONS)]
        self._versions = cycle([prepare(checkpoint) for checkpoint in checkpoints])
        self._num_steps = 0

    def start(self) -> None:
        """See LearnerLink."""

    def offer(self, piece: Piece) -> None:
        """See LearnerLink."""

    def take_heads(self) -> Heads | None:
        """See LearnerLink."""
        self._num_steps += 1
        return next(self._versions) if self._num_steps % STEPS == 0 else None

    def close(self) -> None:
        """See LearnerLink."""


def _noisy(folder: Path, target: TargetShape, seed: int) -> bytes:
    """The heads in a folder with noise in all of their weights, as they come from a learner."""
    heads = load_heads(folder, target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            deviation = weight.std() if weight.numel() > 1 else weight.abs()
            weight.add_(torch.randn(weight.shape, generator=generator) * deviation * _NOISE)
    return pack_learnt(heads, seed + 1, "", target.num_layers)
