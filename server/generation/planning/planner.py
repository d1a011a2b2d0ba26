"""What a request's fields mean for the engine: every one becomes part of the plan or the request is refused."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_runner.contract import Breaker, SamplingParams, Speculation, Verification
from model_runner.info import RunnerInfo
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
from server.config import Settings
from server.errors import InvalidRequestError
from server.api.fields.sampling import SamplingFields
from server.generation.planning.beam_search import choose_beam_search
from server.generation.planning.sampling import SamplingRules, check_tokens, first
from server.generation.planning.scoring import ScoringRules
from server.generation.planning.speculation import SpeculationRules
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

NEGATIVE_PROMPT = "guidance.negative_prompt"
"""Path of that field."""
_SEED_BITS = 53
"""Of a drawn seed: as many as every JSON reader keeps."""


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
    """The API's, where the model has none. None: the rest of the context."""
    logprobs: int | None
    """Alternatives for each output token."""
    prompt_logprobs: int | None
    """Alternatives for each prompt token, whoever wants them."""
    num_choices: int
    """To generate for each prompt."""
    breakers: tuple[Breaker, ...]
    """DRY's sequence breakers, as tokens."""
    prediction: Sequence[int] | None = None
    """The tokens of the predicted output."""
    negative_prompt: Sequence[int] | None = None
    """The tokens of the guide's prompt; None: the last one of the prompt itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated request: one engine request for each prompt, in the order of the prompts."""

    id: str
    """Of the answer; the ids of its requests begin with it."""
    requests: tuple[EngineRequest, ...]
    options: OutputOptions
    n: int
    """Choices of each request."""
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

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, info: RunnerInfo, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._info = info
        self._settings = settings
        self._rules = SamplingRules(tokenizer, model, info)

    def plan(self, id: str, fields: SamplingFields, prompts: Sequence[Sequence[int]], wanted: Wanted) -> Plan:  # noqa: A002
        """Raises InvalidRequestError for whatever does not fit the model, the engine or another field."""
        n = wanted.num_choices
        beams = choose_beam_search(fields, self._stop(fields))
        sampling = self._sampling(fields, wanted)
        self._check_queue(len(prompts), fields, wanted)
        self._check_priority(fields.priority)
        self._check_prediction(wanted.prediction or ())
        self._check_prompt(wanted.negative_prompt or (), NEGATIVE_PROMPT)
        self._check_beams(beams, fields, wanted)
        self._check_step(sampling)
        seed_drawn = fields.seed is None
        seed = secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed
        model = EngineRequest(
            request_id=id,
            prompt=(),
            sampling=sampling,
            max_tokens=0,
            choices=tuple(ChoiceState(choice) for choice in range(n)),
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            speculation=self._speculation(fields, wanted),
            beam_search=beams,
        )
        requests = []
        for index, tokens in enumerate(prompts):
            of_prompt = replace(sampling, seed=(seed + index if seed_drawn else seed) & (2**64 - 1))
            request = replace(model, request_id=f"{id}-{index}", sampling=of_prompt)
            requests.append(self._with_prompt(request, tokens, fields.truncate_prompt_tokens, wanted))
        self._check_min_tokens(fields.min_tokens or 0, min(request.max_tokens for request in requests))
        return Plan(id, tuple(requests), self._options(fields), n, seed, seed_drawn)

    def _sampling(self, fields: SamplingFields, wanted: Wanted) -> SamplingParams:
        """All but the seed, which differs between prompts."""
        return replace(
            self._rules.params(fields, wanted.breakers),
            guidance=self.scoring.guidance(fields.guidance),
            contrastive=self.scoring.contrastive(fields.contrastive),
            dola=self.scoring.dola(fields.dola),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        )

    def _with_prompt(
        self, request: EngineRequest, tokens: Sequence[int], keep: int | None, wanted: Wanted
    ) -> EngineRequest:
        """The request with a prompt, of which the last `keep` tokens are used, and with what follows from it."""
        self._check_prompt(tokens, wanted.prompt_param)
        capacity = self._capacity(request.width, request.sampling.num_candidates)
        prompt = self._truncate(tokens, keep, wanted, capacity)
        max_tokens = self._max_tokens(len(prompt), wanted.prompt_param, wanted, capacity)
        guide: Sequence[int] = ()
        if request.sampling.guidance is not None:
            guide = prompt[-1:] if wanted.negative_prompt is None else wanted.negative_prompt
            max_tokens = min(max_tokens, self._max_tokens(len(guide), NEGATIVE_PROMPT, wanted, capacity))
        return replace(request, prompt=tuple(prompt), max_tokens=max_tokens, guide=tuple(guide))

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
        if at_least > self._capacity():
            raise self._too_long(self._capacity(), f"your {param} resulted in at least {at_least} tokens", param)

    def check_tokens(self, tokens: Sequence[int], path: str) -> None:
        """Refuses ids that the model does not have."""
        check_tokens(tokens, path, self._info.vocab_size)

    def _check_prediction(self, tokens: Sequence[int]) -> None:
        """It may be as long as an answer, and has only tokens that an answer may have."""
        if len(tokens) > self._capacity():
            asked = f"your prediction resulted in {len(tokens)} tokens"
            raise self._too_long(self._capacity(), asked, "prediction")
        self._check_prompt(tokens, "prediction")

    def _check_prompt(self, tokens: Sequence[int], noun: str) -> None:
        """Refuses a text whose spelling has a token that the tokenizer knows and the model does not."""
        strange = next((token for token in tokens if token >= self._info.vocab_size), None)
        if strange is not None:
            name = self._tokenizer.token_text(strange)
            message = f"Invalid '{noun}': it contains the token {name!r}, which the model does not have."
            raise InvalidRequestError(message, param=noun, code="invalid_value")

    def _capacity(self, width: int = 1, num_candidates: int = 0) -> int:
        """Tokens that each of so many beams may have, prompt and output together; candidates need memory only."""
        held = self._info.num_blocks // width * self._info.block_size
        return min(self._info.max_model_len, held - num_candidates)

    def _options(self, fields: SamplingFields) -> OutputOptions:
        return OutputOptions(
            stop=self._stop(fields),
            include_stop=bool(fields.include_stop_str_in_output),
            min_tokens=fields.min_tokens or 0,
            skip_special_tokens=fields.skip_special_tokens is not False,
            eos_token_ids=self._rules.eos_token_ids(fields),
        )

    def _stop(self, fields: SamplingFields) -> tuple[str, ...]:
        return self._model.defaults.stop or () if fields.stop is None else fields.stop_strings

    def _speculation(self, fields: SamplingFields, wanted: Wanted) -> Speculation | None:
        """How to guess ahead; not where all of a step's rows have their use already, whatever the server's default."""
        if fields.penalty_alpha or fields.beams is not None:
            return None
        return self.speculation.choose(fields.speculation, wanted.prediction)

    def _truncate(self, tokens: Sequence[int], keep: int | None, wanted: Wanted, capacity: int) -> Sequence[int]:
        if keep is None:
            return tokens
        if keep == -1:
            output = first(wanted.max_tokens, self._default_max_tokens(wanted), 1)
            keep = max(1, capacity - output)
        return tokens[-keep:]

    def _max_tokens(self, prompt: int, noun: str, wanted: Wanted, capacity: int) -> int:
        """How many tokens to generate after a prompt of so many, where prompt and output may have `capacity`."""
        if prompt == 0:
            message = f"Invalid '{noun}': it has no tokens, and the model needs at least one to begin with."
            raise InvalidRequestError(message, param=noun, code="invalid_value")
        least = 0 if wanted.max_tokens == 0 else 1
        if prompt + least > capacity:
            raise self._too_long(capacity, f"your {noun} resulted in {prompt} tokens", noun)
        room = capacity - prompt
        if wanted.max_tokens is None:
            default = self._default_max_tokens(wanted)
            return room if default is None else min(default, room)
        if wanted.max_tokens > room:
            total = prompt + wanted.max_tokens
            asked = f"you requested {total} tokens ({prompt} in the {noun}, {wanted.max_tokens} in the completion)"
            raise self._too_long(capacity, asked, noun, wanted.max_tokens_param)
        return wanted.max_tokens

    def _default_max_tokens(self, wanted: Wanted) -> int | None:
        of_model = self._model.defaults.max_tokens
        return wanted.default_max_tokens if of_model is None else of_model

    def _too_long(self, capacity: int, asked: str, noun: str, also: str | None = None) -> InvalidRequestError:
        if capacity < self._capacity():
            limit = f"This server's memory for one request that decodes in this way holds {capacity} tokens."
        elif capacity < self._info.max_model_len:
            limit = f"This server's memory for one request holds {capacity} tokens."
        else:
            limit = f"This model's maximum context length is {capacity} tokens."
        advice = f"Please reduce the length of the {noun}{f' or {also}' if also else ''}."
        message = f"{limit} However, {asked}. {advice}"
        return InvalidRequestError(message, param=noun, code="context_length_exceeded")

    def _check_queue(self, num_prompts: int, fields: SamplingFields, wanted: Wanted) -> None:
        most = self._info.max_num_seqs + self._settings.max_waiting
        asked = wanted.num_choices * num_prompts
        if asked > most:
            message = f"The request asks for {asked} choices in all, and this server holds at most {most}."
            ranks = wanted.num_choices > fields.num_answers
            several = "best_of" if ranks else "beam_search.num_return" if fields.beam_search else "n"
            param = several if wanted.num_choices > 1 else wanted.prompt_param
            raise InvalidRequestError(message, param=param, code="integer_above_max_value")

    def _check_beams(self, beams: BeamSearch | None, fields: SamplingFields, wanted: Wanted) -> None:
        if beams is None:
            return
        most = min(self._info.max_num_seqs, self._info.max_num_batched_tokens)
        if beams.width > most:
            message = f"The request asks for {beams.width} beams, and this server runs at most {most} at a time."
            raise InvalidRequestError(message, param=fields.width_field, code="integer_above_max_value")
        if wanted.max_tokens == 0:
            name = wanted.max_tokens_param
            message = f"Invalid '{name}': integer below minimum value. Beam search needs a value >= 1, but got 0."
            raise InvalidRequestError(message, param=name, code="integer_below_min_value")

    def _check_step(self, sampling: SamplingParams) -> None:
        """A step must have room for all that one choice computes in it."""
        if sampling.guidance is not None and min(self._info.max_num_seqs, self._info.max_num_batched_tokens) < 2:
            message = "Unsupported parameter: 'guidance' is not supported by a server that runs one choice at a time."
            raise InvalidRequestError(message, param="guidance", code="unsupported_parameter")
        most = self._info.max_num_batched_tokens - 1
        if sampling.num_candidates > most:
            message = (
                f"Invalid 'top_k': integer above maximum value. Expected a value <= {most}, one less than this "
                f"server computes in one step, beside 'penalty_alpha', but got {sampling.num_candidates} instead."
            )
            raise InvalidRequestError(message, param="top_k", code="integer_above_max_value")

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
