"""One image through each client, unchanged: in a message, and in the result of a tool where the client can send it."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from model_runner.images.decoding import decode
from scheduler.interface import EngineRequest
from server.text.tokenizer import Tokenizer
from tests.clients.test_agents import AGENTS, LIMIT_S
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import serving
from tests.server.images.conftest import data_url, file_of, picture, write_image_folder
from tests.server.tiny_model import END

PNG = file_of(picture())
ASKED = "Look at picture.png."
SAID = "A picture."
TEMPLATE = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|start|>"
    "{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}PLACE{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|end|>{% endfor %}<|start|>assistant\n"
)
Serve = Callable[..., str]


@pytest.fixture
def serve_images(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path) -> Iterator[Serve]:
    """Starts a model that reads images, and calls a tool once if it is given one; returns its address."""
    info = replace(engine.info_, takes_images=True, max_image_rows=1 << 20, max_model_len=1 << 20, num_blocks=1 << 17)
    engine.info_, engine.tokens_per_step = info, 16
    with ExitStack() as stack:

        def start(call: dict[str, Any] | None = None) -> str:
            folder = tmp_path / "model"
            write_image_folder(folder, "llava", TEMPLATE)
            tokenizer = Tokenizer.from_folder(folder)

            def script(request: EngineRequest, choice: int) -> list[int]:
                calls = call is not None and not request.images
                text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if calls else SAID
                return [*tokenizer.encode(text, add_special_tokens=False), END]

            engine.script = script
            app = make_app(folder, tool_parser="hermes")
            return stack.enter_context(serving(app, app.state.websockets))

        yield start


def check_seen(engine: FakeEngine) -> None:
    """The last prompt has the image's pixels, once."""
    (image,) = engine.requests[-1].images
    assert decode(image.data).tobytes() == picture().tobytes()


def _langchain(address: str, api: str) -> Any:
    if api == "messages":
        chat = pytest.importorskip("langchain_anthropic").ChatAnthropic
        return chat(base_url=address, api_key="none", model="tiny", max_retries=0)
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    fields = {"use_responses_api": True} if api == "responses" else {}
    return chat(base_url=f"{address}/v1", api_key="none", model="tiny", max_retries=0, **fields)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langchain(serve_images: Serve, engine: FakeEngine, api: str) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = _langchain(serve_images(), api)
    block = {"type": "image", "base64": data_url(PNG).partition(",")[2], "mime_type": "image/png"}
    asked = messages.HumanMessage([{"type": "text", "text": ASKED}, block])
    assert model.invoke([asked]).text == SAID
    check_seen(engine)
    call = {"name": "look", "args": {}, "id": "call_1", "type": "tool_call"}
    result = messages.ToolMessage([{"type": "text", "text": "Here it is."}, block], tool_call_id="call_1")
    history = [messages.HumanMessage(ASKED), messages.AIMessage("", tool_calls=[call]), result]
    assert "".join(piece.text for piece in model.stream(history)) == SAID
    check_seen(engine)


@pytest.mark.parametrize("api", ["openai.OpenAIChat", "openai.OpenAIResponses", "anthropic.Anthropic"])
async def test_pydantic_ai(serve_images: Serve, engine: FakeEngine, api: str) -> None:
    """Also from a tool, whose image some APIs get in a message after the result."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    module, _, name = api.partition(".")
    models = pytest.importorskip(f"pydantic_ai.models.{module}")
    providers = pytest.importorskip(f"pydantic_ai.providers.{module}")
    address = serve_images({"name": "look", "arguments": {}})
    base_url = address if module == "anthropic" else f"{address}/v1"
    provider = getattr(providers, f"{name.removesuffix('Chat').removesuffix('Responses')}Provider")
    model = getattr(models, f"{name}Model")("tiny", provider=provider(base_url=base_url, api_key="none"))
    image = pydantic_ai.BinaryContent(PNG, media_type="image/png")
    agent = pydantic_ai.Agent(model)
    assert (await agent.run([ASKED, image])).output == SAID
    check_seen(engine)

    @agent.tool_plain
    def look() -> Any:
        """Shows the picture."""
        return image

    assert (await agent.run(ASKED)).output == SAID
    check_seen(engine)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(serve_images: Serve, engine: FakeEngine, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{serve_images()}/v1", api_key="none", max_retries=0) as client:
        agent = agents.Agent(name="Looker", model=getattr(agents, api)(model="tiny", openai_client=client))
        part = {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"}
        item = {"role": "user", "content": [{"type": "input_text", "text": ASKED}, part]}
        assert (await agents.Runner.run(agent, [item])).final_output == SAID
    check_seen(engine)


@pytest.mark.parametrize("api", ["chat", "openai chat", "responses", "messages"])
def test_ai_sdk(
    serve_images: Serve, engine: FakeEngine, node_modules: Path, node_env: dict[str, str], tmp_path: Path, api: str
) -> None:
    copytree(Path(__file__).parent / "node", tmp_path, dirs_exist_ok=True)
    (tmp_path / "node_modules").symlink_to(node_modules)
    (tmp_path / "picture.png").write_bytes(PNG)
    ended = subprocess.run(
        ["node", "ai_sdk_image.mjs", serve_images(), api, ASKED, SAID],
        cwd=tmp_path, env=node_env, timeout=LIMIT_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_seen(engine)


LOOKS: dict[str, tuple[list[str], dict[str, Any] | None]] = {
    "codex": (["-i", "picture.png", "--"], None),
    "codex, its tool": ([], {"name": "view_image", "arguments": {"path": "picture.png"}}),
    "claude-code": ([], {"name": "Read", "arguments": {"file_path": "picture.png"}}),
}
"""Arguments before the prompt, and the call by which the agent looks at the picture."""


@pytest.mark.parametrize("name", LOOKS)
def test_agents(
    serve_images: Serve,
    engine: FakeEngine,
    node_modules: Path,
    node_env: dict[str, str],
    tmp_path: Path,
    name: str,
) -> None:
    agent = AGENTS[name.partition(",")[0]]
    given, call = LOOKS[name]
    (tmp_path / "picture.png").write_bytes(PNG)
    if call is not None:
        place = next(key for key in call["arguments"])
        call["arguments"][place] = str(tmp_path / "picture.png")
    address = serve_images(call)
    for file, text in agent.files(address).items():
        path = Path(node_env["HOME"]) / file[2:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first = ["--allowedTools", "Read", "-p"] if "claude" in name else agent.first
    ended = subprocess.run(
        [node_modules / agent.program, *first, *given, ASKED],
        cwd=tmp_path, env={**node_env, **agent.env(address)}, timeout=LIMIT_S, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert SAID in ended.stdout
    check_seen(engine)
