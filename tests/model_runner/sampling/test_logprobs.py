"""Reported log-probabilities against numpy."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from model_runner.contract import TokenLogprobs
from model_runner.sampling.logprobs import candidates_of, describe, prompt_logprobs, top

from .harness import random_logits


def expected(logprobs: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    values = [max(float(value), -9999.0) for value in logprobs]
    best = sorted(range(len(values)), key=lambda other: (-logprobs[other], other))[:num_top]
    rank = 1 + sum(other > logprobs[token] for other in logprobs)
    return TokenLogprobs(token, values[token], rank, tuple((other, values[other]) for other in best))


@pytest.mark.parametrize("vocab_size", [1, 7, 1003])
def test_values_ranks_and_alternatives(vocab_size):
    logprobs = torch.log_softmax((random_logits(20, vocab_size, seed=1) * 4).round() / 4, -1)  # with ties
    tokens = [row % vocab_size for row in range(20)]
    num_top = [row % 6 for row in range(20)]
    reports = describe(logprobs, tokens, num_top)
    assert reports == [
        expected(*row) for row in zip(logprobs.numpy(), tokens, [min(n, vocab_size) for n in num_top], strict=True)
    ]


def test_equal_alternatives_are_listed_by_id_and_share_a_rank():
    logprobs = torch.log_softmax(torch.zeros(1, 50_000), -1)
    report = describe(logprobs, [49_999], [20])[0]
    assert report.rank == 1
    assert [token for token, _ in report.top] == list(range(20))


def test_zero_probability_is_a_number_that_json_has():
    logprobs = torch.log_softmax(torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf]]), -1)
    report = describe(logprobs, [1], [3])[0]
    assert report == TokenLogprobs(1, 0.0, 1, ((1, 0.0), (0, -9999.0), (2, -9999.0)))
    json.dumps(report.top, allow_nan=False)


def test_prompt_logprobs_are_of_the_raw_distribution_in_any_chunking():
    logits = random_logits(150, 257, seed=9)
    targets = torch.randint(0, 257, (150,), generator=torch.Generator().manual_seed(2))
    reports = prompt_logprobs(logits, targets, 4)
    for report, row, target in zip(reports, logits.double(), targets.tolist(), strict=True):
        truth = (row - row.logsumexp(0)).numpy()
        assert report.token_id == target
        assert report.logprob == pytest.approx(truth[target], abs=1e-5)
        assert report.rank == expected(truth, target, 0).rank
        assert [token for token, _ in report.top] == np.argsort(-truth)[:4].tolist()
    assert prompt_logprobs(logits[:70], targets[:70], 4) + prompt_logprobs(logits[70:], targets[70:], 4) == reports
    assert prompt_logprobs(logits[:0], targets[:0], 4) == []


@pytest.mark.parametrize("num", [0, 1, 3, 7])
def test_the_best_of_rows_of_every_kind(num):
    """With ties, with nothing but -inf, with fewer numbers than are asked for; a row without numbers harms no other."""
    inf, nan = math.inf, math.nan
    rows = [[1, 3, 3, 2, 3, 0, 1], [-inf] * 7, [-inf, 5, -inf, -inf, 4, -inf, 5], [0.0, -0.0, 0, 0, 0, 0, 0]]
    scores = torch.tensor([*rows, [nan] * 7, *rows], dtype=torch.float32)
    found = top(scores, num).tolist()
    truth = [sorted(range(7), key=lambda token: (-row[token], token))[:num] for row in rows]
    assert found[:4] == truth
    assert found[5:] == truth
    assert [top(scores[i : i + 1], num).tolist()[0] for i in range(4)] == truth


@pytest.mark.parametrize("size", [32, 40, 1003, 5000])
def test_the_best_of_long_rows(size):
    """With ties, sorted, with the best in the rest that the folds leave, and where half of the tokens are banned."""
    for scale, num in itertools.product((0.0, 0.3, 3.0, 1000.0), (1, 2, 20, size // 32, size)):
        scores = (random_logits(5, size, seed=3) * scale).round()
        scores[1, -7:] = scores.amax() + 1
        scores[2, ::2] = -math.inf
        scores[3] = scores[3].sort().values
        truth = np.lexsort((np.arange(size) + np.zeros((5, 1)), -scores.numpy()))[:, :num]
        assert top(scores, num).tolist() == truth.tolist()


def test_numbers_that_are_none_come_first_wherever_they_are():
    for place in (0, 500, 1002):
        scores = random_logits(2, 1003, seed=4)
        scores[0, place] = math.nan
        assert top(scores, 3)[0, 0] == place
        assert top(scores, 3)[1].tolist() == top(scores[1:], 3)[0].tolist()


def test_candidates_and_their_reports():
    scores = torch.tensor([[-1.0, -math.inf, -0.5, -0.5], [-math.inf] * 4])
    logits = torch.tensor([[2.0, 9.0, 1.0, 1.0], [0.0] * 4])
    first, second = candidates_of(scores, logits, [5, 2], [2, None])
    assert [(found.token_id, found.logprob) for found in first] == [(2, -0.5), (3, -0.5), (0, -1.0)]
    assert [found.report for found in first] == describe(
        torch.log_softmax(logits[:1].expand(3, -1), -1), [2, 3, 0], [2] * 3
    )
    assert second == ()


def test_candidates_of_many_rows_are_reported_as_if_each_were_chosen():
    """With ties, forced tokens that are far from likely, tokens of probability 0, and rows that want no reports."""
    logits = (random_logits(70, 257, seed=5) * 3).round()
    logits[1, ::2] = -math.inf
    scores = torch.log_softmax(logits + 100 * (random_logits(70, 257, seed=6) > 1.5), -1)
    counts = [1 + row % 40 for row in range(70)]
    num_top = [None if row % 9 == 8 else row % 6 for row in range(70)]
    logprobs = torch.log_softmax(logits, -1).numpy()
    found = candidates_of(scores, logits, counts, num_top)
    assert [len(candidates) for candidates in found] == counts
    for candidates, row, num in zip(found, logprobs, num_top, strict=True):
        reports = [None if num is None else expected(row, candidate.token_id, num) for candidate in candidates]
        assert [candidate.report for candidate in candidates] == reports


def test_more_candidates_are_reported_with_no_more_passes_over_the_vocabulary():
    class Calls(TorchFunctionMode):
        num = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    logits = random_logits(4, 5000, seed=7)
    numbers = []
    for count in (2, 60):
        with Calls() as calls:
            candidates_of(logits, logits, [count] * 4, [3] * 4)
        numbers.append(calls.num)
    assert 0 < numbers[0] == numbers[1]


def test_no_report_of_a_candidate_is_below_the_lowest():
    logits = torch.tensor([[0.0, -20_000.0]])
    (found,) = candidates_of(logits, logits, [2], [0])
    assert [one.report.logprob for one in found] == [0.0, -9999.0]
