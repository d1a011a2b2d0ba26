"""The request's beam search, in an object of its own or by vLLM's names."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.rules import RequestModel, problem, related
from server.api.fields.samplers import DRAWING

MAX_WIDTH = 64
_EXCLUDED = (*DRAWING, "top_k", "best_of", "speculation", "prediction")

LengthPenalty = Annotated[float, Field(ge=-10, le=10)]
EarlyStopping = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["never"], Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<boolean>"),
]


class BeamSearchOptions(RequestModel):
    """The sequences of the highest score, in place of drawn ones."""

    width: int = Field(ge=1, le=MAX_WIDTH, description="Beams in all; 1 is greedy decoding.")
    length_penalty: LengthPenalty | None = Field(
        None,
        description="Scores are divided by length ** length_penalty; 1 by default, which compares means.",
    )
    early_stopping: EarlyStopping | None = Field(
        None,
        description="When to stop once `width` sequences have ended: `true` at once, `false`, the default, when the "
        "best beam as it stands is worse than all of them, `never` when it can become no better.",
    )
    num_return: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="How many of the best sequences are the choices; 1 by default."
    )
    groups: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="Parts of the beams that search by themselves; 1 by default."
    )
    diversity_penalty: float | None = Field(
        None,
        ge=0,
        le=100,
        description="What a token costs for each beam of an earlier group that has just taken it; "
        "above 0 with more than one group.",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.num_return is not None and self.num_return > self.width:
            message = f"Expected a value <= {self.width}, the width, but got {self.num_return} instead."
            raise problem(
                "integer_above_max_value", f"Invalid '{{path}}': integer above maximum value. {message}", "num_return"
            )
        groups = self.groups or 1
        if self.width % groups:
            message = f"Invalid '{{path}}': Expected a divisor of the width, {self.width}, but got {groups} instead."
            raise problem("invalid_value", message, "groups")
        if bool(self.diversity_penalty) != (groups > 1):
            message = "More than one of 'groups' and a 'diversity_penalty' above 0 need each other."
            raise problem("invalid_value", message, "diversity_penalty")
        return self


class BeamSearchFields(RequestModel):
    """Both ways to ask for beam search."""

    beam_search: BeamSearchOptions | None = Field(
        None,
        description="Search for the most probable output.",
        examples=[{"width": 4, "length_penalty": 1.0, "num_return": 2}],
        json_schema_extra=related(excludes=["use_beam_search", "n", *_EXCLUDED]),
    )
    use_beam_search: bool | None = Field(
        None,
        description="The same by vLLM's names: `n` beams, which are all returned.",
        json_schema_extra=related(excludes=_EXCLUDED),
    )
    length_penalty: LengthPenalty | None = Field(
        None, description="See `beam_search`.", json_schema_extra=related(requires=["use_beam_search"], off=[1])
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="See `beam_search`.", json_schema_extra=related(requires=["use_beam_search"])
    )
