"""Tiny checkpoints with quantised weights, in the formats in which they are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.model_runner.quantized_linears import AWQ, GPTQ, Weight, awq, compressed, compressed_config, gptq

FP8_MAX = 448.0


def write_plain(folder: Path, hidden: int = 128) -> dict[str, Tensor]:
    """A random model, whose weights are returned by name."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, weights: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    """Put other weights into a checkpoint, and say how they are quantised."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def write_pair(folder: Path, kind: str, hidden: int = 128) -> tuple[Path, Path]:
    """A checkpoint with weights of this kind, and one with the plain weights that they stand for."""
    quantized, plain = folder / kind, folder / f"{kind}-plain"
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    write_plain(plain, hidden)
    for name, weight in write_plain(quantized, hidden).items():
        if "proj" in name:
            parts, meant[name] = _KINDS[kind][0](weight)
            stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        else:
            stored[name] = meant[name] = weight
    rewrite(quantized, stored, _KINDS[kind][1])
    rewrite(plain, meant, None)
    return quantized, plain


def _fp8_blocks(weight: Tensor, block: int = 128) -> tuple[dict[str, Tensor], Tensor]:
    """As in the releases of DeepSeek and Qwen: a scale for each block of 128 x 128."""
    rows, columns = weight.shape
    up, across = -(-rows // block), -(-columns // block)
    padded = torch.zeros(up * block, across * block)
    padded[:rows, :columns] = weight
    tiles = padded.view(up, block, across, block)
    scales = tiles.abs().amax((1, 3)) / FP8_MAX
    numbers = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (numbers.float() * scales[:, None, :, None]).view(padded.shape)[:rows, :columns].contiguous()
    stored = numbers.view(padded.shape)[:rows, :columns].contiguous()
    return {"weight": stored, "weight_scale_inv": scales}, dense


def _fp8_whole(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale for the whole weight, and one for all activations, which dequantised weights do not need."""
    scale = weight.abs().amax() / FP8_MAX
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": numbers, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.1)}
    return stored, numbers.float() * scale


def _int8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _four_bits(weight: Weight, stored: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    return stored, torch.from_numpy(weight.values()).float()


def _gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In the order of activations."""
    near = Weight.near(weight, shuffled=True)
    return _four_bits(near, gptq(near, 1))


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    near = Weight.near(weight)
    return _four_bits(near, awq(near))


def _compressed_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    near = Weight.near(weight)
    return _four_bits(near, {part: tensor for part, tensor in compressed(near).items() if "zero" not in part})


def _fp8(block: list[int] | None, scheme: str) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, "fmt": "e4m3", "weight_block_size": block}


_COMPRESSED_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}
_KINDS = {
    "fp8": (_fp8_blocks, _fp8([128, 128], "dynamic")),
    "fp8 per tensor": (_fp8_whole, _fp8(None, "static")),
    "compressed-tensors": (_int8_rows, _COMPRESSED_INT8),
    "compressed-tensors int4": (_compressed_int4, compressed_config(group_size=32)),
    "gptq": (_gptq, GPTQ | {"group_size": 32, "desc_act": True}),
    "awq": (_awq, AWQ | {"group_size": 32}),
}
