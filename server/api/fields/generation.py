"""Fields of every API that generates: model, sampling, structured output and extensions."""

import uuid
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from server.api.fields.decoding import DecodingFields, settings_of
from server.api.fields.foreign import ForeignFields, NPredict, own_id
from server.api.fields.rules import Refused, RequestModel, hint, problem, refused, related, same_as
from server.api.fields.samplers import counted_notices
from server.api.fields.structured import StructuredFields
from server.generation.constraints.fragment import Constraint
from server.generation.notices import Notice
from server.generation.settings import MAX_CANDIDATES, BeamSearchSettings, DecodingSettings

MODEL = "Name of the served model. If omitted, the served model is used, and that is reported."
PRIORITY = "Requests with a lower number run first. Needs the server's `--policy priority`."
CACHE_SALT = "Cached prefixes are shared only among requests with the same salt."
MAX_TOKENS = (
    "The most output tokens; by default half of the context, at most 32,768. Never more than the context has left."
)
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerationFields(StructuredFields, DecodingFields, ForeignFields):
    """Fields of every API that generates, including extensions under vLLM's names."""

    model: str | None = Field(None, description=MODEL)
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Seed of the sampling; drawn if omitted. The answer returns it."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep this many tokens at the end of the prompt; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where the prompt is truncated; `right` keeps its beginning. By default `left`.",
        json_schema_extra=related(requires=["truncate_prompt_tokens"], off=["left"]),
    )  # fmt: skip
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description=PRIORITY)
    cache_salt: str | None = Field(None, min_length=1, max_length=128, description=CACHE_SALT)
    cache_prompt: bool | None = Field(
        None, description="llama.cpp: whether a cached prefix may be used. `false` acts as a unique `cache_salt`.",
        json_schema_extra=related(excludes=["cache_salt"], on=True),
    )  # fmt: skip
    no_stop_trim: bool | None = same_as("include_stop_str_in_output", "SGLang's name.")
    learn: bool | None = hint(
        "Whether draft heads may be trained on this request, if the server learns (`--learn`). By default yes, but "
        "never on a request with a `cache_salt`. `true` is ignored and reported if nothing is learnt.",
        "",
    )

    logits_processors: Refused = refused("Code that changes logits.")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "Invalid '{path}': Expected -1 or a value >= 1, but got 0 instead."
            raise problem("integer_below_min_value", message, "truncate_prompt_tokens")
        if self.asks("penalty_alpha") and self.top_k is not None:
            _check_candidates(self.top_k)
        return self

    @property
    def beams(self) -> BeamSearchSettings | None:
        """The requested beam search."""
        return None if self.beam_search is None else self.beam_search.settings()


class ConversationFields(RequestModel):
    """Extensions of APIs that answer conversations."""

    reasoning_budget: NPredict = same_as("thinking_token_budget", "llama.cpp's name; -1 is no limit.")
    thinking_budget_tokens: NPredict = same_as("thinking_token_budget", "llama.cpp's name; -1 is no limit.")
    thinking_budget: int | None = same_as("thinking_token_budget", "Qwen's name.", ge=0, le=2**31 - 1)

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="The most reasoning tokens; after them the reasoning is ended."
    )


class OneAnswerFields(GenerationFields):
    """Fields of an API whose answers have one choice."""

    request_id: str | None = own_id()

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        beams = self.beams
        if beams is not None and (beams.num_return or 1) > 1:
            expected = f"Expected 1, because this API returns one answer, but got {beams.num_return} instead."
            message = f"Invalid '{{path}}': integer above maximum value. {expected}"
            raise problem("integer_above_max_value", message, "beam_search.num_return")
        return self


def generation_fields(body: GenerationFields, paths: dict[str, str], constraint: Constraint | None) -> dict[str, Any]:
    """The fields of a GenerationRequest that all APIs set in the same way, given the API's `paths` and `constraint`."""
    decoding = settings_of(DecodingSettings, body, stop=body.stop_strings, beam_search=body.beams)
    decoding = body.with_samplers(decoding, body.samplers)
    return {
        "model": body.model,
        "decoding": decoding,
        "seed": body.seed,
        "truncate_prompt": body.truncate_prompt_tokens,
        "keeps_beginning": body.truncation_side == "right",
        "priority": body.priority or 0,
        "cache_salt": uuid.uuid4().hex if body.cache_prompt is False else body.cache_salt or "",
        "learn": body.learn,
        "stream": bool(body.stream),
        "constraint": constraint,
        "opens_objects": body.allow_additional_properties,
        "paths": {"constraint": body.constrained_by or "", **paths},
        "notices": (*body.ignored(), *_not_counted(body, decoding)),
    }


def _not_counted(body: GenerationFields, decoding: DecodingSettings) -> Iterator[Notice]:
    """A notice if the request says how many tokens penalties count, and they count others."""
    if body.repeat_last_n is not None:
        yield from counted_notices(decoding, body.repeat_last_n, "repeat_last_n")


def _check_candidates(top_k: int) -> None:
    if not 1 <= top_k <= MAX_CANDIDATES:
        side, sign, limit = ("below", ">=", 1) if top_k < 1 else ("above", "<=", MAX_CANDIDATES)
        bound = "minimum" if top_k < 1 else "maximum"
        message = (
            f"Invalid '{{path}}': integer {side} {bound} value. "
            f"Expected a value {sign} {limit} with 'penalty_alpha', but got {top_k} instead."
        )
        raise problem(f"integer_{side}_{bound[:3]}_value", message, "top_k")
