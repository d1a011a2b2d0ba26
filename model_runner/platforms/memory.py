"""Memory plan: the sizes of weights and KV cache, computed before anything is loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from model_runner.config import RunnerConfig, Sizes
from model_runner.contract import CacheGroup
from model_runner.kv_cache import KVShape
from model_runner.model_needs import DoesNotFitError
from model_runner.platforms.cache_plan import NO_STATES, CacheDivider, StateBytes

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StorageTypes:
    """Storage types of a model and its KV cache."""

    compute: torch.dtype
    """Type that the model computes in, and of embeddings and norms."""
    weights: Literal["int8", "int4", "fp8"] | None
    """Weights of linears, experts and the head; None: the compute type."""
    kv: torch.dtype
    """Keys and values."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Sizes of everything that needs memory."""

    model_bytes: int
    """Weights of all models, as they are stored."""
    heads_bytes: int
    """Weights of draft heads."""
    loading_bytes: int
    """Peak memory while the weights are loaded."""
    weights_name: str
    """Type of the target's weights in matrix products."""
    kv: tuple[KVShape, ...]
    """One entry per attention call of all models and heads. Only the target's have windows."""
    max_model_len: int
    """The model's own limit."""
    step_bytes: int = 0
    """Memory of the largest step, in addition to weights and cache."""
    learning_bytes: int = 0
    """Memory of the process that trains heads, if it shares the device's memory."""
    image_bytes: int = 0
    """Memory of the tower that reads images, and of their features."""
    states: StateBytes = NO_STATES
    """Recurrent states of the target."""
    int4_bytes: int | None = None
    """`model_bytes` with `--quantization int4`; None if that is not possible, or already the case."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device."""

    device: str
    """Name of the device."""
    free: int
    """Free bytes."""
    cache_share: float
    """Share of the memory that the weights leave free that goes to the KV cache; the rest is left to other programs."""
    cache_limit: int | None = None
    """Upper limit of the KV cache's default size, in bytes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of a device after the models were loaded."""

    free: int
    """Free bytes."""
    step_bytes: int
    """Memory of the largest step, in addition to weights and cache."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of everything that will be allocated."""

    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    device: str
    dtype: str
    """Type of the weights in matrix products."""
    kv_dtype: str
    learning_bytes: int = 0
    image_bytes: int = 0
    cache_bytes: int = 0
    """Memory of all blocks, of which `state_bytes` are recurrent states."""
    cache_room: int = 0
    """Memory that the blocks were to take; a rest is smaller than a block."""
    state_bytes: int = 0
    max_num_seqs: int = 1
    """Choices that can run at a time."""
    groups: tuple[CacheGroup, ...] = ()
    num_scratch: int = 0
    """Rows blocks for what a step computes and folds."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """The plan as log lines."""
        groups = [
            f"           layers with a window of {group.window:,}: {group.num_blocks * self.block_size:,} tokens"
            for group in self.groups
            if group.kind == "window"
        ]
        if self.state_bytes:
            pages = sum(group.num_blocks for group in self.groups if group.kind == "page")
            groups.append(
                f"states     {_size(self.state_bytes)} for {self.max_num_seqs} choices at a time and "
                f"{max(pages - 2 * self.max_num_seqs, 0):,} states in the prefix cache"
            )
        kv_bytes = self.cache_bytes - self.state_bytes
        learning = [f"learning   {_size(self.learning_bytes)}"] if self.learning_bytes else []
        images = [f"images     {_size(self.image_bytes)}"] if self.image_bytes else []
        return [
            f"weights    {_size(self.weight_bytes)} as {self.dtype} on {self.device}",
            f"KV cache   {_size(kv_bytes)} as {self.kv_dtype} at {_size(self.kv_bytes_per_token)} per token",
            f"           = {self.num_tokens:,} tokens = {self.num_tokens / self.max_model_len:.1f} full requests "
            f"of {self.max_model_len:,} tokens",
            *groups,
            *learning,
            *images,
        ]


def plan_memory(
    needs: Needs, device_memory: DeviceMemory, config: RunnerConfig, sizes: Sizes, types: StorageTypes
) -> MemoryPlan:
    """Size the KV cache from free memory, or from the configuration.

    Raises:
        DoesNotFitError: if the weights, or one request of the configured length, do not fit.
        ValueError: if the configured length is beyond the model's limit.
    """
    weights, free = needs.model_bytes + needs.heads_bytes, device_memory.free - needs.learning_bytes - needs.image_bytes
    per_token = sum(kv.num_bytes(types.kv) for kv in needs.kv)
    per_block = per_token * config.block_size
    if weights + per_block > free:
        raise _weights_error(needs, device_memory, types, per_block)
    if needs.loading_bytes > free:
        raise DoesNotFitError(
            f"loading the weights takes {_size(needs.loading_bytes)}, but only {_size(free)} are free on "
            f"{device_memory.device}; {_either([])}"
        )

    wanted = config.max_model_len or needs.max_model_len
    if wanted > needs.max_model_len:
        raise ValueError(
            f"max_model_len {wanted:,} is more than the model's own limit of {needs.max_model_len:,}; lower it"
        )
    left = max(free - weights - needs.step_bytes, 0)
    divider = CacheDivider(needs.kv, types.kv, needs.states, wanted, config, sizes)
    cache = _cache_bytes(left, divider.useful_bytes, config, device_memory, needs)
    division = divider.divide(cache)
    fitting = division.num_blocks * config.block_size
    if fitting < 1 or (config.max_model_len is not None and fitting < config.max_model_len):
        required = divider.bytes_for(wanted)
        ways = [
            f"set --kv-cache-gib {math.ceil(required / GIB * 100) / 100}" if cache < required <= left else "",
            f"set --max-model-len {fitting}" if fitting else "",
            "lower --max-num-seqs" if division.state_bytes and division.max_num_seqs > 1 else "",
            _int4_advice(needs, required - left) if required > left else "",
        ]
        raise DoesNotFitError(
            f"the KV cache of {_size(cache)} holds {fitting:,} tokens at {_size(per_token)} each, fewer than one "
            f"request of {wanted:,} tokens ({_size(left)} are free after the weights); {_either(ways)}"
        )
    return MemoryPlan(
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        block_size=config.block_size,
        num_blocks=division.num_blocks,
        max_model_len=min(wanted, fitting),
        device=device_memory.device,
        dtype=needs.weights_name,
        kv_dtype=_name(types.kv),
        learning_bytes=needs.learning_bytes,
        image_bytes=needs.image_bytes,
        cache_bytes=division.num_bytes,
        cache_room=cache,
        state_bytes=division.state_bytes,
        max_num_seqs=division.max_num_seqs,
        groups=division.groups,
        num_scratch=division.num_scratch,
    )


def _weights_error(needs: Needs, device_memory: DeviceMemory, types: StorageTypes, per_block: int) -> DoesNotFitError:
    """The error for weights that do not fit together with one KV block."""
    free = device_memory.free - needs.learning_bytes - needs.image_bytes
    lacking = needs.model_bytes + needs.heads_bytes + per_block - free
    learning = f" next to {_size(needs.learning_bytes)} for training heads" if needs.learning_bytes else ""
    learning += f" next to {_size(needs.image_bytes)} for images" if needs.image_bytes else ""
    ways = [
        _int4_advice(needs, lacking) if needs.loading_bytes <= free else "",
        "turn off --learn" if lacking <= needs.learning_bytes else "",
        "use --no-images" if lacking <= needs.image_bytes else "",
    ]
    return DoesNotFitError(
        f"the weights take {_size(needs.model_bytes + needs.heads_bytes)} as {needs.weights_name}, "
        f"but only {_size(max(free, 0))} are free on {device_memory.device}{learning}; {_either(ways)}"
    )


def _int4_advice(needs: Needs, lacking: int) -> str:
    """Suggest int4 weights if they free as many bytes as are lacking."""
    if needs.int4_bytes is None or needs.model_bytes - needs.int4_bytes < lacking:
        return ""
    return f"use --quantization int4 ({_size(needs.int4_bytes)} of weights)"


def _either(ways: Sequence[str]) -> str:
    """Advice on how to save memory; empty items do not apply."""
    return ", or ".join(filter(None, ways)) or "free some memory, or use a smaller model"


def _cache_bytes(left: int, useful: int, config: RunnerConfig, device_memory: DeviceMemory, needs: Needs) -> int:
    """Bytes for the KV cache: as configured, otherwise a share of `left`, but never more than `useful`."""
    if config.kv_cache_gib is not None:
        asked = int(config.kv_cache_gib * GIB)
        if asked > left:
            fitting = math.floor(left / GIB * 100) / 100
            ways = [f"set --kv-cache-gib {fitting} or less" if fitting else "", _int4_advice(needs, asked - left)]
            raise DoesNotFitError(
                f"kv_cache_gib asks for {_size(asked)}, but only {_size(left)} are free after the weights; "
                f"{_either(ways)}"
            )
        return asked
    shared = min(useful, int(left * device_memory.cache_share))
    return shared if device_memory.cache_limit is None else min(shared, device_memory.cache_limit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    """A number of bytes in a readable unit."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


_HOST_TENSORS = ("you tried to allocate", "std::bad_alloc")
"""Parts of messages that mean out of memory: torch has no error class for CPU tensors."""


def oom_reason(error: Exception) -> str:
    """Return an out-of-memory error's message, which is never empty; re-raise any other error."""
    says = str(error)
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(words in says for words in _HOST_TENSORS)):
        return says or "the host has no memory left"
    raise error
