"""Trains heads on recorded traffic and decides which version to use.

The loop of online speculative decoding (Liu et al., arXiv:2310.07177): the target's own distributions teach the heads
while it serves. Each piece of traffic is a test first: the heads in use, their predecessors, the first heads and the
candidate in training predict it. Only then is it added to the ring and trained on. The tests decide:

    candidate probably better than the heads in use      -> it is published
    older version clearly better than the heads in use   -> it is published again, and training continues from it
    candidate clearly worse than the heads in use        -> training restarts from the heads in use
"""

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from model_runner.heads.base import Example, Heads, TargetShape
from model_runner.heads.hydra import HydraHeads, hydra_features
from model_runner.heads.loading import load_heads
from model_runner.learning.link import Begin, NewHeads
from model_runner.learning.plan import (
    BATCH_ROWS,
    FRESH_DEPTH,
    FRESH_DRAFT_VOCAB,
    check_model,
    fresh_shape,
    ring_bytes,
)
from model_runner.learning.store import HeadsStore, fingerprint
from model_runner.learning.vocabulary import TokenFrequencies, rows_for
from model_runner.modules.loading import load_config
from model_runner.runner_interface import LearningStats
from model_runner.training.hydra import fresh_hydra
from model_runner.training.loop import Optimizer, product_type
from model_runner.training.objective import Objective
from model_runner.training.objectives import SELF_FED_DEPTH, objective_of
from model_runner.training.teacher import TargetWeights, choose_draft_ids

NEWEST = 8
"""One in this many pieces counts as new; half of the draws come from these."""


class Ring:
    """A buffer of pieces in order of arrival; new pieces replace the oldest."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes of features and tokens."""
        self._capacity = capacity
        self._pieces: dict[int, Example] = {}  # by number; the numbers are consecutive
        self._next = 0
        self._bytes = 0
        self._num_answer = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def num_answer(self) -> int:
        """Number of tokens to train on."""
        return self._num_answer

    def add(self, piece: Example) -> None:
        """Add a piece, unless it has no tokens to train on or exceeds the capacity."""
        size = _bytes(piece)
        if size > self._capacity or piece.num_answer < 1:
            return
        self._pieces[self._next] = piece
        self._next += 1
        self._bytes += size
        self._num_answer += piece.num_answer
        while self._bytes > self._capacity:
            oldest = self._pieces.pop(self._next - len(self._pieces))
            self._bytes -= _bytes(oldest)
            self._num_answer -= oldest.num_answer

    def newest(self, rows: int) -> list[Example]:
        """The latest pieces with together at least `rows` tokens to train on, or all; the latest last."""
        taken: list[Example] = []
        for number in reversed(self._pieces):
            if rows <= 0:
                break
            taken.append(self._pieces[number])
            rows -= taken[-1].num_answer
        return taken[::-1]

    def batch(self, rows: int, source: random.Random) -> Sequence[Example]:
        """Random pieces with together at least `rows` tokens to train on; the ring must not be empty.

        Half of the draws are from the newest eighth, so that a change of subject is learned quickly. The other half are
        from all pieces, so that earlier subjects are not forgotten at once.
        """
        taken: list[Example] = []
        count, first = len(self._pieces), self._next - len(self._pieces)
        while rows > 0:
            oldest = count - max(1, count // NEWEST) if source.random() < 0.5 else 0
            taken.append(self._pieces[first + source.randrange(oldest, count)])
            rows -= taken[-1].num_answer
        return taken


def _bytes(piece: Example) -> int:
    return piece.tokens.nbytes + sum(rows.nbytes for rows in piece.features.values())


LEARNING_RATE = 5e-4
AVERAGED = 0.95
"""Decay of the running mean per step: it covers about twenty steps."""
_WARM_UP = 32
"""Steps until the full learning rate: Adam first needs estimates of the gradients' magnitudes."""


class Trainee:
    """A candidate in training, which starts from given heads.

    It takes large, noisy steps and offers their running mean (Polyak and Juditsky, "Acceleration of stochastic
    approximation by averaging", SIAM J. Control Optim. 30, 1992).
    """

    def __init__(self, heads: Heads, target: TargetWeights, dtype: torch.dtype, sample: Sequence[Example]) -> None:
        """Trains a copy of `heads`; `sample` is typical training data."""
        self._heads = copy.deepcopy(heads)
        self._target = target
        self._objective = objective_of(self._heads, target, dtype, sample=sample)
        self._optimizer = Optimizer(self._objective)
        self._parameters = self._optimizer.parameters
        self._means = [one.detach().clone() for one in self._parameters]
        self.steps = 0

    def step(self, examples: Sequence[Example]) -> bool:
        """Train on a batch; False if numbers are no longer finite, so that the heads are useless."""
        if self._optimizer.step(examples, LEARNING_RATE * min(1.0, (self.steps + 1) / _WARM_UP)) is None:
            return False
        self.steps += 1
        self._average()
        return True

    @contextmanager
    def candidate(self) -> Iterator[Objective]:
        """The averaged heads, to be compared or exported."""
        self._swap()
        self._objective.heads.eval()
        try:
            yield self._objective
        finally:
            self._swap()

    @torch.no_grad()
    def _average(self) -> None:
        """Update the running mean. The first steps have equal weights, so that it forgets the initial heads."""
        share = max(1 - AVERAGED, 1 / (self.steps + 1))
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter, share)

    def _swap(self) -> None:
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.data, mean.data = mean.data, parameter.data

    @torch.no_grad()
    def follow(self, counts: TokenFrequencies) -> int:
        """Give rows of the draft vocabulary to frequent tokens that are missing; returns how many tokens were replaced.

        Only for heads with one output matrix for all depths, over a part of the vocabulary.
        """
        weight, ids = _shared_head(self._heads), self._heads.draft_ids
        if ids is None or weight is None:
            return 0
        rows, tokens = counts.swaps(ids)
        if len(rows):
            wanted, known = (self._target.head[some].to(weight) for some in (tokens, ids))
            mean = next(mean for one, mean in zip(self._parameters, self._means, strict=True) if one is weight)
            for matrix in (weight, mean):
                matrix[rows] = rows_for(wanted, known, matrix)
            ids[rows] = tokens
            self._objective.judge.replace(rows, tokens)
            for moment in self._optimizer.adam.state[weight].values():
                if moment.shape == weight.shape:
                    moment[rows] = 0.0
        return len(rows)


