"""The textbook's test of drafts: rejection sampling, which keeps the target's distribution but not its tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model_runner.draft_tree import ROOT, DraftTree, Fork
from model_runner.row_sums import row_softmax, row_sums
from model_runner.sampling.draw import Draw
from model_runner.sampling.noise import Stream, uniform
from model_runner.sampling.rows import SamplingRows

_FIRST_BORN = 0.6
_NEXT_BORN = 0.4


class RejectionDraw:
    """Accepts a draft x with probability min(1, p(x) / q(x)); where none is left, draws from what they left of p.

    Leviathan (arXiv:2211.17192) and Chen (arXiv:2302.01318) for chains, and recursively for siblings that were drawn
    without replacement (Sequoia, arXiv:2402.12374): after a rejection p becomes max(p - q, 0), q loses the token, and
    both are normalised again. A draft that was chosen, not drawn, has q = 1 (SpecInfer, arXiv:2305.09781).

    Tokens are distributed as the target's, whatever the drafts, because q is what they were drawn from and because the
    noise of this test is that of streams of its own. They do depend on the drafts.
    """

    divides = False

    def __init__(self, forks: Sequence[Fork], draw: Draw) -> None:
        """
        Args:
            forks: the drafts for each row's token.
            draw: for where no draft is accepted.
        """
        self._forks = forks
        self._draw = draw

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """See Draw."""
        drawn = sorted((*rows.whole, *rows.truncated))
        tested = [row for row in drawn if self._forks[row].tokens]
        tokens: dict[int, int] = {}
        if tested:
            index = torch.tensor(tested, device=scores.device)
            test = _Test([self._forks[row] for row in tested], scores[index])
            chances = [rows.key(row, Stream.ACCEPT) for row in tested]
            tokens = {tested[place]: token for place, token in test.run(chances).items()}
            scores = scores.index_copy(0, index, test.left.log().float())
        others = tuple(row for row in drawn if row not in tokens)
        if others:
            tokens |= self._draw(scores, replace(rows, whole=(), truncated=others, stream=Stream.RESIDUAL))
        return tokens


class _Test:
    """The drafts of several places, each against the target's scores there."""

    def __init__(self, forks: Sequence[Fork], scores: Tensor) -> None:
        self._forks = forks
        self.left = row_softmax(scores.double())
        """[n, vocab] p after the rejections so far."""
        self._guess = _drawn_from(forks, self.left)  # [n, vocab] q after the rejections so far; 0 for chosen drafts

    def run(self, keys: Sequence[int]) -> dict[int, int]:
        """The token that is accepted at each place, where one is; keys are those of the noise at each place."""
        accepted: dict[int, int] = {}
        for rank in range(max(len(fork.tokens) for fork in self._forks)):
            going = [
                (place, fork.tokens[rank])
                for place, fork in enumerate(self._forks)
                if place not in accepted and rank < len(fork.tokens)
            ]
            if going:
                noise = [uniform(keys[place], rank) for place, _ in going]
                stands = self._test(going, noise)
                accepted |= {place: token for (place, token), good in zip(going, stands, strict=True) if good}
        return accepted

    def _test(self, drafts: Sequence[tuple[int, int]], noise: Sequence[float]) -> list[bool]:
        """Whether each of these (place, token) is accepted; makes the places of the others ready for the next."""
        device = self.left.device
        places, tokens = torch.tensor(drafts, device=device).unbind(1)
        is_chosen = [self._forks[place].drawn_from is None for place, _ in drafts]
        chosen = torch.tensor(is_chosen, device=device)
        self._guess[places[chosen], tokens[chosen]] = 1.0
        chance = torch.tensor(noise, dtype=torch.float64, device=device)
        stands = chance * self._guess[places, tokens] < self.left[places, tokens]
        self._reject(places[~stands], tokens[~stands])
        result: list[bool] = stands.tolist()
        return result

    def _reject(self, places: Tensor, tokens: Tensor) -> None:
        if len(places) == 0:
            return
        left, guess = self.left[places], self._guess[places]
        rest = (left - guess).clamp_(min=0)
        guess[torch.arange(len(places), device=guess.device), tokens] = 0.0
        self._guess[places] = _normalised(guess, guess)
        self.left[places] = _normalised(rest, left)  # p = q is rejected only by a rounding, and leaves nothing


def confidence_of_drawn(elders: int) -> float:
    """What a drawn node with so many siblings before it is worth, whatever its token."""
    return _FIRST_BORN * _NEXT_BORN**elders


def blind_confidence(tree: DraftTree) -> tuple[float, ...]:
    """Confidences that do not depend on what was drawn, only on how many siblings come before."""
    elders = dict.fromkeys((ROOT, *range(len(tree))), 0)
    confidence = []
    for parent in tree.parents:
        confidence.append(confidence_of_drawn(elders[parent]))
        elders[parent] += 1
    return tuple(confidence)


def _drawn_from(forks: Sequence[Fork], like: Tensor) -> Tensor:
    """What the drafts of each place were drawn from, [n, vocab] as `like`; zeros where they were chosen."""
    guess = torch.zeros_like(like)
    drawn = [(place, fork.drawn_from) for place, fork in enumerate(forks) if fork.drawn_from is not None]
    for place, distribution in drawn:
        guess[place, distribution.tokens.to(guess.device)] = distribution.weights.to(guess)
    return _normalised(guess, guess)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows that sum to 1, those of `otherwise` where there is nothing."""
    total = row_sums(weights)
    return torch.where(total > 0, weights / total, otherwise)
