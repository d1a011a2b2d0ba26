"""Log-probabilities as the API reports them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_runner.contract import Candidate, TokenLogprobs

_LOWEST = -9999.0
"""Reported for probability 0, as OpenAI does: JSON has no infinity."""
_PROMPT_ROWS = 64
"""Prompt positions worked on at a time, to bound the memory."""


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
            top=tuple(
                (other, max(its_value, _LOWEST)) for other, its_value in zip(ids[:n], its_values[:n], strict=True)
            ),
        )
        for token, n, value, rank, ids, its_values in zip(tokens, num_top, *columns, strict=True)
    ]


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
    candidates = []
    for row, (tokens, of_row) in enumerate(zip(best.tolist(), values.tolist(), strict=True)):
        possible = [token for token, value in zip(tokens, of_row, strict=True) if value > -math.inf][: counts[row]]
        reports: Sequence[TokenLogprobs | None] = [None] * len(possible)
        wanted = num_top[row]
        if wanted is not None:
            logprobs = torch.log_softmax(logits[row], -1).expand(len(possible), -1)
            reports = describe(logprobs, possible, [wanted] * len(possible))
        candidates.append(tuple(map(Candidate, possible, of_row, reports)))
    return candidates


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """What the raw distribution of each row of logits [rows, vocab] says of the token [rows] that follows it."""
    reports: list[TokenLogprobs] = []
    for start in range(0, len(logits), _PROMPT_ROWS):
        rows = slice(start, start + _PROMPT_ROWS)
        tokens = targets[rows].tolist()
        reports += describe(torch.log_softmax(logits[rows].float(), -1), tokens, [num_top] * len(tokens))
    return reports


def top(scores: Tensor, num: int) -> Tensor:
    """The ids of the highest entries of each row, best first, lower id first among equals: [rows, num].

    topk promises no order among equals, nor which of them it takes, so it only says how high the lowest of them is.
    """
    lowest = scores.topk(num, -1).values[:, -1:]
    rows, ids = np.nonzero((scores >= lowest).cpu().numpy())
    values = scores[torch.from_numpy(rows), torch.from_numpy(ids)].cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    first = np.searchsorted(rows, np.arange(len(scores)))
    return torch.from_numpy(ids[order[first[:, None] + np.arange(num)]]).to(scores.device)
