"""The whole CUDA path without a GPU: a real runner whose kernels are interpreted and whose graphs are recorded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, PlacedBlock, SamplingParams, ScheduledRequest, StepPlan
from model_runner.runner import ModelRunner
from tests.conftest import tiny_config
from tests.model_runner.triton.interpreted_cuda import interpreted_runner

PROMPT = [1, 17, 203, 5, 88, 9, 140]
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 4
FAMILIES = ["llama", "gemma3", "mixtral", "qwen3_moe"]


def generate(runner: ModelRunner, prompt: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """Tokens of one choice, its prompt in one step."""
    size = runner.info.block_size
    blocks = tuple(range(-(-(len(prompt) + num_tokens) // size)))
    placed = tuple(PlacedBlock(number, at, at) for number, _ in enumerate(runner.groups, 1) for at in blocks)
    admitted = AdmittedRequest("a", tuple(prompt), len(prompt), 0, blocks, sampling, placed=placed)
    plan = StepPlan((), (), (admitted,), (ScheduledRequest("a", len(prompt), ()),))
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        (result,) = runner.execute(plan).choices
        tokens += result.tokens
        plan = StepPlan((), (), (), (ScheduledRequest("a", 1, ()),))
    return tokens


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])  # which others run
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(family)
    config.num_hidden_layers = 2 if family == "gemma3" else 1  # with a window and without
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    settings = RunnerConfig(tmp_path, dtype="float32", speculation="off", kv_cache_gib=0.002, max_model_len=64)
    runner, platform = interpreted_runner(settings, graph_sizes=(1,), tries_mixing=family == "mixtral")
    tokens = generate(runner, PROMPT, NUM_TOKENS)
    assert platform.num_replays >= NUM_TOKENS - 1
    length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), **length, do_sample=False)
    assert tokens == expected[0, len(PROMPT) :].tolist()
