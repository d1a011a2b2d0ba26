"""The engine's greedy answers against transformers' own generate(), one request at a time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.interface import EngineRequest
from tests.conftest import load_dense
from tests.engine.conftest import GREEDY, Harness

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "llama4"]


def prompts(count: int, vocab_size: int, lengths: tuple[int, int], seed: int) -> list[tuple[int, ...]]:
    """Random prompts of random lengths, the bounds among them."""
    rng = np.random.default_rng(seed)
    sizes = [*lengths, *rng.integers(lengths[0], lengths[1], size=count)][:count]
    return [tuple(rng.integers(3, vocab_size, size=size).tolist()) for size in sizes]


def check(harness: Harness, folder: Path, requests: list[EngineRequest]) -> None:
    """Run the requests together and compare each with generate() on the same device."""
    answers = harness.run(harness.engine(chunk=256), requests)
    device = harness.runner.info.device
    model = load_dense(folder).to(device)
    for request in requests:
        prompt = torch.tensor([list(request.prompt)], device=device)
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_tokens, do_sample=False
        )
        assert answers[request.request_id, 0].tokens == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_answer_as_generate_does(
    family: str, load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    requests = [
        EngineRequest(f"{index}", prompt, GREEDY, max_tokens=3 + index % 8)
        for index, prompt in enumerate(prompts(10, 320, (1, 700), seed=16))
    ]
    check(load(family, "none"), tiny_model(family), requests)


@pytest.mark.embedded
def test_the_embedded_model_answers_as_generate_does(load: Callable[..., Harness], embedded_folder: Path) -> None:
    requests = [
        EngineRequest(f"{index}", prompt, GREEDY, max_tokens=4 + index % 9)
        for index, prompt in enumerate(prompts(5, 49152, (1, 300), seed=8))
    ]
    check(load("embedded", "none"), embedded_folder, requests)
