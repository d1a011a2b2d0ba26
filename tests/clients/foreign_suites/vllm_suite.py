"""Pytest plugin that runs vLLM's tests of its OpenAI API against Samewise.

vLLM itself is not installed: the tests see stand-ins for `vllm` and `tests.utils`, in which `RemoteOpenAIServer` starts
Samewise with the embedded model under the name that the test asks for. Hub names mean the embedded model's tokenizer.
"""

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from foreign_suites.report import Report
from foreign_suites.served import SERVED, embedded_folder, embedded_variant
from foreign_suites.stand_ins import stand_in
from transformers import AutoConfig, AutoTokenizer

CONTEXT = 4096
"""Tests that ask for more get this, so that few servers are started."""

MAX_TOKENS = 1024
"""The default limit of an answer: this small model seldom ends one by itself."""

MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolVLM-256M-Instruct",
)
"""The names that the tests ask for: one server has all of them, so that it need not start again for each module."""

NOT_APPLICABLE = {
    "responses/test_harmony": "needs gpt-oss",
    "responses/test_mcp_tools": "needs gpt-oss and vLLM's tool server",
    "parser/": "tests vLLM's own code for gpt-oss",
    "test_serving_chat.py": "tests vLLM's own code, and gpt-oss",
    "with_prompt_embeds": "prompts given as hidden states",
    "test_extra_content_fields": "needs images",
    "test_mcp_tool_call": "runs tools of MCP servers",
    "test_openapi_stateless": "needs another release of schemathesis; tests/server/test_schema.py is like it",
    "test_tensorizer_entrypoint": "another format of checkpoints",
    "test_lmeval": "needs lm_eval and a larger model",
    "test_decisions_e2e": "an API of vLLM's own",
    "lora": "adapters of weights",
}


class RemoteOpenAIServer:
    """A Samewise server in place of vLLM's, as tests ask for it."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], **_: object) -> None:
        self.host = "127.0.0.1"
        self.port = SERVED.start(*_translate(model, vllm_serve_args))
        self.url_root = f"http://{self.host}:{self.port}"
        self._clients: dict[str, Any] = {"api_key": self.DUMMY_API_KEY, "max_retries": 0}

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts if part)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._with(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._with(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._with(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._with(options))

    def _with(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**self._clients, **options, "timeout": 900}


def _translate(model: str, args: list[str]) -> list[str]:
    """Translate flags of `vllm serve` to `samewise serve`; flags that choose backends or memory are dropped."""
    values = _values(args)
    names = dict.fromkeys([*values.get("served-model-name", []), *MODELS, model])
    flags = [part for name in names for part in ("--served-model-name", name)]
    wanted = values.get("max-model-len", values.get("max_model_len", [str(CONTEXT)]))
    flags += ["--max-model-len", str(min(int(wanted[0]), CONTEXT))]
    for key in values.get("api-key", []):
        flags += ["--api-key", key]
    return [embedded_variant(max_new_tokens=MAX_TOKENS), *flags]


def _values(args: list[str]) -> dict[str, list[str]]:
    """Values by flag, without its dashes."""
    values: dict[str, list[str]] = {}
    flag = ""
    for arg in args:
        if arg.startswith("--"):
            flag, _, value = arg[2:].partition("=")
            values[flag] = [value] if value else []
        else:
            values.setdefault(flag, []).append(arg)
    return values


def _utils() -> ModuleType:
    """`tests.utils` as far as the selected tests import it."""
    keep: Callable[[Any], Any] = lambda test: test  # noqa: E731
    module = ModuleType("tests.utils")
    vars(module).update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        RemoteLaunchRenderServer=RemoteOpenAIServer,
        RemoteOpenAIServerCustom=RemoteOpenAIServer,
        VLLM_PATH=Path.cwd(),
        ROCM_EXTRA_ARGS=[],
        requires_fp8=keep,
        multi_gpu_only=lambda **_: pytest.mark.skip(reason="needs several GPUs"),
        multi_gpu_test=lambda **_: pytest.mark.skip(reason="needs several GPUs"),
        create_new_process_for_each_test=lambda *_: keep,
    )
    return module


def _embedded_in_place_of_the_hub(loader: Any) -> None:
    original = loader.from_pretrained
    loader.from_pretrained = lambda name, *_, **options: original(embedded_folder(), **options)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the suite's own `conftest.py` files, which import what is replaced here."""
    for loader in (AutoTokenizer, AutoConfig):
        _embedded_in_place_of_the_hub(loader)
    tokenizer = AutoTokenizer.from_pretrained("any")
    stand_in(
        "vllm",
        **{"model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda name, **_: name}},
        tokenizers={"get_tokenizer": lambda *_, **__: tokenizer},
        config={"ModelConfig": lambda *_, **__: SimpleNamespace(get_vocab_size=lambda: len(tokenizer))},
        platforms={
            "current_platform": SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False, is_xpu=lambda: False)
        },
    )
    for package in ("lm_eval", "openai_harmony", "mcp", "gpt_oss"):
        stand_in(package)
    sys.modules["pybase64"] = base64
    sys.modules["tests.utils"] = _utils()
    early_config.pluginmanager.register(Report(NOT_APPLICABLE))
