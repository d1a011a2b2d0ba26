"""The request's `speculation`: whether and how its next tokens are guessed, to be verified several at a time."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from model_runner.contract import Verification
from server.api.fields.rules import RequestModel

MAX_DRAFT_TOKENS = 64


class SpeculationOptions(RequestModel):
    """An object asks for speculation, even an empty one where the server's default is off."""

    method: str | None = Field(
        None,
        max_length=64,
        description="A method of this server, as GET /v1/capabilities lists them. Left out: `prediction` beside a "
        "prediction, else the server's default, or `auto` where that is off.",
    )
    num_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="At most so many draft tokens in a step, and never more than the server's own limit; 0 turns "
        "speculation off. Left out: chosen anew for each step.",
    )
    verify: Verification | None = Field(
        None,
        description="`match`, the default, never changes the answer. `rejection` keeps the distribution, but draws "
        "other tokens: the seed promises nothing. `typical` is lossy: it draws from another distribution.",
    )


def _shape(value: object) -> str | None:
    return "<string>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


SpeculationChoice = Annotated[
    Annotated[Literal["off"], Tag("<string>")] | Annotated[SpeculationOptions, Tag("<object>")],
    Discriminator(
        _shape, custom_error_type="string_or_object_type", custom_error_message="Input should be 'off' or an object"
    ),
]
