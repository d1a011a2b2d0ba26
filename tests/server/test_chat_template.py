"""Chat templates render as in transformers, which is the independent truth here."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.chat_template import ChatTemplate, ChatTemplateError
from tests.server.tiny_model import TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "é <b> & 'x'"},
    {"role": "user", "content": "  hi\n"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and now"},
]
TEMPLATES = [
    TEMPLATE,
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n[U] {{ m['content'] | trim }}{{ eos_token }}\n"
    "  {% endif %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}|{% endif %}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ messages[1:] | map(attribute='content') | list | tojson(indent=2) }}{{ undefined_thing }}",
    "{% if tools is none and documents is none %}none{% endif %}{{ tools is defined }}",
    "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}",
    "{{ strftime_now('%Y') }}{{ messages | length }}{% if add_generation_prompt %}>{% endif %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("add", [True, False])
def test_renders_as_transformers_does(source: str, add: bool):
    rendered, _ = render_jinja_template([CONVERSATION], chat_template=source, add_generation_prompt=add, **SPECIAL)
    assert ChatTemplate(source, SPECIAL).render(CONVERSATION, add_generation_prompt=add, variables={}) == rendered[0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.x.y }}", "has no attribute"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[0]['content'][99999].x }}", "99999"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
    ],
)
def test_what_a_template_does_not_take(source: str, said: str):
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(source, {}).render(CONVERSATION, add_generation_prompt=True, variables={})


def test_source_that_is_no_template():
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTemplate("{% if %}", {})


def test_continues_the_final_message_exactly():
    template = ChatTemplate(TEMPLATE, SPECIAL)
    messages = [CONVERSATION[1], {"role": "assistant", "content": "It is "}]
    text = template.render_open(messages, variables={})
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\nIt is "
    with pytest.raises(ChatTemplateError, match="continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render_open(messages, variables={})


def test_developer_is_system_unless_the_template_knows_it():
    messages: list[dict[str, Any]] = [{"role": "developer", "content": "x"}]
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(roles, {}).render(messages, add_generation_prompt=False, variables={}) == "system"
    aware = ChatTemplate(roles + "{# developer #}", {})
    assert aware.render(messages, add_generation_prompt=False, variables={}) == "developer"


def test_variables():
    template = ChatTemplate(TEMPLATE, SPECIAL)
    assert template.variables == {"tone"}
    text = template.render(CONVERSATION, add_generation_prompt=False, variables={"tone": "dry"})
    assert text.startswith("tone=dry;")


def test_variables_with_a_default():
    source = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}"
    assert ChatTemplate(source, {}).variables == {"date"}
    assert ChatTemplate("{{ bos_token }}{% set x = 1 %}{{ x }}{{ strftime_now('%Y') }}", SPECIAL).variables == set()


def test_notices_what_it_does_not_show():
    template = ChatTemplate(TEMPLATE, SPECIAL)
    named = [{**CONVERSATION[1], "name": "Ann"}]
    role = named[0]["role"]
    assert template.ignores("name", role, named, variables={})
    assert not template.ignores("content", role, named, variables={})
    assert not ChatTemplate("{{ messages[0].name }}", {}).ignores("name", role, named, variables={})


def test_a_role_whose_name_is_shown_does_not_hide_one_whose_name_is_not():
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a", "name": "Bob"}, {"role": "tool", "content": "b", "name": "f"}]
    template = ChatTemplate(source, {})
    assert template.ignores("name", "user", messages, variables={})
    assert not template.ignores("name", "tool", messages, variables={})
