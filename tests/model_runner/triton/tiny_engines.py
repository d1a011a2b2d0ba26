"""Engines on models so small that the interpreter is fast enough, on the CUDA path and on the CPU's."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    OlmoConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from model_runner.config import RunnerConfig
from model_runner.cuda.graphs import GraphedTarget
from model_runner.runner import ModelRunner
from tests.engine.conftest import Harness
from tests.model_runner.triton.interpreted_cuda import InterpretedCuda, interpreted_runner

VOCAB = 48
BLOCK = 16
SIZES = (1, 2, 4, 8)
"""Batch sizes of the graphs."""
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,  # no multiple of a tile
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # spreads the logits, so that the argmax is no coin toss
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WITHOUT_HEAD_DIM = {name: value for name, value in _COMMON.items() if name != "head_dim"}
_WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_CONFIGS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_EXPERTS),
    "gemma3": lambda: Gemma3TextConfig(**_COMMON | _WINDOWS),
    "olmo": lambda: OlmoConfig(**_WITHOUT_HEAD_DIM),
    "wide": lambda: LlamaConfig(**_COMMON | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
}


@dataclass(eq=False)
class CudaHarness(Harness):
    """A runner on the CUDA path."""

    platform: InterpretedCuda = field(kw_only=True)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """All steps run as they are."""
        graphed = self.runner._target
        assert isinstance(graphed, GraphedTarget)
        self.runner._target = graphed._target
        yield
        self.runner._target = graphed


class TinyEngines:
    """Makes models and what runs them, each once. Call it in tests: fixtures mend the interpreter while those run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, Harness] = {}

    def model(self, family: str) -> Path:
        """A folder with a random model, in bfloat16."""
        folder = self._folder / family
        if not folder.exists():
            torch.manual_seed(3)
            AutoModelForCausalLM.from_config(_CONFIGS[family]()).bfloat16().save_pretrained(folder)
            (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
        return folder

    def config(self, family: str, **settings: Any) -> RunnerConfig:
        """Settings of all of them."""
        config = RunnerConfig(self.model(family), block_size=BLOCK, kv_cache_gib=0.0002, max_model_len=512)
        return replace(config, max_num_seqs=12, speculation="off", **settings)

    def cuda(self, family: str, graph_sizes: tuple[int, ...] = SIZES, **settings: Any) -> CudaHarness:
        """On the CUDA path."""
        key = (family, graph_sizes, tuple(settings.items()))
        if key not in self._made:
            self._made[key] = _harness(self.config(family, **settings), graph_sizes)
        made = self._made[key]
        assert isinstance(made, CudaHarness)
        return made

    def cpu(self, family: str, **settings: Any) -> Harness:
        """On the CPU, in float32."""
        key = (family, tuple(settings.items()))
        if key not in self._made:
            self._made[key] = Harness(ModelRunner.load(self.config(family, quantization="none", **settings)))
        return self._made[key]


def _harness(config: RunnerConfig, graph_sizes: tuple[int, ...]) -> CudaHarness:
    runner, platform = interpreted_runner(config, graph_sizes)
    return CudaHarness(runner, config.aux_model is not None, platform=platform)
