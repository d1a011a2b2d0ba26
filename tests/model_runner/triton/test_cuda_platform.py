"""The whole CUDA path without a GPU: a real runner whose kernels are interpreted and whose graphs are recorded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from bench.tiny_models import write_tiny_model
from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, PlacedBlock, SamplingParams, ScheduledRequest, StepPlan
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from tests.conftest import tiny_config
from tests.model_runner.triton.interpreted_cuda import interpreted_runner

PROMPT = [1, 17, 203, 5, 88, 9, 140]
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 4


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


def answers(model: Any, prompt: list[int]) -> list[int]:
    """By transformers."""
    length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), **length, do_sample=False)
    return tokens[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_a_model_without_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=256, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    settings = RunnerConfig(tmp_path, dtype="float32", speculation="off", kv_cache_gib=0.002, max_model_len=64)
    runner, _ = interpreted_runner(replace(settings, max_num_seqs=2), graph_sizes=())
    assert generate(runner, PROMPT, NUM_TOKENS) == answers(model, PROMPT)


@pytest.mark.parametrize("family", ["gemma3", "mixtral"])  # others run Llama and Qwen3
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
    assert tokens == answers(model, PROMPT)


def test_a_model_with_indexers_is_refused(tmp_path: Path) -> None:
    write_tiny_model("minimax_m3_vl_text", tmp_path)
    with pytest.raises(UnsupportedModelError, match="has layers with an indexer, which run on the CPU only"):
        interpreted_runner(RunnerConfig(tmp_path, kv_cache_gib=0.002), graph_sizes=())
