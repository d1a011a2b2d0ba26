"""Where a folder's chat templates are: the one for a request is transformers' choice."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from server.config import Settings
from server.generation.fingerprint import Fingerprint
from server.text.chat_template import ChatTemplate, TemplateSources
from server.text.template_files import read_templates
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.tiny_model import write_folder

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
]
BOTH = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
RAG = [*BOTH, {"name": "rag", "template": "rag"}]
Files = Mapping[str, Any]


def write(folder: Path, files: Files) -> Path:
    """A folder with a tokenizer and these files; texts are written as they are, other values as JSON."""
    write_folder(folder, template=None)
    (folder / "tokenizer_config.json").write_text("{}")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "plain"}},
        {"tokenizer_config.json": {"chat_template": BOTH}},
        {"tokenizer_config.json": {"chat_template": RAG}},
        {"chat_template.jinja": "plain"},
        {"chat_template.jinja": "plain", "tokenizer_config.json": {"chat_template": BOTH}},
        {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "for tools"},
        {"chat_template.jinja": "plain", "additional_chat_templates/rag.jinja": "rag"},
    ],
)
def test_the_choice_is_that_of_transformers(files: Files, tmp_path: Path) -> None:
    true = PreTrainedTokenizerFast.from_pretrained(write(tmp_path, files))
    template = Tokenizer.from_folder(tmp_path).chat_template
    assert template is not None
    assert template.source == true.get_chat_template()
    assert template.with_tools.source == true.get_chat_template(tools=TOOLS)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.json": {"chat_template": "p"}}, TemplateSources("p")),
        ({"processor_config.json": {"chat_template": "p"}}, TemplateSources("p")),
        ({"processor_config.json": {"image_processor": {}}}, None),
        (
            {"chat_template.json": {"chat_template": "first"}, "processor_config.json": {"chat_template": "second"}},
            TemplateSources("first"),
        ),
        (
            {"chat_template.json": {"chat_template": "second"}, "tokenizer_config.json": {"chat_template": "first"}},
            TemplateSources("first"),
        ),
        (
            {"chat_template.json": {"chat_template": {"default": "p", "tool_use": "t"}}},
            TemplateSources("p", "t"),
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "r"}]}}, None),
    ],
)
def test_other_files_have_templates_too(files: Files, expected: TemplateSources | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert read_templates(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"chat_template.json": "{"}, r"chat_template\.json is not valid JSON \(.*\); download it again"),
        ({"chat_template.json": "[]"}, r"chat_template\.json does not hold a JSON object"),
        ({"chat_template.json": {"chat_template": 3}}, r"chat_template\.json: chat_template is neither a text nor"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, r"tokenizer_config\.json: chat_template"),
    ],
)
def test_files_that_hold_no_template_are_named(files: Files, said: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    with pytest.raises(ValueError, match=said):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.from_folder(tmp_path)


def test_each_template_keeps_its_own_variables() -> None:
    template = ChatTemplate("{{ mood }}", {}, "{{ tools }}{{ date }}")
    assert (template.variables, template.with_tools.variables) == ({"mood"}, {"date"})
    assert not template.knows_tools
    assert template.with_tools.knows_tools
    assert template.sources == TemplateSources("{{ mood }}", "{{ tools }}{{ date }}")


DEFAULT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_USE = "{{ tools[0].function.name }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ date }}"


@pytest.fixture
def served(make_app: Callable[..., FastAPI], tmp_path: Path) -> FastAPI:
    names = {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE}
    return make_app(write(tmp_path / "model", names))


async def test_the_fingerprint_covers_the_templates(tmp_path: Path) -> None:
    names = {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE}
    folder = write(tmp_path / "model", names)

    async def digest() -> str:
        fingerprint = Fingerprint([folder], Settings())
        await fingerprint.wait_known()
        return fingerprint._digest.result()

    before = await digest()
    assert before == await digest()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert before != await digest()


async def test_llama_cpps_properties_have_both_templates(served: FastAPI, client: httpx.AsyncClient) -> None:
    async with client_of(served) as own:
        properties = (await own.get("/props")).json()
    assert (properties["chat_template"], properties["chat_template_tool_use"]) == (DEFAULT, TOOL_USE)
    assert "chat_template_tool_use" not in (await client.get("/props")).json()


async def test_a_request_with_tools_gets_the_template_for_them(served: FastAPI, engine: FakeEngine) -> None:
    async with client_of(served) as client:
        for fields, prompt in (({}, "hi"), ({"tools": TOOLS}, "f<tool_call>hi"), ({"tools": []}, "hi")):
            assert (await client.post(CHAT, json=chat(**fields))).status_code == 200
            assert bytes(engine.requests[-1].prompt).decode() == prompt
        variables = {"chat_template_kwargs": {"date": "!"}}
        answer = (await client.post(CHAT, json=chat(tools=TOOLS, **variables))).json()
        assert bytes(engine.requests[-1].prompt).decode() == "f<tool_call>hi!"
        assert "warnings" not in answer
        ignored = (await client.post(CHAT, json=chat(**variables))).json()["warnings"]
        assert [warning["path"] for warning in ignored] == ["chat_template_kwargs.date"]
        capabilities = (await client.get("/v1/capabilities")).json()
        assert capabilities["tool_format"] == "hermes"  # which only the template for tools names
        assert capabilities["chat_template_variables"] == ["date"]
