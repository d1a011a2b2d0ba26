"""Base of the answers that are not yet AnswerObjects."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from server.api import answer_object
from server.api.openai import answer

WARNINGS = answer_object.WARNINGS
CACHE_WRITTEN = answer.CACHE_WRITTEN


class ResponseModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _constants: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        fields = cls.model_fields.items()
        cls._constants = frozenset(
            name for name, field in fields if not field.is_required() and field.default is not None
        )

    def model_post_init(self, context: object) -> None:
        """Constants are always part of the JSON; only a default of None means that a property does not apply."""
        self.__pydantic_fields_set__.update(self._constants)


class TopLogprob(ResponseModel):
    """One token and its log-probability."""

    token: str = Field(description=r"Its text; `bytes:\xe2` and so on where it is no whole characters.")
    logprob: float = Field(description="-9999 where the probability is zero.")
    bytes: list[int] | None = Field(description="Its bytes.")


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable alternatives."""

    top_logprobs: list[TopLogprob] = Field(description="As many as `top_logprobs` of the request says, best first.")


class ReportedNotice(ResponseModel):
    """Something of the request that was left out or changed."""

    path: str = Field(description="The field.")
    reason: str = Field(description="Why, or into what.")
