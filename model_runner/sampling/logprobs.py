"""Log-probabilities as the API reports them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.batch import PromptRows
from model_runner.contract import Candidate, SamplingParams, TokenLogprobs
from model_runner.kernels.row_sums import row_log_softmax
from model_runner.sampling.truncations import places

_LOWEST = -9999.0
"""Reported for probability 0, as OpenAI does: JSON has no infinity."""
_FOLDS = 32
"""See `top`."""
_ROWS_AT_ONCE = 64
"""Rows of log-probabilities that are held at a time, to bound the memory."""


def describe(logprobs: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One report per row of log-probabilities [rows, vocab], float32.

    `tokens` are the chosen ones, `num_top` how many alternatives each row wants, cut to the vocabulary. The rank is 1
    plus the number of tokens that are more probable; of equally probable alternatives the lower id comes first.
    """
    if not tokens:
        return []
    chosen = torch.tensor(tokens, device=logprobs.device).unsqueeze(1)
    values = logprobs.gather(1, chosen)
    ranks = 1 + (logprobs > values).sum(-1)
    top_tokens = top(logprobs, min(max(num_top), logprobs.shape[-1]))
    top_values = logprobs.gather(1, top_tokens)
    columns = (values.squeeze(1).tolist(), ranks.tolist(), top_tokens.tolist(), top_values.tolist())
    return [
        TokenLogprobs(
            token_id=token,
            logprob=max(value, _LOWEST),
            rank=rank,
            top=_pairs(ids[:n], its_values[:n]),
        )
        for token, n, value, rank, ids, its_values in zip(tokens, num_top, *columns, strict=True)
    ]


def values_of(logprobs: Tensor, tokens: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """These tokens with what a row of log-probabilities [vocab] says of them."""
    return _pairs(tokens, logprobs[torch.tensor(tokens, device=logprobs.device)].tolist())


def candidates_of(
    scores: Tensor, logits: Tensor, counts: Sequence[int], num_top: Sequence[int | None]
) -> list[tuple[Candidate, ...]]:
    """The best tokens of each row, as many as are possible and at most so many as its count.

    Args:
        scores: [rows, vocab] float32, by which they are the best; what is -inf is not possible.
        logits: [rows, vocab] float32, to be reported.
        counts: of each row.
        num_top: alternatives in the reports of each row; None for no reports.
    """
    best = top(scores, min(max(counts), scores.shape[-1]))
    values = scores.gather(1, best)
    possible = [
        [(token, value) for token, value in zip(tokens, of_row, strict=True) if value > -math.inf][:count]
        for tokens, of_row, count in zip(best.tolist(), values.tolist(), counts, strict=True)
    ]
    reports = _reports(logits, [[token for token, _ in of_row] for of_row in possible], num_top)
    return [
        tuple(Candidate(token, value, report) for (token, value), report in zip(of_row, its_reports, strict=True))
        for of_row, its_reports in zip(possible, reports, strict=True)
    ]


def _reports(
    logits: Tensor, tokens: Sequence[Sequence[int]], num_top: Sequence[int | None]
) -> list[Sequence[TokenLogprobs | None]]:
    """What `describe` says of several tokens of each row of logits [rows, vocab]; None where no reports are wanted."""
    reports: list[Sequence[TokenLogprobs | None]] = [[None] * len(of_row) for of_row in tokens]
    asked = {row: num for row, num in enumerate(num_top) if num is not None}
    for start in range(0, len(asked), _ROWS_AT_ONCE):
        rows = list(asked)[start : start + _ROWS_AT_ONCE]
        logprobs = row_log_softmax(take(logits, rows))
        best = top(logprobs, min(max(asked[row] for row in rows), logprobs.shape[-1]))
        columns = (logprobs.cpu().numpy(), best.tolist(), logprobs.gather(1, best).tolist())
        for row, of_row, ids, values in zip(rows, *columns, strict=True):
            num = asked[row]
            reports[row] = _reports_of_row(of_row, tokens[row], _pairs(ids[:num], values[:num]))
    return reports


def _reports_of_row(
    logprobs: NDArray[np.float32], tokens: Sequence[int], alternatives: tuple[tuple[int, float], ...]
) -> list[TokenLogprobs]:
    """The same of one row of log-probabilities [vocab]. What is above the lowest of the tokens is sorted once, which
    ranks all of them: one pass over the vocabulary, and not one for each token.
    """
    values = logprobs[np.array(tokens, dtype=np.int64)]
    above = np.sort(logprobs[logprobs > np.fmin.reduce(values, initial=np.inf)])
    ranks = 1 + len(above) - np.searchsorted(above, values, side="right")
    return [
        TokenLogprobs(token, max(value, _LOWEST), rank, alternatives)
        for token, value, rank in zip(tokens, values.tolist(), ranks.tolist(), strict=True)
    ]


def _pairs(tokens: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token, max(value, _LOWEST)) for token, value in zip(tokens, values, strict=True))


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """What the raw distribution of each row of logits [rows, vocab] says of the token [rows] that follows it."""
    reports: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        tokens = targets[rows].tolist()
        reports += describe(row_log_softmax(logits[rows].float()), tokens, [num_top] * len(tokens))
    return reports


