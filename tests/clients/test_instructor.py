"""Instructor's modes on the embedded model."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.served.conftest import Server

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.embedded


class Weather(BaseModel, extra="forbid"):
    """Tells the weather of a city."""

    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2, 3]


ASKED: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "How cold is it in Oslo?"}],
    "max_tokens": 80,
    "seed": 3,
    "max_retries": 0,
}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_pydantic_model(server: Server, mode: str) -> None:
    client = instructor.from_openai(server.client, mode=instructor.Mode[mode])
    assert isinstance(client.chat.completions.create(**ASKED, response_model=Weather), Weather)


def test_the_pieces_of_one(server: Server) -> None:
    client = instructor.from_openai(server.client, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(**ASKED, response_model=Weather)
    assert (last.city in {"Rome", "Oslo"}, last.degrees in {1, 2, 3}) == (True, True)
