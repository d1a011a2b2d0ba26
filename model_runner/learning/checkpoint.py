"""Learnt heads as bytes: the same for the pipe to the runner and for the files in the cache folder.

They are a safetensors file whose metadata holds the heads' configuration, their version, the fingerprint of what they
were learnt from, and a SHA-256 of all of that and of the weights. Matrices are bfloat16.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from model_runner.models.heads.base import Heads, HeadsError, TargetShape
from model_runner.models.heads.checkpoint import HeadsCheckpoint
from model_runner.models.heads.loading import heads_of
from model_runner.models.heads.saving import heads_checkpoint, stored_as

_METADATA = "__metadata__"
_ALIGNMENT = 8
"""Of the weights behind the header, as the format wants it."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a file holds."""

    version: int
    fingerprint: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def pack_learnt(heads: Heads, version: int, fingerprint: str, num_layers: int) -> bytes:
    """The file of these heads; `num_layers` are the target's."""
    config, tensors = heads_checkpoint(heads, num_layers)
    metadata = {"config": json.dumps(config), "version": str(version), "fingerprint": fingerprint}
    header, weights = _split(save(stored_as(torch.bfloat16, tensors), metadata))
    header[_METADATA]["checksum"] = _checksum(header, weights)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text + weights


def read_learnt(content: bytes) -> Learnt:
    """Raises HeadsError if this is no such file, or not as it was written."""
    try:
        header, weights = _split(content)
        metadata = header[_METADATA]
        if metadata.pop("checksum") != _checksum(header, weights):
            raise HeadsError("its checksum is that of another content")
        return Learnt(
            int(metadata["version"]), metadata["fingerprint"], json.loads(metadata["config"]), dict(load(content))
        )
    except (struct.error, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadsError(f"it holds no learnt heads ({type(error).__name__})") from error


def load_learnt(checkpoint: bytes, target: TargetShape) -> Heads:
    """The heads, in float32 on the CPU, in evaluation mode. Raises HeadsError if they are damaged or do not fit."""
    learnt = read_learnt(checkpoint)
    return heads_of(HeadsCheckpoint(f"learnt heads, version {learnt.version},", learnt.config, learnt.tensors), target)


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and weights. Raises ValueError or struct.error."""
    (length,) = struct.unpack_from("<Q", content)
    start = struct.calcsize("<Q") + length
    header = json.loads(content[struct.calcsize("<Q") : start])
    if not isinstance(header, dict):
        raise TypeError("the header is no object")
    return header, memoryview(content)[start:]


def _checksum(header: dict[str, Any], weights: memoryview) -> str:
    """Of a header without one, however it is written, and of the weights."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(weights)
    return digest.hexdigest()
