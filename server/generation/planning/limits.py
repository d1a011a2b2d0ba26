"""Limits of prompts and answers: the context, the queue, the answer's size, and long conversations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from model_runner.contract import SamplingParams
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import BeamSearch, EngineRequest
from server.errors import ContextLengthError, InvalidRequestError
from server.generation.notices import Notice
from server.generation.request import Conversation, GenerationRequest, Message
from server.text.tokenizer import Tokenizer

MAX_IMPLICIT_TOKENS = 32_768
"""Upper bound on the output if neither request nor model limits it, however long the context is."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one engine."""

    info: RunnerInfo
    max_waiting: int
    """Choices that may wait in addition to the running ones."""
    clamps: bool
    """Whether a `max_tokens` that does not fit is reduced to what fits, instead of refused."""
    max_logprobs: int
    """Alternatives that may be reported for a token."""
    shortens: bool = False
    """Whether the server was started with --max-model-len, which may be below the model's own limit."""

    def capacity(self, width: int = 1, num_candidates: int = 0) -> int:
        """Tokens that each of `width` beams may have, prompt and output together. Candidates only need memory."""
        held = self.info.num_blocks // width * self.info.block_size
        return min(self.info.max_model_len, held - num_candidates)

    def room(
        self, request: EngineRequest, asked: GenerationRequest, default: int | None, notices: list[Notice]
    ) -> "TokenBudget":
        """The token budget of one prompt; `default` limits the output if the request does not."""
        return TokenBudget(self, self.capacity(request.width, request.sampling.num_candidates), asked, default, notices)

    def too_long(self, num_tokens: int, noun: str, capacity: int | None = None, *, at_least: bool = False) -> Exception:
        """The error for a text that exceeds the capacity, by default the capacity of one plain choice."""
        asked = f"your {noun} resulted in {'at least ' if at_least else ''}{num_tokens} tokens"
        capacity = self.capacity() if capacity is None else capacity
        advice = f"Please reduce the length of the {noun}, or {self._remedy(capacity)}."
        message = f"{self._limit(capacity)} However, {asked}. {advice}"
        return ContextLengthError(message, param=noun, num_tokens=num_tokens, max_tokens=None, capacity=capacity)

    def too_much(self, num_tokens: int, max_tokens: int, noun: str, name: str, capacity: int) -> Exception:
        """The error for a prompt that fits, but not with the requested output; `name` is the field `max_tokens`."""
        total = num_tokens + max_tokens
        asked = f"you requested {total} tokens ({num_tokens} in the {noun}, {max_tokens} in the completion)"
        advice = f"Please reduce the length of the {noun} or {name}."
        message = f"{self._limit(capacity)} However, {asked}. {advice}"
        return ContextLengthError(message, param=noun, num_tokens=num_tokens, max_tokens=max_tokens, capacity=capacity)

    def _limit(self, capacity: int) -> str:
        """The capacity as a sentence."""
        if capacity < self.capacity():
            return f"This server's memory for one request that decodes in this way holds {capacity} tokens."
        if capacity < self.info.max_model_len:
            return f"This server's memory for one request holds {capacity} tokens."
        return f"This model's maximum context length is {capacity} tokens."

    def _remedy(self, capacity: int) -> str:
        """Advice on how an operator can raise the capacity."""
        if capacity < self.info.max_model_len:
            return "start the server with a larger --kv-cache-gib"
        if self.shortens:
            return "start the server with a larger --max-model-len or with a model that has a longer context"
        return "start the server with a model that has a longer context"

    def check_queue(self, request: GenerationRequest) -> None:
        """Refuses more choices or beams than the server ever holds."""
        most = self.info.max_num_seqs + self.max_waiting
        beams = request.decoding.beam_search
        name, each = ("num_choices", request.num_choices) if beams is None else ("beam_search.width", beams.width)
        num = each * len(request.prompts)
        if num > most:
            kind = "choices" if beams is None else "beams"
            message = f"The request asks for {num} {kind} in all, and this server holds at most {most} at a time."
            param = request.path(name if each > 1 else "prompt")
            raise InvalidRequestError(message, param=param, code="integer_above_max_value")

    def check_logprobs(self, request: GenerationRequest) -> None:
        """Refuses to report more alternatives of a token than the server's setting allows."""
        for name, num in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if num is not None and num > self.max_logprobs:
                path = request.path(name)
                message = (
                    f"Invalid '{path}': integer above maximum value. Expected a value <= {self.max_logprobs}, which "
                    f"the server's --max-logprobs sets, but got {num} instead."
                )
                raise InvalidRequestError(message, param=path, code="integer_above_max_value")

    def check_beams(self, beams: BeamSearch | None, request: GenerationRequest) -> None:
        """Refuses more beams than run at a time, and a search for no output."""
        if beams is None:
            return
        most = min(self.info.max_num_seqs, self.info.max_num_batched_tokens)
        if beams.width > most:
            message = (
                f"Beam search with {beams.width} beams is too wide: this server runs at most {most} choices at a time. "
                "Use fewer beams, or start the server with a larger --max-num-seqs."
            )
            raise InvalidRequestError(message, param=request.path("beam_search.width"), code="integer_above_max_value")
        if request.max_tokens == 0:
            name = request.path("max_tokens")
            message = f"Invalid '{name}': integer below minimum value. Beam search needs a value >= 1, but got 0."
            raise InvalidRequestError(message, param=name, code="integer_below_min_value")

    def check_step(self, sampling: SamplingParams) -> None:
        """Refuses settings with which one choice does not fit into a step."""
        if sampling.guidance is not None and min(self.info.max_num_seqs, self.info.max_num_batched_tokens) < 2:
            message = (
                "Unsupported parameter: 'guidance' is not supported by a server that runs one choice at a time, "
                "because it needs two. Start it with --max-num-seqs 2 or more."
            )
            raise InvalidRequestError(message, param="guidance", code="unsupported_parameter")
        most = self.info.max_num_batched_tokens - 1
        if sampling.num_candidates > most:
            message = (
                f"Invalid 'top_k': integer above maximum value. Expected a value <= {most}, one less than this "
                f"server computes in one step, with 'penalty_alpha', but got {sampling.num_candidates} instead."
            )
            raise InvalidRequestError(message, param="top_k", code="integer_above_max_value")

    def check_min_tokens(self, min_tokens: int, max_tokens: int) -> None:
        """Refuses a `min_tokens` above the most tokens that may be generated."""
        if min_tokens > max_tokens:
            message = (
                f"Invalid 'min_tokens': integer above maximum value. "
                f"Expected a value <= {max_tokens}, the most that may be generated, but got {min_tokens} instead."
            )
            raise InvalidRequestError(message, param="min_tokens", code="integer_above_max_value")


