"""The whole CUDA path without a GPU: a real runner whose kernels are interpreted and whose graphs are recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.runner import ModelRunner
from tests.model_runner.triton.interpreted_cuda import interpreted_runner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")

PROMPT = [1, 17, 203, 5, 88, 9, 140]
GREEDY = SamplingParams(temperature=0.0)
FAMILIES = ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe"]


def generate(runner: ModelRunner, prompt: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """Tokens of one choice, its prompt in one step."""
    size = runner.info.block_size
    blocks = tuple(range(-(-(len(prompt) + num_tokens) // size)))
    admitted = AdmittedRequest("a", tuple(prompt), len(prompt), 0, blocks, sampling)
    plan = StepPlan((), (), (admitted,), (ScheduledRequest("a", len(prompt), ()),))
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        (result,) = runner.execute(plan).choices
        tokens += result.tokens
        plan = StepPlan((), (), (), (ScheduledRequest("a", 1, ()),))
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(tiny_model: Callable[[str], Path], family: str) -> None:
    config = RunnerConfig(tiny_model(family), dtype="float32", speculation="off", kv_cache_gib=0.005, max_model_len=64)
    runner, graphs = interpreted_runner(config, graph_sizes=(1, 2))
    tokens = generate(runner, PROMPT, 6)
    assert graphs.num_replays > 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert tokens == expected[0, len(PROMPT) :].tolist()
