"""A chat template cannot take more work than its place allows, however it is written."""

from collections.abc import Callable

import httpx
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.chat_template import ChatTemplate, ChatTemplateError, check_template
from server.text.template_sandbox import TemplateWorkError, limited_work
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat

MESSAGES = [{"role": "user", "content": "hi"}]
TWINS = "{% set x=['a'] %}{% set y=['a'] %}" + "{% set x=[x,x] %}{% set y=[y,y] %}" * 60
LONG = "{% set s = 'a' * 200000 %}"
COSTLY = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    LONG + "{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    *("{{ 'x' * 4000000000 }}", "{{ ([0] * 4000000000)|length }}", "{{ 4000000000 * 'x' }}"),
    *("{{ 'x'|center(4000000000) }}", "{{ 'x'.ljust(4000000000) }}", "{{ '\t'.expandtabs(2000000000) }}"),
    *("{{ 'a\nb'|indent(2000000000) }}", "{% filter center(2000000000) %}a{% endfilter %}"),
    *("{{ '%2000000000d' % 1 }}", "{{ '%*d' % (2000000000, 1) }}", "{{ '%.2000000000f'|format(1) }}"),
    *("{{ '{:2000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 2000000000) }}"),
    *("{{ [1]|batch(2000000000, 'x')|list }}", "{{ [1]|slice(2000000000)|list }}", "{{ 5|round(-1000000000) }}"),
    *("{{ (5).to_bytes(2000000000, 'big')|length }}", "{{ {}.fromkeys(range(99999))|length }}" * 20),
    "{% set x %}aaaaaaaaaaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{% set ns=namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns=namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns=namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    *(TWINS + use for use in ("{{ x }}", "{{ x|tojson }}", "{{ x == y }}", "{{ x in [y] }}", "{{ x is eq(y) }}")),
    *(TWINS + use for use in ("{{ x ~ '' }}", "{{ '%s' % [x] }}", "{{ [x,y]|sort }}", "{{ [x].index(y) }}")),
    TWINS + "{% for z in [x,y] %}{{ loop.changed(z) }}{% endfor %}",
    "{% set x=('a',) %}" + "{% set x=(x,x) %}" * 60 + "{{ {x: 1}|length }}",
    *(LONG + use for use in ("{{ s.replace('', s) }}", "{{ s|replace('', s) }}", "{{ s.join(s) }}", "{{ s|join(s) }}")),
    LONG + "{% for i in range(99999) %}{% if ('b' ~ i) in s %}{% endif %}{% endfor %}",
    LONG + "{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "{% for i in range(99999) %}" + "y" * 100000 + "{% endfor %}",
    LONG + "{% for i in range(999) %}{% set t = s + s + s + s %}{% endfor %}",
    "{% set s = [0] * 20000 %}{{ (" + "s + " * 200 + "s)|length }}",
    "{% set s = 2 ** 16000 %}{% for i in range(999) %}{% set t = s + s %}{% endfor %}",
    "{{ range(99999)|map('string')|map('upper')|list|length }}",
]  # fmt: skip
REFUSED = [
    ("{{ 2 ** 1000000000 }}", "integer of more than"),
    ("{% set ns=namespace(x=9) %}{% for i in range(99) %}{% set ns.x=ns.x*ns.x %}{% endfor %}", "integer of more than"),
    ("{{ messages|tojson(indent=1000000000) }}", "indentation"),
    ("{{ messages|tojson(indent='x' * 1000) }}", "indentation"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
    ("{{ lipsum(99999) }}", "lipsum"),
]
UNREADABLE = [
    ("x{{ 1 }}" * (20 << 17), "characters, and at most"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ("{{ " + "not " * 5000 + "1 }}", "nested too deeply"),
    ("{% if a %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
    ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
    ("{{a}}" * 20001, "more than 20000 parts"),
    ("{{ " + "9" * 5000 + " }}", "4300 digits"),
    ("{{ messages|random }}", "No filter named 'random'"),
]
USUAL = """
{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ system ~ '|' ~ 1 ~ none }}
{% for m in messages[::-1] if m.role not in ['tool'] %}
  {{ '%s: %d' % (m.role, 17320000000) }}{{ '{} {:>4}'.format(m.role, loop.index) }}
  {{ m.content.split('a')[-1].strip() | upper }}{{ (3 * 'x', 7 // 2) }}
  {{ m.get('name', 'no') | replace('n', 'N') | indent(4, true) }}{{ m.items() | list | tojson(indent=2) }}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}{{ {(1, 2): 3} }}
{% macro show(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}
{{ show(1) }}{% call show(4) %}c{% endcall %}
{% for k, v in {'b': 1, 'a': [2, {'c': none}]} | dictsort %}
  {{ k }}{{ v | string }}{{ loop.last }}{% else %}e
{% endfor %}
{% set ns = namespace(n=0) %}
{% for x in [[1, [2]], 3] recursive %}
  {% set ns.n = ns.n + 1 %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}
{% endfor %}
{{ 'a' + messages[0].content + ('b' + 'c')|upper + 'd' }}{{ 9000000000 + 1 + 2.5 }}{{ [1] + [ns.n] + [[]] }}
{{ ('<'|safe) + '<' + 'x' }}{{ 'x<' + ('<'|safe) }}{{ ns.n }}{{ 'é' in messages[0].content and 1 < 2 <= 3 }}
"""


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True, variables={})


def test_counting_changes_no_text() -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": " banana ", "name": "Ann"}]
    true, _ = render_jinja_template([messages], chat_template=USUAL)
    assert ChatTemplate(USUAL, {}).render(messages, add_generation_prompt=False, variables={}) == true[0]


@pytest.mark.parametrize("source", COSTLY)
def test_costly_templates_are_stopped(source: str) -> None:
    template = ChatTemplate(source, {})
    with limited_work(10_000), pytest.raises(TemplateWorkError):
        template.render(MESSAGES, add_generation_prompt=True, variables={})


@pytest.mark.parametrize(("source", "reason"), REFUSED)
def test_values_of_any_size_are_refused(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        rendered(source)


@pytest.mark.parametrize(("source", "reason"), UNREADABLE)
def test_sources_that_would_not_compile_are_refused_in_a_line(source: str, reason: str) -> None:
    for read in (check_template, lambda text: ChatTemplate(text, {})):
        with pytest.raises(ValueError, match=reason) as raised:
            read(source)
        assert len(str(raised.value)) < 300


async def test_costly_templates_are_rendered_in_a_worker_process(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """If its limit suffices, the prompt is as ever; otherwise the request is refused, and the server goes on."""
    steps = "{% for a in range(9999) %}{% for b in range(99999 if c in ['a', 'all'] else 1) %}{% endfor %}{% endfor %}"
    async with client_with("{% set c = messages[0].content %}" + steps + "{{ c }}") as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert bytes(engine.requests[-1].prompt) == b"hi"
        answer = await client.post(CHAT, json=chat(messages=[{"role": "user", "content": "all"}]))
        assert answer.json()["error"]["code"] == "request_too_complex"
        assert "chat template takes too much work" in answer.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
    assert "takes long to show two short messages" in caplog.text
