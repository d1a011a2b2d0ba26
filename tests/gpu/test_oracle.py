"""Greedy answers in float32 against transformers' own generate() on the same device."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.interface import EngineRequest
from tests.conftest import VOCAB_SIZE
from tests.engine.conftest import GREEDY
from tests.engine.test_oracle import check, prompts
from tests.gpu.conftest import Load


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe"])
def test_tiny_models_answer_as_generate_does(
    family: str, count: int, load: Load, tiny_model: Callable[[str], Path]
) -> None:
    requests = [
        EngineRequest(f"{index}", prompt, GREEDY, max_tokens=3 + index % 20)
        for index, prompt in enumerate(prompts(count, VOCAB_SIZE, (1, 700), seed=count))
    ]
    check(load(family, "float32"), tiny_model(family), requests)
