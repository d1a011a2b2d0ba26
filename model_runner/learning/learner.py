"""Trains heads on what arrives, and decides which version is to be used.

The loop of online speculative decoding (Liu et al., arXiv:2310.07177): the target's own distributions teach the heads
while it serves. Here each piece of traffic goes through two stages. First it is a test: the heads in use, those before
them, the first ones and the candidate in training all guess it (trial.py). Only then it is put into the ring, and is
learnt from. From the tests follow the decisions:

    candidate likely better than those in use    -> it is published
    an older version clearly better than those   -> that one is published again, and training goes on from it
    candidate clearly worse than those in use    -> training starts again from those
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from model_runner.learning.plan import BATCH_ROWS, FRESH_DEPTH, FRESH_DRAFT_VOCAB, learning_needs
from model_runner.learning.ring import Ring
from model_runner.learning.trainee import Trainee
from model_runner.learning.trial import CLEAR, LIKELY, Comparison, Rate, Tally, judge
from model_runner.learning.vocabulary import TokenCounts
from model_runner.models.heads.base import Heads
from model_runner.models.heads.hydra import hydra_features
from model_runner.training.examples import Example
from model_runner.training.hydra import fresh_hydra
from model_runner.training.objective import Objective
from model_runner.training.objectives import depth_of, judge_of, objective_of
from model_runner.training.rows import answer_rows
from model_runner.training.teacher import TargetWeights
from model_runner.training.vocabulary import choose_draft_ids

logger = logging.getLogger("samewise.learning")

PASSES = 3
"""Times that a token is trained on, on average: what has been learnt well enough takes no more power."""
_LEAST_BATCHES = 2
"""With less than that in the ring, what is learnt is the ring by heart."""
PUBLISH_EVERY_S = 30.0
"""At most: to pack heads for its kernels costs the engine some milliseconds."""
_FOLLOW_EVERY = 32
"""Steps between looks at the vocabulary."""


class Packer(Protocol):
    """Turns heads into what is published, and back."""

    def pack(self, heads: Heads, version: int) -> bytes:
        """Raises nothing."""
        ...

    def load(self, checkpoint: bytes) -> Heads:
        """Raises HeadsError."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """What there is when learning begins; the heads are taken over."""

    first: Heads | None
    """What the engine began with, if anything."""
    learnt: Heads | None = None
    """What an earlier run made of it."""
    version: int = 0
    """Of the newest heads that there ever were."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Heads that the engine shall use from now on."""

    version: int
    checkpoint: bytes


