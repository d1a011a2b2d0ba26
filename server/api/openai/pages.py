"""Query parameters, and lists in pages."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar

from fastapi import Request
from pydantic import ConfigDict, Field, ValidationError

from server.api.fields.rules import RequestModel
from server.errors import InvalidRequestError, shorten
from server.http.validation import from_validation


class Query(RequestModel):
    """Query parameters. Their values arrive as text and are converted."""

    model_config = ConfigDict(strict=False)

    lists: ClassVar[frozenset[str]] = frozenset()
    """Parameters that may be sent several times."""


class ListQuery(Query):
    """Query parameters of a list in pages."""

    limit: int = Field(20, ge=1, le=100, description="The most items to return.")
    order: Literal["asc", "desc"] = Field("desc", description="`desc`: newest first; `asc`: oldest first.")
    after: str | None = Field(None, description="Return the items after the one with this id.")


_Query = TypeVar("_Query", bound=Query)
_Item = TypeVar("_Item")


def query_of(schema: type[_Query], request: Request, but: Collection[str] = ()) -> _Query:
    """The query of a request, validated, except these parameters. Raises InvalidRequestError."""
    values: dict[str, Any] = {}
    for key, value in request.query_params.multi_items():
        name = key.removesuffix("[]")
        if name in but:
            continue
        if name in schema.lists:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def select(
    items: Sequence[_Item], asked: ListQuery, ids_of: Callable[[_Item], Collection[str]]
) -> tuple[Sequence[_Item], bool]:
    """The items of a page, and whether there are more after it; `items` are oldest first.

    If several items have the id `after`, the page begins after the last of them. Raises InvalidRequestError.
    """
    ordered = list(items) if asked.order == "asc" else list(reversed(items))
    if asked.after is not None:
        places = [index for index, item in enumerate(ordered) if asked.after in ids_of(item)]
        if not places:
            raise no_such_item(asked)
        ordered = ordered[places[-1] + 1 :]
    return ordered[: asked.limit], len(ordered) > asked.limit


def no_such_item(asked: ListQuery) -> InvalidRequestError:
    """The error for a page after an item that is not in the list."""
    message = f"Invalid 'after': there is no item '{shorten(asked.after or '')}' in the list."
    return InvalidRequestError(message, param="after", code="invalid_value")


class _Listed(Protocol):
    @property
    def id(self) -> str: ...


def ends_of(items: Sequence[_Listed]) -> "_Ends":
    """The ids of the first and the last item of a page, as a list object has them."""
    return {"first_id": items[0].id if items else None, "last_id": items[-1].id if items else None}


class _Ends(TypedDict):
    first_id: str | None
    last_id: str | None
