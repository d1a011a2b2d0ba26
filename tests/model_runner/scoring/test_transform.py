"""Which rows a transform gets, and where its scores go."""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, SampleRows
from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.draft_tree import DraftTree, chain
from model_runner.features import Feature
from model_runner.sampling.rows import EarlySamplingPlan
from model_runner.scoring.transforms import RawStep, Scoring, Share
from tests.model_runner.batches import Chunk, make_batch

PLAIN = SamplingParams()
CONTRASTIVE = SamplingParams(contrastive=Contrastive())
DOLA = SamplingParams(dola=DoLa("low"))


class Doubling:
    """Doubles the logits of choices with one of the settings, and notes what it was given."""

    def __init__(self, setting: str) -> None:
        self.shares: list[Share] = []
        self._setting = setting

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return getattr(sampling, self._setting) is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        return [self._setting]

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        self.shares.append(share)
        return step.logits[share.rows] * 2

    def warm_up(self, batch: Batch) -> None:
        pass


def make_step(sampling: list[SamplingParams]) -> RawStep:
    """A choice in its prompt, one that decodes with three drafts, and one without."""
    chunks = [
        Chunk([1, 2, 3], 0, [4]),
        Chunk([5], 20, [7, 8]),
        Chunk([6, 7, 8], 21, [7, 8], parents=[-1, 0, -1]),
        Chunk([9], 3, [5]),
    ]
    batch = make_batch(chunks, 16)
    batch.choice_of[batch.choice_of > 1] -= 1  # the tree belongs to the choice before it
    tree = DraftTree((6, 7, 8), (-1, 0, -1), (1.0, 1.0, 1.0))
    samples = [SampleRows(1, 0, tree), SampleRows(2, 4, chain([], []))]
    made = Batch(
        **{name: getattr(batch, name) for name in Batch.__slots__}
        | {"samples": samples, "logits_index": np.array([3, 4, 5, 6, 7]), "block_tables": [[4], [7, 8], [5]]}
    )
    logits = torch.arange(20.0).view(5, 4)
    return RawStep(made, sampling, logits, {}, EarlySamplingPlan.greedy(5))


def test_all_rows_of_those_who_ask_and_no_others() -> None:
    step = make_step([PLAIN, CONTRASTIVE, DOLA])
    contrastive, dola = Doubling("contrastive"), Doubling("dola")
    scores = Scoring([contrastive, dola])(step)
    assert torch.equal(scores, step.logits * 2)
    assert torch.equal(step.logits, torch.arange(20.0).view(5, 4))
    (share,) = contrastive.shares
    assert (share.choices, share.rows.tolist(), share.sampling) == ((1,), [0, 1, 2, 3], (CONTRASTIVE,) * 4)
    (share,) = dola.shares
    assert (share.choices, share.rows.tolist(), share.sampling) == ((2,), [4], (DOLA,))


def test_where_nobody_asks_the_logits_are_the_scores() -> None:
    step = make_step([PLAIN, PLAIN, PLAIN])
    scoring = Scoring([Doubling("contrastive")])
    assert scoring(step) is step.logits
    assert scoring.needs(step.sampling) == frozenset()
    assert scoring.needs([PLAIN, CONTRASTIVE, DOLA]) == {"contrastive"}


def test_prompts_are_computed_too() -> None:
    transform = Doubling("contrastive")
    step = make_step([CONTRASTIVE, PLAIN, PLAIN])
    assert torch.equal(Scoring([transform])(step), step.logits)
    assert [(share.choices, share.rows.tolist()) for share in transform.shares] == [((0,), [])]


def test_a_batch_of_some_choices() -> None:
    batch = make_step([]).batch
    part = batch.only((1, 2))
    assert part.tokens.tolist() == [5, 6, 7, 8, 9]
    assert part.positions.tolist() == [20, 21, 22, 21, 3]
    assert part.choice_of.tolist() == [0, 0, 0, 0, 1]
    assert part.block_tables == [[7, 8], [5]]
    assert part.block_of.tolist() == batch.block_of[3:].tolist()
    assert part.offset_of.tolist() == batch.offset_of[3:].tolist()
    assert part.logits_index.tolist() == [0, 1, 2, 3, 4]
    assert [(sample.choice, sample.first) for sample in part.samples] == [(0, 0), (1, 4)]
    assert part.paths is not None
    assert batch.paths is not None
    assert part.paths.start.tolist() == batch.paths.start[3:].tolist()
    assert part.paths.first.tolist() == [0, 0, 1, 3, 4, 4]
    assert part.paths.places.tolist() == batch.paths.places.tolist()


def test_a_batch_of_the_last_choice_and_one_without_rows() -> None:
    batch = make_step([]).batch
    last = batch.only((2,))
    assert (last.tokens.tolist(), last.choice_of.tolist(), last.logits_index.tolist()) == ([9], [0], [0])
    assert [(sample.choice, sample.first) for sample in last.samples] == [(0, 0)]
    assert last.paths is not None
    assert last.paths.places.tolist() == []
    first = batch.only((0,))
    assert (first.tokens.tolist(), first.logits_index.tolist(), first.samples) == ([1, 2, 3], [], [])
