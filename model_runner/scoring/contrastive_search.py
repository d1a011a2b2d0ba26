"""Contrastive search: among the most probable tokens, prefers one that is unlike the preceding text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, SampleRows
from model_runner.contract import SamplingParams, ScheduledRequest
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.features import LAST, Feature
from model_runner.kernels.row_sums import row_softmax, row_sums
from model_runner.sampling.logprobs import take, top
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler, constrain
from model_runner.speculative.verify import Verdict

_BLOCK_ROWS = 1024
"""Hidden states compared at a time, to bound the memory of their float64 copies."""


class HiddenStates:
    """The unit vectors of one choice's hidden states, by position, stored as float32 with room to grow.

    Every sum is in float64 and in a fixed order, whatever the number of rows, so what is stored for a token does not
    depend on the step that computed it.
    """

    def __init__(self, most: int) -> None:
        """Room for at most `most` positions."""
        self._most = most
        self._rows = torch.empty(0, 0)  # [room, hidden] float32 of length 1

    def put(self, start: int, hidden: Tensor) -> None:
        """Store hidden states [n, hidden] of the positions from `start` on. All earlier positions must be stored."""
        end = start + len(hidden)
        if end > len(self._rows):
            room = max(end, min(2 * start, self._most))
            grown = torch.empty(room, hidden.shape[1], dtype=torch.float32, device=hidden.device)
            if start:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = _directions(hidden)

    def similarity(self, hidden: Tensor, count: int) -> list[float]:
        """For each row of [n, hidden], its highest cosine similarity with the first `count` positions."""
        directions = _directions(hidden).T
        blocks = [self._rows[start : min(start + _BLOCK_ROWS, count)] for start in range(0, count, _BLOCK_ROWS)]
        highest = torch.stack([(block.double() @ directions).amax(0) for block in blocks]).amax(0)
        similarity: list[float] = highest.tolist()
        return similarity


@dataclass(slots=True)
class _Searching:
    """The state of one choice with contrastive search."""

    sampling: SamplingParams
    states: HiddenStates
    candidates: DraftTree = NO_DRAFT
    """Candidates for its next token, most probable first. Empty until the last known token's logits were seen."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The rows of one choice in a step that computes its last known token."""

    slot: int
    searching: _Searching
    sample: SampleRows
    last: int
    """Row of the last known token in the step's hidden states. Its candidates' rows follow."""
    position: int
    """Position of the last known token."""


