"""Runners on the GPU. Without a GPU, all tests of this folder are skipped unless another device is requested."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model_runner.config import RunnerConfig
from model_runner.runner import ModelRunner
from tests.conftest import VOCAB_SIZE
from tests.engine.conftest import Harness

Load = Callable[..., Harness]
"""From a family's name, a type, and further settings of the runner to a harness with the model on the device."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark them, and skip what cannot run."""
    device = config.getoption("--gpu-tests-on")
    has_device = device == "cpu" or torch.cuda.is_available()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
            elif device == "cpu" and item.get_closest_marker("cuda_only") is not None:
                item.add_marker(pytest.mark.skip(reason="only CUDA has what is tested"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the tests run."""
    return request.config.getoption("--gpu-tests-on")


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model as wide as quantised weights and the larger tiles need."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.06,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def load(device: str, tiny_model: Callable[[str], Path], wide_model: Path) -> Load:
    """Every runner is made once."""
    made: dict[RunnerConfig, Harness] = {}

    def make(family: str, dtype: str = "bfloat16", **settings: object) -> Harness:
        folder = wide_model if family == "wide" else tiny_model(family)
        config = RunnerConfig(
            folder,
            device,
            "auto" if device == "cpu" else dtype,
            "none",
            kv_cache_gib=0.05,
            max_num_seqs=72,
            max_num_batched_tokens=8192,
        )
        config = replace(config, **settings)
        if config not in made:
            made[config] = Harness(ModelRunner.load(config))
        return made[config]

    return make
