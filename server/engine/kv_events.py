"""Prefix-cache events for routers, in vLLM's format.

A batch is the msgpack array `[seconds, events, data_parallel_rank]`. An event is an array: its tag, then its fields in
a fixed order. A block's hash is a 64-bit integer, the last 8 bytes of its name, so it is the same in every process.
Newer readers also accept events as maps and hashes as bytes; all readers accept this form.
"""

from collections.abc import Sequence

import msgspec

from scheduler.prefix_cache import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

_HASH_BYTES = 8
_MEDIUM = "GPU"
"""The readers' name for the memory from which the model computes, whatever the device."""
_RANK = 0


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """A chain of blocks, each extending the one before it, and the first extending `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """Tokens of all the blocks."""
    block_size: int
    lora_id: None = None
    medium: str = _MEDIUM
    lora_name: None = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str = _MEDIUM


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


def block_hash(name: bytes) -> int:
    """The hash by which readers identify the block of this name."""
    return int.from_bytes(name[-_HASH_BYTES:], "big")


def encode_batch(events: Sequence[CacheEvent], seconds: float) -> bytes:
    """The events as one batch, in order; `seconds` is when they happened, in Unix time."""
    return msgspec.msgpack.encode((seconds, _written(events), _RANK))


def _written(events: Sequence[CacheEvent]) -> list[_Stored | _Removed | _Cleared]:
    """The events to send: successive blocks, as in a long prompt, share one event."""
    written: list[_Stored | _Removed | _Cleared] = []
    for event in events:
        last = written[-1] if written else None
        match event:
            case BlockStored(name, parent, tokens):
                before = None if parent is None else block_hash(parent)
                if isinstance(last, _Stored) and last.block_hashes[-1] == before:
                    last.block_hashes.append(block_hash(name))
                    last.token_ids += tokens
                else:
                    written.append(_Stored([block_hash(name)], before, list(tokens), len(tokens)))
            case BlockRemoved(name):
                if isinstance(last, _Removed):
                    last.block_hashes.append(block_hash(name))
                else:
                    written.append(_Removed([block_hash(name)]))
            case AllBlocksCleared():
                written.append(_Cleared())
    return written
