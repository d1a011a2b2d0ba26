"""Inspection, planning and refusals before a model runs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, PretrainedConfig, RwkvConfig, T5Config

from model_runner.assemble import assemble
from model_runner.config import InputType, Quantization, RunnerConfig, Sizes
from model_runner.contract import BlockCopy
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels, NativeWeight, WeightKind
from model_runner.kv_cache import KVCache, KVShape
from model_runner.model_needs import DoesNotFitError
from model_runner.modules.loading import inspect_model, load_config
from model_runner.native.model import NativeModel
from model_runner.native.packer import NativePacker
from model_runner.platforms.choose import choose_platform, resolve_device
from model_runner.platforms.cpu import CpuPlatform, resolve_activation_type, resolve_quantization
from model_runner.platforms.memory import (
    GIB,
    DeviceMemory,
    MemoryPlan,
    Needs,
    StorageTypes,
    plan_memory,
)
from model_runner.processes import free_memory
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from model_runner.spec.model_folder import open_checkpoint
from model_runner.spec.model_shape import ModelShape
from model_runner.spec.model_spec import read_model_spec
from tests.conftest import tiny_config
from tests.engine import tiny_heads

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_inspection_agrees_with_the_configuration(family: str) -> None:
    config = tiny_config(family)
    shape = inspect_model(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    heads = config.num_key_value_heads, head_dim, head_dim, group
    assert shape.kv == tuple(KVShape(*heads, window) for window in windows)
    assert shape.vocab_size == config.vocab_size
    assert shape.max_model_len == 1024
    assert shape.num_shared == (config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0)


def scaled_llama(kind: str) -> LlamaConfig:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (RwkvConfig(num_hidden_layers=2, hidden_size=32), "rwkv"),
        (BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2), "not causal"),
        (scaled_llama("dynamic"), "dynamic"),
        (scaled_llama("longrope"), "longrope"),
    ],
)
def test_inspection_refuses_what_cannot_run(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        inspect_model(config)


def test_weights_used_in_another_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    monkeypatch.setattr("model_runner.modules.text_model.make_linear", lambda model: None)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="not supported"):
        ModelRunner.load(RunnerConfig(model=tmp_path, kv_cache_gib=0.01))


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(UnsupportedModelError, match="no_such_thing"):
        load_config(tmp_path)


def test_device_and_dtype_that_cannot_be_had(tiny_model: Callable[[str], Path]) -> None:
    for settings, message in (
        ({"dtype": "bfloat16"}, "bfloat16 is not supported on CPU"),
        ({"exact": False}, "the CPU always computes exactly"),
        ({"quantization": "fp8"}, "fp8 is only supported on CUDA"),
        (
            {"quantization": "int4", "activation_type": "int8"},
            "rows int8 needs int8 weights; int4 weights always use int16",
        ),
        (
            {"quantization": "none", "activation_type": "int16"},
            "rows int16 needs int8 weights; float32 weights always use",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            choose_platform(RunnerConfig(tiny_model("llama"), device="cpu", **settings))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA"):
            resolve_device("cuda")


def test_what_weights_are_packed_as() -> None:
    kinds = {"auto": "int8", "none": None, "int8": "int8", "int4": "int4"}
    assert {name: resolve_quantization(name) for name in kinds} == kinds


def test_without_kernels_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(folder: Path) -> Path:
        raise NoKernelsError("no C++ compiler was found")

    monkeypatch.setattr("model_runner.platforms.cpu.kernels_library", build)
    with pytest.raises(ValueError, match=r"cannot be built: no C\+\+ compiler was found; install a C\+\+ compiler"):
        CpuPlatform(RunnerConfig(model=Path()))


def test_what_rows_are_rounded_to(kernels_library: Path) -> None:
    kernels = Kernels(kernels_library, threads=1, isa="portable")
    assert kernels.int8_kind == "int8"  # where 8 bits would not be faster
    assert resolve_activation_type("auto", "int8", kernels) == "int8"
    assert resolve_activation_type("int16", "int8", kernels) == "int8"
    assert resolve_activation_type("int8", "int8", kernels) == "int8_rotated"
    kernels.int8_kind = "int8_rotated"
    assert resolve_activation_type("auto", "int8", kernels) == "int8_rotated"
    assert resolve_activation_type("int16", "int8", kernels) == "int8"
    for weights in ("int4", None):
        assert resolve_activation_type("auto", weights, kernels) == weights


@pytest.mark.parametrize(
    ("settings", "rows", "kind"),
    [
        ({"activation_type": "int8"}, "int8", "int8_rotated"),
        ({"activation_type": "int16"}, "int16", "int8"),
        ({"quantization": "int4"}, "int16", "int8"),
        ({"quantization": "none"}, "float32", "int8"),
    ],
)
def test_rows_are_told_and_heads_have_the_same(
    settings: dict[str, Any], rows: str, kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = CpuPlatform(RunnerConfig(model=Path(), **settings))
    assert platform.activation_type == rows
    packed: list[WeightKind] = []
    monkeypatch.setattr(NativePacker, "__call__", lambda packer, weight: packed.append(packer.kind))
    platform.prepare_heads(torch.nn.Linear(64, 3))
    assert packed == [kind]


def test_hydra_heads_draft_in_one_call() -> None:
    heads = HydraHeads(HydraShape(hidden=64, depth=2, num_layers=1, draft_vocab=50, shared_head=True))
    CpuPlatform(RunnerConfig(model=Path())).prepare_heads(heads)
    assert heads.native is not None


def test_inputs_that_are_padded_to_be_rotated_are_counted() -> None:
    config = tiny_config("llama")  # 100 inputs into the last linear of each layer
    shape = inspect_model(config)
    added = config.num_hidden_layers * config.hidden_size * (128 - config.intermediate_size)
    assert shape.num_rotated == shape.num_multiplied + added


def test_int4_is_for_whole_groups_and_not_for_the_head() -> None:
    config = tiny_config("llama")  # 100 inputs into the last linear of each layer
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    layer = hidden * (2 * hidden + 2 * kv + 2 * config.intermediate_size)
    assert inspect_model(config).num_groupable == 3 * layer


def test_what_is_counted_for_int4_is_what_loading_packs_in_int4(
    tiny_model: Callable[[str], Path], kernels_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[str, int, int]] = []
    kernels = Kernels(kernels_library, threads=1)
    start = kernels.start

    def noting(kind: WeightKind, outputs: int, inputs: int, bias: torch.Tensor | None = None) -> NativeWeight:
        packed.append((kind, outputs, inputs))
        return start(kind, outputs, inputs, bias)

    monkeypatch.setattr(kernels, "start", noting)
    config = load_config(tiny_model("llama"))
    checkpoint = open_checkpoint(tiny_model("llama"))
    assert checkpoint is not None
    spec = read_model_spec(config, checkpoint)
    assert spec is not None
    assert spec.shape() == inspect_model(config)
    NativeModel(NativePacker(kernels, "int4"), spec)
    num_int4 = sum(outputs * inputs for kind, outputs, inputs in packed if kind == "int4")
    assert num_int4 == spec.shape().num_groupable
    assert ("int8", config.vocab_size, config.hidden_size) in packed


SHAPE = ModelShape(
    (KVShape(2, 16, 16),) * 3,
    num_layers=3,
    num_parameters=1_000_000,
    num_shared=100_000,
    num_multiplied=900_000,
    num_rotated=910_000,
    num_inner=740_000,
    num_groupable=640_000,
    hidden=100,
    vocab_size=9,
    max_model_len=1024,
)


@pytest.mark.parametrize(
    ("quantization", "rows", "expected"),
    [
        ("none", "auto", 4 * 1_100_000),  # the shared head is packed in addition to the embedding
        ("int8", "int16", 900_000 + 4 * 200_000),
        ("int8", "int8", 910_000 + 4 * 200_000),
        ("int4", "auto", 640_000 * 5 // 8 + 260_000 + 4 * 200_000),
    ],
)
def test_weights_are_counted_as_they_are_stored(quantization: Quantization, rows: InputType, expected: int) -> None:
    platform = CpuPlatform(RunnerConfig(model=Path(), quantization=quantization, activation_type=rows))
    assert platform.weight_bytes(SHAPE) == expected


FLOAT32 = StorageTypes(torch.float32, None, torch.float32)
PER_TOKEN = 3 * 2 * 32 * 4
NEEDS = Needs(4_400_000, 0, 4_000_000, "float32", SHAPE.kv, 1024)


def plan(free: int, needs: Needs = NEEDS, types: StorageTypes = FLOAT32, **settings: float | None) -> MemoryPlan:
    sizes = Sizes(int(settings.pop("max_num_seqs", None) or 64), 512)
    return plan_memory(
        needs, DeviceMemory("cpu", free, 0.5, 4 * GIB), RunnerConfig(model=Path(), **settings), sizes, types
    )


def test_plan_counts_weights_and_cache() -> None:
    made = plan(64 * GIB, max_num_seqs=3)
    assert made.weight_bytes == NEEDS.model_bytes
    assert made.kv_bytes_per_token == PER_TOKEN
    assert made.num_tokens == 3 * 1024  # no more than three full requests can use
    assert "3,072 tokens = 3.0 full requests of 1,024 tokens" in made.lines()[-1]


def test_plan_says_what_is_stored_in_fewer_bits() -> None:
    needs = replace(NEEDS, weights_name="Q4_K, Q6_K")
    made = plan(64 * GIB, needs=needs, types=StorageTypes(torch.float32, "int8", torch.bfloat16))
    assert made.kv_bytes_per_token == PER_TOKEN // 2
    assert made.lines()[0].endswith("as Q4_K, Q6_K on cpu")


def test_plan_counts_all_models(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned: list[Needs] = []

    def noting(needs: Needs, *others: Any) -> MemoryPlan:
        planned.append(needs)
        return plan_memory(needs, *others)

    monkeypatch.setattr("model_runner.planning.plan_memory", noting)
    folder = tiny_model("llama")
    copies = [shutil.copytree(folder, tmp_path / name) for name in ("draft", "aux")]
    (tmp_path / "link").symlink_to(folder)
    config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_gib=0.02)
    for draft, aux in ((None, None), copies, (copies[0], copies[0]), (folder, tmp_path / "link")):
        assemble(replace(config, draft_model=draft, aux_model=aux))
    one, *others = planned
    assert one.model_bytes == 4 * inspect_model(load_config(folder)).num_parameters
    assert [needs.model_bytes / one.model_bytes for needs in others] == [3, 2, 1]  # a folder is loaded once
    assert [needs.loading_bytes / one.loading_bytes for needs in others] == [3, 2, 1]
    assert [needs.kv for needs in others] == [one.kv * 3] * 3  # and each role has its cache


def test_plan_counts_what_loading_takes() -> None:
    with pytest.raises(DoesNotFitError, match=r"loading the weights takes 3\.8 MiB, but only 2\.9 MiB are free"):
        plan(3_000_000, replace(NEEDS, model_bytes=1_700_000))


def test_plan_leaves_memory_to_a_step() -> None:
    free = 4_400_000 + 2 * PER_TOKEN * 640
    assert plan(free + 9_000_000, replace(NEEDS, step_bytes=9_000_000)).num_tokens == 640


def test_plan_leaves_memory_to_others() -> None:
    free = 4_400_000 + 2 * PER_TOKEN * 640
    made = plan(free)
    assert made.num_tokens == 640
    assert made.max_model_len == 640


def test_plan_keeps_the_size_asked_for() -> None:
    made = plan(64 * GIB, kv_cache_gib=0.01)
    assert made.num_blocks == int(0.01 * GIB) // (PER_TOKEN * 32)


SMALLER = {"loading_bytes": 3_000_000, "int4_bytes": 1_000_000}


@pytest.mark.parametrize(
    ("free", "needs", "settings", "message"),
    [
        (
            4_000_000,
            {},
            {},
            r"the weights take 4.2 MiB as float32, but only 3.8 MiB are free on cpu; free some memory",
        ),
        (4_000_000, SMALLER, {}, r"are free on cpu; use --quantization int4 \(976\.6 KiB of weights\)$"),
        (3_000_000, {"int4_bytes": 1_000_000}, {}, "free some memory, or use a smaller model"),  # loading would not fit
        (5_000_000, {"learning_bytes": 2 << 20}, {}, r"next to 2\.0 MiB for training heads; turn off --learn$"),
        (
            GIB,
            {},
            {"kv_cache_gib": 2.0},
            r"asks for 2\.0 GiB, but only .* MiB are .*; set --kv-cache-gib 0\.99 or less$",
        ),
        (
            GIB,
            {},
            {"kv_cache_gib": 0.0001, "max_model_len": 1000},
            r"holds 128 tokens .*, fewer than one request of 1,000 tokens .*; set --kv-cache-gib 0\.01, or "
            r"set --max-model-len 128$",
        ),
        (4_600_000, SMALLER, {"max_model_len": 1000}, r"; set --max-model-len 128, or use --quantization int4"),
    ],
)
def test_plan_refuses_with_the_numbers_and_with_what_helps(
    free: int, needs: dict[str, Any], settings: dict[str, float], message: str
) -> None:
    with pytest.raises(DoesNotFitError, match=message):
        plan(free, replace(NEEDS, **needs), **settings)


def test_plan_has_whole_blocks_for_every_request() -> None:
    assert plan(64 * GIB, max_model_len=100, max_num_seqs=2).num_blocks == 2 * 4


def test_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ValueError, match="2,000 is more than the model's own limit of 1,024"):
        plan(64 * GIB, max_model_len=2000)


def test_free_memory_is_some_of_this_machine() -> None:
    assert 0 < free_memory() < 1 << 50


@pytest.mark.parametrize(("limit", "free"), [(3_000_000, 2_200_000), (1_000_000, 200_000)])
def test_the_control_group_limits_it_and_can_give_up_pages_of_files(limit: int, free: int, tmp_path: Path) -> None:
    write_control_group(tmp_path, str(limit))
    assert free_memory([tmp_path]) == free


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None])
def test_a_control_group_without_a_limit_has_the_machine(limit: str | None, tmp_path: Path) -> None:
    write_control_group(tmp_path, limit)
    assert 100_000_000 < free_memory([tmp_path]) < 1 << 50


def write_control_group(folder: Path, limit: str | None) -> None:
    """Write the kernel's files for a group that uses 2.5 MB, of which 1.7 MB are unused pages of files."""
    if limit is not None:
        (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("2500000\n")
    (folder / "memory.stat").write_text("anon 600000\nfile 1900000\ninactive_file 1700000\nactive_file 200000\n")


def test_cache_copies_whole_blocks_in_all_layers() -> None:
    cache = KVCache([KVShape(2, 4, 6), KVShape(1, 8, 8)], 4, 16, torch.float32, CPU)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        keys.copy_(torch.randn(keys.shape))
        values.copy_(torch.randn(values.shape))
        key, value = torch.ones(1, *keys.shape[1:3]), torch.ones(1, values.shape[1], values.shape[3])
        cache.write(layer, key, value, torch.tensor([1]), torch.tensor([3]))
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([BlockCopy(1, 2), BlockCopy(0, 3)])
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new, old[[0, 1, 1, 0]])
    assert all(torch.all(keys[1, :, :, 3] == 1) for keys in cache.keys)
    assert all(torch.all(values[1, :, 3] == 1) for values in cache.values)


def test_two_heads_of_a_method_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    heads = tuple(tiny_heads.write_medusa(tmp_path / name, 320) for name in ("one", "other"))
    with pytest.raises(ValueError, match=r"the heads in .*/one and .*/other both draft by medusa"):
        ModelRunner.load(RunnerConfig(tiny_model("llama"), heads=heads))
