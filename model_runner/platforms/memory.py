"""The memory plan: what weights and KV cache take, made before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model_runner.config import RunnerConfig, Sizes
from model_runner.kv_cache import KVShape

GIB = 1 << 30
_CONTROL_GROUP = Path("/sys/fs/cgroup")


class DoesNotFitError(ValueError):
    """The model, or a cache for a single useful request, is larger than the memory at hand."""


@dataclass(frozen=True, slots=True)
class StorageTypes:
    """What the model's numbers are stored as."""

    compute: torch.dtype
    """What the model computes in; embeddings and norms."""
    weights: Literal["int8", "int4", "fp8"] | None
    """Weights of linears, experts and the head; None: as the model computes."""
    kv: torch.dtype
    """Keys and values."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What has to go into the memory."""

    model_bytes: int
    """Of the weights of all models, as they are kept."""
    heads_bytes: int
    """Of those of draft heads."""
    loading_bytes: int
    """The most that is taken while they are loaded."""
    kv: tuple[KVShape, ...]
    """Of each token, in all layers of all models and heads."""
    max_model_len: int
    """The model's own limit."""
    step_bytes: int = 0
    """See Measured."""
    learning_bytes: int = 0
    """Of the process that trains heads beside, where that has the same memory."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device."""

    device: str
    """Its name."""
    free: int
    """Bytes."""
    cache_share: float
    """Of what is free after the weights, so much is for the KV cache; the rest is for others on the machine."""
    cache_limit: int | None = None
    """The cache's default size at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of a device on which the models are loaded."""

    free: int
    """Bytes."""
    step_bytes: int
    """What the largest step takes beside weights and cache."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What will be allocated."""

    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    device: str
    dtype: str
    """Of the weights in products."""
    kv_dtype: str
    learning_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """The plan for people."""
        cache = self.num_tokens * self.kv_bytes_per_token
        learning = [f"learning   {_size(self.learning_bytes)}"] if self.learning_bytes else []
        return [
            f"weights    {_size(self.weight_bytes)} as {self.dtype} on {self.device}",
            f"KV cache   {_size(cache)} as {self.kv_dtype} at {_size(self.kv_bytes_per_token)} per token",
            f"           = {self.num_tokens:,} tokens = {self.num_tokens / self.max_model_len:.1f} full requests "
            f"of {self.max_model_len:,} tokens",
            *learning,
        ]


def plan_memory(needs: Needs, room: Room, config: RunnerConfig, sizes: Sizes, types: StorageTypes) -> MemoryPlan:
    """Size the KV cache from free memory, or from the configuration.

    Raises:
        DoesNotFitError: if the weights or one request of the asked-for length do not fit; the message has the numbers.
        ValueError: if the asked-for length is beyond the model's own.
    """
    weights, free = needs.model_bytes + needs.heads_bytes, room.free - needs.learning_bytes
    per_token = sum(kv.num_bytes(types.kv) for kv in needs.kv)
    per_block = per_token * config.block_size
    if weights + per_block > free:
        beside = f", beside {_size(needs.learning_bytes)} for learning" if needs.learning_bytes else ""
        raise DoesNotFitError(
            f"the weights take {_size(weights)} and {_size(max(free, 0))} are free on {room.device}{beside}"
        )
    if needs.loading_bytes > free:
        raise DoesNotFitError(
            f"loading the weights takes {_size(needs.loading_bytes)} and {_size(free)} are free on {room.device}"
        )

    wanted = config.max_model_len or needs.max_model_len
    if wanted > needs.max_model_len:
        raise ValueError(f"max_model_len {wanted:,} is more than the model's own limit of {needs.max_model_len:,}")
    left = max(free - weights - needs.step_bytes, 0)
    useful = -(-wanted // config.block_size) * per_block * sizes.max_num_seqs
    cache = _cache_bytes(left, useful, config, room)
    num_blocks = cache // per_block
    fitting = num_blocks * config.block_size
    if fitting < 1 or (config.max_model_len is not None and fitting < config.max_model_len):
        raise DoesNotFitError(
            f"a KV cache of {_size(cache)} holds {fitting:,} tokens at {_size(per_token)} each, fewer than one request "
            f"of {wanted:,} tokens; lower max_model_len or raise kv_cache_gib ({_size(left)} are free)"
        )
    return MemoryPlan(
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(wanted, fitting),
        device=room.device,
        dtype=types.weights or _name(types.compute),
        kv_dtype=_name(types.kv),
        learning_bytes=needs.learning_bytes,
    )


def _cache_bytes(left: int, useful: int, config: RunnerConfig, room: Room) -> int:
    """Bytes for the KV cache: as configured, else a share of what is left, never more than `useful`."""
    if config.kv_cache_gib is not None:
        asked = int(config.kv_cache_gib * GIB)
        if asked > left:
            raise DoesNotFitError(f"kv_cache_gib asks for {_size(asked)}; {_size(left)} are free after the weights")
        return asked
    shared = min(useful, int(left * room.cache_share))
    return shared if room.cache_limit is None else min(shared, room.cache_limit)


def free_memory(group: Path = _CONTROL_GROUP) -> int:
    """Bytes of the host that can be allocated now, within the limit of the control group (version 2)."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - _used_memory(group))
    return free


def _used_memory(group: Path) -> int:
    """Bytes that the group cannot give up. What it has read of files also counts as current, a downloaded model say,
    but pages that nobody has used for a while make room when memory is asked for.
    """
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(stat["inactive_file"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    """Bytes in a unit that reads well."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


_HOST_TENSORS = ("you tried to allocate", "std::bad_alloc")
"""Torch has no class of errors for the memory of tensors on the CPU."""


def oom_reason(error: Exception) -> str:
    """What an error says if it says that memory ran out: never empty.

    Raises:
        Exception: the error itself, if it says anything else.
    """
    says = str(error)
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(words in says for words in _HOST_TENSORS)):
        return says or "the host has no memory left"
    raise error