def logprobs_of_prompts(
    logits: Tensor, parts: Sequence[PromptRows], sampling: Sequence[SamplingParams]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """For each choice of a step that asked for them, by its index in the batch. `sampling` are those of all choices."""
    return {
        part.choice: tuple(prompt_logprobs(logits[part.rows], part.targets, sampling[part.choice].prompt_logprobs or 0))
        for part in parts
    }


def top(scores: Tensor, num: int) -> Tensor:
    """The ids of the highest entries of each row, best first, lower id first among equals: [rows, num].

    topk promises no order among equals, nor which of them it takes, so it only says how high the lowest of them is. It
    need not look at all entries: those of a column in each fold of the row have a highest one, and the `num` highest of
    these are so many entries. What is as high is in the columns that they stand for, or in the rest of the row.
    """
    if num == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    width = scores.shape[1] // _FOLDS
    if num > width:
        return _top_of_any(scores, num)
    folds = scores[:, : _FOLDS * width].view(-1, _FOLDS, width)
    rest = scores[:, _FOLDS * width :]
    highest = folds.amax(1)  # [rows, width]
    best = highest.topk(num, -1).values
    if not (best.isfinite().all() and (rest < torch.inf).all()):
        return _top_of_any(scores, num)
    lowest = best[:, -1:]
    row, column = places(highest >= lowest)
    entries = folds[row, :, column]  # [columns, _FOLDS]
    which, fold = places(entries >= lowest[row])
    rest_row, rest_column = places(rest >= lowest)
    rows = torch.cat([row[which], rest_row]).cpu().numpy()
    ids = torch.cat([fold * width + column[which], rest_column + _FOLDS * width]).cpu().numpy()
    values = torch.cat([entries[which, fold], rest[rest_row, rest_column]]).cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    first = np.searchsorted(rows[order], np.arange(len(scores)))
    return torch.from_numpy(ids[order[first[:, None] + np.arange(num)]]).to(scores.device)


def _top_of_any(scores: Tensor, num: int) -> Tensor:
    """The same where many entries may be equal, or no numbers, which come first.

    topk gets unique integers: the float's bits, in an order that integers share, and below them the id counted
    backwards.
    """
    vocab_size = scores.shape[-1]
    numbers = torch.where(scores.isnan(), torch.inf, scores) + 0.0  # which makes one zero of the two
    bits = numbers.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    backwards = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.long() << 32) | backwards
    return vocab_size - 1 - (keys.topk(num, -1).values & 0xFFFFFFFF)


def take(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in ascending order; not a copy if they are all."""
    return scores if len(rows) == len(scores) else scores.index_select(0, torch.tensor(rows, device=scores.device))
