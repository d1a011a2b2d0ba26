"""Heads of weight files that are still on a server: what the model is and needs, before it is downloaded."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from model_runner.gguf.header import GgufFile, GgufTensor, IncompleteHeadError, parse_head
from model_runner.hub.transfer import Answer, get
from model_runner.kernels.block_formats import BLOCK_FORMATS
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.safetensors_head import BITS, end_of_head, parse_safetensors_head

_FIRST = 1 << 21
_LARGEST = 1 << 27
"""Bytes: no head is larger. One with 150,000 tokens and their merges has 8 MiB."""
_LEAST_BITS = 5
"""Bits of a weight in the smallest form that this server packs weights into (int4 with its scales)."""


def read_gguf_head(client: httpx.Client, url: str, headers: Mapping[str, str], path: Path) -> tuple[GgufFile, Answer]:
    """The head of a GGUF file, and the answer that it came with.

    Args:
        client: the client to ask with.
        url: address of the file.
        headers: further headers.
        path: its name, for errors.

    Raises:
        UnsupportedModelError: if it is not a GGUF file, or is damaged.
        TransferError: if it cannot be read.
    """
    size = _FIRST
    while True:
        answer = get(client, url, {**headers, **_range(0, size)}, path.name, size)
        try:
            return parse_head(answer.content, path), answer
        except IncompleteHeadError:
            if len(answer.content) < size or size >= _LARGEST:
                raise
            size *= 4


def read_safetensors_head(client: httpx.Client, url: str, headers: Mapping[str, str], name: str) -> dict[str, Any]:
    """The head of a safetensors file: type and shape of each tensor. Raises TransferError, UnsupportedModelError."""
    content = get(client, url, {**headers, **_range(0, _FIRST)}, name, _FIRST).content
    end = end_of_head(content, name)
    if end > len(content):
        content = get(client, url, {**headers, **_range(0, end)}, name, end).content
    return parse_safetensors_head(content[:end], name)


def _range(start: int, end: int) -> dict[str, str]:
    return {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}


def least_bytes_of_gguf(files: Iterable[GgufFile]) -> int:
    """Bytes of memory that the weights certainly need: as stored, or packed to int4, whichever is smaller."""
    tensors = [tensor for file in files for tensor in file.tensors.values()]
    return sum(min(stored_bytes(tensor), tensor.size * _LEAST_BITS // 8) for tensor in tensors)


def stored_bytes(tensor: GgufTensor) -> int:
    """Bytes of a tensor in its file. Raises UnsupportedModelError if its type is unknown."""
    if (stored := BLOCK_FORMATS.get(tensor.block_format)) is None:
        raise UnsupportedModelError(f"{tensor.file.name} has weights of the unknown type {tensor.block_format}")
    return tensor.size // stored.weights * stored.num_bytes


def least_bytes_of_safetensors(heads: Iterable[Mapping[str, Any]]) -> int:
    """As for GGUF files. Types that are unknown count as the smallest."""
    total = 0
    for head in heads:
        for entry in head.values():
            bits = min(BITS.get(entry["dtype"], _LEAST_BITS), _LEAST_BITS)
            total += math.prod(entry["shape"]) * bits // 8
    return total
