"""Families that run their own transformers modules, where a module is unlike Llama's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FlintConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    PretrainedConfig,
)

from model_runner.config import Quantization, RunnerConfig
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVShape
from model_runner.modules.loading import inspect_model, load_config, load_model
from model_runner.modules.packing import prepare
from model_runner.native.packer import NativePacker
from model_runner.runner import ModelRunner
from model_runner.weights.packed_weight import PackedWeight
from scheduler.interface import EngineRequest
from tests.engine.conftest import GREEDY, Harness
from tests.engine.test_oracle import check, prompts

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
GPT2 = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
COHERE = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}

SINKS = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {
    **SINKS,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 48,
    "floor_scale": 16,
    "attn_scale": 2.0,
    "num_local_experts": 4,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
}
LATENTS = {
    **{name: value for name, value in SINKS.items() if name not in ("layer_types", "sliding_window")},
    **{"num_key_value_heads": 4, "head_dim": 8},
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
MIMO = {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2, scaled by layer": lambda: GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=50),
    "command-r-plus": lambda: CohereConfig(**COHERE, use_qk_norm=True, num_key_value_heads=2),
    "gpt-oss": lambda: GptOssConfig(**SINKS | EXPERTS, swiglu_limit=2.0),
    "granite with sinks": lambda: GraniteSWAConfig(**SINKS),
    "granite with sinks and experts": lambda: GraniteMoeSWAConfig(**SINKS | EXPERTS),
    "flint": lambda: FlintConfig(**SINKS),
    "llama 4": lambda: Llama4TextConfig(**LLAMA4, num_experts_per_tok=1),
    "llama 4 with two experts": lambda: Llama4TextConfig(**LLAMA4, num_experts_per_tok=2, moe_layers=[0, 1]),
    "deepseek 2": lambda: DeepseekV2Config(**LATENTS | ROUTED, first_k_dense_replace=1),
    "deepseek 3": lambda: DeepseekV3Config(**LATENTS | ROUTED, first_k_dense_replace=1),
    "glm 4.7 flash": lambda: Glm4MoeLiteConfig(**LATENTS | ROUTED),
    "minicpm 3": lambda: MiniCPM3Config(**LATENTS),
    "mimo": lambda: MiMoV2FlashConfig(**SINKS | MIMO),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model with norms and biases unlike a fresh one's."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param]())
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "q_norm" in name or "k_norm" in name or name.endswith("_bias"):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_answers_are_those_of_generate(folder: Path) -> None:
    runner = ModelRunner.load(RunnerConfig(folder, device="cpu", kv_cache_gib=0.01, quantization="none"))
    texts = prompts(6, 64, (1, 90), seed=2)
    check(Harness(runner), folder, [EngineRequest(f"{i}", text, GREEDY, 12) for i, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("folder", "quantization"),
    [(family, ("int8", "int4")[index % 2]) for index, family in enumerate(FAMILIES)],
    indirect=["folder"],
)
def test_packed_weights_answer_the_same_alone_and_in_a_crowd(folder: Path, quantization: Quantization) -> None:
    harness = Harness(
        ModelRunner.load(RunnerConfig(folder, device="cpu", kv_cache_gib=0.01, quantization=quantization))
    )
    requests = [EngineRequest(f"{i}", text, GREEDY, 8) for i, text in enumerate(prompts(6, 64, (1, 90), seed=3))]
    crowd = harness.run(harness.engine(chunk=64), requests)
    for request in requests:
        assert harness.run(harness.engine(), [request])[request.request_id, 0] == crowd[request.request_id, 0]


def test_only_weights_that_are_multiplied_are_packed(folder: Path, kernels_library: Path) -> None:
    model = load_model(folder, load_config(folder), torch.float32)
    prepare(model, NativePacker(Kernels(kernels_library, threads=1), "int8"))
    dense = [name for name, weight in model.named_parameters() if weight.dim() == 2]
    others = ("embed", "norm", "wte", "wpe", "bias")
    assert all(any(part in name for part in others) for name in dense)
    assert isinstance(model.get_output_embeddings().weight, PackedWeight)


def test_latents_are_stored_on_the_cpu_and_take_less() -> None:
    config = DeepseekV3Config(**LATENTS | ROUTED)
    assert inspect_model(config).kv[0] == KVShape(4, 24, 12, 1)
    assert inspect_model(config, keeps_latents=True).kv[0] == KVShape(1, 40, 32, 4)
    assert replace(inspect_model(config, keeps_latents=True), kv=()) == replace(inspect_model(config), kv=())


def test_inputs_and_outputs_of_a_conv1d_are_counted_as_those_of_a_linear() -> None:
    shape = inspect_model(GPT2Config(**GPT2 | {"n_embd": 24}, n_inner=64))  # of all inputs, only 64 are whole groups
    assert shape.num_groupable == 2 * 24 * 64
