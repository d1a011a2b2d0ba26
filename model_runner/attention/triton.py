"""Paged attention on CUDA, by Triton's kernels."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from model_runner.attention.attention_plan import AttentionPlan, Cutting, empty_items, longest_run, make_plan
from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.triton.attention import HEADER, ITEM, MERGE, LayerKV, Step, attend, padded
from model_runner.kernels.triton.kv_write import CacheLayer, write_kv
from model_runner.kv_cache import LARGEST, KVCache


def cache_layer(cache: KVCache, layer: int) -> CacheLayer:
    """Where the kernels find a layer's keys and values."""
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.key_scales else (None, None)
    return CacheLayer(cache.keys[layer], cache.values[layer], *scales)


_EXACT_M = 64
"""Rows of a tile in exact mode: those of a Hopper tensor core's wide products, for a single token as for a prompt."""
_DECODING_M, _PROMPT_M = 16, 128
_DECODED_TOKENS = 32
"""A batch where no choice has more tokens is one of decoding and verification, if that may matter."""
_PROGRAMS_OF_AN_SM = 2
"""That fit at once, by their registers and shared memory."""
_PROGRAMS_FOR_ALL = 1 << 20
"""More than any step has work for."""
_PARTIAL_SUMS = 2**23
"""Numbers, in 32 MiB: the splits of half a million positions, with 32 heads of 128 numbers."""


