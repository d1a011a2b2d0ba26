"""What a request's fields mean for the engine: every one becomes part of the plan or the request is refused."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from model_runner.contract import SamplingParams, Verification
from scheduler.interface import ChoiceState, EngineRequest
from server.config import Settings
from server.engine.client import EngineInfo
from server.errors import InvalidRequestError
from server.openai.protocol.common import SamplingFields
from server.scoring import ScoringRules
from server.served_model import ServedModel
from server.speculation import SpeculationRules
from server.tokenization import Tokenizer

_SEED_BITS = 53
"""Of a drawn seed: as many as every JSON reader keeps."""
_SMALLEST_TEMPERATURE = 1e-30
"""Below this, dividing logits by it would overflow; only the highest has any probability there anyway."""
_Number = TypeVar("_Number", int, float)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the server makes of the engine's tokens."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    eos_token_ids: tuple[int, ...] = ()
    """Those that end the output by the model's own habit, not by `stop_token_ids` of the request."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a request differs between the endpoints."""

    prompt_param: str
    """Name of the field that the prompt came from."""
    max_tokens: int | None
    """As the client gave it."""
    max_tokens_param: str
    default_max_tokens: int | None
    """None: the rest of the context."""
    logprobs: int | None
    """Alternatives for each output token."""
    prompt_logprobs: int | None
    """Alternatives for each prompt token, whoever wants them."""
    prediction: Sequence[int] | None = None
    """The tokens of the predicted output."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated request: one engine request for each prompt, in the order of the prompts."""

    requests: tuple[EngineRequest, ...]
    options: OutputOptions
    n: int
    seed: int
    """As the client gave it, or drawn; prompt i was given seed + i if it was drawn, so that they differ."""
    seed_drawn: bool

    def seed_of(self, prompt: int) -> int:
        """With this seed, the prompt alone gives the same answer."""
        return self.seed + prompt if self.seed_drawn else self.seed

    @property
    def verification(self) -> Verification:
        """How drafts are verified; all but `match` may give other answers than without speculation."""
        speculation = self.requests[0].speculation
        return "match" if speculation is None else speculation.verify


