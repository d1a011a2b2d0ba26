"""Paged attention on CUDA with Triton kernels."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from model_runner.attention.attention_plan import AttentionPlan, Tiling, empty_items, longest_run, make_plan
from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.triton.attention import HEADER, ITEM, MERGE, LayerKV, ScoreOptions, Step, attend, padded
from model_runner.kernels.triton.kv_write import CacheLayer, write_kv
from model_runner.kv_cache import LARGEST, KVCache


def cache_layer(cache: KVCache, layer: int) -> CacheLayer:
    """A layer's keys and values as the kernels take them."""
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.key_scales else (None, None)
    return CacheLayer(cache.keys[layer], cache.values[layer], *scales)


_EXACT_M = 64
"""Rows of a tile in exact mode, for prompts and single tokens alike: the height of Hopper's wide tensor-core
products."""
_DECODING_M, _PROMPT_M = 16, 128
_DECODED_TOKENS = 32
"""A batch whose choices all have at most this many tokens counts as decoding or verification."""
_PROGRAMS_PER_SM = 2
"""Programs per SM that fit at once, by registers and shared memory."""
_PROGRAMS_FOR_ALL = 1 << 20
"""More programs than any step has work for."""
_PARTIAL_SUMS = 2**23
"""Capacity in float32 values (32 MiB): splits of half a million positions with 32 heads of 128 values."""


