"""Sampling: from logits to tokens, for all rows of a step at once.

Constraints come first: bias, bans and penalties. Then greedy rows are decided, and others continue in truncations.py.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from model_runner.config import LogprobsMode
from model_runner.contract import BeamCandidate, Failure, TokenLogprobs, no_token_left
from model_runner.kernels.library import Kernels
from model_runner.kernels.row_sums import row_log_softmax
from model_runner.sampling.logprobs import candidates_of, describe, take, values_of
from model_runner.sampling.rows import NO_TOKEN, Entries, MaskedRows, SamplingRows, Setting
from model_runner.sampling.truncations import Truncations, truncate


class Draw(Protocol):
    """Draws tokens. Implementations differ only in speed: on CPU all draw the same tokens, bit for bit."""

    divides: bool
    """Whether the draw itself divides the rows in `rows.whole` by their temperature."""

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """Returns the token of each row in `rows.whole` and `rows.truncated`.

        Each of these rows of `scores` [rows, vocab] float32 has at least one finite entry and no NaN or +inf.
        """
        ...


class NativeDraw:
    """Draws with the native CPU kernels. Tokens removed by truncation cost almost nothing there, so rows are not
    compacted.
    """

    def __init__(self, kernels: Kernels, divides: bool) -> None:
        self.divides = divides
        self._kernels = kernels

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        drawn = (*rows.whole, *rows.truncated)
        keys = np.array([rows.key(row) for row in drawn], dtype=np.uint64)
        temperatures = np.ones(len(drawn))
        if self.divides:
            temperatures[: len(rows.whole)] = [rows.sampling[row].temperature for row in rows.whole]
        tokens = self._kernels.pick(scores.contiguous(), keys, temperatures, drawn).tolist()
        return dict(zip(drawn, tokens, strict=True))


def pick(kernels: Kernels, logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """Samples all rows with the native kernels, as modules.target.Pick describes."""
    return kernels.pick(logits.contiguous(), keys.numpy().view(np.uint64), temperatures.numpy())


def sample_allowed(kernels: Kernels, logits: Tensor, masked: MaskedRows) -> list[int]:
    """Samples masked rows with the native kernels; a rows.SampleAllowed."""
    tokens: list[int] = kernels.pick(
        logits.contiguous(), masked.keys, masked.temperatures, masked.rows, masked.masks
    ).tolist()
    return tokens


NOT_FINITE = Failure("the model's logits are not finite")


@dataclass(frozen=True, slots=True)
class Picks:
    """The sampled tokens and reports, one entry per row."""

    tokens: tuple[int, ...]
    """NO_TOKEN where there is an error or where candidates are wanted."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """For rows that request logprobs and have no error."""
    errors: tuple[Failure | None, ...]
    """Why nothing could be sampled, or None."""
    surprises: tuple[float | None, ...]
    """For rows with mirostat and no error: -log2 of the token's probability in the distribution it was drawn from."""
    candidates: Mapping[int, tuple[BeamCandidate, ...]] = field(default_factory=dict)
    """For rows that want candidates and have no error."""


