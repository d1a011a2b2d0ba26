"""Checkpoints of gpt-oss: experts in MXFP4 stay as they are, and are the weights that transformers unpacks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_runner.config import RunnerConfig
from model_runner.native.model import NativeModel
from model_runner.platforms.cpu import CpuPlatform
from model_runner.spec.model_folder import open_checkpoint
from model_runner.weights.checkpoint import TensorCheckpoint
from model_runner.weights.interleaved_experts import as_modules, deinterleave_experts
from tests.model_runner.test_stored_blocks import TOKENS, logits_of, whole

EXPERTS, HIDDEN, INNER = 4, 64, 96
WEIGHTS = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def write_dense(folder: Path) -> None:
    """A random model of gpt-oss with whole blocks of inputs."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=131072,
        initializer_range=0.2,
        swiglu_limit=2.0,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(folder)


def write_mxfp4(dense: Path, folder: Path) -> None:
    """The same model with other experts in MXFP4; and these, unpacked by transformers, in the dense one."""
    tensors = load_file(dense / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if (sizes := WEIGHTS.get(name.rpartition(".")[2])) is None:
            stored[name] = tensor
            continue
        shape = EXPERTS, sizes[0], sizes[1] // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(123, 125, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A dense checkpoint, and one in MXFP4 with the same weights."""
    dense, blocks = tmp_path / "dense", tmp_path / "blocks"
    write_dense(dense)
    write_mxfp4(dense, blocks)
    return dense, blocks


def served(folder: Path, *, as_stored: bool = True) -> tuple[CpuPlatform, NativeModel]:
    platform = CpuPlatform(RunnerConfig(folder, multiplies_stored_blocks=as_stored, kv_cache_dtype="float32"))
    model = platform.load(folder, platform.inspect(folder))
    assert isinstance(model, NativeModel)
    return platform, model


@torch.inference_mode()
def test_experts_in_mxfp4_keep_their_values(folders: tuple[Path, Path]) -> None:
    dense, blocks = folders
    model = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager").eval()
    expected = model(TOKENS[None]).logits[0]
    for layer in model.model.layers:
        experts = layer.mlp.experts.gate_up_proj
        experts.copy_(experts.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))  # up and gate
    wrong = model(TOKENS[None]).logits[0]
    assert ((wrong - expected).norm(dim=-1) / expected.norm(dim=-1)).median() > 0.4
    for name, folder, as_stored in (
        ("dense", dense, True),
        ("blocks", blocks, True),
        ("packed", blocks, False),
    ):
        platform, model = served(folder, as_stored=as_stored)
        assert ("MXFP4" in platform.weights_name(platform.inspect(folder))) == (name == "blocks")
        logits = logits_of(platform, model, whole())
        # Rows of 8 bits before the attention's products differ by this much.
        assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.08


def test_weights_are_those_that_transformers_unpacks(folders: tuple[Path, Path]) -> None:
    dense, blocks = (open_checkpoint(folder) for folder in folders)
    assert dense is not None
    assert blocks is not None
    assert blocks.shapes == dense.shapes
    for name in dense.shapes:
        assert torch.equal(blocks.tensor(name), dense.tensor(name))
    for layer in range(2):
        for weight in WEIGHTS:
            name = f"model.layers.{layer}.mlp.experts.{weight}"
            for [stored], [plain] in zip(blocks.matrices(name), dense.matrices(name), strict=True):
                assert torch.equal(stored.read(5, 40), plain.read(5, 40))


def test_the_order_of_the_modules_comes_back(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    usual = deinterleave_experts(TensorCheckpoint(tensors))
    moved = {name: usual.tensor(name) for name in usual.shapes}
    restored = as_modules(moved)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(moved[name][:, INNER], tensors[name][:, :, 1])


def test_other_checkpoints_stay_as_they_are() -> None:
    plain = TensorCheckpoint({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 4)})
    assert deinterleave_experts(plain) is plain
