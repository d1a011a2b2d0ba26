"""Answers held to a form by the embedded model, through the helpers of the official client."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.served.conftest import Server

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"
ASKED = [{"role": "user", "content": "Describe a cat as JSON, with its name, age and colour."}]
MANNERS = {"model": MODEL, "messages": ASKED, "seed": 3, "temperature": 0.8, "max_tokens": 80}


class Cat(BaseModel):
    colour: Literal["black", "white", "striped"]
    age: Literal[1, 2, 3] | None
    kitten: bool


def test_a_pydantic_model_parsed_and_streamed(server: Server) -> None:
    client = server.client.chat.completions
    message = client.parse(**MANNERS, response_format=Cat).choices[0].message
    assert isinstance(message.parsed, Cat)
    with client.stream(**MANNERS, response_format=Cat) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert (streamed.parsed, streamed.content) == (message.parsed, message.content)


@pytest.mark.parametrize("method", ["auto", "grammar"])
def test_drafts_do_not_change_it(server: Server, method: str) -> None:
    schema = {"name": "cat", "strict": True, "schema": {**Cat.model_json_schema(), "additionalProperties": False}}
    body = {**MANNERS, "n": 2, "logprobs": True, "response_format": {"type": "json_schema", "json_schema": schema}}
    plain, drafted = (
        server.client.chat.completions.create(**body, extra_body={"speculation": choice})
        for choice in ("off", {"method": method})
    )
    assert [choice.message.content for choice in drafted.choices] == [one.message.content for one in plain.choices]
    for choice in drafted.choices:
        assert choice.finish_reason == "stop"
        Cat.model_validate(json.loads(choice.message.content or ""))


def test_without_a_token_left_the_error_says_which_fields_took_them(server: Server) -> None:
    with pytest.raises(
        openai.APIError, match=r"No token can be chosen with these settings: allowed_token_ids, grammar"
    ):
        server.client.completions.create(
            model=MODEL, prompt="x", extra_body={"guided_regex": "[0-9]+", "allowed_token_ids": [28]}
        )
