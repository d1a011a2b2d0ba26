"""How tokens are chosen: every field becomes part of SamplingParams or the request is refused."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from model_runner.contract import SAMPLER_ORDER, Breaker, Dry, Mirostat, SamplingParams, Xtc
from model_runner.info import RunnerInfo
from server.errors import InvalidRequestError
from server.generation.generation_config import GenerationDefaults
from server.api.fields.sampling import SamplingFields
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

ORDERS: Mapping[str, tuple[str, ...]] = {
    "samewise": SAMPLER_ORDER,
    "llama.cpp": ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
}
"""What `sampler_order` may name."""
_SMALLEST_TEMPERATURE = 1e-30
"""Below this, dividing logits by it would overflow; only the highest has any probability there anyway."""
_CANDIDATES = 4
"""Of contrastive search, where the request names no top_k. The model's own is meant for draws."""
_Number = TypeVar("_Number", int, float)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingRules:
    """What requests can ask for, of one model on one engine."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, info: RunnerInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._info = info

    def params(self, fields: SamplingFields, breakers: tuple[Breaker, ...]) -> SamplingParams:
        """All but seed, choice and logprobs; `breakers` are those of DRY as tokens. Raises InvalidRequestError."""
        defaults = self._model.defaults
        check_tokens(fields.stop_token_ids or (), "stop_token_ids", self._info.vocab_size)
        stop_ids = tuple(dict.fromkeys([*(fields.stop_token_ids or ()), *self.eos_token_ids(fields)]))
        bad_words = self._bad_words(fields.bad_words or ())
        params = SamplingParams(
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            allowed_token_ids=self._allowed(fields, stop_ids, bad_words),
            bad_words=bad_words,
            min_tokens=fields.min_tokens or 0,
            stop_token_ids=stop_ids,
            no_repeat_ngram_size=first(fields.no_repeat_ngram_size, defaults.no_repeat_ngram_size, 0),
            repetition_penalty=first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
            frequency_penalty=fields.frequency_penalty or 0.0,
            presence_penalty=fields.presence_penalty or 0.0,
            dry=_dry(fields, breakers),
            exponential_decay_length_penalty=_length_penalty(fields, defaults, stop_ids),
        )
        if fields.beams is not None:
            return replace(params, temperature=0.0)
        if fields.penalty_alpha:
            top_k = first(fields.top_k, None, _CANDIDATES)
            return replace(params, temperature=0.0, top_k=top_k, penalty_alpha=fields.penalty_alpha)
        return self._with_drawing(params, fields)

    def _with_drawing(self, params: SamplingParams, fields: SamplingFields) -> SamplingParams:
        """With what decides among the tokens that are left."""
        defaults = self._model.defaults
        if fields.asks("mirostat"):
            defaults = defaults.without_truncations()
        temperature = first(fields.temperature, defaults.temperature, 1.0)
        params = replace(
            params,
            temperature=temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0,
            top_n_sigma=max(0.0, fields.top_n_sigma or 0.0),
            typical_p=first(fields.typical_p, defaults.typical_p, 1.0),
            epsilon_cutoff=first(fields.epsilon_cutoff, defaults.epsilon_cutoff, 0.0),
            eta_cutoff=first(fields.eta_cutoff, defaults.eta_cutoff, 0.0),
            top_k=max(0, first(fields.top_k, defaults.top_k, 0)),
            top_p=first(fields.top_p, defaults.top_p, 1.0),
            min_p=first(fields.min_p, defaults.min_p, 0.0),
            xtc=_xtc(fields),
            mirostat=_mirostat(fields),
            sampler_order=_order(fields.sampler_order),
        )
        _check_order(params)
        return params

    def eos_token_ids(self, fields: SamplingFields) -> tuple[int, ...]:
        """Those that end the output by the model's own habit, less those that it cannot generate."""
        if fields.ignore_eos:
            return ()
        return tuple(token for token in self._model.defaults.eos_token_ids if token < self._info.vocab_size)

    def _logit_bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        for key in bias:
            if not _TOKEN_ID.fullmatch(key):
                message = f"Invalid key in 'logit_bias': '{key}'. Expected the id of a token."
                raise InvalidRequestError(message, param="logit_bias", code="invalid_value")
            if int(key) >= self._info.vocab_size:
                raise _no_such_token(int(key), f"logit_bias.{key}", self._info.vocab_size)
        return tuple((int(key), value) for key, value in bias.items())

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the beginning of a text and after a space."""
        spellings: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            variants = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word)]
            if not variants[0]:
                message = f"Invalid 'bad_words[{index}]': it has no tokens."
                raise InvalidRequestError(message, param=f"bad_words[{index}]", code="invalid_value")
            spellings.update(dict.fromkeys(variants))
        return tuple(word for word in spellings if max(word) < self._info.vocab_size)  # others cannot be generated

    def _allowed(
        self, fields: SamplingFields, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> tuple[int, ...] | None:
        """The allowed tokens, of which at least one must be left at every position."""
        if fields.allowed_token_ids is None:
            return None
        check_tokens(fields.allowed_token_ids, "allowed_token_ids", self._info.vocab_size)
        allowed = tuple(dict.fromkeys(fields.allowed_token_ids))
        blocked = {word[0] for word in bad_words if len(word) == 1}
        if fields.min_tokens:
            blocked.update(stop_ids)
        if blocked.issuperset(allowed):
            message = "Invalid 'allowed_token_ids': other parameters forbid every one of them."
            raise InvalidRequestError(message, param="allowed_token_ids", code="invalid_value")
        return allowed


def check_tokens(tokens: Sequence[int], path: str, vocab_size: int) -> None:
    """Refuses ids that the model does not have."""
    if tokens and max(tokens) >= vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        raise _no_such_token(tokens[index], f"{path}[{index}]", vocab_size)


def first(given: _Number | None, default: _Number | None, otherwise: _Number) -> _Number:
    """The request, then the model, then the API."""
    return given if given is not None else default if default is not None else otherwise


def _dry(fields: SamplingFields, breakers: tuple[Breaker, ...]) -> Dry | None:
    if not fields.dry_multiplier or fields.dry_penalty_last_n == 0:
        return None
    default = Dry(fields.dry_multiplier)
    return Dry(
        multiplier=fields.dry_multiplier,
        base=first(fields.dry_base, None, default.base),
        allowed_length=first(fields.dry_allowed_length, None, default.allowed_length),
        last_n=first(fields.dry_penalty_last_n, None, default.last_n),
        breakers=breakers,
    )


def _xtc(fields: SamplingFields) -> Xtc | None:
    if not fields.xtc_probability:
        return None
    return Xtc(fields.xtc_probability, first(fields.xtc_threshold, None, Xtc(1.0).threshold))


def _mirostat(fields: SamplingFields) -> Mirostat | None:
    if not fields.mirostat:
        return None
    return Mirostat(first(fields.mirostat_tau, None, Mirostat().tau), first(fields.mirostat_eta, None, Mirostat().eta))


def _length_penalty(
    fields: SamplingFields, defaults: GenerationDefaults, stop_ids: Sequence[int]
) -> tuple[int, float] | None:
    if fields.exponential_decay_length_penalty is None:
        return defaults.exponential_decay_length_penalty
    if not stop_ids:
        message = "Invalid 'exponential_decay_length_penalty': there is no token that ends the output."
        raise InvalidRequestError(message, param="exponential_decay_length_penalty", code="invalid_value")
    start, factor = fields.exponential_decay_length_penalty
    return int(start), factor


def _order(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return SAMPLER_ORDER
    return ORDERS[given] if isinstance(given, str) else tuple(given)


def _check_order(params: SamplingParams) -> None:
    """Refuses an order without a step that would be taken."""
    silent = SamplingParams()
    for name in SAMPLER_ORDER if params.temperature > 0 else ():
        if getattr(params, name) != getattr(silent, name) and name not in params.sampler_order:
            message = f"Invalid 'sampler_order': it does not name '{name}', which is in use."
            raise InvalidRequestError(message, param="sampler_order", code="invalid_value")


def _no_such_token(token: int, path: str, vocab_size: int) -> InvalidRequestError:
    shown = token if token < 10**20 else "a very large integer"
    limit = f"Expected a value <= {vocab_size - 1}, but got {shown} instead."
    message = f"Invalid '{path}': integer above maximum value. {limit}"
    return InvalidRequestError(message, param=path, code="integer_above_max_value")