class Planner:
    """Makes plans for one model on one engine."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, info: EngineInfo, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._info = info
        self._settings = settings

    def plan(self, id: str, fields: SamplingFields, prompts: Sequence[Sequence[int]], wanted: Wanted) -> Plan:  # noqa: A002
        """Raises InvalidRequestError for whatever does not fit the model, the engine or another field."""
        n = fields.n or 1
        self._check_queue(n * len(prompts), wanted)
        self._check_priority(fields.priority)
        seed_drawn = fields.seed is None
        seed = secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed
        sampling = self._sampling(fields, wanted)
        self._check_prediction(wanted.prediction or ())
        speculation = self.speculation.choose(fields.speculation, wanted.prediction)
        requests = []
        for index, tokens in enumerate(prompts):
            self._check_prompt(tokens, wanted.prompt_param)
            prompt = self._truncate(tokens, fields.truncate_prompt_tokens, wanted)
            max_tokens = self._max_tokens(len(prompt), wanted)
            requests.append(
                EngineRequest(
                    request_id=f"{id}-{index}",
                    prompt=tuple(prompt),
                    sampling=replace(sampling, seed=(seed + index if seed_drawn else seed) & (2**64 - 1)),
                    max_tokens=max_tokens,
                    choices=tuple(ChoiceState(choice) for choice in range(n)),
                    priority=fields.priority or 0,
                    cache_salt=fields.cache_salt or "",
                    speculation=speculation,
                )
            )
        self._check_min_tokens(fields.min_tokens or 0, min(request.max_tokens for request in requests))
        return Plan(tuple(requests), self._options(fields), n, seed, seed_drawn)

    @property
    def speculation(self) -> SpeculationRules:
        """What a request can ask for."""
        return SpeculationRules(self._info.speculation_methods, self._settings.speculation)

    @property
    def scoring(self) -> ScoringRules:
        """Which scores a request can ask for."""
        return ScoringRules(self._model.aux_model, self._info.num_early_exits)

    def check_text(self, text: str, param: str) -> None:
        """Refuses a text that is far too long before anybody spends time on encoding it."""
        at_least = self._tokenizer.fewest_tokens(text)
        if at_least > self._capacity:
            raise self._too_long(f"your {param} resulted in at least {at_least} tokens", param)

    def check_tokens(self, tokens: Sequence[int], path: str) -> None:
        """Refuses ids that the model does not have."""
        if tokens and max(tokens) >= self._info.vocab_size:
            index = next(i for i, token in enumerate(tokens) if token >= self._info.vocab_size)
            raise self._no_such_token(tokens[index], f"{path}[{index}]")

    def _check_prediction(self, tokens: Sequence[int]) -> None:
        """It may be as long as an answer, and has only tokens that an answer may have."""
        if len(tokens) > self._capacity:
            raise self._too_long(f"your prediction resulted in {len(tokens)} tokens", "prediction")
        self._check_prompt(tokens, "prediction")

    def _check_prompt(self, tokens: Sequence[int], noun: str) -> None:
        """Refuses a text whose spelling has a token that the tokenizer knows and the model does not."""
        strange = next((token for token in tokens if token >= self._info.vocab_size), None)
        if strange is not None:
            name = self._tokenizer.token_text(strange)
            message = f"Invalid '{noun}': it contains the token {name!r}, which the model does not have."
            raise InvalidRequestError(message, param=noun, code="invalid_value")

    @property
    def _eos_token_ids(self) -> tuple[int, ...]:
        """The model's own, less those that it cannot generate."""
        return tuple(token for token in self._model.defaults.eos_token_ids if token < self._info.vocab_size)

    @property
    def _capacity(self) -> int:
        """Tokens that one choice may have, prompt and output together."""
        return min(self._info.max_model_len, self._info.num_blocks * self._info.block_size)

    def _options(self, fields: SamplingFields) -> OutputOptions:
        return OutputOptions(
            stop=fields.stop_strings,
            include_stop=bool(fields.include_stop_str_in_output),
            min_tokens=fields.min_tokens or 0,
            skip_special_tokens=fields.skip_special_tokens is not False,
            eos_token_ids=() if fields.ignore_eos else self._eos_token_ids,
        )

    def _sampling(self, fields: SamplingFields, wanted: Wanted) -> SamplingParams:
        """All but the seed, which differs between prompts."""
        defaults = self._model.defaults
        eos = () if fields.ignore_eos else self._eos_token_ids
        self.check_tokens(fields.stop_token_ids or (), "stop_token_ids")
        stop_ids = tuple(dict.fromkeys([*(fields.stop_token_ids or ()), *eos]))
        bad_words = self._bad_words(fields.bad_words or ())
        temperature = _first(fields.temperature, defaults.temperature, 1.0)
        return SamplingParams(
            contrastive=self.scoring.contrastive(fields.contrastive),
            dola=self.scoring.dola(fields.dola),
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            allowed_token_ids=self._allowed(fields, stop_ids, bad_words),
            bad_words=bad_words,
            min_tokens=fields.min_tokens or 0,
            stop_token_ids=stop_ids,
            no_repeat_ngram_size=_first(fields.no_repeat_ngram_size, defaults.no_repeat_ngram_size, 0),
            repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
            frequency_penalty=fields.frequency_penalty or 0.0,
            presence_penalty=fields.presence_penalty or 0.0,
            temperature=temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0,
            typical_p=_first(fields.typical_p, defaults.typical_p, 1.0),
            top_k=max(0, _first(fields.top_k, defaults.top_k, 0)),
            top_p=_first(fields.top_p, defaults.top_p, 1.0),
            min_p=_first(fields.min_p, defaults.min_p, 0.0),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        )

    def _truncate(self, tokens: Sequence[int], keep: int | None, wanted: Wanted) -> Sequence[int]:
        if keep is None:
            return tokens
        if keep == -1:
            output = _first(wanted.max_tokens, wanted.default_max_tokens, 1)
            keep = max(1, self._capacity - output)
        return tokens[-keep:]

    def _max_tokens(self, prompt: int, wanted: Wanted) -> int:
        """How many tokens to generate after a prompt of so many."""
        noun = wanted.prompt_param
        if prompt == 0:
            message = f"Invalid '{noun}': it has no tokens, and the model needs at least one to begin with."
            raise InvalidRequestError(message, param=noun, code="invalid_value")
        least = 0 if wanted.max_tokens == 0 else 1
        if prompt + least > self._capacity:
            raise self._too_long(f"your {noun} resulted in {prompt} tokens", noun)
        room = self._capacity - prompt
        if wanted.max_tokens is None:
            return room if wanted.default_max_tokens is None else min(wanted.default_max_tokens, room)
        if wanted.max_tokens > room:
            total = prompt + wanted.max_tokens
            asked = f"you requested {total} tokens ({prompt} in the {noun}, {wanted.max_tokens} in the completion)"
            raise self._too_long(asked, noun, wanted.max_tokens_param)
        return wanted.max_tokens

    def _too_long(self, asked: str, noun: str, also: str | None = None) -> InvalidRequestError:
        if self._capacity < self._info.max_model_len:
            limit = f"This server's memory for one request holds {self._capacity} tokens."
        else:
            limit = f"This model's maximum context length is {self._capacity} tokens."
        advice = f"Please reduce the length of the {noun}{f' or {also}' if also else ''}."
        message = f"{limit} However, {asked}. {advice}"
        return InvalidRequestError(message, param=noun, code="context_length_exceeded")

    def _logit_bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        for key in bias:
            if not _TOKEN_ID.fullmatch(key):
                message = f"Invalid key in 'logit_bias': '{key}'. Expected the id of a token."
                raise InvalidRequestError(message, param="logit_bias", code="invalid_value")
            if int(key) >= self._info.vocab_size:
                raise self._no_such_token(int(key), f"logit_bias.{key}")
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
        self.check_tokens(fields.allowed_token_ids, "allowed_token_ids")
        allowed = tuple(dict.fromkeys(fields.allowed_token_ids))
        blocked = {word[0] for word in bad_words if len(word) == 1}
        if fields.min_tokens:
            blocked.update(stop_ids)
        if blocked.issuperset(allowed):
            message = "Invalid 'allowed_token_ids': other parameters forbid every one of them."
            raise InvalidRequestError(message, param="allowed_token_ids", code="invalid_value")
        return allowed

    def _no_such_token(self, token: int, path: str) -> InvalidRequestError:
        last = self._info.vocab_size - 1
        shown = token if token < 10**20 else "a very large integer"
        message = f"Invalid '{path}': integer above maximum value. Expected a value <= {last}, but got {shown} instead."
        return InvalidRequestError(message, param=path, code="integer_above_max_value")

    def _check_queue(self, choices: int, wanted: Wanted) -> None:
        most = self._settings.max_num_seqs + self._settings.max_waiting
        if choices > most:
            message = f"The request asks for {choices} choices in all, and this server holds at most {most}."
            raise InvalidRequestError(message, param="n", code="integer_above_max_value")

    def _check_priority(self, priority: int | None) -> None:
        if priority and self._settings.policy != "priority":
            message = f"Unsupported value: 'priority' does not support {priority} while the server's policy is "
            raise InvalidRequestError(
                f"{message}'{self._settings.policy}'. Only 0 is supported.", param="priority", code="unsupported_value"
            )

    def _check_min_tokens(self, min_tokens: int, max_tokens: int) -> None:
        if min_tokens > max_tokens:
            message = (
                f"Invalid 'min_tokens': integer above maximum value. "
                f"Expected a value <= {max_tokens}, the most that may be generated, but got {min_tokens} instead."
            )
            raise InvalidRequestError(message, param="min_tokens", code="integer_above_max_value")


def _first(given: _Number | None, default: _Number | None, otherwise: _Number) -> _Number:
    """The request, then the model, then the API."""
    return given if given is not None else default if default is not None else otherwise