class TritonMetadata:
    """A plan in device memory. Tensors stay at their addresses, so that a CUDA graph can be replayed with other plans.

    Attributes:
        slots: [tokens] int64, where keys and values of the step go, block * block_size + offset; -1 for no token.
        block_m: rows of a tile.
        plan: [...] int32, see the kernels' HEADER.
    """

    def __init__(self, max_tokens: int, num_numbers: int, block_m: int, tile_tokens: int, device: torch.device) -> None:
        """Room for plans of so many tokens at most, that take so many numbers beside the slots."""
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

    def load(self, plan: AttentionPlan, num_rows: int | None = None) -> None:
        """Take over a plan, without waiting for the device.

        Args:
            plan: of a step.
            num_rows: of the step with those that fill it up; all that there is room for if it is None. Rows without a
                token get the slot -1, and zeros for output.

        Raises:
            ValueError: if there is no room for it, or it has tiles of another size.
        """
        num_tokens, max_tokens = len(plan.slots), len(self.slots)
        num_rows = max_tokens if num_rows is None else num_rows
        if plan.block_m != self.block_m:
            raise ValueError(f"this metadata takes plans with tiles of {self.block_m} rows, not {plan.block_m}")
        items = np.concatenate([plan.items, empty_items(num_tokens, num_rows, self._tile_tokens)])
        at = np.cumsum([HEADER, items.size, plan.merges.size, plan.paths.size, plan.tables.size])
        if not num_tokens <= num_rows <= max_tokens or at[-1] > len(self.plan):
            needs = f"{num_tokens} tokens and {at[-1]} numbers"
            raise ValueError(f"there is room for {max_tokens} tokens and {len(self.plan)} numbers, not for {needs}")
        if self._copied is not None:
            self._copied.synchronize()  # until the plan before has left the staging memory
        staging = self._staging.numpy()
        staging[:num_tokens], staging[num_tokens:max_tokens] = plan.slots, -1
        numbers = staging[max_tokens:].view(np.int32)
        numbers[:5] = len(items), len(plan.merges), *at[1:4]
        for part, start, end in zip((items, plan.merges, plan.paths, plan.tables), at[:-1], at[1:], strict=True):
            numbers[start:end] = part.ravel()
        used = max_tokens + -(-int(at[-1]) // 2)
        self._device[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class TritonAttention(AttentionBackend[TritonMetadata]):
    """Attention on CUDA.

    Exact mode keeps the backend's guarantee. Without it, tiles are smaller where choices have few tokens and larger
    elsewhere, so that a row may round otherwise in another batch.

    A value that is not finite makes the whole of a row's head NaN where the tile's rows do not all see it.
    """

    needs_clean_blocks = False

    def __init__(self, cache: KVCache, *, exact: bool, num_heads: int, num_programs: int | None = None) -> None:
        """For queries of so many heads.

        Args:
            cache: with whole keys.
            exact: see the class.
            num_heads: of a query, in all layers.
            num_programs: that run at once; None: as many as the device takes.

        Raises:
            ValueError: for a cache without whole keys, or more heads for a key-value head than rows in a tile.
        """
        device = cache.keys[0].device
        kv_heads = [keys.shape[1] for keys in cache.keys]
        self._group = num_heads // min(kv_heads)
        if not cache.keys[0].mT.is_contiguous():
            raise ValueError("the Triton attention reads only caches with whole keys")
        if self._group > _EXACT_M:
            raise ValueError(f"a key-value head has {self._group} heads; the Triton attention takes {_EXACT_M} at most")
        if num_programs is None:
            num_programs = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_OF_AN_SM
        self._cache, self._exact = cache, exact
        self._is_narrow = all(max(k.shape[2], v.shape[3]) <= 128 for k, v in zip(cache.keys, cache.values, strict=True))
        self._programs = max(1, num_programs // max(kv_heads))
        width = max(padded(values.shape[3]) for values in cache.values)
        self._part_rows = _PARTIAL_SUMS // (max(kv_heads) * width)
        self._sums = torch.empty(max(kv_heads) * self._part_rows * width, device=device)
        self._peaks = torch.empty(max(kv_heads) * self._part_rows, 2, device=device)

    @property
    def cache(self) -> KVCache:
        """What it attends to."""
        return self._cache

    @property
    def exact(self) -> bool:
        """See the class."""
        return self._exact

    def plan(self, batch: Batch) -> AttentionPlan:
        """The step's work, on the host."""
        return make_plan(batch, self._cutting(is_decoding=longest_run(batch) <= _DECODED_TOKENS))

    def upload(self, plan: AttentionPlan) -> TritonMetadata:
        """The plan in tensors of its own."""
        metadata = self._metadata(len(plan.slots), plan.num_numbers, plan.block_m)
        metadata.load(plan)
        metadata.has_merges = len(plan.merges) > 0
        return metadata

    def reserve(self, max_tokens: int, max_blocks: int | None = None) -> TritonMetadata:
        """Tensors with room for the plan of any batch, of decoding if that matters, of so many tokens.

        No choice has more than `max_blocks` blocks; None: all that there are.
        """
        cutting = self._cutting(is_decoding=True)
        max_blocks = self._cache.num_blocks if max_blocks is None else max_blocks
        items = max_tokens + cutting.part_rows // cutting.group
        merges = min(max_tokens * cutting.group, cutting.part_rows)
        paths = max_tokens * (max_tokens + 1) // 2  # if each token follows the one before
        numbers = HEADER + items * ITEM + merges * MERGE + paths + max_tokens * max_blocks
        return self._metadata(max_tokens, numbers, cutting.block_m)

    def prepare(self, batch: Batch) -> TritonMetadata:
        return self.upload(self.plan(batch))

    def layouts(self, batch: Batch) -> Mapping[str, TritonMetadata]:
        """Metadata for keys in splits, each in a program of its own, and for all keys in one program."""
        cutting = self._cutting(is_decoding=longest_run(batch) <= _DECODED_TOKENS)
        cut = make_plan(batch, replace(cutting, programs=_PROGRAMS_FOR_ALL))
        whole = make_plan(batch, replace(cutting, part_rows=0))
        return {"keys split": self.upload(cut), "keys not split": self.upload(whole)}

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: TritonMetadata
    ) -> Tensor:
        write_kv(key, value, metadata.slots, cache_layer(self._cache, layer))
        return self.attend(layer, query, options, metadata)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: TritonMetadata) -> Tensor:
        """The output [tokens, heads, value_dim] where keys and values are in the cache; zeros for rows of no token.

        The products are in the type of the queries where the cache has scales, else in the cache's: draft heads, in
        float32, share it with a model in half precision.
        """
        cache = self._cache
        rows = query if cache.dtype in LARGEST else query.to(cache.dtype)
        scales = (s[layer] if s else None for s in (cache.key_scales, cache.value_scales))
        step = Step(
            plan=metadata.plan,
            block_m=metadata.block_m,
            programs=self._programs,
            has_merges=metadata.has_merges,
            part_rows=self._part_rows,
            sums=self._sums,
            peaks=self._peaks,
        )
        out = rows.new_empty(*rows.shape[:2], cache.values[layer].shape[3])
        kv = LayerKV(cache.keys[layer], cache.values[layer], *scales)
        attend(rows, kv, step, options.scale, options.window, options.softcap, out)
        return out.to(query.dtype)

    def _metadata(self, max_tokens: int, num_numbers: int, block_m: int) -> TritonMetadata:
        tile_tokens = block_m // self._group
        return TritonMetadata(max_tokens, num_numbers, block_m, tile_tokens, self._cache.keys[0].device)

    def _cutting(self, *, is_decoding: bool) -> Cutting:
        block_m = _EXACT_M
        if not self._exact and not is_decoding and self._is_narrow:
            block_m = _PROMPT_M
        elif not self._exact and self._group <= _DECODING_M:
            block_m = _DECODING_M
        return Cutting(self._cache.block_size, self._group, block_m, self._programs, self._part_rows)
