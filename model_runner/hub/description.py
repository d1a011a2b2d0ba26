"""Describes a model by the heads of its files, without loading it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model_runner.gguf.header import GgufFile, read_gguf
from model_runner.gguf.weights import check_formats
from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.choice import choose_weights
from model_runner.hub.limits import check_architecture, least_bytes_of_gguf, least_bytes_of_safetensors, stored_bytes
from model_runner.json_files import find_object, read_object
from model_runner.refusal import UnsupportedModelError, refused
from model_runner.weights.safetensors_head import INDEX, read_safetensors_head

_KV_BYTES = 2
"""Bytes of a number in a KV cache of 16 bits."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model, as far as its files tell."""

    format: str
    architecture: str
    parameters: int
    """Weights in all tensors."""
    size: int
    """Bytes of all files with weights."""
    types: Mapping[str, int] = field(default_factory=dict)
    """Weights by the type that they are stored in."""
    context: int | None = None
    """Tokens that the model was made for."""
    vocabulary: int | None = None
    has_chat_template: bool = False
    quantization: str | None = None
    """Method of a quantised checkpoint of safetensors, or the name of a GGUF file's mixture of types."""
    least_memory: int = 0
    """Bytes that the weights need at least: as stored, or in int4."""
    kv_bytes_per_token: int | None = None
    """Bytes of the KV cache for a token, in 16 bits, without sliding windows."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: Path) -> Description:
    """Describe a GGUF file or the folder of a model.

    Raises:
        ModelNotFoundError: if it cannot be read.
    """
    try:
        with refused(f"{path} cannot be read", ModelNotFoundError, advice="download it again"):
            return _describe_file(path) if path.is_file() else _describe_folder(path)
    except UnsupportedModelError as error:
        is_named = str(path) in str(error)
        raise ModelNotFoundError(str(error) if is_named else f"{path}: {error}") from error


def describe_gguf(files: Sequence[GgufFile], size: int | None = None) -> Description:
    """Describe a model by the heads of its GGUF files.

    Args:
        files: one for each part, or one that has all tensors.
        size: bytes of the files; None: of the tensors.

    Raises:
        UnsupportedModelError: if the architecture, or a type of weights, is unknown.
    """
    from gguf import GGMLQuantizationType  # noqa: PLC0415

    first = files[0]
    check_architecture(first)
    tensors = [tensor for file in files for tensor in file.tensors.values()]
    types: dict[str, int] = {}
    stored = 0
    for tensor in tensors:
        stored += stored_bytes(tensor)
        name = GGMLQuantizationType(tensor.block_format).name
        types[name] = types.get(name, 0) + tensor.size
    tokens = first.metadata.get("tokenizer.ggml.tokens")
    return Description(
        format="GGUF",
        architecture=first.architecture,
        parameters=sum(tensor.size for tensor in tensors),
        size=stored if size is None else size,
        types=_by_share(types),
        context=_number(first, "context_length"),
        vocabulary=len(tokens) if isinstance(tokens, list) else None,
        has_chat_template="tokenizer.chat_template" in first.metadata,
        quantization=_file_type(first),
        least_memory=least_bytes_of_gguf(files),
        kv_bytes_per_token=_kv_of_gguf(first),
    )


def describe_safetensors(
    heads: Iterable[Mapping[str, Any]], config: Mapping[str, Any], size: int, *, has_chat_template: bool
) -> Description:
    """Describe a model by the heads of its safetensors and its config.json."""
    types: dict[str, int] = {}
    heads = list(heads)
    for head in heads:
        for entry in head.values():
            name = str(entry["dtype"])
            types[name] = types.get(name, 0) + math.prod(entry["shape"])
    text = config.get("text_config") or config
    method = (config.get("quantization_config") or {}).get("quant_method")
    return Description(
        format="safetensors",
        architecture=", ".join(map(str, config.get("architectures") or [config.get("model_type", "unknown")])),
        parameters=sum(types.values()),
        size=size,
        types=_by_share(types),
        context=_whole(text.get("max_position_embeddings")),
        vocabulary=_whole(text.get("vocab_size")),
        has_chat_template=has_chat_template,
        quantization=None if method is None else str(method),
        least_memory=least_bytes_of_safetensors(heads),
        kv_bytes_per_token=_kv_of_config(text),
    )


def has_chat_template(folder: Path) -> bool:
    """Whether a folder has a chat template, in one of the places where transformers looks."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(find_object(folder / "tokenizer_config.json").get("chat_template"))


def _describe_file(path: Path) -> Description:
    file = read_gguf(path)
    check_formats(file)
    return describe_gguf([file])


def _describe_folder(folder: Path) -> Description:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    index = folder / INDEX
    weights = [folder / name for name in choose_weights(names, index if index.is_file() else None, str(folder))]
    heads = [read_safetensors_head(path)[0] for path in weights]
    config = read_object(folder / "config.json")
    size = sum(path.stat().st_size for path in weights)
    return describe_safetensors(heads, config, size, has_chat_template=has_chat_template(folder))


def _by_share(types: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(types.items(), key=lambda item: -item[1]))


def _file_type(file: GgufFile) -> str | None:
    """The name of a file's mixture of types, such as Q4_K_M; None if the file does not tell."""
    from gguf import LlamaFileType  # noqa: PLC0415

    kind = file.metadata.get("general.file_type")
    names = {int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
    return names.get(kind) if isinstance(kind, int) else None


def _number(file: GgufFile, key: str) -> int | None:
    return _whole(file.metadata.get(f"{file.architecture}.{key}"))


def _whole(value: Any) -> int | None:
    """A number that a file may say; None if it says something else."""
    return value if type(value) is int else None


def _kv_of_gguf(file: GgufFile) -> int | None:
    layers, width = _number(file, "block_count"), _number(file, "embedding_length")
    heads = _number(file, "attention.head_count")
    kept: Any = file.metadata.get(f"{file.architecture}.attention.head_count_kv", heads)
    if not layers or not width or not heads or not kept:
        return None
    key = _number(file, "attention.key_length") or width // heads
    value = _number(file, "attention.value_length") or width // heads
    return int(np.sum(kept) if isinstance(kept, np.ndarray) else layers * kept) * (key + value) * _KV_BYTES


def _kv_of_config(text: Mapping[str, Any]) -> int | None:
    names = "num_hidden_layers", "num_attention_heads", "hidden_size"
    layers, heads, width = (_whole(text.get(name)) for name in names)
    if not layers or not heads or not width:
        return None
    head_dim = _whole(text.get("head_dim")) or width // heads
    kept = _whole(text.get("num_key_value_heads")) or heads
    return layers * kept * head_dim * 2 * _KV_BYTES
