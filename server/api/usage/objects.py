"""What a request for usage asks, and what it gets."""

from datetime import date
from typing import Literal

from pydantic import Field

from server.api.openai.objects import ResponseModel
from server.api.openai.pages import Query


class UsageQuery(Query):
    """Of which days."""

    start_date: date | None = Field(None, description="The first day, as YYYY-MM-DD; by default today.")
    end_date: date | None = Field(None, description="The last day; by default today.")


class UsageOfDay(ResponseModel):
    """What was used of a model in a day of UTC."""

    object: Literal["usage"] = Field("usage", description="Always this.")
    date: str = Field(description="As YYYY-MM-DD.")
    model: str = Field(description="The model.")
    num_model_requests: int = Field(description="That have ended and were computed, at least in part.")
    input_tokens: int = Field(description="Of their prompts.")
    input_cached_tokens: int = Field(description="Of these, found in the prefix cache.")
    output_tokens: int = Field(description="Of their answers.")


class UsageList(ResponseModel):
    """By day, then by model; days without any are left out."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[UsageOfDay] = Field(description="The days.")
