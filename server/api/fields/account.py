"""What requests of OpenAI's newer APIs say about who asks, what it costs, and what is cached."""

from typing import Annotated, Literal

from pydantic import Field

from server.api.fields.rules import Opaque, RequestModel, at_most, hint, no_effect

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, at_most(16)
]
EndUser = Annotated[str, Field(max_length=64)]
"""The client's own id of whoever it asks for, no longer than OpenAI takes."""
ServiceTier = Literal["auto", "default", "fast", "flex", "scale", "priority", "ultrafast"]


class AccountFields(RequestModel):
    """None of these changes an answer."""

    metadata: Metadata = no_effect("Up to 16 pairs of strings.")
    prompt_cache_key: str | None = no_effect("Prefixes are found without it.", max_length=64)
    safety_identifier: str | None = no_effect("Your own id of the end user.", max_length=128)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = hint(
        "How long prefixes are kept.", "Prefixes are kept in memory, for as long as there is room.",
        off=["in_memory", "in-memory"],
    )  # fmt: skip
    prompt_cache_options: Opaque | None = hint(
        "Control of the prompt cache.", "All prefixes are cached, for as long as there is room."
    )
    service_tier: ServiceTier | None = hint(
        "Which price is paid for which speed.", "There is one tier.", off=["auto", "default"]
    )
