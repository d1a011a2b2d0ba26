"""Log-probabilities as the API reports them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.batch import PromptRows
from model_runner.contract import BeamCandidate, SamplingParams, TokenLogprobs
from model_runner.kernels.row_sums import row_log_softmax
from model_runner.sampling.truncations import places

_LOWEST = -9999.0
"""Reported for probability 0, as OpenAI does, because JSON has no infinity."""
_FOLDS = 32
"""Number of folds into which `top` splits each row."""
_ROWS_AT_ONCE = 64
"""Rows of log-probabilities processed at a time, to bound memory."""


def describe(logprobs: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One TokenLogprobs per row of log-probabilities [rows, vocab] float32.

    `tokens` are the chosen tokens, `num_top` the number of alternatives per row, limited to the vocabulary. The rank is
    1 plus the number of more probable tokens. Equally probable alternatives are ordered by id.
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
    """(token, log-probability) pairs of these tokens from one row of log-probabilities [vocab]."""
    return _pairs(tokens, logprobs[torch.tensor(tokens, device=logprobs.device)].tolist())


def candidates_of(
    scores: Tensor, logits: Tensor, counts: Sequence[int], num_top: Sequence[int | None]
) -> list[tuple[BeamCandidate, ...]]:
    """The best possible tokens of each row, at most `counts` of them.

    Args:
        scores: [rows, vocab] float32 that ranks the tokens; -inf marks impossible tokens.
        logits: [rows, vocab] float32 to report log-probabilities from.
        counts: the maximum for each row.
        num_top: alternatives to report per row; None for no report.
    """
    best = top(scores, min(max(counts), scores.shape[-1]))
    values = scores.gather(1, best)
    possible = [
        [(token, value) for token, value in zip(tokens, of_row, strict=True) if value > -math.inf][:count]
        for tokens, of_row, count in zip(best.tolist(), values.tolist(), counts, strict=True)
    ]
    reports = _reports(logits, [[token for token, _ in of_row] for of_row in possible], num_top)
    return [
        tuple(BeamCandidate(token, value, report) for (token, value), report in zip(of_row, its_reports, strict=True))
        for of_row, its_reports in zip(possible, reports, strict=True)
    ]


def _reports(
    logits: Tensor, tokens: Sequence[Sequence[int]], num_top: Sequence[int | None]
) -> list[Sequence[TokenLogprobs | None]]:
    """Reports for several tokens of each row of logits [rows, vocab]; None where no report is wanted."""
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
    """Reports for several tokens of one row of log-probabilities [vocab].

    Everything above the least probable token is sorted once, which ranks all tokens in one pass over the vocabulary.
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
    """Log-probabilities of the token [rows] that follows each row of raw logits [rows, vocab]."""
    reports: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        tokens = targets[rows].tolist()
        reports += describe(row_log_softmax(logits[rows].float()), tokens, [num_top] * len(tokens))
    return reports


def logprobs_of_prompts(
    logits: Tensor, parts: Sequence[PromptRows], sampling: Sequence[SamplingParams]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Prompt logprobs of the choices that asked for them, by index in the batch. `sampling` has all choices."""
    return {
        part.choice: tuple(prompt_logprobs(logits[part.rows], part.targets, sampling[part.choice].prompt_logprobs or 0))
        for part in parts
    }


def top(scores: Tensor, num: int) -> Tensor:
    """The ids of the `num` highest entries of each row, best first, lower id first among equals: [rows, num].

    topk guarantees neither an order among equals nor which of them it takes, so it only provides the lowest value that
    is included. It need not see all entries: the row is folded, and the `num` highest column maxima bound the `num`
    highest entries from below. All entries that reach this bound are in those columns or in the remainder of the row.
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
    """Like `top`, for rows in which many entries may be equal or NaN. NaN ranks first.

    topk gets unique integers: the float's bits, mapped to an order that integers share, followed by the inverted id.
    """
    vocab_size = scores.shape[-1]
    numbers = torch.where(scores.isnan(), torch.inf, scores) + 0.0  # turns -0 into 0
    bits = numbers.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    backwards = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.long() << 32) | backwards
    return vocab_size - 1 - (keys.topk(num, -1).values & 0xFFFFFFFF)


def take(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows in ascending order; not a copy if they are all rows."""
    return scores if len(rows) == len(scores) else scores.index_select(0, torch.tensor(rows, device=scores.device))