def _shared_head(heads: Heads) -> Tensor | None:
    head = heads.hydra_lm_head if isinstance(heads, HydraHeads) else getattr(heads, "lm_head", None)
    return head.weight if isinstance(head, nn.Linear) else None


HALF_LIFE = 4096
"""Rows after which older observations count half."""
LIKELY = 2.0
"""Standard errors needed to try a gain; heads that turn out equally good cost nothing."""
CLEAR = 3.0
"""Standard errors needed to give something up. The comparison is repeated often, so two would be too few."""
_LEAST = 0.01
"""Smallest relevant difference, as a fraction of the tokens per step."""
_PIECES = 8
"""Minimum number of pieces for a standard error."""


@dataclass(frozen=True, slots=True)
class PieceScore:
    """A version's score on one piece."""

    rows: int
    """Positions in the output that are followed by at least as many tokens as the heads predict."""
    accepted: int
    """Total number of tokens that chains of first guesses got right at these positions."""


def judge(heads: Objective | None, pieces: Sequence[Example], depth: int) -> list[PieceScore]:
    """Score each piece; None means no heads, which predict nothing at the same positions for `depth`."""
    if heads is None:
        return [PieceScore(max(0, one.num_answer - depth), 0) for one in pieces]
    ranks = heads.ranks(pieces)  # [R, depth]
    whole = (ranks >= 0).all(1)
    accepted = (ranks == 0).long().cumprod(1).sum(1) * whole
    sizes = [one.num_answer for one in pieces]
    parts = zip(torch.split(whole, sizes), torch.split(accepted, sizes), strict=True)
    return [PieceScore(int(places.sum()), int(tokens.sum())) for places, tokens in parts]


class Rate:
    """Tokens per step on recent traffic."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._accepted = 0.0

    @property
    def value(self) -> float | None:
        """Tokens per step, including the target's own; None before the first piece."""
        return 1 + self._accepted / self._rows if self._rows else None

    def add(self, score: PieceScore) -> None:
        """Add the score of the next piece."""
        kept = 0.5 ** (score.rows / HALF_LIFE)
        self._rows = self._rows * kept + score.rows
        self._accepted = self._accepted * kept + score.accepted


