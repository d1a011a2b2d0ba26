"""The list of models, for those who ask as Anthropic's clients do."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.answer_object import AnswerObject, doc
from server.errors import InvalidRequestError, shorten

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class ModelInfo(AnswerObject):
    """A served model."""

    type: Literal["model"] = "model"
    id: Annotated[str, doc("Its name in requests.")]
    display_name: Annotated[str, doc("The same.")]
    created_at: Annotated[str, doc("When the server was started (RFC 3339).")]
    max_input_tokens: Annotated[int, doc("Prompt and output together, in tokens.")]
    max_tokens: Annotated[int, doc("The same.")]
    lifecycle: Literal["active"] = "active"
    capabilities: Annotated[None, doc("Always null; see `/v1/capabilities`.")] = None


class ModelPage(AnswerObject):
    """Some of the models."""

    data: Annotated[Sequence[ModelInfo], doc("The served model, once for each of its names.")]
    has_more: Annotated[bool, doc("Whether there are more in the direction that was asked for.")]
    first_id: Annotated[str | None, doc("Of `data`, for `before_id`.")]
    last_id: Annotated[str | None, doc("Of `data`, for `after_id`.")]


def is_asked_for(scope: Scope) -> bool:
    """Whether a request is of one of Anthropic's clients."""
    return "anthropic-version" in Headers(scope=scope)


def model_info(name: str, created: int, max_model_len: int) -> ModelInfo:
    """The model by this name; `created` is Unix time in seconds."""
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )


def page_of(models: Sequence[ModelInfo], limit: str | None, before_id: str | None, after_id: str | None) -> ModelPage:
    """The part of the models that was asked for: up to `limit` of them, next to one of these. InvalidRequestError."""
    count = _limit(limit)
    if before_id is not None and after_id is not None:
        message = "Setting 'before_id' and 'after_id' at the same time is not supported."
        raise InvalidRequestError(message, param="before_id", code="invalid_parameter_combination")
    if before_id is not None:
        before = models[: _place(models, "before_id", before_id)]
        page, has_more = before[-count:], len(before) > count
    else:
        after = models if after_id is None else models[_place(models, "after_id", after_id) + 1 :]
        page, has_more = after[:count], len(after) > count
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return ModelPage(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1])


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MAX_LIMIT):
        message = f"Invalid 'limit': expected a whole number from 1 to {MAX_LIMIT}, but got '{shorten(text)}' instead."
        raise InvalidRequestError(message, param="limit", code="invalid_value")
    return int(text)


def _place(models: Sequence[ModelInfo], name: str, model: str) -> int:
    place = next((index for index, one in enumerate(models) if one.id == model), None)
    if place is None:
        message = f"Invalid '{name}': there is no model called '{shorten(model)}'."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return place
