"""What requests without a body ask for."""

from typing import ClassVar

from pydantic import Field

from server.api.fields.rules import no_effect, related
from server.api.openai.pages import ListQuery, Query


class RetrieveQuery(Query):
    """How to get a response."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("What is stored is told whole.")
    stream: bool = Field(False, description="As the events of its stream.")
    starting_after: int | None = Field(
        None,
        ge=0,
        description="Of these, those after the one of this number.",
        json_schema_extra=related(requires=["stream"]),
    )
    include_obfuscation: bool | None = no_effect("Events are not padded.")


class ItemsQuery(ListQuery):
    """Which items to get."""

    lists: ClassVar[frozenset[str]] = frozenset({"include"})

    include: list[str] | None = no_effect("What is stored is told whole.")