class ContrastiveSearch:
    """Chooses tokens for choices with `penalty_alpha` (Su et al., arXiv:2202.06417, section 4).

    The next token is the candidate v with the highest

        (1 - alpha) * p(v) - alpha * max over all tokens j before it of cos(h(v), h(j))

    The candidates are the k most probable tokens. p is their probability after bias, bans and penalties; banned tokens
    are not candidates. h is the hidden state that enters the model's head; h(v) is computed with v appended. Equal
    scores go to the more probable token, equal probabilities to the lower id. Nothing is drawn and every choice is
    computed alone, so the token depends only on the choice.

    A step computes the last known token with its candidates as children. The chosen one is computed again by the next
    step as the last known token, so no KV of candidates is kept. Its logits will be the same, so they already name the
    next candidates: only a choice's first step has none to compare.
    """

    def __init__(self, sampling: SamplingState, sampler: Sampler, max_model_len: int) -> None:
        self._sampling = sampling
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._searching: dict[int, _Searching] = {}

    def begin(self, slot: int, sampling: SamplingParams) -> None:
        """Start a choice. If it uses contrastive search, none of its tokens may be computed yet."""
        if sampling.num_candidates:
            self._searching[slot] = _Searching(sampling, HiddenStates(self._max_model_len))

    def end(self, slot: int) -> None:
        """Forget a choice that has ended or was preempted."""
        self._searching.pop(slot, None)

    def forget_candidates(self, slot: int) -> None:
        """Drop the candidates. The next step that computes the last known token finds them again."""
        if slot in self._searching:
            self._searching[slot].candidates = NO_DRAFT

    def needs(self, slots: Sequence[int]) -> frozenset[Feature]:
        """The hidden states that a step with these slots must keep."""
        return frozenset() if self._searching.keys().isdisjoint(slots) else frozenset({LAST})

    def candidates(self, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """The candidates to compare in this step, for each scheduled choice."""
        return [
            self._searching[slot].candidates if entry.num_candidates else NO_DRAFT
            for slot, entry in zip(slots, scheduled, strict=True)
        ]

    def num_candidates(self) -> dict[int, int]:
        """Number of candidates for the next token, by slot."""
        return {slot: len(searching.candidates) for slot, searching in self._searching.items()}

    @torch.inference_mode()
    def decide(
        self, batch: Batch, slots: Sequence[int], features: Mapping[Feature, Tensor], logits: Tensor
    ) -> dict[int, Verdict]:
        """Choose tokens, commit them to the slots, and find the candidates for the next ones.

        Args:
            batch: the step's batch.
            slots: slots of its choices.
            features: the step's hidden states, including LAST.
            logits: [rows, vocab] of the step.

        Returns:
            By index in the batch, a verdict for each choice with contrastive search whose last known token was
            computed.
        """
        if self._searching.keys().isdisjoint(slots):
            return {}
        hidden = features[LAST]
        places = self._remember(batch, slots, hidden)
        verdicts = {place.sample.choice: Verdict() for place in places}
        self._choose([place for place in places if place.sample.tree], verdicts, hidden, logits)
        self._look(places, verdicts, logits)
        return verdicts

    def _remember(self, batch: Batch, slots: Sequence[int], hidden: Tensor) -> list[_Place]:
        """Store hidden states of known tokens. Returns the choices whose last known token is among them."""
        samples = {sample.choice: sample for sample in batch.samples}
        bounds = np.searchsorted(batch.choice_of, np.arange(len(slots) + 1)).tolist()
        places = []
        for index, slot in enumerate(slots):
            searching, sample = self._searching.get(slot), samples.get(index)
            if searching is None:
                continue
            first, end = bounds[index], bounds[index + 1] - (len(sample.tree) if sample else 0)
            searching.states.put(int(batch.positions[first]), hidden[first:end])
            if sample is not None:
                places.append(_Place(slot, searching, sample, end - 1, int(batch.positions[end - 1])))
        return places

    def _choose(
        self, places: Sequence[_Place], verdicts: Mapping[int, Verdict], hidden: Tensor, logits: Tensor
    ) -> None:
        """Choose among the candidates of each of these choices."""
        if not places:
            return
        rows = self._sampling.rows([place.slot for place in places])
        raw = take(logits, [place.sample.first for place in places]).float()
        scores, _ = constrain(raw, rows)  # no errors: there were candidates
        probs = row_softmax(scores.double())
        tokens = {
            row: _best(place, probs[row], hidden[place.last + 1 : place.last + 1 + len(place.sample.tree)])
            for row, place in enumerate(places)
        }
        reports = self._sampler.logprobs(raw, scores, tokens, rows)
        for row, place in enumerate(places):
            verdict = verdicts[place.sample.choice]
            verdict.tokens.append(tokens[row])
            verdict.logprobs += [reports[row]] if row in reports else []
            self._sampling.commit(place.slot, tokens[row])

    def _look(self, places: Sequence[_Place], verdicts: Mapping[int, Verdict], logits: Tensor) -> None:
        """Find the candidates for the token after the chosen one, or after the last known one if none was chosen."""
        if not places:
            return
        nodes = [_chosen(place.sample.tree, verdicts[place.sample.choice]) for place in places]
        raw = take(logits, [place.sample.row_of(node) for place, node in zip(places, nodes, strict=True)]).float()
        scores, errors = constrain(raw, self._sampling.rows([place.slot for place in places]))
        most = min(max(place.searching.sampling.num_candidates for place in places), scores.shape[1])
        best = top(scores, most)
        values = scores.gather(1, best).tolist()
        for row, (place, tokens) in enumerate(zip(places, best.tolist(), strict=True)):
            searching = place.searching
            if row in errors:
                searching.candidates = NO_DRAFT
                if nodes[row] == ROOT:  # an error at a candidate is reported by the next step, if that token is reached
                    verdicts[place.sample.choice].error = errors[row]
                continue
            ranked = zip(tokens[: searching.sampling.num_candidates], values[row], strict=False)
            usable = tuple(token for token, value in ranked if value > -math.inf)
            searching.candidates = DraftTree(usable, (ROOT,) * len(usable))


def _best(place: _Place, probs: Tensor, hidden: Tensor) -> int:
    """The candidate with the highest score, from probabilities [vocab] and the candidates' hidden states."""
    alpha, tokens = place.searching.sampling.penalty_alpha, place.sample.tree.tokens
    similarity = place.searching.states.similarity(hidden, place.position + 1)
    chances: list[float] = probs[torch.tensor(tokens, device=probs.device)].tolist()
    scores = [(1 - alpha) * p - alpha * cosine for p, cosine in zip(chances, similarity, strict=True)]
    return tokens[max(range(len(tokens)), key=scores.__getitem__)]  # the first among equals


def _chosen(tree: DraftTree, verdict: Verdict) -> int:
    return tree.tokens.index(verdict.tokens[0]) if verdict.tokens else ROOT


def _directions(hidden: Tensor) -> Tensor:
    """The rows [n, hidden] as float64 unit vectors; rows of zeros stay zero."""
    rows = hidden.double()
    lengths = row_sums(rows.square()).sqrt()
    return rows / lengths.clamp(min=torch.finfo(torch.float64).tiny)
