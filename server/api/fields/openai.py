"""Fields that completions and chat completions share: OpenAI's own, and extensions under vLLM's names."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from server.api.fields.decoding import EarlyStopping, NumAlternatives, TokenId
from server.api.fields.generation import GenerationFields, generation_fields
from server.api.fields.rules import Opaque, RequestModel, at_most, hint, no_effect, problem, related, same_as
from server.generation.constraints.fragment import Constraint
from server.generation.notices import Notice
from server.generation.settings import MAX_BEAMS, NOT_WITH_BEAMS, BeamSearchSettings

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, at_most(16)
]
EndUser = Annotated[str, Field(max_length=64)]
"""The client's own id for its end user, at most as long as OpenAI accepts."""
ServiceTier = Literal["auto", "default", "fast", "flex", "scale", "priority", "ultrafast"]


class AccountFields(RequestModel):
    """Fields about the account and the prompt cache, none of which changes an answer."""

    metadata: Metadata = no_effect("Up to 16 pairs of strings.")
    prompt_cache_key: str | None = no_effect("Cached prefixes are found without it.", max_length=64)
    safety_identifier: str | None = no_effect("Your own id for the end user.", max_length=128)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = hint(
        "How long prefixes are cached.", "Prefixes are cached in memory while there is room.",
        off=["in_memory", "in-memory"],
    )  # fmt: skip
    prompt_cache_options: Opaque | None = hint(
        "Options of the prompt cache.", "All prefixes are cached while there is room."
    )
    service_tier: ServiceTier | None = hint(
        "The price and speed of the request.", "There is one tier.", off=["auto", "default"]
    )


MAX_LISTED_TOKENS = 128

RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
LengthPenalty = Annotated[float, Field(ge=-10, le=10)]


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far with every chunk. Ignored and reported if include_usage is false."
    )
    include_obfuscation: bool | None = hint("Padding of the chunks against traffic analysis.", "Chunks are not padded.")

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.continuous_usage_stats and self.include_usage is False:
            yield Notice(f"{path}.continuous_usage_stats", "No usage is sent because 'include_usage' is false.")


class OpenAIFields(RequestModel):
    """The number of answers, and options of their stream."""

    n: int | None = Field(
        None, ge=1, le=128, description="Choices for each prompt; 1 by default.", json_schema_extra=related(off=[1])
    )
    stream_options: StreamOptions | None = Field(
        None, description="Options of the stream.", json_schema_extra=related(requires=["stream"])
    )
    user: EndUser | None = no_effect("Your own id for the end user.")


class BeamSearchFields(RequestModel):
    """Beam search under vLLM's names."""

    use_beam_search: bool | None = Field(
        None,
        description="vLLM's form of `beam_search`: `n` beams, all of which are returned.",
        json_schema_extra=related(excludes=NOT_WITH_BEAMS),
    )
    length_penalty: LengthPenalty | None = Field(
        None, description="As in `beam_search`.", json_schema_extra=related(requires=["use_beam_search"], off=[1])
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="As in `beam_search`.", json_schema_extra=related(requires=["use_beam_search"])
    )


class SamplingFields(BeamSearchFields, GenerationFields, OpenAIFields):
    """All fields that completions and chat completions share, including reports."""

    prompt_logprobs: NumAlternatives | None = Field(
        None,
        description="Report this many alternatives for each token of the prompt, at most the setting `max_logprobs`.",
        json_schema_extra=related(excludes=["stream"]),
    )
    return_token_ids: bool | None = Field(None, description="Report the token ids of prompt and output.")
    return_token_sources: bool | None = Field(
        None,
        description="Report the source of each output token: `drawn` in a step of the model, or `draft:METHOD`, "
        "drafted by this speculation method and accepted. Sources differ from run to run; the tokens do not.",
        json_schema_extra=related(excludes=["use_beam_search", "beam_search"]),
    )

    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write the tokens of `logprobs` as `token_id:ID` instead of their text."
    )
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED_TOKENS, fail_fast=True)] | None = Field(
        None, description="Report the logprobs of these tokens and the chosen one, instead of the most probable ones.",
        json_schema_extra=related(requires=["logprobs"], excludes=["use_beam_search", "beam_search"]),
    )  # fmt: skip
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokenizer's begin and end tokens to the prompt. On by default for texts, off for chat "
        "templates.",
    )
    spaces_between_special_tokens: bool | None = no_effect(
        "Special tokens are written by the tokenizer's decoder, which puts no spaces between them."
    )
    request_id: RequestId | None = Field(None, description="Your own id for the request. The answer's id ends with it.")
    rid: RequestId | None = same_as("request_id", "SGLang's name.")

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.use_beam_search and (self.n or 1) > MAX_BEAMS:
            expected = f"Expected a value <= {MAX_BEAMS} with 'use_beam_search', but got {self.n} instead."
            raise problem(
                "integer_above_max_value", f"Invalid '{{path}}': integer above maximum value. {expected}", "n"
            )
        return self

    @property
    def beams(self) -> BeamSearchSettings | None:
        """The requested beam search, in either form."""
        if self.use_beam_search:
            width, penalty, stopping = self.n or 1, self.length_penalty, self.early_stopping
            return BeamSearchSettings(width=width, num_return=width, length_penalty=penalty, early_stopping=stopping)
        return super().beams

    @property
    def num_answers(self) -> int:
        """The number of choices returned for each prompt."""
        beams = self.beams
        return (self.n if beams is None else beams.num_return) or 1

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats) and options.include_usage is not False


def shared_fields(body: SamplingFields, paths: dict[str, str], constraint: Constraint | None) -> dict[str, Any]:
    """The fields of a GenerationRequest that both APIs set in the same way, given an API's `paths` and `constraint`."""
    if body.use_beam_search:
        paths = {"beam_search.width": "n", **paths}
    reports = "return_token_ids" if body.return_token_ids else "return_token_sources"
    several = "beam_search.num_return" if body.beam_search else "n"
    return {
        **generation_fields(body, {"num_choices": several, "reports_tokens": reports, **paths}, constraint),
        "own_id": body.named_value("request_id")[1],
        "prompt_logprobs": body.prompt_logprobs,
        "logprob_token_ids": tuple(body.logprob_token_ids or ()),
        "reports_tokens": bool(body.return_token_ids or body.return_token_sources),
    }