class GainEstimate:
    """Gain in tokens per step of one version over another, estimated on the same pieces.

    The mean is a ratio of sums over pieces. The standard error comes from the variation between pieces, because rows of
    one piece are similar and not independent. With decayed weights w, n rows and a difference of s in each piece, mean
    = sum(w s) / sum(w n) and error^2 = sum(w^2 (s - mean n)^2) / sum(w n)^2.
    """

    def __init__(self) -> None:
        self._pieces = 0
        self._sums = torch.zeros(2, dtype=torch.float64)  # w s, w n
        self._squares = torch.zeros(2, 2, dtype=torch.float64)  # w^2 times s s, s n, n s, n n

    def add(self, one: PieceScore, other: PieceScore) -> None:
        """Add both versions' scores on the next piece."""
        kept = 0.5 ** (one.rows / HALF_LIFE)
        seen = torch.tensor([one.accepted - other.accepted, one.rows], dtype=torch.float64)
        self._pieces += one.rows > 0
        self._sums = self._sums * kept + seen
        self._squares = self._squares * kept**2 + torch.outer(seen, seen)

    @property
    def mean(self) -> float:
        """Mean gain of the first version over the other."""
        difference, rows = self._sums.tolist()
        return difference / rows if rows else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite before there are enough pieces."""
        if self._pieces < _PIECES:
            return math.inf
        weights: Tensor = torch.tensor([1.0, -self.mean], dtype=torch.float64)
        return math.sqrt(max(0.0, float(weights @ self._squares @ weights))) / float(self._sums[1])

    def is_gain(self, rate: float, errors: float) -> bool:
        """Whether there is a relevant gain of at least `errors` standard errors; `rate` is about the versions' rate."""
        return self.mean > max(errors * self.error, _LEAST * rate)

    def is_loss(self, rate: float, errors: float) -> bool:
        """Whether there is a relevant loss of at least `errors` standard errors."""
        return -self.mean > max(errors * self.error, _LEAST * rate)


logger = logging.getLogger("samewise.learning")

PASSES = 3
"""How often a token is trained on, on average; more would waste power."""
_LEAST_BATCHES = 2
"""Minimum batches in the ring; with fewer, training would memorise them."""
PUBLISH_EVERY_S = 30.0
"""Minimum time between publications: packing heads for the kernels takes the engine some milliseconds."""
_FOLLOW_EVERY = 32
"""Steps between updates of the draft vocabulary."""


