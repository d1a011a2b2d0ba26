"""A chat template of the operator's own: it is checked at the start, and everything that reads a template sees it."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from server.api.body_worker_process import _context
from server.assembly import ModelOnEngine, StartError, find_checkpoints, make_app
from server.config import Settings
from server.generation.fingerprint import Fingerprint
from tests.server.fake_engine import FakeEngine
from tests.server.tiny_model import write_folder

OTHER = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{% endif -%}{%- for message in messages if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls | tojson }}
{% endfor -%}
{%- for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<think>{% endif %}{# </think> #}"""


def settings_with(template: Path, folder: Path) -> Settings:
    return Settings(model=str(write_folder(folder / "tiny")), chat_template=template)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^chat_template: .*chat.jinja: No such file or directory; give a file with a Jinja template$"),
        (b"a\nb {% if %}", r"^chat_template: .*chat.jinja, line 2: Expected an expression"),
        (b"{% for m in messages %}\n{{ m }}\n", r"^chat_template: .*chat.jinja, line 2: Unexpected end of template"),
        (b"\n\n{{ 1 | no_such_filter }}", r"^chat_template: .*chat.jinja, line 3: No filter named 'no_such_filter'"),
        (b"\xff", r"^chat_template: .*chat.jinja is not UTF-8 text"),
    ],
)
def test_what_is_no_template_ends_the_start(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError, match=message):
        find_checkpoints(Settings(model="no/such-model", chat_template=file), Console(quiet=True))


def test_it_replaces_the_models_own_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(OTHER)
    settings = settings_with(file, tmp_path)
    checkpoints = find_checkpoints(settings, Console(quiet=True))
    file.write_text("changed since the start")
    made = make_app([ModelOnEngine(FakeEngine(), settings, checkpoints)], settings)
    services = made.state.services.models.default
    assert services.tokenizer.chat_template.source == OTHER
    assert services.model.formats.tool_format.startswith("mistral")
    assert services.model.formats.reasoning == "think"
    worker = _context(services.body_worker._pickled_context(None))
    assert worker.tokenizer.chat_template is not None
    assert worker.tokenizer.chat_template.source == OTHER
    own = Settings(model=settings.model)
    found = find_checkpoints(own, Console(quiet=True))
    plain = make_app([ModelOnEngine(FakeEngine(), own, found)], own).state.services.models.default
    assert (plain.model.formats.tool_format, plain.model.formats.reasoning) == ("hermes", None)


async def test_the_fingerprint_changes_with_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    info = FakeEngine().info
    found = {await Fingerprint([folder], Settings(), template).of(info) for template in ("", "a", "b")}
    assert len(found) == 3


def test_no_secret_is_in_the_capabilities(tmp_path: Path) -> None:
    settings = Settings(model="x", hub_token="hush")  # type: ignore[arg-type]
    assert "hush" not in json.dumps(settings.model_dump(mode="json"))
