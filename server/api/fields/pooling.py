"""The fields of every API that answers with numbers made of texts."""

from typing import Any

from pydantic import Field

from server.api.fields.foreign import ForeignHints, own_id
from server.api.fields.generation import MODEL
from server.api.fields.openai import EndUser
from server.api.fields.rules import hint, no_effect


class PoolingFields(ForeignHints):
    """Which model, who asks, and when it is computed."""

    model: str | None = Field(None, description=MODEL)
    request_id: str | None = own_id()
    user: EndUser | None = no_effect("Your own id of the end user.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first. Needs the server's policy to be `priority`."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=128, description="Share cached prefixes only with requests of the same salt."
    )
    learn: bool | None = hint(
        "Whether heads for speculation may be trained on this request.", "Only answers are learnt from."
    )


class ScoringFields(PoolingFields):
    """How pairs of texts are scored."""

    instruction: str | None = Field(
        None, min_length=1, description="What is asked of a document, for models that are told; by default their own."
    )
    use_activation: bool | None = Field(
        None,
        description="Off: scores are the model's own numbers, without the sigmoid that makes probabilities of them.",
    )


def pooling_fields(body: PoolingFields) -> dict[str, Any]:
    """What of a PoolingRequest these say."""
    return {
        "model": body.model,
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "notices": tuple(body.left_out()),
    }
