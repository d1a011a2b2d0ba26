"""Rules that turn a request's decoding settings into the engine's parameters, or refuse them."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_runner.config import METHOD_ALIASES, REMOVED_METHODS
from model_runner.contract import SAMPLER_ORDER, Contrastive, DoLa, Dry, Mirostat, SamplingParams, Speculation, Xtc
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import BeamSearch
from server.errors import InvalidRequestError
from server.generation.served_model import ServedModel
from server.generation.settings import (
    DEFAULT_CANDIDATES,
    ContrastiveSettings,
    DecodingSettings,
    DoLaSettings,
    GuidanceSettings,
    SpeculationSettings,
    with_defaults,
)
from server.text.tokenizer import Tokenizer

ORDERS: Mapping[str, tuple[str, ...]] = {
    "samewise": SAMPLER_ORDER,
    "llama.cpp": ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
}
"""Named orders of `sampler_order`."""
_SMALLEST_TEMPERATURE = 1e-30
"""Below this, dividing logits by it would overflow. Only the highest logit has any probability there anyway."""
_AS_THEY_ARE = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_p", "min_p")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingRules:
    """Validates decoding settings for one model on one engine."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, info: RunnerInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._info = info

    def params(self, asked: DecodingSettings, *, fills_in: bool = False) -> SamplingParams:
        """The sampling parameters without seed, choice, logprobs, guidance, contrastive decoding and DoLa.

        Raises InvalidRequestError.
        """
        full: DecodingSettings = with_defaults(asked, self._model.defaults.values)
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
        """The model's EOS tokens, without those that it cannot generate.

        With `fills_in`, they include the tokens that end the middle of a fill-in prompt.
        """
        if asked.ignore_eos:
            return ()
        of_gap = self._tokenizer.fill_in.ends if fills_in and self._tokenizer.fill_in is not None else ()
        ends = dict.fromkeys([*self._model.defaults.eos_token_ids, *of_gap])
        return tuple(token for token in ends if token < self._info.vocab_size)

    def _logit_bias(self, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        strange = [f"'{key}'" for key in bias if not _TOKEN_ID.fullmatch(key)]
        if strange:
            message = f"Invalid key in 'logit_bias': {', '.join(strange[:8])}. Expected token ids."
            raise InvalidRequestError(message, param="logit_bias", code="invalid_value")
        for key in bias:
            if int(key) >= self._info.vocab_size:
                raise _no_such_token(int(key), f"logit_bias.{key}", self._info.vocab_size)
        return tuple((int(key), value) for key, value in bias.items())

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's spellings at the beginning of a text and after a space."""
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
        """The allowed tokens. Refuses a set if no token of it is left."""
        if asked.allowed_token_ids is None:
            return None
        check_tokens(asked.allowed_token_ids, "allowed_token_ids", self._info.vocab_size)
        allowed = tuple(dict.fromkeys(asked.allowed_token_ids))
        blocked = {word[0] for word in bad_words if len(word) == 1}
        if asked.min_tokens:
            blocked.update(stop_ids)
        if blocked.issuperset(allowed):
            message = "Invalid 'allowed_token_ids': other parameters forbid all of them."
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
    """The parameters with the settings for drawing a token."""
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
        message = "Invalid 'exponential_decay_length_penalty': no token ends the output (see 'ignore_eos')."
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
    """Refuses a sampler order without a step that is in use."""
    silent = SamplingParams()
    for name in SAMPLER_ORDER if params.temperature > 0 else ():
        if getattr(params, name) != getattr(silent, name) and name not in params.sampler_order:
            message = f"Invalid 'sampler_order': it does not contain '{name}', which is in use."
            raise InvalidRequestError(message, param="sampler_order", code="invalid_value")


def _no_such_token(token: int, path: str, vocab_size: int) -> InvalidRequestError:
    shown = f"token {token}" if token < 10**20 else "a very large integer"
    message = f"Invalid '{path}': {shown} is out of vocabulary. This model has {vocab_size} tokens, numbered from 0."
    return InvalidRequestError(message, param=path, code="integer_above_max_value")


def choose_beam_search(decoding: DecodingSettings, stop: tuple[str, ...]) -> BeamSearch | None:
    """The beam search of a request, which ends at the strings `stop`.

    None if the request has none, or one beam, which is greedy decoding.
    """
    if decoding.beam_search is None or decoding.beam_search.width == 1:
        return None
    full = with_defaults(decoding.beam_search, {})
    return BeamSearch(
        width=full.width,
        length_penalty=1.0 if full.length_penalty is None else full.length_penalty,
        early_stopping=full.early_stopping or False,
        groups=full.groups or 1,
        diversity_penalty=full.diversity_penalty or 0.0,
        stop=stop,
        skip_special_tokens=decoding.skip_special_tokens is not False,
    )


_CONTRASTIVE = Contrastive()
_DOLA = DoLa("low")


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """Validates decoding methods that combine several scores, for the loaded models."""

    aux_model: str | None
    """Name of the auxiliary model, if one is loaded."""
    num_early_exits: int
    """Layers from which the model can predict the next token; 0 if it does not support this."""

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields that the loaded models do not support."""
        missing = {"contrastive": self.aux_model is None, "dola": self.num_early_exits == 0}
        return frozenset(name for name, is_missing in missing.items() if is_missing)

    def contrastive(self, asked: ContrastiveSettings | None) -> Contrastive | None:
        """The settings, or None. Raises InvalidRequestError without an auxiliary model, or if another one is named."""
        if asked is None:
            return None
        if self.aux_model is None:
            message = (
                "Unsupported parameter: 'contrastive' is not supported by this server, which has no auxiliary model. "
                "Start it with --aux-model and a weaker model with the same tokenizer."
            )
            raise InvalidRequestError(message, param="contrastive", code="unsupported_parameter")
        if asked.amateur not in {None, self.aux_model}:
            message = (
                f"Unsupported value: 'contrastive.amateur' does not support '{asked.amateur}' with this server. "
                f"Supported values are: '{self.aux_model}'."
            )
            raise InvalidRequestError(message, param="contrastive.amateur", code="unsupported_value")
        beta = _CONTRASTIVE.amateur_weight if asked.beta is None else asked.beta
        return Contrastive(
            alpha=_CONTRASTIVE.alpha if asked.alpha is None else asked.alpha,
            expert_weight=1 + beta if asked.expert_weight is None else asked.expert_weight,
            amateur_weight=beta,
            temperature=_CONTRASTIVE.temperature if asked.temperature is None else asked.temperature,
        )

    def guidance(self, asked: GuidanceSettings | None) -> float | None:
        """The guidance scale, or None if it changes nothing."""
        return None if asked is None or asked.scale == 1 else asked.scale

    def dola(self, asked: DoLaSettings | None) -> DoLa | None:
        """The settings, or None. Raises InvalidRequestError for layers that the model does not have."""
        if asked is None:
            return None
        if self.num_early_exits == 0:
            message = "Unsupported parameter: 'dola' is not supported with this model."
            raise InvalidRequestError(message, param="dola", code="unsupported_parameter")
        alpha = _DOLA.alpha if asked.alpha is None else asked.alpha
        if isinstance(asked.layers, str):
            return DoLa(asked.layers, alpha)
        last = self.num_early_exits - 1
        for index, layer in enumerate(asked.layers):
            if layer > last:
                path = f"dola.layers[{index}]"
                shown = layer if layer < 10**20 else "a very large integer"
                expected = f"Expected a value <= {last}, the model's last layer, but got {shown} instead."
                message = f"Invalid '{path}': integer above maximum value. {expected}"
                raise InvalidRequestError(message, param=path, code="integer_above_max_value")
        return DoLa(tuple(sorted(set(asked.layers))), alpha)


_AUTO, _OFF, _PREDICTION = "auto", "off", "prediction"
_TAKES_PREDICTION = (_AUTO, _PREDICTION)


@dataclass(frozen=True, slots=True)
class SpeculationRules:
    """Chooses how to speculate for a request, from the methods that the engine has."""

    methods: tuple[str, ...]
    """The engine's methods."""
    default: str
    """The server's setting: a method for requests that name none, or "off"."""

    @property
    def default_method(self) -> str:
        """The method for a request that names none, or "off". `prediction` needs a prediction, so it becomes "off"."""
        return self.default if self.default in self.methods and self.default != _PREDICTION else _OFF

    def choose(
        self, asked: Literal["off"] | SpeculationSettings | None, prediction: Sequence[int] | None
    ) -> Speculation | None:
        """How to speculate for a request, or None. `prediction` has the tokens of its predicted output.

        Raises InvalidRequestError for an unknown method, and for a prediction that the method cannot use.
        """
        if asked is None and prediction is None:
            return None if self.default_method == _OFF else Speculation(self.default_method)
        options = asked if isinstance(asked, SpeculationSettings) else SpeculationSettings()
        asked_method = options.method and METHOD_ALIASES.get(options.method, options.method)
        is_off = asked == _OFF or options.num_tokens == 0
        if asked_method is not None:
            self._check_method(asked_method)
        self._check_prediction(asked_method, is_off=is_off, given=prediction is not None)
        if is_off:
            return None
        method = asked_method or self._implied_method(prediction)
        self._check_method(method)
        return Speculation(method, options.num_tokens, options.verify or "match", tuple(prediction or ()))

    def _implied_method(self, prediction: Sequence[int] | None) -> str:
        if prediction is not None:
            return _PREDICTION
        return _AUTO if self.default in (_OFF, _PREDICTION) else self.default

    def _check_method(self, method: str) -> None:
        if method in self.methods:
            return
        message = f"Unsupported value: 'speculation.method' does not support '{method}' with this server."
        if method in REMOVED_METHODS:
            message += f" {REMOVED_METHODS[method]}"
        elif near := difflib.get_close_matches(method, self.methods, n=1):
            message += f" Did you mean '{near[0]}'?"
        there = ", ".join(f"'{name}'" for name in self.methods)
        message += f" Supported values are: {there}." if there else " This server has no speculation method."
        raise InvalidRequestError(message, param="speculation.method", code="unsupported_value")

    def _check_prediction(self, method: str | None, *, is_off: bool, given: bool) -> None:
        if not given:
            if method == _PREDICTION and not is_off:
                message = "'speculation.method': 'prediction' needs the parameter 'prediction' of chat completions."
                raise InvalidRequestError(message, param="speculation.method", code="invalid_parameter_combination")
            return
        if _PREDICTION not in self.methods:
            message = "Unsupported parameter: 'prediction' is not supported by this server."
            raise InvalidRequestError(message, param="prediction", code="unsupported_parameter")
        if is_off or method not in (None, *_TAKES_PREDICTION):
            found = "is off" if is_off else f"has the method '{method}'"
            message = (
                f"'prediction' cannot be used while 'speculation' {found}. "
                "Leave 'speculation' out, or give it the method 'prediction' or 'auto'."
            )
            raise InvalidRequestError(message, param="prediction", code="invalid_parameter_combination")
