"""From logits to tokens, for all rows of a step."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.config import LogprobsMode
from model_runner.contract import Failure, SamplingParams, TokenLogprobs
from model_runner.kernels.library import Kernels
from model_runner.sampling.draw import Draw, NativeDraw, TorchDraw, take
from model_runner.sampling.logprobs import describe
from model_runner.sampling.processors import CONSTRAINTS, TRUNCATIONS, keep_plausible, process
from model_runner.sampling.rows import SamplingRows

NO_TOKEN = -1
_NOT_FINITE = Failure("the model's logits are not finite")


@dataclass(frozen=True, slots=True)
class Picks:
    """What was sampled; one entry for each row."""

    tokens: tuple[int, ...]
    """NO_TOKEN where there is an error."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """For rows that ask for them and have no error."""
    errors: tuple[Failure | None, ...]
    """Why nothing could be sampled."""


class Sampler:
    """Every processor in its order, then one token per row. What a row gets does not depend on the other rows."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw",
        kernels: Kernels | None = None,
    ) -> None:
        """Kernels, on CPU, make it faster; the tokens are the same."""
        self._logprobs_mode = logprobs_mode
        self.draw: Draw
        """How tokens are drawn; a draw of another kind can make use of it."""
        if kernels is None:
            self.draw = TorchDraw(vocab_size, device)
        else:
            self.draw = NativeDraw(kernels, divides=logprobs_mode == "raw")  # processed ones need what is divided

    def __call__(
        self, logits: Tensor, rows: SamplingRows, draw: Draw | None = None, raw: Tensor | None = None
    ) -> Picks:
        """Sample from logits [rows, vocab], which are left as they are; rows that are not greedy by this draw.

        `raw` are the model's own logits where those to sample from are others: they decide on what is plausible, and
        raw logprobs are theirs.
        """
        draw = draw or self.draw
        logits = logits.float()
        if rows.is_plain:
            return _pick_highest(logits)
        errors = dict.fromkeys(_unusable(logits), _NOT_FINITE)
        scores = process(CONSTRAINTS, logits, rows)
        if scores is not logits:
            errors = {row: _blame(rows.sampling[row]) for row in _unusable(scores)} | errors
        if errors:
            scores = scores.index_fill(0, torch.tensor(list(errors), device=scores.device), 0.0)
        raw = logits if raw is None else raw.float()
        if rows.least_share:
            scores = keep_plausible(scores, raw, rows.least_share)
        if rows.truncated or not draw.divides:
            scores = process(TRUNCATIONS, scores, rows.without_whole_temperature() if draw.divides else rows)
        tokens = _choose(scores, rows, draw) | dict.fromkeys(errors, NO_TOKEN)
        reports = self._logprobs(raw if self._logprobs_mode == "raw" else scores, tokens, rows)
        order = range(len(tokens))
        return Picks(
            tokens=tuple(tokens[row] for row in order),
            logprobs=tuple(reports.get(row) for row in order),
            errors=tuple(errors.get(row) for row in order),
        )

    def _logprobs(self, scores: Tensor, tokens: dict[int, int], rows: SamplingRows) -> dict[int, TokenLogprobs]:
        asked = {
            row: params.logprobs
            for row, params in enumerate(rows.sampling)
            if params.logprobs is not None and tokens[row] != NO_TOKEN
        }
        if not asked:
            return {}
        logprobs = torch.log_softmax(take(scores, tuple(asked)), -1)
        reports = describe(logprobs, [tokens[row] for row in asked], list(asked.values()))
        return dict(zip(asked, reports, strict=True))


def _choose(scores: Tensor, rows: SamplingRows, draw: Draw) -> dict[int, int]:
    """The token of each row."""
    tokens: dict[int, int] = {}
    if rows.greedy:
        tokens.update(zip(rows.greedy, _highest(take(scores, rows.greedy))[0], strict=True))
    if rows.whole or rows.truncated:
        tokens.update(draw(scores, rows))
    return tokens


def _pick_highest(logits: Tensor) -> Picks:
    """What plain rows get. That a row's highest logit is finite says the same of what `_unusable` looks for."""
    tokens, values = _highest(logits)
    errors = tuple(None if math.isfinite(value) else _NOT_FINITE for value in values)
    return Picks(
        tokens=tuple(token if error is None else NO_TOKEN for token, error in zip(tokens, errors, strict=True)),
        logprobs=(None,) * len(tokens),
        errors=errors,
    )


def _highest(scores: Tensor) -> tuple[list[int], list[float]]:
    """The column of each row's highest entry, the first among equals, and this entry; NaN counts as the highest.

    torch and numpy, which is much faster, both promise so.
    """
    if scores.device.type == "cpu":
        rows = scores.numpy()
        best = rows.argmax(-1)
        return best.tolist(), rows[np.arange(len(rows)), best].tolist()
    columns = scores.argmax(-1)
    return columns.tolist(), scores.gather(1, columns.unsqueeze(1)).squeeze(1).tolist()


def _unusable(logits: Tensor) -> list[int]:
    """Rows that hold NaN or +inf, or -inf only."""
    return [row for row, highest in enumerate(logits.amax(-1).tolist()) if not math.isfinite(highest)]


def _blame(sampling: SamplingParams) -> Failure:
    used = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": sampling.bad_words,
        "min_tokens": sampling.min_tokens,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }
    names = ", ".join(name for name, value in used.items() if value)
    return Failure(f"no token can be chosen with these settings: {names}", by_request=True)
