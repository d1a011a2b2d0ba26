"""A learner's stand-in whose heads change every few steps without improving."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from model_runner.heads.base import Example, Heads, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.learning.link import Begin, ProcessLink
from model_runner.learning.store import pack_learnt
from model_runner.modules.loading import load_config

STEPS = 3
"""Steps between two changes."""
_VERSIONS = 2
_NOISE = 0.2
"""Standard deviation of the noise, relative to the weights'."""


class ChangingHeads(ProcessLink):
    """Has no process: ignores pieces, and returns the initial heads with varying noise."""

    def __init__(self, begin: Begin, prepare: Callable[[bytes], Heads]) -> None:
        """Raises ValueError if there are no heads to begin with."""
        if begin.heads is None:
            raise ValueError("no heads were given; name heads that can be changed")
        super().__init__(begin, prepare)
        self.is_open = True
        target = TargetShape.of(load_config(Path(begin.model)))
        checkpoints = [_noisy(Path(begin.heads), target, seed) for seed in range(_VERSIONS)]
        self._versions = cycle([prepare(checkpoint) for checkpoint in checkpoints])
        self._num_steps = 0

    def start(self) -> None:
        """There is nothing to start."""

    def offer(self, piece: Example) -> None:
        """Ignore a piece."""

    def take_heads(self) -> Heads | None:
        """The next version of the heads at every `STEPS`-th call, otherwise None."""
        self._num_steps += 1
        return next(self._versions) if self._num_steps % STEPS == 0 else None

    def close(self) -> None:
        """There is nothing to close."""


def _noisy(folder: Path, target: TargetShape, seed: int) -> bytes:
    """The heads in a folder with noise added to all weights, packed as a learner sends them."""
    heads = load_heads(folder, target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            deviation = weight.std() if weight.numel() > 1 else weight.abs()
            weight.add_(torch.randn(weight.shape, generator=generator) * deviation * _NOISE)
    return pack_learnt(heads, seed + 1, "", target.num_layers)
