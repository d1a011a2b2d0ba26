"""Pytest plugin that runs the tests of llama.cpp's server against Samewise.

Their `ServerProcess` starts Samewise with the embedded model. The tests expect TinyStories' answers and counts of its
tokens. Here an answer need only be there, and a prompt has the tokens that transformers counts with the embedded model.
"""

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from foreign_suites.report import Report
from foreign_suites.served import SERVED, embedded_folder, embedded_variant
from transformers import AutoTokenizer

TINY_STORIES = re.compile(r"[\w\s'^()|+]+|.*Suddenly.*")
"""Patterns of plain words, which describe what another model writes. All others describe a format, and are kept."""

CHATML = ("chatml",)
"""Names of built-in templates that are the embedded model's own."""

MODELS = (
    "test",
    "codellama70b",
    "davinci-002",
    "gpt-3.5-turbo",
    "gpt-3.5-turbo-instruct",
    "gpt-4.1",
    "text-embedding-3-small",
)
"""Names that tests ask for: llama.cpp answers under any, while OpenAI, vLLM and Samewise refuse an unknown one."""

SETTING = re.compile(
    r"(?:ServerPreset|server\.(n_ctx|n_slots|kv_unified|model_alias|api_key|cors_origins|no_ui|temperature|n_predict"
    r"|chat_template|chat_template_file) =)[. ](.*)"
)
"""Where a test chooses its server, as far as that makes a difference here."""

NOT_APPLICABLE = {
    "test_router.py": "several models in one server",
    "test_stream.py": "several models in one server",
    "test_mcp_servers.py": "runs tools of MCP servers",
    "test_tools_builtin.py": "runs tools on the server's machine",
    "test_vision_api.py": "needs images",
    "test_local_media_file": "needs images",
    "multimodal": "needs images",
    "test_lora.py": "adapters of weights",
    "test_sleep.py": "unloads the model when idle",
    "test_proxy.py": "forwards web requests for its page",
    "test_cors_proxy": "forwards web requests for its page",
}


class _Server:
    """Replaces the methods of `ServerProcess` that start and stop llama.cpp's server."""

    def start(self: Any, timeout_seconds: int = 0) -> None:
        """Translate the attributes that tests set; other models and templates that are not at hand are skipped."""
        slots = self.n_slots or 1
        flags = ["--max-num-seqs", str(slots), "--speculation", "off"]
        if self.n_ctx:
            flags += ["--max-model-len", str(self.n_ctx if self.kv_unified else self.n_ctx // slots)]
        lists_models = "test_basic.py" in os.environ["PYTEST_CURRENT_TEST"]
        for name in dict.fromkeys((self.model_alias or "test", *(() if lists_models else MODELS))):
            flags += ["--served-model-name", name]
        if self.api_key:
            flags += ["--api-key", self.api_key]
        if self.cors_origins:
            flags += ["--cors-origins", self.cors_origins]
        if self.no_ui:
            flags += ["--no-page"]
        limit = self.n_predict if self.n_predict and self.n_predict > 0 else None
        folder = embedded_variant(_template(self), temperature=self.temperature, max_new_tokens=limit)
        self.server_port = SERVED.start(folder, *flags)
        self.ready = True

    def stop(self: Any) -> None:
        """The server stays for the next test."""


def _with_defaults(send: Callable[..., Any]) -> Callable[..., Any]:
    """A method that sends a request, with fields in place of the flags for the seed and for reasoning."""

    def sent(server: Any, method: str, path: str, data: Any = None, *args: Any, **options: Any) -> Any:
        if path == "/completion":
            data = {"seed": server.seed, **data}
        if server.reasoning is not None and "messages" in (data or {}):
            data = {"chat_template_kwargs": {"enable_thinking": server.reasoning != "off"}, **data}
        return send(server, method, path, data, *args, **options)

    return sent


def _settings(item: pytest.Item) -> str:
    """The attributes that a test sets, as its source and its fixture's have them, with its parameters in place."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    fixture = getattr(item.module, "create_server", None)  # type: ignore[attr-defined]
    sources = [inspect.getsource(getattr(it, "__wrapped__", it)) for it in (fixture, item.function) if it is not None]
    found = SETTING.findall("\n".join(sources))
    return str({name or "preset": str(params.get(value, value)) for name, value in found})


def _template(server: Any) -> str | None:
    """The chat template that a test asks for, if it is not the model's own."""
    if server.chat_template_file:
        file = Path(server.chat_template_file)
        if not file.is_file():
            pytest.skip(f"no template {file.name} in the package")
        return file.read_text()
    if server.chat_template in (None, *CHATML):
        return None
    if not server.chat_template.replace("-", "").replace("_", "").isalnum():
        return str(server.chat_template)
    pytest.skip(f"the template {server.chat_template!r} is built into llama.cpp")


class _Adapted:
    """The order of the tests, and their expectations that hang on the model."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(embedded_folder())

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests that set the same attributes come together, so that few servers are started."""
        sizes = Counter(_settings(item) for item in items)
        items.sort(key=lambda item: (-sizes[_settings(item)], _settings(item)))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "n_prompt" in params:
            params["n_prompt"] = self._count(params)

    def _count(self, params: dict[str, Any]) -> int:
        if "prompt" in params:
            return len(self._tokenizer(params["prompt"])["input_ids"])
        asked = params["user_prompt"]
        messages = [
            {"role": "system", "content": params["system_prompt"]},
            {"role": "user", "content": asked if isinstance(asked, str) else "\n".join(part["text"] for part in asked)},
        ]
        chat = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(self._tokenizer(chat)["input_ids"])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the suite's own `conftest.py`, which imports `utils`."""
    sys.modules["wget"] = ModuleType("wget")
    sys.path.insert(0, str(Path.cwd()))
    utils: Any = __import__("utils")
    described = utils.match_regex
    utils.match_regex = lambda regex, text: bool(text) if TINY_STORIES.fullmatch(regex) else described(regex, text)
    utils.ServerProcess.start = _Server.start
    utils.ServerProcess.stop = _Server.stop
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, _with_defaults(getattr(utils.ServerProcess, name)))
    utils.ServerPreset.load_all = lambda: None
    early_config.pluginmanager.register(Report(NOT_APPLICABLE))
    early_config.pluginmanager.register(_Adapted())