class Sampler:
    """Applies all processors in order, then chooses one token per row. Rows do not affect each other."""

    def __init__(self, draw: Draw, logprobs_mode: LogprobsMode = "raw", truncations: Truncations = truncate) -> None:
        """Processed logprobs require a draw with `divides` False."""
        self._logprobs_mode = logprobs_mode
        self._truncate = truncations
        self.draw = draw
        """How tokens are drawn. Other kinds of draws can build on it."""

    def __call__(
        self, logits: Tensor, rows: SamplingRows, draw: Draw | None = None, raw: Tensor | None = None
    ) -> Picks:
        """Sample from logits [rows, vocab], which are not modified.

        Args:
            logits: the scores to sample from.
            rows: settings of the rows.
            draw: how rows above temperature 0 are drawn; by default `self.draw`.
            raw: the model's own logits, if `logits` are transformed scores. They determine plausibility and raw
                logprobs.
        """
        draw = draw or self.draw
        logits = logits.float()
        if rows.takes_highest:
            return _pick_highest(logits)
        scores, errors = constrain(logits, rows)
        raw = logits if raw is None else raw.float()
        if rows.least_share is not None:
            scores = _keep_plausible(scores, raw, rows.least_share)
        if rows.truncated or not draw.divides:
            scores = self._truncate(scores, rows.without_whole_temperature() if draw.divides else rows)
        tokens = _choose(scores, rows, draw) | dict.fromkeys((*rows.listed, *errors), NO_TOKEN)
        reports = self.logprobs(raw, scores, tokens, rows)
        reported = raw if self._logprobs_mode == "raw" else scores
        surprises = _surprises(scores, tokens, rows)
        order = range(len(tokens))
        return Picks(
            tokens=tuple(tokens[row] for row in order),
            logprobs=tuple(reports.get(row) for row in order),
            errors=tuple(errors.get(row) for row in order),
            candidates=_candidates(scores, reported, rows, errors),
            surprises=tuple(surprises.get(row) for row in order),
        )

    def logprobs(
        self, raw: Tensor, scores: Tensor, tokens: dict[int, int], rows: SamplingRows
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities of each row's token, from raw or processed logits as `logprobs_mode` says."""
        scores = raw if self._logprobs_mode == "raw" else scores
        asked = {
            row: params.logprobs
            for row, params in enumerate(rows.sampling)
            if params.logprobs is not None and tokens[row] != NO_TOKEN
        }
        if not asked:
            return {}
        logprobs = row_log_softmax(take(scores, tuple(asked)))
        reports = describe(logprobs, [tokens[row] for row in asked], list(asked.values()))
        return {
            row: replace(report, top=values_of(of_row, listed)) if listed else report
            for row, report, of_row in zip(asked, reports, logprobs, strict=True)
            for listed in (rows.sampling[row].logprob_token_ids,)
        }


def _with_logprobs(raw: Tensor, listed: Sequence[int]) -> Tensor:
    """Logits, with log-probabilities in the rows of `listed`."""
    if not listed:
        return raw
    if len(listed) == len(raw):
        return row_log_softmax(raw)
    return raw.index_copy(0, torch.tensor(listed, device=raw.device), row_log_softmax(take(raw, listed)))


def _candidates(
    scores: Tensor, reported: Tensor, rows: SamplingRows, errors: Collection[int]
) -> dict[int, tuple[BeamCandidate, ...]]:
    """Candidates of the rows that want some and have no error."""
    listed = [row for row in rows.listed if row not in errors]
    if not listed:
        return {}
    counts = [rows.sampling[row].beam_candidates for row in listed]
    num_top = [rows.sampling[row].logprobs for row in listed]
    return dict(zip(listed, candidates_of(take(scores, listed), take(reported, listed), counts, num_top), strict=True))


_LARGEST: Final = torch.finfo(torch.float32).max


def _bias(logits: Tensor, rows: SamplingRows) -> None:
    _add(logits, rows.logit_bias)


def _allow(logits: Tensor, rows: SamplingRows) -> None:
    """Ban all tokens that are not in the request's list."""
    places = rows.allowed.rows, rows.allowed.tokens
    kept = logits[places]
    logits[rows.allowed_rows] = -math.inf
    logits[places] = kept


def _follow_grammar(logits: Tensor, rows: SamplingRows) -> None:
    """Ban tokens that the grammar does not allow."""
    if len(rows.grammar_rows) == len(logits):
        logits.masked_fill_(~rows.masks, -math.inf)
    else:
        kept = logits.index_select(0, rows.grammar_rows).masked_fill_(~rows.masks, -math.inf)
        logits.index_copy_(0, rows.grammar_rows, kept)


def _ban(logits: Tensor, rows: SamplingRows) -> None:
    """Ban the tokens that bad_words, min_tokens and no_repeat_ngram_size forbid."""
    _add(logits, rows.banned)


def _penalise_repetition(logits: Tensor, rows: SamplingRows) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    places, penalty = (rows.repetition.rows, rows.repetition.tokens), rows.repetition.values
    old = logits[places].double()
    logits[places] = torch.where(old > 0, old / penalty, old * penalty).float()


def _penalise_output(logits: Tensor, rows: SamplingRows) -> None:
    """Frequency and presence penalty as OpenAI defines them: only generated tokens count."""
    _add(logits, rows.output_penalty, sign=-1)


def _penalise_extension(logits: Tensor, rows: SamplingRows) -> None:
    """DRY ("don't repeat yourself"): penalise tokens that would extend a repetition, more for longer repetitions."""
    _add(logits, rows.dry, sign=-1)


def _favour_ending(logits: Tensor, rows: SamplingRows) -> None:
    """Raise the logits of tokens that end the output as it grows longer. Banned tokens stay banned."""
    places = rows.ending.rows, rows.ending.tokens
    old = logits[places].double()
    new = (old + old.abs() * rows.ending.values).clamp(-_LARGEST, _LARGEST)  # DRY may have made `old` huge
    logits[places] = torch.where(old.isfinite(), new, old).float()


def _add(logits: Tensor, entries: Entries, sign: int = 1) -> None:
    places = entries.rows, entries.tokens
    logits[places] = (logits[places].double() + sign * entries.values).float()


def constrained(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [rows, vocab] float32 after bias, bans and penalties: the argument itself if no row has any.

    Rows that do not use a step keep their exact bits.
    """
    steps: tuple[tuple[bool, Callable[[Tensor, SamplingRows], None]], ...] = (
        (bool(rows.logit_bias), _bias),
        (len(rows.allowed_rows) > 0, _allow),
        (len(rows.grammar_rows) > 0, _follow_grammar),
        (bool(rows.banned), _ban),
        (bool(rows.repetition), _penalise_repetition),  # before the output penalties, which may change a logit's sign
        (bool(rows.output_penalty), _penalise_output),
        (bool(rows.dry), _penalise_extension),
        (bool(rows.ending), _favour_ending),
    )
    used = [step for is_used, step in steps if is_used]
    if used:
        logits = logits.clone()
    for step in used:
        step(logits, rows)
    return logits


def _keep_plausible(scores: Tensor, logits: Tensor, least_share: Setting) -> Tensor:
    """Scores with -inf for tokens whose probability by `logits` is below the row's share of the highest probability.

    This is the adaptive plausibility constraint of contrastive decoding (arXiv:2210.15097). Tokens that are already
    banned do not count, so at least one other token always remains.
    """
    old = least_share.take(scores)
    possible = least_share.take(logits).masked_fill(old == -math.inf, -math.inf)
    lowest = possible.amax(-1, keepdim=True).double() + least_share.values.log()
    return least_share.put(scores.clone(), old.masked_fill(possible < lowest, -math.inf))


def constrain(raw: Tensor, rows: SamplingRows) -> tuple[Tensor, dict[int, Failure]]:
    """Apply all constraints. Returns the scores, and the rows in which no token can be chosen, with the reason."""
    errors = dict.fromkeys(_unusable(raw), NOT_FINITE)
    scores = constrained(_with_logprobs(raw, rows.listed), rows)
    if scores is not raw:
        blamed = [row for row in _unusable(scores) if row not in rows.listed]  # listed rows may have no candidates
        errors = {row: no_token_left(rows.sampling[row]) for row in blamed} | errors | dict(rows.failures)
    if errors:
        scores = scores.index_fill(0, torch.tensor(list(errors), device=scores.device), 0.0)
    return scores, errors


def _choose(scores: Tensor, rows: SamplingRows, draw: Draw) -> dict[int, int]:
    """The token of each row."""
    tokens: dict[int, int] = {}
    if rows.greedy:
        tokens.update(zip(rows.greedy, _highest(take(scores, rows.greedy))[0], strict=True))
    if rows.whole or rows.truncated:
        tokens.update(draw(scores, rows))
    return tokens


def _surprises(scores: Tensor, tokens: dict[int, int], rows: SamplingRows) -> dict[int, float]:
    """-log2 of the probability of each mirostat row's token."""
    asked = [row for row in rows.mirostat if tokens[row] != NO_TOKEN]
    if not asked:
        return {}
    chosen = [row_log_softmax(scores[row].double())[tokens[row]] for row in asked]  # row by row, to stay in the cache
    return dict(zip(asked, (torch.stack(chosen) / -math.log(2)).tolist(), strict=True))


def _pick_highest(logits: Tensor) -> Picks:
    """Results of plain rows. A finite maximum implies what `_unusable` checks."""
    tokens, values = _highest(logits)
    errors = tuple(None if math.isfinite(value) else NOT_FINITE for value in values)
    return Picks(
        tokens=tuple(token if error is None else NO_TOKEN for token, error in zip(tokens, errors, strict=True)),
        logprobs=(None,) * len(tokens),
        errors=errors,
        surprises=(None,) * len(tokens),
    )


def _highest(scores: Tensor) -> tuple[list[int], list[float]]:
    """The column and value of each row's highest entry; the first among equals, and NaN counts as the highest.

    torch and numpy both guarantee this; numpy is much faster.
    """
    if scores.device.type == "cpu":
        rows = scores.numpy()
        best = rows.argmax(-1)
        return best.tolist(), rows[np.arange(len(rows)), best].tolist()
    columns = scores.argmax(-1)
    return columns.tolist(), scores.gather(1, columns.unsqueeze(1)).squeeze(1).tolist()


def _unusable(logits: Tensor) -> list[int]:
    """Rows that contain NaN or +inf, or only -inf."""
    return [row for row, highest in enumerate(logits.amax(-1).tolist()) if not math.isfinite(highest)]
