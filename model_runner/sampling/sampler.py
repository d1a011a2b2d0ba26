"""From logits to tokens, for all rows of a step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.config import LogprobsMode
from model_runner.contract import SamplingParams, TokenLogprobs
from model_runner.kernels.library import Kernels
from model_runner.sampling.draw import Draw, NativeDraw, TorchDraw, take
from model_runner.sampling.logprobs import describe
from model_runner.sampling.processors import CONSTRAINTS, TRUNCATIONS, process
from model_runner.sampling.rows import SamplingRows

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Picks:
    """What was sampled; one entry for each row."""

    tokens: tuple[int, ...]
    """NO_TOKEN where there is an error."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """For rows that ask for them and have no error."""
    errors: tuple[str | None, ...]
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
        self._draw: Draw
        if kernels is None:
            self._draw = TorchDraw(vocab_size, device)
        else:
            self._draw = NativeDraw(kernels, divides=logprobs_mode == "raw")  # processed ones need what is divided

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Picks:
        """Sample from logits [rows, vocab], which are left as they are."""
        raw = logits.float()
        errors = dict.fromkeys(_unusable(raw), "the model's logits are not finite")
        scores = process(CONSTRAINTS, raw, rows)
        if scores is not raw:
            errors = {row: _blame(rows.sampling[row]) for row in _unusable(scores)} | errors
        if errors:
            scores = scores.index_fill(0, torch.tensor(list(errors), device=scores.device), 0.0)
        scores = process(TRUNCATIONS, scores, rows.without_whole_temperature() if self._draw.divides else rows)
        tokens = self._choose(scores, rows) | dict.fromkeys(errors, NO_TOKEN)
        reports = self._logprobs(raw if self._logprobs_mode == "raw" else scores, tokens, rows)
        order = range(len(tokens))
        return Picks(
            tokens=tuple(tokens[row] for row in order),
            logprobs=tuple(reports.get(row) for row in order),
            errors=tuple(errors.get(row) for row in order),
        )

    def _choose(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """The token of each row."""
        tokens: dict[int, int] = {}
        if rows.greedy:
            tokens.update(zip(rows.greedy, _argmax(take(scores, rows.greedy)), strict=True))
        if rows.whole or rows.truncated:
            tokens.update(self._draw(scores, rows))
        return tokens

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


def _argmax(scores: Tensor) -> list[int]:
    """The column of each row's highest entry, the first among equals: torch and numpy, much faster, both promise it."""
    best = scores.numpy().argmax(-1) if scores.device.type == "cpu" else scores.argmax(-1)
    columns: list[int] = best.tolist()
    return columns


def _unusable(logits: Tensor) -> list[int]:
    """Rows that hold NaN or +inf, or -inf only."""
    return [row for row, highest in enumerate(logits.amax(-1).tolist()) if not math.isfinite(highest)]


def _blame(sampling: SamplingParams) -> str:
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
    return f"no token can be chosen with these settings: {', '.join(name for name, value in used.items() if value)}"
