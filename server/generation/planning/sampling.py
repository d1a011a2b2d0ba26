"""How tokens are chosen: every field becomes part of SamplingParams or the request is refused."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from model_runner.contract import SAMPLER_ORDER, Dry, Mirostat, SamplingParams, Xtc
from model_runner.info import RunnerInfo
from server.errors import InvalidRequestError
from server.generation.field_table import filled
from server.generation.served_model import ServedModel
from server.generation.settings import DEFAULT_CANDIDATES, DecodingSettings
from server.text.tokenizer import Tokenizer

ORDERS: Mapping[str, tuple[str, ...]] = {
    "samewise": SAMPLER_ORDER,
    "llama.cpp": ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
}
"""What `sampler_order` may name."""
_SMALLEST_TEMPERATURE = 1e-30
"""Below this, dividing logits by it would overflow; only the highest has any probability there anyway."""
_AS_THEY_ARE = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_p", "min_p")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingRules:
    """What requests can ask for, of one model on one engine."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, info: RunnerInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._info = info

    def params(self, asked: DecodingSettings, *, fills_in: bool = False) -> SamplingParams:
        """All but seed, choice, logprobs and what mixes scores. Raises InvalidRequestError."""
        full: DecodingSettings = filled(asked, self._model.defaults.values)
        check_tokens(asked.stop_token_ids or (), "stop_token_ids", self._info.vocab_size)
        stop_ids = tuple(dict.fromkeys([*(asked.stop_token_ids or ()), *self.eos_token_ids(asked, fills_in=fills_in)]))
        bad_words = self._bad_words(asked.bad_words or ())
        params = SamplingParams(
            logit_bias=self._logit_bias(asked.logit_bias or {}),
            allowed_token_ids=self._allowed(asked, stop_ids, bad_words),
            bad_words=bad_words,
            min_tokens=full.min_tokens or 0,
            stop_token_ids=stop_ids,
            no_repeat_ngram_size=full.no_repeat_ngram_size or 0,
            repetition_penalty=full.repetition_penalty or 1.0,
            frequency_penalty=full.frequency_penalty or 0.0,
            presence_penalty=full.presence_penalty or 0.0,
            dry=self._dry(full),
            exponential_decay_length_penalty=_length_penalty(asked, full, stop_ids),
        )
        if asked.beam_search is not None:
            return replace(params, temperature=0.0)
        if asked.penalty_alpha:
            top_k = DEFAULT_CANDIDATES if asked.top_k is None else asked.top_k
            return replace(params, temperature=0.0, top_k=top_k, penalty_alpha=asked.penalty_alpha)
        return _with_drawing(params, full)

    def eos_token_ids(self, asked: DecodingSettings, *, fills_in: bool = False) -> tuple[int, ...]:
        """Those that end the output by the model's own habit, less those that it cannot generate.

        One that `fills_in` a gap also ends with the tokens that end the middle.
        """
        if asked.ignore_eos:
            return ()
        of_gap = self._tokenizer.fill_in.ends if fills_in and self._tokenizer.fill_in is not None else ()
        ends = dict.fromkeys([*self._model.defaults.eos_token_ids, *of_gap])
        return tuple(token for token in ends if token < self._info.vocab_size)

    def _logit_bias(self, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        strange = [f"'{key}'" for key in bias if not _TOKEN_ID.fullmatch(key)]
        if strange:
            message = f"Invalid key in 'logit_bias': {', '.join(strange[:8])}. Expected the ids of tokens."
            raise InvalidRequestError(message, param="logit_bias", code="invalid_value")
        for key in bias:
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
        self, asked: DecodingSettings, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> tuple[int, ...] | None:
        """The allowed tokens, of which at least one must be left at every position."""
        if asked.allowed_token_ids is None:
            return None
        check_tokens(asked.allowed_token_ids, "allowed_token_ids", self._info.vocab_size)
        allowed = tuple(dict.fromkeys(asked.allowed_token_ids))
        blocked = {word[0] for word in bad_words if len(word) == 1}
        if asked.min_tokens:
            blocked.update(stop_ids)
        if blocked.issuperset(allowed):
            message = "Invalid 'allowed_token_ids': other parameters forbid every one of them."
            raise InvalidRequestError(message, param="allowed_token_ids", code="invalid_value")
        return allowed

    def _dry(self, full: DecodingSettings) -> Dry | None:
        if not full.dry_multiplier or full.dry_penalty_last_n == 0:
            return None
        assert full.dry_base is not None
        assert full.dry_allowed_length is not None
        assert full.dry_penalty_last_n is not None
        return Dry(
            multiplier=full.dry_multiplier,
            base=full.dry_base,
            allowed_length=full.dry_allowed_length,
            last_n=full.dry_penalty_last_n,
            breakers=self._tokenizer.spell_breakers(full.breakers, self._info.vocab_size),
        )


def check_tokens(tokens: Sequence[int], path: str, vocab_size: int) -> None:
    """Refuses ids that the model does not have."""
    if tokens and max(tokens) >= vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        raise _no_such_token(tokens[index], f"{path}[{index}]", vocab_size)


def _with_drawing(params: SamplingParams, full: DecodingSettings) -> SamplingParams:
    """With what decides among the tokens that are left."""
    temperature, top_k, sigma = full.temperature or 0.0, full.top_k or 0, full.top_n_sigma or 0.0
    params = replace(
        params,
        temperature=temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0,
        top_n_sigma=max(0.0, sigma),
        top_k=max(0, top_k),
        xtc=Xtc(full.xtc_probability, full.xtc_threshold or 0.0) if full.xtc_probability else None,
        mirostat=Mirostat(full.mirostat_tau or 0.0, full.mirostat_eta or 0.0) if full.mirostat else None,
        sampler_order=_order(full.sampler_order),
        **{name: getattr(full, name) for name in _AS_THEY_ARE},
    )
    _check_order(params)
    return params


def _length_penalty(
    asked: DecodingSettings, full: DecodingSettings, stop_ids: Sequence[int]
) -> tuple[int, float] | None:
    if asked.exponential_decay_length_penalty is not None and not stop_ids:
        message = "Invalid 'exponential_decay_length_penalty': there is no token that ends the output."
        raise InvalidRequestError(message, param="exponential_decay_length_penalty", code="invalid_value")
    if full.exponential_decay_length_penalty is None:
        return None
    start, factor = full.exponential_decay_length_penalty
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
    shown = f"token {token}" if token < 10**20 else "a very large integer"
    message = f"Invalid '{path}': {shown} is out of vocabulary. This model has {vocab_size} tokens, numbered from 0."
    return InvalidRequestError(message, param=path, code="integer_above_max_value")
