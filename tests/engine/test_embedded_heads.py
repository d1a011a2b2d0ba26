"""The heads that come with the embedded model: the same answers, in fewer steps."""

from pathlib import Path

import pytest
from rich.console import Console

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.hub.repository import resolve_model
from model_runner.runner import ModelRunner
from model_runner.training.prompts import held_out_prompts
from scheduler.interface import EngineRequest
from server.text.tokenizer import Tokenizer
from tests.engine.conftest import Harness

pytestmark = pytest.mark.embedded

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def harness() -> Harness:
    model = resolve_model(None, Console(stderr=True))
    return Harness(ModelRunner.load(RunnerConfig(model.path, kv_cache_gib=0.2, heads=model.heads)))


@pytest.fixture(scope="module")
def prompts(embedded_folder: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_folder(embedded_folder)
    template = tokenizer.chat_template
    assert template is not None
    texts = [prompt.text for prompts in held_out_prompts().values() for prompt in prompts[:1]]
    chats = [
        template.render([{"role": "user", "content": text}], add_generation_prompt=True, variables={}) for text in texts
    ]
    return [tuple(tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.15), (1.0, 0.05)])
def test_guesses_come_true_and_change_nothing(
    harness: Harness, prompts: list[tuple[int, ...]], temperature: float, least: float
) -> None:
    def requests(speculation: Speculation | None) -> list[EngineRequest]:
        return [
            EngineRequest(
                f"{speculation}{index}",
                prompt,
                SamplingParams(temperature=temperature, seed=index, logprobs=2),
                NUM_TOKENS,
                speculation=speculation,
            )
            for index, prompt in enumerate(prompts)
        ]

    alone = harness.run(harness.engine(), requests(None))
    guessed = harness.run(harness.engine(), requests(Speculation("hydra", num_tokens=4)))
    for without, with_it in zip(alone.values(), guessed.values(), strict=True):
        assert with_it.tokens == without.tokens
        assert with_it.logprobs == without.logprobs
    assert sum(answer.num_accepted for answer in guessed.values()) > least * NUM_TOKENS * len(prompts)
