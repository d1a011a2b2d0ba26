"""Descriptions of models, by the heads of their files."""

import json
from pathlib import Path

import pytest

from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.description import describe
from tests.model_runner.hub.weights import gguf_bytes, safetensors_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(rows=100))
    found = describe(path)
    assert (found.format, found.architecture, found.parameters) == ("GGUF", "llama", 6464)
    assert found.types == {"Q8_0": 6400, "F32": 64}
    assert found.size == 6400 // 32 * 34 + 64 * 4
    assert found.least_memory == 6400 * 5 // 8 + 64 * 5 // 8
    assert (found.context, found.vocabulary, found.has_chat_template) == (256, 3, True)
    assert found.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2


@pytest.mark.parametrize("template", [None, "chat_template.jinja", "tokenizer_config.json"])
def test_a_folder(template: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    names = {"model-1.safetensors": 1, "model-2.safetensors": 2}
    for name, seed in names.items():
        (tmp_path / name).write_bytes(safetensors_bytes(rows=100, seed=seed))
    (tmp_path / "consolidated.safetensors").write_bytes(b"x")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    )
    if template is not None:
        (tmp_path / template).write_text('{"chat_template": "x"}')
    found = describe(tmp_path)
    assert (found.format, found.architecture) == ("safetensors", "LlamaForCausalLM")
    assert found.types == {"F16": 2 * 6400}
    assert found.size == 2 * len(safetensors_bytes(rows=100, seed=1))
    assert found.least_memory == 2 * 6400 * 5 // 8
    assert (found.context, found.vocabulary, found.quantization) == (256, 300, "fp8")
    assert found.has_chat_template == (template is not None)
    assert found.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x0f\0\0\0\0\0\0\0{"a":{"shape":1}', b"\x04\0\0\0\0\0\0\0null"],
)
def test_damaged_folders(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors .*; download it again"):
        describe(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGU", gguf_bytes()[:100], b"x" * 100])
def test_damaged_gguf_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=r"download it again"):
        describe(tmp_path / "m.gguf")