def implicit_max_tokens(max_model_len: int) -> int:
    """Default limit of the output where neither the request nor the model sets one.

    It is half the context, because a model that repeats itself would otherwise fill all of it.
    """
    return max(1, min(max_model_len // 2, MAX_IMPLICIT_TOKENS))


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The tokens that one prompt and its output may have together."""

    limits: RequestLimits
    capacity: int
    request: GenerationRequest
    default_max_tokens: int | None
    notices: list[Notice]
    """Gets a notice if `max_tokens` was reduced."""

    def cut(self, tokens: Sequence[int]) -> Sequence[int]:
        """The part of a prompt to use, by the request's `truncate_prompt`: its end or its beginning."""
        keep = self.request.truncate_prompt
        if keep is None:
            return tokens
        if keep == -1:
            wanted = self.default_max_tokens if self.request.max_tokens is None else self.request.max_tokens
            keep = max(1, self.capacity - (1 if wanted is None else wanted))
        return tokens[:keep] if self.request.keeps_beginning else tokens[-keep:]

    def max_tokens(self, prompt: int, noun: str) -> int:
        """The number of tokens to generate after a prompt of `prompt` tokens."""
        if prompt == 0:
            message = f"Invalid '{noun}': it has no tokens, and the model needs at least one to begin with."
            raise InvalidRequestError(message, param=noun, code="invalid_value")
        asked = self.request.max_tokens
        if prompt + (0 if asked == 0 else 1) > self.capacity:
            raise self.limits.too_long(prompt, noun, self.capacity)
        room = self.capacity - prompt
        if asked is None:
            return min(room, self._implicit)
        return asked if asked <= room else self._clamped(prompt, asked, room, noun)

    @property
    def _implicit(self) -> int:
        """Limit of the output for a request without `max_tokens`."""
        if self.default_max_tokens is not None:
            return self.default_max_tokens
        return self.capacity if self.request.may_fill_context else implicit_max_tokens(self.capacity)

    def _clamped(self, prompt: int, asked: int, room: int, noun: str) -> int:
        """Reduce `max_tokens` to `room` with a notice. Raises ContextLengthError on a strict server."""
        name = self.request.path("max_tokens")
        if not self.limits.clamps:
            raise self.limits.too_much(prompt, asked, noun, name, self.capacity)
        self.notices.append(Notice(name, f"The context has room for {room} tokens of output, not for {asked}."))
        return room


MAX_ANSWER_MIB = 64
"""Requests whose answer could exceed this size are refused."""
_MAX_BYTES = MAX_ANSWER_MIB << 20
_LOGPROB = 80
"""Approximate bytes of JSON for one token with its log-probability."""
_TOKEN = 18
"""Bytes of JSON for a token's id and its source."""


def bound_answer(
    requests: Sequence[EngineRequest], asked: GenerationRequest, tokenizer: Tokenizer, notices: list[Notice]
) -> Sequence[EngineRequest]:
    """The requests, with a smaller `max_tokens` if the request sets none and the answer could be too large.

    Raises InvalidRequestError if the answer could still be too large.
    """
    of_prompts = {field: asked.num_repeats * size for field, size in _of_prompts(requests, asked, tokenizer).items()}
    of_token = {} if asked.stream and not asked.is_held else _of_output_token(asked)
    num_tokens = asked.num_choices * sum(one.max_tokens for one in requests)
    sizes = {field: of_prompts.get(field, 0) + num_tokens * of_token.get(field, 0) for field in of_prompts | of_token}
    if sum(sizes.values()) <= _MAX_BYTES:
        return requests
    if asked.max_tokens is None and of_token:
        num_choices = asked.num_choices * len(requests)
        most = (_MAX_BYTES - sum(of_prompts.values())) // (num_choices * sum(of_token.values()))
        if most > 0:
            reason = (
                f"Set to {most}: with more tokens, the reported details could exceed the limit of {MAX_ANSWER_MIB} MiB."
            )
            notices.append(Notice(asked.path("max_tokens"), reason))
            return [replace(one, max_tokens=min(one.max_tokens, most)) for one in requests]
    raise _too_large(sizes, asked, requests)


def _of_prompts(requests: Sequence[EngineRequest], asked: GenerationRequest, tokenizer: Tokenizer) -> dict[str, int]:
    """Bytes with which the answer describes the prompts once, by the fields that request it."""
    num_tokens = sum(len(one.prompt) for one in requests)
    sizes: dict[str, int] = {}
    if asked.echoes:
        texts = (tokenizer.decode(one.prompt, skip_special_tokens=False) for one in requests)
        sizes[asked.path("echoes")] = sum(len(msgspec.json.encode(text)) for text in texts)
    if asked.prompt_logprobs is not None:
        sizes[asked.path("prompt_logprobs")] = num_tokens * (asked.prompt_logprobs + 1) * _LOGPROB
    if asked.reports_tokens:
        sizes[asked.path("reports_tokens")] = num_tokens * _TOKEN
    return sizes


def _of_output_token(asked: GenerationRequest) -> dict[str, int]:
    """Bytes with which the answer reports one output token, by the fields that request it."""
    sizes: dict[str, int] = {}
    if asked.logprobs is not None:
        num_others = len(asked.logprob_token_ids) or asked.logprobs
        sizes[asked.path("logprobs")] = (num_others + 1) * _LOGPROB
    if asked.reports_tokens:
        sizes[asked.path("reports_tokens")] = _TOKEN
    return sizes


def _too_large(
    sizes: Mapping[str, int], asked: GenerationRequest, requests: Sequence[EngineRequest]
) -> InvalidRequestError:
    """The error for an answer that could be too large; `sizes` has the bytes that each field adds."""
    fields = sorted(sizes, key=lambda field: -sizes[field])
    named = ", ".join(f"'{field}' {_mib(sizes[field])}" for field in fields)
    most = max(one.max_tokens for one in requests)
    message = (
        f"The answer could take about {_mib(sum(sizes.values()))} MiB ({named}), and this server allows "
        f"{MAX_ANSWER_MIB} MiB. Please reduce these fields, the length or the number of the prompts ({len(requests)}), "
        f"'{asked.path('num_choices')}' ({asked.num_choices}), or '{asked.path('max_tokens')}' ({most})."
    )
    return InvalidRequestError(message, param=fields[0], code="invalid_parameter_combination")


def _mib(num_bytes: int) -> int:
    return -(-num_bytes >> 20)


_SYSTEM = ("system", "developer")


def without_oldest(conversation: Conversation, fits: Callable[[Conversation], bool]) -> Conversation:
    """The conversation without its oldest messages, as few as needed to fit; the shortest version if none fits.

    System messages stay. The rest begins with a user message, so that no tool result loses its call. `fits` must be
    monotonic: if a version fits, all shorter ones must fit.
    """
    starts = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    shorter = [conversation, *(replace(conversation, messages=_from(conversation.messages, at)) for at in starts[1:])]
    if len(shorter) == 1 or fits(conversation):  # as almost always
        return conversation
    low, high = 1, len(shorter) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(shorter[middle]) else (middle + 1, high)
    return shorter[low]


def _from(messages: Sequence[Message], start: int) -> Sequence[Message]:
    return [message for index, message in enumerate(messages) if index >= start or message["role"] in _SYSTEM]
