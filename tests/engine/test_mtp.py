"""Multi-token prediction on a tiny model of DeepSeek-V3's kind: the tokens and logprobs of no speculation."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.speculation_matrix import FEATURES
from model_runner.config import RunnerConfig
from model_runner.runner import ModelRunner
from tests.engine.conftest import Harness
from tests.model_runner.heads.test_mtp import LAYERS, Truth


def write_deepseek(folder: Path) -> Path:
    """A random model with its module, in the names of the published checkpoint."""
    truth = Truth()
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(truth.config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    weights = folder / "model.safetensors"
    module = {name: tensor for name, tensor in truth.tensors().items() if name.startswith(f"model.layers.{LAYERS}.")}
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 20  # so that some tokens are much more probable than others, and are guessed
    save_file(tensors | module, weights, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = write_deepseek(tmp_path_factory.mktemp("deepseek"))
    config = RunnerConfig(folder, heads=(folder,), kv_cache_gib=0.02, max_num_seqs=34)
    harness = Harness(ModelRunner.load(config))
    yield harness
    harness.forget()


@pytest.mark.parametrize("feature", FEATURES)
def test_equal_to_no_speculation(harness: Harness, feature: str) -> None:
    cell = harness.matrix().cell("mtp", feature)
    assert cell.is_equal
    assert cell.num_drafted > 0
    assert cell.num_preempted > 0 or not FEATURES[feature].is_short_of_blocks
