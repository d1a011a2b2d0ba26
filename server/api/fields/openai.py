"""The fields that completions and chat completions share: OpenAI's own, and the extensions under vLLM's names."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from server.api.fields.decoding import DecodingFields, EarlyStopping
from server.api.fields.rules import Refused, RequestModel, hint, no_effect, problem, refused, related
from server.api.fields.structured import StructuredFields
from server.api.fields.wire import settings_of
from server.generation.constraints.constraint import Constraint
from server.generation.constraints.json_text import LooseJson
from server.generation.settings import MAX_BEAMS, MAX_CANDIDATES, NOT_WITH_BEAMS, BeamSearchSettings, DecodingSettings

MAX_PROMPT_LOGPROBS = 20

LengthPenalty = Annotated[float, Field(ge=-10, le=10)]


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")
    include_obfuscation: bool | None = hint("Padding of the chunks against traffic analysis.", "Chunks are not padded.")


class OpenAIFields(RequestModel):
    """Which model, how many answers, and how they are sent."""

    model: str = Field(description="Name of the served model.")
    n: int | None = Field(
        None, ge=1, le=128, description="Choices for each prompt; 1 by default.", json_schema_extra=related(off=[1])
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Drawn if not given, and returned either way as `seed`."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="What the stream tells beside the answer.", json_schema_extra=related(requires=["stream"])
    )
    user: str | None = no_effect("Your own id of the end user.")


class BeamSearchFields(RequestModel):
    """Beam search by vLLM's names."""

    use_beam_search: bool | None = Field(
        None,
        description="`beam_search` by vLLM's names: `n` beams, which are all returned.",
        json_schema_extra=related(excludes=NOT_WITH_BEAMS),
    )
    length_penalty: LengthPenalty | None = Field(
        None, description="See `beam_search`.", json_schema_extra=related(requires=["use_beam_search"], off=[1])
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="See `beam_search`.", json_schema_extra=related(requires=["use_beam_search"])
    )


class SamplingFields(StructuredFields, BeamSearchFields, DecodingFields, OpenAIFields):
    """All of these, and what to report."""

    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_PROMPT_LOGPROBS, description="Report so many alternatives for each token of the prompt.",
        json_schema_extra=related(excludes=["stream"]),
    )  # fmt: skip
    return_token_ids: bool | None = Field(None, description="Report the token ids of prompt and output.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only so many tokens at the end of the prompt; -1: what fits."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first. Needs the server's policy to be `priority`."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=128, description="Share cached prefixes only with requests of the same salt."
    )

    logits_processors: Refused = refused("Code that changes logits.")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "Invalid '{path}': Expected -1 or a value >= 1, but got 0 instead."
            raise problem("integer_below_min_value", message, "truncate_prompt_tokens")
        if self.use_beam_search and (self.n or 1) > MAX_BEAMS:
            expected = f"Expected a value <= {MAX_BEAMS} beside 'use_beam_search', but got {self.n} instead."
            raise problem(
                "integer_above_max_value", f"Invalid '{{path}}': integer above maximum value. {expected}", "n"
            )
        if self.asks("penalty_alpha") and self.top_k is not None:
            _check_candidates(self.top_k)
        return self

    @property
    def beams(self) -> BeamSearchSettings | None:
        """The beam search that is asked for, in whichever way."""
        if self.use_beam_search:
            width, penalty, stopping = self.n or 1, self.length_penalty, self.early_stopping
            return BeamSearchSettings(width=width, num_return=width, length_penalty=penalty, early_stopping=stopping)
        return None if self.beam_search is None else self.beam_search.settings()

    @property
    def num_answers(self) -> int:
        """Choices that each prompt is answered with."""
        beams = self.beams
        return (self.n if beams is None else beams.num_return) or 1

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk brings the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk does."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def shared_fields(body: SamplingFields, paths: dict[str, str], constraint: Constraint | None) -> dict[str, Any]:
    """What of a GenerationRequest both APIs say alike; `paths` and `constraint` are those of one of them."""
    if body.use_beam_search:
        paths = {"beam_search.width": "n", **paths}
    several = "beam_search.num_return" if body.beam_search else "n"
    return {
        "model": body.model,
        "decoding": settings_of(DecodingSettings, body, stop=body.stop_strings, beam_search=body.beams),
        "seed": body.seed,
        "prompt_logprobs": body.prompt_logprobs,
        "reports_tokens": bool(body.return_token_ids),
        "truncate_prompt": body.truncate_prompt_tokens,
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "stream": bool(body.stream),
        "constraint": constraint,
        "paths": {"num_choices": several, "constraint": body.constrained_by or "", **paths},
        "notices": (*body.left_out(), *(constraint.notices if isinstance(constraint, LooseJson) else ())),
    }


def _check_candidates(top_k: int) -> None:
    if not 1 <= top_k <= MAX_CANDIDATES:
        side, sign, limit = ("below", ">=", 1) if top_k < 1 else ("above", "<=", MAX_CANDIDATES)
        bound = "minimum" if top_k < 1 else "maximum"
        message = (
            f"Invalid '{{path}}': integer {side} {bound} value. "
            f"Expected a value {sign} {limit} beside 'penalty_alpha', but got {top_k} instead."
        )
        raise problem(f"integer_{side}_{bound[:3]}_value", message, "top_k")
