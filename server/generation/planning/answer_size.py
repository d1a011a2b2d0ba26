"""How large an answer may become by what it repeats of its prompts and reports of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from scheduler.interface import EngineRequest
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.request import GenerationRequest
from server.text.tokenizer import Tokenizer

MAX_ANSWER_MIB = 64
"""A request whose answer could become larger is refused."""
_MAX_BYTES = MAX_ANSWER_MIB << 20
_LOGPROB = 80
"""Bytes of JSON that a token with its log-probability takes, about."""
_TOKEN = 18
"""Bytes of JSON that a token's id takes, with where the token came from."""


def bound_answer(
    requests: Sequence[EngineRequest], asked: GenerationRequest, tokenizer: Tokenizer, notices: list[Notice]
) -> Sequence[EngineRequest]:
    """The requests, with fewer output tokens if the request does not say how many and the answer could be too large.

    Raises InvalidRequestError if the answer could be too large and that does not help.
    """
    of_prompts = {field: asked.num_repeats * size for field, size in _of_prompts(requests, asked, tokenizer).items()}
    of_token = {} if asked.stream else _of_output_token(asked)  # a stream holds none of it
    num_tokens = asked.num_choices * sum(one.max_tokens for one in requests)
    sizes = {field: of_prompts.get(field, 0) + num_tokens * of_token.get(field, 0) for field in of_prompts | of_token}
    if sum(sizes.values()) <= _MAX_BYTES:
        return requests
    if asked.max_tokens is None and of_token:
        num_choices = asked.num_choices * len(requests)
        most = (_MAX_BYTES - sum(of_prompts.values())) // (num_choices * sum(of_token.values()))
        if most > 0:
            reason = (
                f"Set to {most}: more tokens, as they are reported, could exceed the {MAX_ANSWER_MIB} MiB of an answer."
            )
            notices.append(Notice(asked.path("max_tokens"), reason))
            return [replace(one, max_tokens=min(one.max_tokens, most)) for one in requests]
    raise _too_large(sizes, asked, requests)


def _of_prompts(requests: Sequence[EngineRequest], asked: GenerationRequest, tokenizer: Tokenizer) -> dict[str, int]:
    """Bytes that the answer takes to tell of the prompts once, by the fields that ask for it."""
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
    """Bytes that the answer takes to report one token of the output, by the fields that ask for it."""
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
    """The error for an answer that could be too large by what these fields add to it, in bytes."""
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
