"""Scores that are not the model's logits: which tokens they may choose, and what is reported."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.sampling.sampler import NO_TOKEN, Picks, Sampler
from tests.model_runner.oracles.draw import TorchDraw

from . import oracle
from .harness import CPU, Case, random_logits, rows_of

VOCAB = 40
LOGITS = random_logits(6, VOCAB, seed=1)
SCORES = random_logits(6, VOCAB, seed=2)
GREEDY = SamplingParams(temperature=0, contrastive=Contrastive(alpha=0.1))


def sample(cases: list[Case], scores: torch.Tensor, logits: torch.Tensor, mode: str = "raw") -> Picks:
    return Sampler(TorchDraw(VOCAB, CPU), mode)(scores, rows_of(cases, VOCAB), raw=logits)  # type: ignore[arg-type]


def plausible(row: int, share: float, banned: tuple[int, ...] = ()) -> np.ndarray:
    """The scores of a row where its logits say that a token is plausible, by the definition."""
    probs = oracle.softmax(LOGITS[row].double().numpy())
    probs[list(banned)] = 0
    return np.where(probs >= share * probs.max(), SCORES[row].numpy(), -np.inf) + np.where(probs > 0, 0, -np.inf)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_the_best_score_among_what_the_model_finds_plausible(share: float) -> None:
    for setting in ({"contrastive": Contrastive(share)}, {"dola": DoLa("low", share)}):
        picks = sample([Case(SamplingParams(temperature=0, **setting))] * 6, SCORES, LOGITS)  # type: ignore[arg-type]
        assert list(picks.tokens) == [int(plausible(row, share).argmax()) for row in range(6)]


def test_rows_without_it_are_left_alone() -> None:
    cases = [Case(GREEDY), Case(replace(GREEDY, contrastive=None)), Case(SamplingParams(seed=3))] * 2
    mixed = sample(cases, SCORES, LOGITS)
    for row, case in enumerate(cases):
        assert sample([case], SCORES[row : row + 1], LOGITS[row : row + 1]).tokens == mixed.tokens[row : row + 1]
    assert mixed.tokens[1] == int(SCORES[1].argmax())


def test_something_is_left_whatever_else_is_ruled_out() -> None:
    best = tuple(int(token) for token in LOGITS[0].topk(8).indices)
    settings = [
        replace(GREEDY, bad_words=tuple((token,) for token in best)),
        replace(GREEDY, min_tokens=3, stop_token_ids=best),
        replace(GREEDY, logit_bias=tuple((token, -torch.inf) for token in best)),
        replace(GREEDY, allowed_token_ids=tuple(token for token in range(VOCAB) if token not in best)),
    ]
    for params in settings:
        picks = sample([Case(params)], SCORES[:1], LOGITS[:1])
        assert picks.tokens == (int(plausible(0, 0.1, best).argmax()),)


def test_draws_are_from_the_plausible_scores_and_truncations_come_after() -> None:
    params = SamplingParams(contrastive=Contrastive(0.05), top_k=2, temperature=2.0)
    seen = {sample([Case(replace(params, seed=seed))], SCORES[:1], LOGITS[:1]).tokens[0] for seed in range(200)}
    assert seen == {int(token) for token in plausible(0, 0.05).argsort()[-2:]}


def test_logprobs_are_of_the_model_or_of_what_was_drawn_from() -> None:
    case = Case(replace(GREEDY, logprobs=VOCAB))
    (raw,) = sample([case], SCORES[:1], LOGITS[:1]).logprobs
    (processed,) = sample([case], SCORES[:1], LOGITS[:1], "processed").logprobs
    assert raw is not None
    assert processed is not None
    truth = np.log(oracle.softmax(LOGITS[0].double().numpy()))
    np.testing.assert_allclose([value for _, value in sorted(raw.top)], truth, atol=1e-5)
    drawn = oracle.softmax(plausible(0, 0.1).astype(np.float64))
    np.testing.assert_allclose(np.exp([value for _, value in sorted(processed.top)]), drawn, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("changes", [{}, {"contrastive": Contrastive(0.0)}, {"temperature": 1.0}])
def test_scores_that_are_not_finite_fail_their_row_alone(poison: float, changes: dict[str, Any]) -> None:
    scores = SCORES.clone()
    scores[1, int(LOGITS[1].argmax())] = poison
    picks = sample([Case(replace(GREEDY, **changes))] * 6, scores, LOGITS)
    assert [row for row, token in enumerate(picks.tokens) if token == NO_TOKEN] == [1]
    assert picks.errors[1] is not None
    assert not picks.errors[1].by_request