class TritonMetadata:
    """A plan in device memory. Tensors keep their addresses, so that a CUDA graph can be replayed with other plans.

    Attributes:
        slots: [tokens] int64 slots for the step's keys and values, block * block_size + offset; -1 for padding.
        block_m: rows of a tile.
        plan: [...] int32, laid out as the kernels' HEADER describes.
        groups: the same for each further cache group.
    """

    def __init__(
        self,
        max_tokens: int,
        num_numbers: int,
        block_m: int,
        tile_tokens: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        """Buffers for plans of up to `max_tokens` tokens and `num_numbers` int32 values in each group."""
        sizes = max_tokens, num_numbers, block_m, tile_tokens
        self.groups = [TritonMetadata(*sizes, device) for _ in range(1, num_groups)]
        self.block_m = block_m
        self._tile_tokens = tile_tokens
        size = max_tokens + -(-num_numbers // 2)
        on_cuda = device.type == "cuda"
        self._staging = torch.zeros(size, dtype=torch.int64, pin_memory=on_cuda)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.slots = self._device[:max_tokens]
        self.plan = self._device[max_tokens:].view(torch.int32)
        self.has_merges = True
        self.has_lasts = False

    def load(self, plan: AttentionPlan, num_rows: int | None = None) -> None:
        """Upload a plan without waiting for the device.

        Args:
            plan: of a step.
            num_rows: rows of the step including padding; None for the full capacity. Padding rows get slot -1 and zeros
                as output. They have no last position, so only steps without padding may have lasts.

        Raises:
            ValueError: if the plan does not fit or has another tile size.
        """
        for metadata, of_group in zip(self.groups, plan.groups, strict=True):
            metadata.load(of_group, num_rows)
        num_tokens, max_tokens = len(plan.slots), len(self.slots)
        num_rows = max_tokens if num_rows is None else num_rows
        if plan.block_m != self.block_m:
            raise ValueError(f"this metadata takes plans with tiles of {self.block_m} rows, not {plan.block_m}")
        items = np.concatenate([plan.items, empty_items(num_tokens, num_rows, self._tile_tokens)])
        parts = items, plan.merges, plan.paths, plan.tables, plan.lasts
        at = np.cumsum([HEADER, *(part.size for part in parts)])
        if not num_tokens <= num_rows <= max_tokens or at[-1] > len(self.plan):
            needs = f"{num_tokens} tokens and {at[-1]} numbers"
            raise ValueError(f"there is room for {max_tokens} tokens and {len(self.plan)} numbers, not for {needs}")
        if self._copied is not None:
            self._copied.synchronize()  # until the previous upload has left the staging memory
        staging = self._staging.numpy()
        staging[:num_tokens], staging[num_tokens:max_tokens] = plan.slots, -1
        numbers = staging[max_tokens:].view(np.int32)
        numbers[:6] = len(items), len(plan.merges), *at[1:5]
        for part, start, end in zip(parts, at[:-1], at[1:], strict=True):
            numbers[start:end] = part.ravel()
        used = max_tokens + -(-int(at[-1]) // 2)
        self._device[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class TritonAttention(AttentionBackend[TritonMetadata]):
    """Attention on CUDA.

    Exact mode keeps the backend's guarantee. Without it, tiles are smaller for choices with few tokens and larger
    otherwise, so a row may round differently in another batch.

    If a tile's rows do not all see a non-finite value, the whole output head of each row that sees it becomes NaN.
    """

    def __init__(self, cache: KVCache, *, exact: bool, num_heads: int, num_programs: int | None = None) -> None:
        """Allocates the buffers for partial sums.

        Args:
            cache: KV cache with whole keys.
            exact: whether to keep the backend's guarantee.
            num_heads: query heads, the same in all layers.
            num_programs: programs that run at once; None for as many as the device takes.

        Raises:
            ValueError: if the cache has no whole keys, or a key-value head has more query heads than a tile has rows.
        """
        device = cache.device
        kv_heads = [keys.shape[1] for keys in cache.keys] or [1]  # Mamba's cache has no layers
        self._group = num_heads // min(kv_heads)
        if not all(keys.mT.is_contiguous() for keys in cache.keys):
            raise ValueError("the Triton attention reads only caches with whole keys")
        if self._group > _EXACT_M:
            raise ValueError(f"a key-value head has {self._group} heads; the Triton attention takes {_EXACT_M} at most")
        if num_programs is None:
            num_programs = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM
        self._cache, self._exact = cache, exact
        self._is_narrow = all(max(k.shape[2], v.shape[3]) <= 128 for k, v in zip(cache.keys, cache.values, strict=True))
        self._programs = max(1, num_programs // max(kv_heads))
        width = max((padded(values.shape[3]) for values in cache.values), default=padded(1))
        self._part_rows = _PARTIAL_SUMS // (max(kv_heads) * width)
        self._sums = torch.empty(max(kv_heads) * self._part_rows * width, device=device)
        self._peaks = torch.empty(max(kv_heads) * self._part_rows, 2, device=device)

    @property
    def cache(self) -> KVCache:
        """The KV cache it attends to."""
        return self._cache

    @property
    def exact(self) -> bool:
        """Whether a row's bits are independent of the batch."""
        return self._exact

    def plan(self, batch: Batch) -> AttentionPlan:
        """The step's work, on the host."""
        return make_plan(batch, self._tiling(is_decoding=longest_run(batch) <= _DECODED_TOKENS), self._cache.num_groups)

    def upload(self, plan: AttentionPlan) -> TritonMetadata:
        """Upload the plan to newly allocated buffers."""
        most_numbers = max(of_group.num_numbers for of_group in (plan, *plan.groups))
        metadata = self._metadata(len(plan.slots), most_numbers, plan.block_m)
        metadata.load(plan)
        for one in (metadata, *metadata.groups):
            one.has_merges = len(plan.merges) > 0
            one.has_lasts = len(plan.lasts) > 0
        return metadata

    def reserve(self, max_tokens: int, max_blocks: int | None = None) -> TritonMetadata:
        """Buffers with room for the plan of any decoding batch of up to `max_tokens` tokens.

        No choice has more than `max_blocks` blocks; None for all blocks of the cache.
        """
        tiling = self._tiling(is_decoding=True)
        max_blocks = self._cache.num_blocks if max_blocks is None else max_blocks
        items = max_tokens + tiling.part_rows // tiling.group
        merges = min(max_tokens * tiling.group, tiling.part_rows)
        paths = max_tokens * (max_tokens + 1) // 2  # if each token follows the one before
        numbers = HEADER + items * ITEM + merges * MERGE + paths + max_tokens * max_blocks
        return self._metadata(max_tokens, numbers, tiling.block_m)

    def prepare(self, batch: Batch) -> TritonMetadata:
        return self.upload(self.plan(batch))

    def layouts(self, batch: Batch) -> Mapping[str, TritonMetadata]:
        """Metadata with keys split between programs, and with all keys in one program."""
        tiling = self._tiling(is_decoding=longest_run(batch) <= _DECODED_TOKENS)
        num_groups = self._cache.num_groups
        cut = make_plan(batch, replace(tiling, programs=_PROGRAMS_FOR_ALL), num_groups)
        whole = make_plan(batch, replace(tiling, part_rows=0), num_groups)
        return {"keys split": self.upload(cut), "keys not split": self.upload(whole)}

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: TritonMetadata
    ) -> Tensor:
        write_kv(key, value, self.slots(layer, metadata), cache_layer(self._cache, layer))
        return self.attend(layer, query, options, metadata)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: TritonMetadata) -> Tensor:
        """The output [tokens, heads, value_dim] for cached keys and values; zeros for padding rows.

        Products use the type of the queries if the cache has scales, and otherwise the type of the cache: draft heads,
        in float32, share it with a model in half precision.
        """
        cache, metadata = self._cache, self._of_layer(metadata, layer)
        rows = query if cache.dtype in LARGEST else query.to(cache.dtype)
        scales = (s[layer] if s else None for s in (cache.key_scales, cache.value_scales))
        step = Step(
            plan=metadata.plan,
            block_m=metadata.block_m,
            programs=self._programs,
            has_merges=metadata.has_merges,
            has_lasts=metadata.has_lasts,
            part_rows=self._part_rows,
            sums=self._sums,
            peaks=self._peaks,
        )
        out = rows.new_empty(*rows.shape[:2], cache.values[layer].shape[3])
        kv = LayerKV(cache.keys[layer], cache.values[layer], *scales)
        limits = options.window, options.softcap, options.chunk
        scoring = ScoreOptions(options.scale, *limits, options.sinks, options.sees_spans)
        attend(rows, kv, step, scoring, out)
        return out.to(query.dtype)

    def slots(self, layer: int, metadata: TritonMetadata) -> Tensor:
        """[T] int64 slots of the step's tokens in the blocks of the layer's cache group, as `write_kv` takes them."""
        return self._of_layer(metadata, layer).slots

    def _of_layer(self, metadata: TritonMetadata, layer: int) -> TritonMetadata:
        group = self._cache.group_of[layer]
        return metadata.groups[group - 1] if group else metadata

    def _metadata(self, max_tokens: int, num_numbers: int, block_m: int) -> TritonMetadata:
        tile_tokens = block_m // self._group
        device, num_groups = self._cache.device, self._cache.num_groups
        return TritonMetadata(max_tokens, num_numbers, block_m, tile_tokens, device, num_groups)

    def _tiling(self, *, is_decoding: bool) -> Tiling:
        block_m = _EXACT_M
        if not self._exact and not is_decoding and self._is_narrow:
            block_m = _PROMPT_M
        elif not self._exact and self._group <= _DECODING_M:
            block_m = _DECODING_M
        return Tiling(self._cache.block_size, self._group, block_m, self._programs, self._part_rows)