class Learner:
    """Tests, trains, publishes and stores heads."""

    def __init__(
        self,
        target: TargetWeights,
        first: Heads | None,
        store: HeadsStore,
        ring: Ring,
        dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts from what an earlier run stored.

        Args:
            target: embedding and head of the model.
            first: the engine's initial heads, if there are any; the learner takes ownership.
            store: the files of trained heads.
            ring: the pieces to train on.
            dtype: type of training's products.
            clock: seconds, for the time between publications.

        Raises:
            ValueError: if this kind of heads cannot be trained.
        """
        self._target = target
        self._store = store
        self._ring = ring
        self._dtype = dtype
        self._clock = clock
        self._source = random.Random(0)
        self._depth = FRESH_DEPTH if first is None else first.depth or SELF_FED_DEPTH
        self._counts = TokenFrequencies(target.shape.vocab_size)
        self._credit = 0
        self._published_at = clock()
        self._first = self._objective(first)
        self._previous: Objective | None = None
        stored = store.read()
        self._current = self._first if stored is None else self._objective(stored.heads)
        self.restored = None if stored is None else NewHeads(stored.version, stored.checkpoint)
        """Heads that an earlier run trained, if there are any."""
        self._trainee: Trainee | None = None
        self._rates = {"first": Rate(), "current": Rate()}
        self._begin_trial()
        self.version = store.last_version
        """The highest version that was ever published."""
        self.steps = self.tokens = self.published = self.rolled_back = 0

    @property
    def first(self) -> float | None:
        """Tokens per step of the first heads on recent traffic."""
        return self._rates["first"].value

    @property
    def current(self) -> float | None:
        """Tokens per step of the heads in use on recent traffic."""
        return self._rates["current"].value

    @property
    def held(self) -> int:
        """Number of tokens in the ring."""
        return self._ring.num_answer

    def stats(self) -> LearningStats:
        """Statistics since the start."""
        return LearningStats(
            tokens=self.tokens,
            steps=self.steps,
            publications=self.published,
            rollbacks=self.rolled_back,
            tokens_per_step_first=self.first,
            tokens_per_step_current=self.current,
        )

    @property
    def has_work(self) -> bool:
        """Whether to train now: each new token earns a limited number of training passes."""
        return self._credit > 0 and self.held >= _LEAST_BATCHES * BATCH_ROWS

    def take(self, pieces: Sequence[Example]) -> None:
        """Test all versions on the pieces, then add these to the ring. Pieces that are not finite are ignored."""
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
        """Train one step on a batch from the ring."""
        if self._trainee is None:
            self._trainee = self._new_trainee()
        if self._trainee.steps % _FOLLOW_EVERY == 0:
            self._trainee.follow(self._counts)
        self._credit -= BATCH_ROWS
        self.steps += 1
        if not self._trainee.step(self._ring.batch(BATCH_ROWS, self._source)):
            logger.warning("Training diverged (numbers are no longer finite); it restarts from the heads in use")
            self._restart()

    def decide(self, *, is_last: bool = False) -> NewHeads | None:
        """The heads to switch to, or None; the last call ignores the minimum time between publications."""
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
        """Have every version predict the pieces once."""
        versions = self._versions
        scores = {heads: judge(heads, pieces, self._depth) for heads in set(versions.values())}
        current = scores[self._current]
        for name, rate in self._rates.items():
            for score in scores[versions[name]]:
                rate.add(score)
        trials = [(trial, scores[versions[name]]) for name, trial in self._older.items()]
        if self._trainee is not None:
            with self._trainee.candidate() as candidate:
                trials.append((self._candidate, judge(candidate, pieces, self._depth)))
        for trial, seen in trials:
            for one, other in zip(seen, current, strict=True):
                trial.add(one, other)

    @property
    def _versions(self) -> dict[str, Objective | None]:
        """The finished versions, the same for two names at times; None for no heads."""
        return {"first": self._first, "previous": self._previous, "current": self._current}

    def _begin_trial(self) -> None:
        """Restart all comparisons with the heads in use."""
        self._candidate = GainEstimate()
        older = [name for name, heads in self._versions.items() if heads not in (None, self._current)]
        self._older = {name: GainEstimate() for name in older}

    def _publish(self) -> NewHeads:
        assert self._trainee is not None
        before, gain, first = self.current or 1.0, self._candidate.mean, self.first or 1.0
        with self._trainee.candidate() as candidate:
            publication = self._use(candidate.export())
        self.published += 1
        logger.info(
            "Published heads version %d: %.3f tokens per step on recent traffic, %.3f before and %.3f initially; "
            "%d steps on %d tokens",
            *(self.version, before + gain, before, first, self.steps, self.tokens),
        )
        return publication

    def _roll_back(self, name: str) -> NewHeads:
        before, gain = self.current or 1.0, self._older[name].mean
        heads = self._versions[name]
        assert heads is not None
        publication = self._use(heads.export())
        self._previous = None
        self.rolled_back += 1
        self._restart()
        logger.info(
            "Restored the %s heads as version %d: %.3f tokens per step on recent traffic, %.3f before",
            *(name, self.version, before + gain, before),
        )
        return publication

    def _use(self, heads: Heads) -> NewHeads:
        """Use the heads as published, including rounding."""
        self.version += 1
        checkpoint = self._store.pack(heads, self.version)
        self._previous, self._current = self._current, self._objective(self._store.load(checkpoint))
        self._published_at = self._clock()
        self._begin_trial()
        self._store.write(self.version, checkpoint)
        return NewHeads(self.version, checkpoint)

    def _restart(self) -> None:
        """Drop the candidate; the next step starts from the heads in use."""
        self._trainee = None
        self._candidate = GainEstimate()

    def _objective(self, heads: Heads | None) -> Objective | None:
        if heads is None:
            return None
        return objective_of(heads, self._target, self._dtype)

    def _new_trainee(self) -> Trainee:
        """A trainee from the heads in use, or else from fresh ones that fit the traffic so far."""
        sample = self._ring.newest(BATCH_ROWS)
        if self._current is not None:
            return Trainee(self._current.export(), self._target, self._dtype, sample)
        shape = self._target.shape
        ids = choose_draft_ids(sample, FRESH_DRAFT_VOCAB, shape.vocab_size)
        torch.manual_seed(0)
        fresh = fresh_hydra(self._target, ids, FRESH_DEPTH, 1, hydra_features(shape.num_layers), sample)
        return Trainee(fresh, self._target, self._dtype, sample)


def make_learner(begin: Begin) -> Learner:
    """Raises ValueError, HeadsError or OSError, with a message for the user, if training is not possible."""
    model, cache = Path(begin.model), Path(begin.cache)
    folder = None if begin.heads is None else Path(begin.heads)
    shape = TargetShape.of(load_config(model))
    first = None if folder is None else load_heads(folder, shape)
    if first is None and begin.kind != "hydra":
        raise ValueError(f"training of {begin.kind} heads needs initial heads; only hydra heads can start fresh")
    if first is not None and first.kind != begin.kind:
        raise ValueError(f"{begin.heads} holds {first.kind} heads, not {begin.kind}")
    like = first or fresh_shape(shape)
    ring = Ring(ring_bytes(begin.memory, like, shape))
    check_model(begin.memory, model)
    store = HeadsStore(cache, fingerprint(model, begin.kind, folder, cache), shape, like)
    return Learner(TargetWeights.load(model), first, store, ring, product_type(torch.device("cpu")))


def _is_finite(piece: Example) -> bool:
    return all(bool(np.isfinite(rows).all()) for rows in piece.features.values())
