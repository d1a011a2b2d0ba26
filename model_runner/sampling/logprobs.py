"""Log-probabilities as the API reports them."""

import math
from collections.abc import Sequence

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


def candidates_of(scores: Tensor, logprobs: Tensor, num: int, num_top: int | None) -> tuple[Candidate, ...]:
    """The best tokens of one row, as many as are possible and at most `num`.

    Args:
        scores: [vocab] float32, by which they are the best; what is -inf is not possible.
        logprobs: [vocab] float32, to be reported.
        num: of candidates.
        num_top: alternatives in each report; None for no reports.
    """
    tokens = top(scores.unsqueeze(0), min(num, len(scores))).squeeze(0)
    values = scores[tokens]
    possible = int((values > -math.inf).sum())
    ids: list[int] = tokens[:possible].tolist()
    reports: list[TokenLogprobs] | list[None] = [None] * possible
    if num_top is not None:
        reports = describe(logprobs.expand(possible, -1), ids, [num_top] * possible)
    return tuple(
        Candidate(token, value, report)
        for token, value, report in zip(ids, values[:possible].tolist(), reports, strict=True)
    )


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """What the raw distribution of each row of logits [rows, vocab] says of the token [rows] that follows it."""
    reports: list[TokenLogprobs] = []
    for start in range(0, len(logits), _PROMPT_ROWS):
        rows = slice(start, start + _PROMPT_ROWS)
        tokens = targets[rows].tolist()
        reports += describe(torch.log_softmax(logits[rows].float(), -1), tokens, [num_top] * len(tokens))
    return reports


def top(logprobs: Tensor, num: int) -> Tensor:
    """The ids of the highest entries of each row of float32, best first, lower id first among equals: [rows, num].

    topk promises no order among equals, so it gets unique integers: the float's bits, in an order that integers
    share, and below them the id counted backwards.
    """
    vocab_size = logprobs.shape[-1]
    bits = logprobs.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    keys = (ordered.long() << 32) | backwards
    return vocab_size - 1 - (keys.topk(num, -1).values & 0xFFFFFFFF)
