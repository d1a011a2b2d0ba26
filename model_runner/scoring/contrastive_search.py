"""Contrastive search: of the most probable tokens, the one that adds something to what was said."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, SampleRows
from model_runner.contract import SamplingParams, ScheduledRequest
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.kernels.row_sums import row_softmax, row_sums
from model_runner.models.features import LAST, Feature
from model_runner.sampling.logprobs import top
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler, constrain
from model_runner.speculative.verify import Verdict

_BLOCK_ROWS = 1024
"""Hidden states compared at a time, to bound the memory of their float64 copies."""


class HiddenStates:
    """The directions of one choice's hidden states, by position. 4 bytes for each of their entries, and room to grow.

    Every sum is in float64 and takes its terms in the same order however many rows come along, so that what is kept
    of a token does not depend on the step that computed it.
    """

    def __init__(self, most: int) -> None:
        """For at most so many positions."""
        self._most = most
        self._rows = torch.empty(0, 0)  # [room, hidden] float32 of length 1

    def put(self, start: int, hidden: Tensor) -> None:
        """Keep those of the positions from `start` on, [n, hidden]; all before them must be there."""
        end = start + len(hidden)
        if end > len(self._rows):
            room = max(end, min(2 * start, self._most))
            grown = torch.empty(room, hidden.shape[1], dtype=torch.float32, device=hidden.device)
            if start:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = _directions(hidden)

    def similarity(self, hidden: Tensor, count: int) -> list[float]:
        """For each row of [n, hidden], its highest cosine with any of the first `count` positions."""
        directions = _directions(hidden).T
        blocks = [self._rows[start : min(start + _BLOCK_ROWS, count)] for start in range(0, count, _BLOCK_ROWS)]
        highest = torch.stack([(block.double() @ directions).amax(0) for block in blocks]).amax(0)
        similarity: list[float] = highest.tolist()
        return similarity


@dataclass(slots=True)
class _Searching:
    """A choice that searches."""

    sampling: SamplingParams
    states: HiddenStates
    candidates: DraftTree = NO_DRAFT
    """For its next token, most probable first; none until the last known token's logits were seen."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a searching choice stands in a step that computes its last known token."""

    slot: int
    searching: _Searching
    sample: SampleRows
    last: int
    """Row of the last known token in the step's hidden states; those of the candidates come after it."""
    position: int
    """Of that token."""


class ContrastiveSearch:
    """Decides for the choices that have a `penalty_alpha` (Su et al., arXiv:2202.06417, section 4).

    The next token is the candidate v with the highest

        (1 - alpha) * p(v) - alpha * max over all tokens j before it of cos(h(v), h(j))

    The candidates are the k most probable tokens, p their probabilities after bias, bans and penalties (a banned token
    is none), and h a hidden state as the model's head gets it, v's after v was appended. Equal scores go to the more
    probable token, equal probabilities to the lower id. Nothing is drawn, and every choice is worked on alone, so the
    token depends on nothing but the choice.

    A step computes the last known token with its candidates as its children. The one that is chosen is computed again
    by the next step, as the last known token then: so nothing that was computed for candidates is kept. Its logits will
    be the same again, and name the next candidates already now: only a choice's first step has none to compare.
    """

    def __init__(self, sampling: SamplingState, sampler: Sampler, max_model_len: int) -> None:
        self._sampling = sampling
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._searching: dict[int, _Searching] = {}

    def begin(self, slot: int, sampling: SamplingParams) -> None:
        """A choice starts, none of whose tokens are computed if it searches."""
        if sampling.num_candidates:
            self._searching[slot] = _Searching(sampling, HiddenStates(self._max_model_len))

    def end(self, slot: int) -> None:
        """A choice has ended, or was preempted."""
        self._searching.pop(slot, None)

    def forget_candidates(self, slot: int) -> None:
        """The next step that computes the choice's last known token finds them again."""
        if slot in self._searching:
            self._searching[slot].candidates = NO_DRAFT

    def needs(self, slots: Sequence[int]) -> frozenset[Feature]:
        """The hidden states that a step with these slots has to keep."""
        return frozenset() if self._searching.keys().isdisjoint(slots) else frozenset({LAST})

    def candidates(self, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """For each scheduled choice, what is compared in this step."""
        return [
            self._searching[slot].candidates if entry.num_candidates else NO_DRAFT
            for slot, entry in zip(slots, scheduled, strict=True)
        ]

    def num_candidates(self) -> dict[int, int]:
        """For each slot that searches, how many candidates there are for its next token."""
        return {slot: len(searching.candidates) for slot, searching in self._searching.items()}

    @torch.inference_mode()
    def decide(
        self, batch: Batch, slots: Sequence[int], features: Mapping[Feature, Tensor], logits: Tensor
    ) -> dict[int, Verdict]:
        """Choose tokens, which go to the slots' histories, and find the candidates of the next ones.

        Args:
            batch: the step.
            slots: of its choices.
            features: of the step, LAST among them.
            logits: [rows, vocab] of the step.

        Returns:
            A verdict for each choice that searches and whose last known token was computed, by its index in the batch.
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
        """Keep the hidden states of known tokens; returns the choices whose last one is among them."""
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
        """Compare the candidates of each of these places."""
        if not places:
            return
        rows = self._sampling.rows([place.slot for place in places])
        raw = _take(logits, [place.sample.first for place in places])
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
        raw = _take(logits, [place.sample.row_of(node) for place, node in zip(places, nodes, strict=True)])
        scores, errors = constrain(raw, self._sampling.rows([place.slot for place in places]))
        most = min(max(place.searching.sampling.num_candidates for place in places), scores.shape[1])
        best = top(scores, most)
        values = scores.gather(1, best).tolist()
        for row, (place, tokens) in enumerate(zip(places, best.tolist(), strict=True)):
            searching = place.searching
            if row in errors:
                searching.candidates = NO_DRAFT
                if nodes[row] == ROOT:  # at a candidate it has not got there yet: the next step will tell
                    verdicts[place.sample.choice].error = errors[row]
                continue
            ranked = zip(tokens[: searching.sampling.num_candidates], values[row], strict=False)
            usable = tuple(token for token, value in ranked if value > -math.inf)
            searching.candidates = DraftTree(usable, (ROOT,) * len(usable))


def _best(place: _Place, probs: Tensor, hidden: Tensor) -> int:
    """The candidate with the highest score, by the probabilities [vocab] and the candidates' hidden states."""
    alpha, tokens = place.searching.sampling.penalty_alpha, place.sample.tree.tokens
    similarity = place.searching.states.similarity(hidden, place.position + 1)
    chances: list[float] = probs[torch.tensor(tokens, device=probs.device)].tolist()
    scores = [(1 - alpha) * p - alpha * cosine for p, cosine in zip(chances, similarity, strict=True)]
    return tokens[max(range(len(tokens)), key=scores.__getitem__)]  # the first among equals


def _chosen(tree: DraftTree, verdict: Verdict) -> int:
    return tree.tokens.index(verdict.tokens[0]) if verdict.tokens else ROOT


def _directions(hidden: Tensor) -> Tensor:
    """The rows [n, hidden] in float64, divided by their lengths; a row of zeros stays one."""
    rows = hidden.double()
    lengths = row_sums(rows.square()).sqrt()
    return rows / lengths.clamp(min=torch.finfo(torch.float64).tiny)


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    return logits.index_select(0, torch.tensor(rows, device=logits.device)).float()
