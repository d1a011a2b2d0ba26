"""Contents of small weight files."""

import tempfile
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy


def gguf_bytes(architecture: str = "llama", rows: int = 8, seed: int = 0, **keys: int) -> bytes:
    """A GGUF file with one matrix [rows, 64] in Q8_0 and one vector in F32."""
    path = Path(tempfile.mkdtemp()) / "file.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 256, "block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    for key, value in {**sizes, "attention.head_count_kv": 2, **keys}.items():
        writer.add_uint32(key if key.startswith("general.") else f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    matrix = np.random.default_rng(seed).standard_normal((rows, 64), np.float32)
    writer.add_tensor(
        "token_embd.weight",
        gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def safetensors_bytes(rows: int = 8, seed: int = 0) -> bytes:
    """A safetensors file with one matrix [rows, 64] in float16."""
    matrix = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float16)
    return safetensors.numpy.save({f"model.layers.{seed}.weight": matrix})
