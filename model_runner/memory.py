"""The memory plan: what weights and KV cache take, made before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runner.config import RunnerConfig
from model_runner.kernels.library import WeightKind
from model_runner.kv_cache import KVShape
from model_runner.models.inspection import ModelShape

GIB = 1 << 30
_CPU_CACHE_LIMIT = 4 * GIB
"""The cache's default size at most on CPU: there it competes with everything else on the machine."""
_CPU_SHARE = 0.5
_CUDA_SHARE = 0.9
"""Share of what is free after the weights; the rest is for activations and for the others on the machine."""


class DoesNotFitError(ValueError):
    """The model, or a cache for a single useful request, is larger than the memory at hand."""


@dataclass(frozen=True, slots=True)
class StorageTypes:
    """What the model's numbers are stored as."""

    compute: torch.dtype
    """What the model computes in; embeddings and norms."""
    weights: WeightKind | None
    """Weights of linears, experts and the head; None: as the model computes."""
    kv: torch.dtype
    """Keys and values."""


@dataclass(frozen=True, slots=True)
class HeadsSize:
    """What draft heads take beside the models."""

    weight_bytes: int
    """Not yet allocated."""
    kv: tuple[KVShape, ...]
    """Of each token."""


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

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """The plan for people."""
        cache = self.num_tokens * self.kv_bytes_per_token
        return [
            f"weights    {_size(self.weight_bytes)} as {self.dtype} on {self.device}",
            f"KV cache   {_size(cache)} as {self.kv_dtype} at {_size(self.kv_bytes_per_token)} per token",
            f"           = {self.num_tokens:,} tokens = {self.num_tokens / self.max_model_len:.1f} full requests "
            f"of {self.max_model_len:,} tokens",
        ]


def plan_memory(
    shape: ModelShape,
    config: RunnerConfig,
    types: StorageTypes,
    device: torch.device,
    others: Sequence[ModelShape] = (),
    heads: Sequence[HeadsSize] = (),
) -> MemoryPlan:
    """Size the KV cache from free memory, or from the configuration. Other models and heads live in the same memory.

    Raises:
        DoesNotFitError: if the weights or one request of the asked-for length do not fit; the message has the numbers.
        ValueError: if the asked-for length is beyond the model's own.
    """
    free = free_memory(device)
    models = [shape, *others]
    weights = sum(_weight_bytes(model, types, device) for model in models) + sum(one.weight_bytes for one in heads)
    kept = [kv for model in models for kv in model.kv] + [kv for one in heads for kv in one.kv]
    per_token = sum(kv.num_bytes(types.kv) for kv in kept)
    per_block = per_token * config.block_size
    if weights + per_block > free:
        raise DoesNotFitError(f"the weights take {_size(weights)} and {_size(free)} are free on {device}")
    unpacked = sum(model.num_parameters for model in models)  # weights are packed one by one, after all were read
    loading = unpacked * types.compute.itemsize
    if loading > free:
        raise DoesNotFitError(f"loading the weights takes {_size(loading)} and {_size(free)} are free on {device}")

    wanted = config.max_model_len or shape.max_model_len
    if wanted > shape.max_model_len:
        raise ValueError(f"max_model_len {wanted:,} is more than the model's own limit of {shape.max_model_len:,}")
    useful = -(-wanted // config.block_size) * per_block * config.max_num_seqs
    cache = _cache_bytes(free - weights, useful, config, device)
    num_blocks = cache // per_block
    fitting = num_blocks * config.block_size
    if fitting < 1 or (config.max_model_len is not None and fitting < config.max_model_len):
        raise DoesNotFitError(
            f"a KV cache of {_size(cache)} holds {fitting:,} tokens at {_size(per_token)} each, fewer than one request "
            f"of {wanted:,} tokens; lower max_model_len or raise kv_cache_gib ({_size(free - weights)} are free)"
        )
    return MemoryPlan(
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(wanted, fitting),
        device=str(device),
        dtype=types.weights or _name(types.compute),
        kv_dtype=_name(types.kv),
    )


def _weight_bytes(shape: ModelShape, types: StorageTypes, device: torch.device) -> int:
    """On CPU a head that is shared with the embedding is packed for its products beside it."""
    if device.type != "cpu":
        return shape.num_parameters * types.compute.itemsize
    num_all = shape.num_parameters + shape.num_shared
    if types.weights is None:
        return num_all * types.compute.itemsize
    return (num_all - shape.num_multiplied) * types.compute.itemsize + shape.packed_bytes(types.weights)


def _cache_bytes(free: int, useful: int, config: RunnerConfig, device: torch.device) -> int:
    """Bytes for the KV cache: as configured, else a share of what is free, never more than `useful`."""
    if config.kv_cache_gib is not None:
        asked = int(config.kv_cache_gib * GIB)
        if asked > free:
            raise DoesNotFitError(f"kv_cache_gib asks for {_size(asked)}; {_size(free)} are free after the weights")
        return asked
    if device.type == "cuda":
        return min(useful, int(free * _CUDA_SHARE))
    return min(useful, int(free * _CPU_SHARE), _CPU_CACHE_LIMIT)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now; on CPU within the limits of the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    """Bytes in a unit that reads well."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