class Learner:
    """Takes pieces, trains, publishes."""

    def __init__(
        self,
        target: TargetWeights,
        start: Start,
        packer: Packer,
        ring: Ring,
        dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Products of training run in `dtype`. Raises ValueError if heads of their kind cannot learn."""
        self._target = target
        self._packer = packer
        self._ring = ring
        self._dtype = dtype
        self._clock = clock
        self._source = random.Random(0)
        self._depth = FRESH_DEPTH if start.first is None else depth_of(start.first)
        self._needs = learning_needs(start.first, target.shape)
        self._counts = TokenCounts(target.shape.vocab_size)
        self._credit = 0
        self._published_at = clock()
        self._first = self._objective(start.first)
        self._previous: Objective | None = None
        self._current = self._first if start.learnt is None else self._objective(start.learnt)
        self._trainee: Trainee | None = None
        self._rates = {"first": Rate(), "current": Rate()}
        self._begin_trial()
        self.version = start.version
        self.steps = self.tokens = self.published = self.rolled_back = 0

    @property
    def first(self) -> float | None:
        """Tokens per step that the first heads would give on what came in lately."""
        return self._rates["first"].value

    @property
    def current(self) -> float | None:
        """The same of those in use."""
        return self._rates["current"].value

    @property
    def held(self) -> int:
        """Tokens that can be trained on."""
        return self._ring.num_answer

    @property
    def has_work(self) -> bool:
        """Whether `train` has something to do. There is no end to what could be learnt from a ring; this one ends."""
        return self._credit > 0 and self.held >= _LEAST_BATCHES * BATCH_ROWS

    def take(self, pieces: Sequence[Example]) -> None:
        """Test all versions on the pieces, then remember these. Those that are not of numbers teach nothing."""
        pieces = [one for one in pieces if one.num_answer > 0 and _is_finite(one)]
        if not pieces:
            return
        self._test(pieces)
        for piece in pieces:
            self._ring.add(piece)
            self._counts.add(torch.from_numpy(piece.tokens[piece.num_prompt :]))
            self.tokens += piece.num_answer
            self._credit += PASSES * piece.num_answer
        self._credit = min(self._credit, PASSES * self.held)

    def train(self) -> None:
        """One step on a batch of what is remembered."""
        if self._trainee is None:
            self._trainee = self._new_trainee()
        if self._trainee.steps % _FOLLOW_EVERY == 0:
            self._trainee.follow(self._counts)
        self._credit -= BATCH_ROWS
        self.steps += 1
        if not self._trainee.step(self._ring.batch(BATCH_ROWS, self._source)):
            logger.warning("training left the range of numbers; it starts again from the heads in use")
            self._restart()

    def decide(self, *, is_last: bool = False) -> Publication | None:
        """What is to be used from now on, if that should be something else; the last time without regard to when."""
        rate = self.current or 1.0
        better = {name: trial for name, trial in self._older.items() if trial.is_gain(rate, CLEAR)}
        if better:
            return self._roll_back(max(better, key=lambda name: better[name].mean))
        if self._candidate.is_loss(rate, CLEAR):
            self._restart()
        is_time = is_last or self._clock() - self._published_at >= PUBLISH_EVERY_S
        if is_time and self._candidate.is_gain(rate, LIKELY):
            return self._publish()
        return None

    def _test(self, pieces: Sequence[Example]) -> None:
        """Have every version guess the pieces, each once."""
        known: dict[int, list[Tally]] = {}

        def tallies(heads: Objective | None) -> list[Tally]:
            if id(heads) not in known:
                known[id(heads)] = judge(heads, pieces, self._depth)
            return known[id(heads)]

        current, first = tallies(self._current), tallies(self._first)
        for rate, seen in (("current", current), ("first", first)):
            for tally in seen:
                self._rates[rate].add(tally)
        trials = [(trial, tallies(self._named(name))) for name, trial in self._older.items()]
        if self._trainee is not None:
            with self._trainee.candidate() as candidate:
                trials.append((self._candidate, judge(candidate, pieces, self._depth)))
        for trial, seen in trials:
            for one, other in zip(seen, current, strict=True):
                trial.add(one, other)

    def _named(self, name: str) -> Objective | None:
        return self._first if name == "first" else self._previous

    def _begin_trial(self) -> None:
        """Whenever other heads are in use: what was compared with those before says nothing about them."""
        self._candidate = Comparison()
        older = {"first": self._first, "previous": self._previous}
        self._older = {
            name: Comparison() for name, heads in older.items() if heads is not None and heads is not self._current
        }

    def _publish(self) -> Publication:
        assert self._trainee is not None
        before, gain, first = self.current or 1.0, self._candidate.mean, self.first or 1.0
        with self._trainee.candidate() as candidate:
            publication = self._use(candidate.export())
        self.published += 1
        logger.info(
            "heads version %d: %.3f tokens per step on what came in lately, %.3f before and %.3f at first; %d steps "
            "on %d tokens",
            *(self.version, before + gain, before, first, self.steps, self.tokens),
        )
        return publication

    def _roll_back(self, name: str) -> Publication:
        before, gain = self.current or 1.0, self._older[name].mean
        heads = self._named(name)
        assert heads is not None
        publication = self._use(heads.export())
        self._previous = None
        self.rolled_back += 1
        self._restart()
        logger.info(
            "heads version %d are the %s ones again: %.3f tokens per step on what came in lately, %.3f before",
            *(self.version, name, before + gain, before),
        )
        return publication

    def _use(self, heads: Heads) -> Publication:
        """What is in use here is what was published, rounding included."""
        self.version += 1
        checkpoint = self._packer.pack(heads, self.version)
        self._previous, self._current = self._current, self._objective(self._packer.load(checkpoint))
        self._published_at = self._clock()
        self._begin_trial()
        return Publication(self.version, checkpoint)

    def _restart(self) -> None:
        """Forget the candidate; the next step begins with the heads in use."""
        self._trainee = None
        self._candidate = Comparison()

    def _objective(self, heads: Heads | None) -> Objective | None:
        if heads is None:
            return None
        return objective_of(heads, self._target, judge_of(heads, self._target, torch.device("cpu"), self._dtype))

    def _new_trainee(self) -> Trainee:
        """From the heads in use; without any, from fresh ones that fit what has come in so far."""
        sample = self._ring.newest(BATCH_ROWS)
        if self._current is not None:
            return Trainee(self._current.export(), self._target, self._dtype, sample)
        shape = self._target.shape
        ids = choose_draft_ids(sample, FRESH_DRAFT_VOCAB, shape.vocab_size)
        rows = answer_rows(sample, self._needs, torch.device("cpu"))
        torch.manual_seed(0)
        fresh = fresh_hydra(self._target, ids, FRESH_DEPTH, 1, hydra_features(shape.num_layers), rows)
        return Trainee(fresh, self._target, self._dtype, sample)


def _is_finite(piece: Example) -> bool:
    return all(bool(np.isfinite(rows).all()) for rows in piece.features.values())
