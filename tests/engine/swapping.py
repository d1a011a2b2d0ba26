"""Heads that change under those who draft with them, every few steps."""

from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path

import torch

from model_runner.config import RunnerConfig
from model_runner.heads.base import Example, Heads, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.learning.link import Begin, ProcessLink
from model_runner.modules.loading import load_config
from model_runner.platforms.choose import choose_platform
from model_runner.runner import ModelRunner
from model_runner.speculative.heads import method_of

STEPS = 3
"""From one change to the next."""


class ListeningLink(ProcessLink):
    """Keeps the pieces, and has no learner at all."""

    def __init__(self, begin: Begin, prepare: Callable[[bytes], Heads]) -> None:
        super().__init__(begin, prepare)
        self.is_open = True
        self.begin = begin
        self.prepare = prepare
        self.pieces: list[Example] = []

    def start(self) -> None:
        pass

    def offer(self, piece: Example) -> None:
        self.pieces.append(piece)

    def take_heads(self) -> Heads | None:
        return None

    def close(self) -> None:
        self.is_open = False


class SwappingLink(ListeningLink):
    """Gives other random heads every few steps, of every kind in turn."""

    heads: list[Heads]

    def start(self) -> None:
        self._next = cycle(self.heads)
        self._num_steps = 0
        self.num_swaps = 0

    def take_heads(self) -> Heads | None:
        self._num_steps += 1
        if self._num_steps % STEPS:
            return None
        self.num_swaps += 1
        return next(self._next)


def load_swapping(
    config: RunnerConfig, writers: Mapping[str, Callable[[Path], Path]], folder: Path
) -> tuple[ModelRunner, SwappingLink]:
    """A runner whose heads change as it runs: to those that the writers write, by method, with several seeds."""
    platform = choose_platform(config)
    links: list[SwappingLink] = []

    def make_link(begin: Begin, prepare: Callable[[bytes], Heads]) -> SwappingLink:
        links.append(SwappingLink(begin, prepare))
        links[0].heads = []
        for seed in range(2):
            for method, write in writers.items():
                torch.manual_seed(seed)
                heads = load_heads(write(folder / f"{method}-{seed}"), TargetShape.of(load_config(config.model)))
                platform.prepare_heads(heads)
                links[0].heads.append(heads)
        return links[0]

    runner = ModelRunner.load(config, platform, make_link)
    proposers = runner._speculator._proposers
    runner._learning._replace_heads = lambda heads: proposers[method_of(heads.kind)].replace_heads(heads)  # type: ignore[attr-defined]
    return runner, links[0]
