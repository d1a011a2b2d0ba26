"""Clients made for other servers: their calls are answered, and mean here what they mean there."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from tests.model_runner.hub.weights import gguf_bytes
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import says, serving
from tests.server.tiny_model import byte_level_tokenizer, write_folder

ASKED = [{"role": "user", "content": "hi"}]
SAID = "Ahoy."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WEATHER = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
LIMIT_S = 120
Start = Callable[..., str]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


@pytest.fixture
def start(make_app: Callable[..., FastAPI], engine: FakeEngine) -> Iterator[Start]:
    """Starts a server that says `SAID`; returns its address."""
    engine.script = says(SAID)
    with ExitStack() as stack:
        yield lambda *folder, **settings: stack.enter_context(serving(make_app(*folder, **settings)))


@pytest.fixture
def hugging_face() -> Iterator[Any]:
    """The package, whose clients share connections."""
    package = pytest.importorskip("huggingface_hub")
    yield package
    package.close_session()


def prompt_of(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)


def grammar_of(address: str, engine: FakeEngine, schema: dict[str, Any]) -> str | None:
    """The grammar of a schema, as OpenAI's client asks for it."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(model="tiny", messages=ASKED, response_format=form)  # type: ignore[arg-type]
    return engine.requests[-1].sampling.grammar


def test_hugging_face(hugging_face: Any, start: Start, engine: FakeEngine) -> None:
    """It gives a schema as TGI takes it, and describes what a tool returns."""
    address = start()
    client = hugging_face.InferenceClient(base_url=address)
    client.chat_completion(ASKED, model="tiny", response_format={"type": "json_object", "value": SCHEMA})
    assert engine.requests[-1].sampling.grammar == grammar_of(address, engine, SCHEMA) is not None
    function = {**WEATHER, "return": {"type": "string", "description": "A sentence."}}
    answer = client.chat_completion(ASKED, model="tiny", tools=[{"type": "function", "function": function}])
    assert answer.choices[0].message.content == SAID
    assert "get_weather" in prompt_of(engine)


def test_hugging_face_names_no_model(hugging_face: Any, start: Start) -> None:
    client = hugging_face.InferenceClient(base_url=start(any_model_name=True))
    assert client.chat_completion(ASKED).choices[0].message.content == SAID


def test_anthropic(start: Start, engine: FakeEngine) -> None:
    """The answer may be begun with nothing, and a tool may be a place to cache."""
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "get_weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    with anthropic.Anthropic(base_url=start(), api_key="none", max_retries=0) as client:
        messages = [*ASKED, {"role": "assistant", "content": ""}]
        answer = client.messages.create(model="tiny", max_tokens=9, messages=messages, tools=[tool])
    assert answer.content[0].text == SAID
    assert "get_weather" in prompt_of(engine)


def test_ollama(start: Start, engine: FakeEngine, tmp_path: Path) -> None:
    """A model without a chat template gets the prompt alone; its file says how it is quantised."""
    ollama = pytest.importorskip("ollama")
    folder = write_folder(tmp_path / "m", template=None)
    (folder / "model.gguf").write_bytes(gguf_bytes("llama", **{"general.file_type": 15}))
    with ollama.Client(start(folder)) as client:
        assert client.generate("tiny", "Once").response == SAID
        assert prompt_of(engine) == "Once"
        (model,) = client.list().models
    assert (model.details.quantization_level, model.details.family) == ("Q4_K_M", "llama")


def test_mistral(start: Start, engine: FakeEngine) -> None:
    """Reasoning comes back as a part of the content."""
    client = pytest.importorskip("mistralai.client")
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    said = {"role": "assistant", "content": [thinking, {"type": "text", "text": "Aye."}], "tool_calls": []}
    with client.Mistral(server_url=start(), api_key="none") as mistral:
        answer = mistral.chat.complete(model="tiny", messages=[*ASKED, said, *ASKED])
    assert answer.choices[0].message.content == SAID
    assert "Aye." in prompt_of(engine)


def test_litellm(start: Start, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of other APIs are passed on as they are."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # or it asks the network
    litellm = pytest.importorskip("litellm")
    parts = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "output_text", "text": "Aye."}]
    history = [*ASKED, {"role": "assistant", "content": parts, "tool_calls": []}, *ASKED]
    tool = {"type": "function", "function": WEATHER, "cache_control": {"type": "ephemeral"}}
    answer = litellm.completion(
        model="openai/tiny", api_base=f"{start()}/v1", api_key="none", messages=history, tools=[tool], max_retries=0
    )
    assert answer.choices[0].message.content == SAID
    assert "Aye." in prompt_of(engine)


def test_llm(start: Start, engine: FakeEngine, tmp_path: Path) -> None:
    """Its short form of a schema does not say that there are no other properties."""
    library = pytest.importorskip("llm")
    address = start()
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: tiny, model_name: tiny, api_base: '{address}/v1', supports_schema: true}}\n"
    )
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONPATH": str(Path(library.__file__).parents[1]),
           "LLM_LOAD_PLUGINS": ""}  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "llm", "--model", "tiny", "--schema", "name, age int", "--key", "none", "hi"],
        env=env, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.strip()) == (0, SAID), ended.stderr
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    assert engine.requests[-1].sampling.grammar == grammar_of(address, engine, closed) is not None


@pytest.mark.parametrize("sends_ids", [True, False])
def test_vectors_of_langchain(
    start: Start, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, sends_ids: bool
) -> None:
    """By default it sends token ids of its own tokenizer, which is reported; texts are not."""
    embeddings = pytest.importorskip("langchain_openai").OpenAIEmbeddings
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): (byte * 37 + 11) % 256 for byte in range(256)}  # its own vocabularies would be downloaded
    other = tiktoken.Encoding("other", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: other)
    reported: list[str | None] = []
    hooks = {"response": [lambda response: reported.append(response.headers.get("x-samewise-ignored"))]}
    with httpx.Client(event_hooks=hooks) as client:
        model = embeddings(
            base_url=f"{start()}/v1", api_key="none", model="tiny", max_retries=0, http_client=client,
            check_embedding_ctx_length=sends_ids,
        )  # fmt: skip
        text = "The capital of France is Paris. " * 3
        assert len(model.embed_query(text)) == 16
    assert (prompt_of(engine) == text, reported) == (not sends_ids, ["input[0]" if sends_ids else None])


@pytest.mark.parametrize("cuts", [True, False])
def test_long_chunks_of_langchain(start: Start, engine: FakeEngine, cuts: bool) -> None:
    embeddings = pytest.importorskip("langchain_openai").OpenAIEmbeddings
    address = start(auto_truncate=cuts)
    model = embeddings(
        base_url=f"{address}/v1", api_key="none", model="tiny", max_retries=0, check_embedding_ctx_length=False
    )
    text = "x" * (engine.info.max_model_len + 1)
    if cuts:
        assert len(model.embed_documents(["a", text])) == 2
    else:
        with pytest.raises(openai.BadRequestError, match="--auto-truncate"):
            model.embed_documents(["a", text])
