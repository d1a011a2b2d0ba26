"""Models whose weights keep the blocks of their GGUF file, against transformers on the unpacked weights."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.gguf.checkpoint import GgufCheckpoint
from model_runner.hub.conversion import convert_gguf
from model_runner.kernels.library import Kernels, NativeWeight
from model_runner.modules.loading import load_config
from model_runner.native import packer as native_packer
from model_runner.native.model import NativeModel
from model_runner.platforms.cpu import CpuPlatform
from model_runner.weights.interleaved_experts import as_modules
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.gguf_families import make_config
from tests.model_runner.gguf_files import contents_of, in_blocks

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
MIXED = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "IQ4_XS",
    "ffn_down": "Q3_K",
}
LEGACY = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "IQ4_NL",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q5_1",
    "ffn_down": "MXFP4",
}
EXPERTS = {
    "token_embd": "BF16",
    "attn_q": "Q4_K",
    "attn_k": "Q6_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q6_K",
    "output": "Q6_K",
}
ALL_KINDS = {
    "token_embd": "F16",
    "attn_q": "IQ2_XS",
    "attn_k": "IQ3_S",
    "attn_v": "Q8_0",
    "attn_output": "TQ2_0",
    "ffn_gate": "Q2_K",
    "ffn_up": "IQ3_XXS",
    "ffn_down": "IQ2_S",
    "output": "Q8_0",
}
PHI3 = {**MIXED, "attn_qkv": "Q5_K", "ffn_up": "Q4_K", "output": "Q8_0"}


def write(family: str, formats: Mapping[str, str], folder: Path) -> Path:
    config = make_config(family)
    config.update(WIDE | ({"moe_intermediate_size": 256} if hasattr(config, "moe_intermediate_size") else {}))
    contents = contents_of(config)
    in_blocks(formats)(contents)
    return contents.write(folder / "model.gguf")


def served(folder: Path, *, as_stored: bool = True) -> tuple[CpuPlatform, NativeModel]:
    platform = CpuPlatform(RunnerConfig(model=folder, multiplies_stored_blocks=as_stored, kv_cache_dtype="float32"))
    model = platform.load(folder, platform.inspect(folder))
    assert isinstance(model, NativeModel)
    return platform, model


def logits_of(platform: CpuPlatform, model: NativeModel, batch: Batch) -> torch.Tensor:
    shape = platform.inspect(platform_folder(model))
    cache = platform.make_cache(shape.kv, 16, 16)
    return platform.make_target(model, platform.attention(cache), 256).forward(batch).clone()


def platform_folder(model: NativeModel) -> Path:
    return Path(model.config.name_or_path)


TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1))


def whole() -> Batch:
    return make_batch([Chunk(TOKENS.tolist(), 0, [3, 1, 2])], 16)


@pytest.mark.parametrize(
    ("family", "formats"),
    [
        ("llama with a tied head", MIXED),
        ("llama with a tied head", LEGACY),
        ("llama", ALL_KINDS),
        ("phi3", PHI3),
        ("qwen2", {**MIXED, "output": "Q6_K"}),  # with biases
        ("mixtral", EXPERTS),
        ("qwen3moe", EXPERTS),
        ("gemma3", MIXED),
        ("gpt-oss", {**EXPERTS, "ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"}),
    ],
)
def test_the_model_is_that_of_the_file(family: str, formats: Mapping[str, str], tmp_path: Path) -> None:
    convert_gguf(write(family, formats, tmp_path), tmp_path / "model")
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    config = load_config(tmp_path / "model")
    dense = AutoModelForCausalLM.from_config(config).eval()
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    dense.load_state_dict(as_modules(tensors) if family == "gpt-oss" else tensors, strict=False)
    expected = dense(TOKENS[None]).logits[0]
    platform, model = served(tmp_path / "model")
    logits = logits_of(platform, model, whole())
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 3e-3
    packed = served(tmp_path / "model", as_stored=False)
    others = (logits_of(*packed, whole()) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert others.median() > 2 * errors.median()  # weights that were rounded again are further away


def test_plain_numbers_are_packed_through_one_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_gguf(write("llama with a tied head", MIXED, tmp_path), tmp_path / "model")
    slabs: list[tuple[int, int]] = []
    original = Kernels.pack_rows

    def pack_rows(kernels: Kernels, weight: NativeWeight, first: int, rows: torch.Tensor) -> None:
        slabs.append((rows.data_ptr(), len(rows)))
        original(kernels, weight, first, rows)

    monkeypatch.setattr(Kernels, "pack_rows", pack_rows)
    monkeypatch.setattr(native_packer, "_SLAB", 100 * 256)
    served(tmp_path / "model", as_stored=False)
    assert max(rows for _, rows in slabs) == 96  # whole panels
    assert len({address for address, _ in slabs}) == 1


def test_memory_is_that_of_the_blocks(tmp_path: Path) -> None:
    convert_gguf(write("llama with a tied head", MIXED, tmp_path), tmp_path / "model")
    platform = CpuPlatform(RunnerConfig(model=tmp_path / "model", multiplies_stored_blocks=True))
    shape = platform.inspect(tmp_path / "model")
    assert platform.weights_name(shape) == "IQ4_XS, Q3_K, Q4_K, Q5_K, Q6_K"
    num_weights = shape.num_parameters + shape.num_shared
    assert platform.weight_bytes(shape) < num_weights * 8.8 / 8
    assert platform.loading_bytes(shape) - platform.weight_bytes(shape) == 4 * 2 * 512 * 256  # gate and up in float32


def test_a_setting_of_rows_or_weights_packs_all_weights(tmp_path: Path) -> None:
    convert_gguf(write("llama", MIXED, tmp_path), tmp_path / "model")
    for settings in ({"activation_type": "int16"}, {"quantization": "int4"}, {"quantization": "int8"}):
        platform = CpuPlatform(RunnerConfig(model=tmp_path / "model", multiplies_stored_blocks=True, **settings))
        names = platform.weights_name(platform.inspect(tmp_path / "model"))
        assert set(names.split(", ")) <= {"int4", "int8"}
