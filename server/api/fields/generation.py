"""The fields of every API that generates: which model, how its tokens are chosen, in what form."""

import uuid
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from server.api.fields.decoding import DecodingFields, settings_of
from server.api.fields.foreign import ForeignFields, own_id
from server.api.fields.rules import Refused, RequestModel, hint, problem, refused, related, same_as
from server.api.fields.structured import StructuredFields
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import LooseJson
from server.generation.settings import MAX_CANDIDATES, BeamSearchSettings, DecodingSettings

MODEL = "Name of the served model. Left out, it is the served one, and that is reported."
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerationFields(StructuredFields, DecodingFields, ForeignFields):
    """Fields of every API that generates, with the extensions under vLLM's names."""

    model: str | None = Field(None, description=MODEL)
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Drawn if not given, and returned either way as `seed`."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only so many tokens at the end of the prompt; -1: what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens are cut off; `right` keeps those at the beginning of the prompt.",
        json_schema_extra=related(requires=["truncate_prompt_tokens"], off=["left"]),
    )  # fmt: skip
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first. Needs the server's policy to be `priority`."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=128, description="Share cached prefixes only with requests of the same salt."
    )
    cache_prompt: bool | None = Field(
        None, description="llama.cpp's: whether a cached prefix may be used; `false` is a `cache_salt` that no other "
        "request has.",
        json_schema_extra=related(excludes=["cache_salt"], on=True),
    )  # fmt: skip
    no_stop_trim: bool | None = same_as("include_stop_str_in_output", "SGLang's name.")
    learn: bool | None = hint(
        "Whether heads for speculation may be trained on this request, where the server learns (`--learn`); by default "
        "they may, but never on one with a `cache_salt`. `true` is reported where nothing is learnt.",
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
        """The beam search that is asked for."""
        return None if self.beam_search is None else self.beam_search.settings()


class ConversationFields(RequestModel):
    """Extensions of the APIs that answer conversations."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the chat template knows.")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Tokens of reasoning after which its end is forced."
    )


class OneAnswerFields(GenerationFields):
    """Fields of an API whose answers have one choice."""

    request_id: str | None = own_id()

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        beams = self.beams
        if beams is not None and (beams.num_return or 1) > 1:
            expected = f"Expected 1, the answers of this API, but got {beams.num_return} instead."
            message = f"Invalid '{{path}}': integer above maximum value. {expected}"
            raise problem("integer_above_max_value", message, "beam_search.num_return")
        return self


def generation_fields(body: GenerationFields, paths: dict[str, str], constraint: Constraint | None) -> dict[str, Any]:
    """The fields of a GenerationRequest that every API sets alike, given its `paths` and `constraint`."""
    return {
        "model": body.model,
        "decoding": settings_of(DecodingSettings, body, stop=body.stop_strings, beam_search=body.beams),
        "seed": body.seed,
        "truncate_prompt": body.truncate_prompt_tokens,
        "keeps_beginning": body.truncation_side == "right",
        "priority": body.priority or 0,
        "cache_salt": uuid.uuid4().hex if body.cache_prompt is False else body.cache_salt or "",
        "learn": body.learn,
        "stream": bool(body.stream),
        "constraint": constraint,
        "paths": {"constraint": body.constrained_by or "", **paths},
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
