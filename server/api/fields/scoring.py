"""The request's `contrastive`, `dola` and `guidance`: scores that mix the model's distribution with another one."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.api.fields.rules import RequestModel, shape

MAX_LAYERS = 256

Layer = Annotated[int, Field(ge=0)]
Layers = Annotated[
    Annotated[Literal["low", "high"], Tag("<string>")]
    | Annotated[list[Layer], Field(min_length=1, max_length=MAX_LAYERS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


class ContrastiveOptions(RequestModel):
    """Contrastive decoding: an empty object is O'Brien and Lewis's; Li et al. have 1 and 1 for weights, and 0.5."""

    alpha: float | None = Field(
        None, ge=0, le=1, description="Least share of the highest probability that a token needs; 0.1 by default."
    )
    beta: float | None = Field(
        None, ge=0, le=10, description="Factor of the amateur's logits, which are subtracted; 0.5 by default."
    )
    expert_weight: float | None = Field(
        None, gt=0, le=11, description="Factor of the model's own logits; 1 + beta by default."
    )
    temperature: float | None = Field(None, ge=0.01, le=100, description="Divides the amateur's logits; 1 by default.")
    amateur: str | None = Field(
        None, min_length=1, max_length=256, description="The server's auxiliary model, the only one that can be named."
    )


class DoLaOptions(RequestModel):
    """Decoding by contrasting layers."""

    layers: Layers = Field(
        description="The candidates: every other layer of the lower or the upper half, or their numbers. n stands for "
        "what enters layer n, so 0 for the embedding."
    )
    alpha: float | None = Field(
        None, ge=0, le=1, description="Least share of the highest probability that a token needs; 0.1 by default."
    )


class GuidanceOptions(RequestModel):
    """Classifier-free guidance."""

    scale: float = Field(ge=0, le=100, description="How far to go away from the negative prompt; 1 changes nothing.")
    negative_prompt: str | None = Field(
        None,
        min_length=1,
        description="What to go away from. In a completion it stands in place of the prompt, in a chat in place of the "
        "system message. Left out: the prompt's last token alone.",
    )
