"""No message is dropped in silence because the model's chat template does not show it."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat

GEMMA = """{%- if messages[0]['role'] == 'system' -%}
  {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("must alternate") }}{%- endif -%}
  {{ '<start_of_turn>' + message['role'] + '\n' + (first_user_prefix if loop.first else "") }}
  {{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
"""As Gemma 3's."""
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.role[0] }}:{{ m.content | upper }};{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "lost"}
TURN = "<start_of_turn>{}\n{}<end_of_turn>\n"
FOLDED = ["messages[].role"]


@pytest.mark.parametrize(
    ("template", "messages", "prompt", "reported"),
    [
        (GEMMA, [SYSTEM, USER], TURN.format("user", "Be brief.\n\nhi"), []),
        (GEMMA, [SYSTEM], TURN.format("user", "Be brief."), FOLDED),
        (GEMMA, [{**SYSTEM, "role": "developer"}], TURN.format("user", "Be brief."), FOLDED),
        (GEMMA, [{**SYSTEM, "content": "hi"}], TURN.format("user", "hi"), FOLDED),
        (FIRST_SYSTEM, [USER, SYSTEM], "S:Be brief.;u:HI;", ["messages[].role"]),
        (FIRST_SYSTEM, [SYSTEM, USER], "S:Be brief.;u:HI;", []),
        (FIRST_SYSTEM, [{**SYSTEM, "content": "hi"}, USER], "S:hi;u:HI;", []),
        (NO_SYSTEM, [SYSTEM, USER], "user:Be brief.\n\nhi;", FOLDED),
        (NO_SYSTEM, [USER, ANSWER, SYSTEM], "user:Be brief.\n\nhi;assistant:lost;", FOLDED),
        ("{{ messages[-1].content }}", [{**USER, "content": "lost"}, USER], "hi", ["messages[0].content"]),
        ("{{ messages[0].content }}", [USER, ANSWER], "hi", ["messages[1].content"]),
    ],
)  # fmt: skip
async def test_what_a_template_does_not_show_is_folded_or_reported(
    template: str,
    messages: list[dict[str, Any]],
    prompt: str,
    reported: list[str],
    client_with: Callable[..., httpx.AsyncClient],
    engine: FakeEngine,
    tokenizer: Tokenizer,
) -> None:
    async with client_with(template) as client:
        answer = await client.post(CHAT, json=chat(messages=messages, add_generation_prompt=False))
    assert answer.status_code == 200, answer.text
    assert tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False) == prompt
    assert list(dict.fromkeys(one["path"] for one in answer.json().get("warnings", ()))) == reported


async def test_a_strict_server_refuses_it(client_with: Callable[..., httpx.AsyncClient]) -> None:
    async with client_with(GEMMA, strict=True) as client:
        answer = await client.post(CHAT, json=chat(messages=[SYSTEM]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[].role"
