"""The trial of attention at the start: backends as they are pass it, and those that break their promise do not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.trial import first_difference
from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, KVShape
from model_runner.platforms.cpu import CpuPlatform
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from tests.model_runner.oracles.attention import ReferenceAttention

CPU = torch.device("cpu")
SHAPES = (KVShape(2, 16, 16, 2), KVShape(2, 16, 16, 2), KVShape(1, 8, 24, 3), KVShape(1, 16, 0, 4))
TYPES = (torch.float32, torch.bfloat16, torch.int8)


def make_cache(dtype: torch.dtype = torch.float32, num_blocks: int = 12) -> KVCache:
    return KVCache(SHAPES, num_blocks, 32, dtype, CPU)


@pytest.mark.parametrize("num_blocks", [1, 2, 12])
@pytest.mark.parametrize("dtype", TYPES)
def test_backends_keep_their_promise(dtype: torch.dtype, num_blocks: int, kernels_library: Path) -> None:
    for make in (ReferenceAttention, lambda cache: NativeAttention(Kernels(kernels_library, 2), cache)):
        cache = make_cache(dtype, num_blocks)
        assert first_difference(make(cache), cache, torch.float32) is None


class Straying(ReferenceAttention):
    """Rounds otherwise where its test says so."""

    strays: Callable[[Batch, str], bool]

    def prepare(self, batch: Batch) -> Any:
        return super().prepare(batch), self.strays(batch, "")

    def layouts(self, batch: Batch) -> Mapping[str, Any]:
        prepared = ReferenceAttention.prepare(self, batch)
        return {name: (prepared, self.strays(batch, name)) for name in ("split", "not split")}

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Any, metadata: Any) -> Tensor:
        prepared, strays = metadata
        result = super().forward(layer, query, key, value, options, prepared)
        return result.nextafter(result + 1) if strays else result

    def select(
        self, layer: int, query: Tensor, key: Tensor, weights: Tensor | None, options: Any, metadata: Any
    ) -> Tensor:
        result = super().select(layer, query, key, weights, options, metadata[0])
        return ~result if metadata[1] else result


@pytest.mark.parametrize(
    ("strays", "how"),
    [
        (lambda batch, _: len(batch.positions) > 1, "in the middle of a prompt, split"),
        (lambda batch, _: len(batch.block_tables) > 1, "with others, split"),
        (lambda batch, name: name == "not split" and batch.positions[0] > 255, "alone, not split"),
        (lambda batch, name: name == "split" and len(batch.block_tables) > 1, "with others, split"),
    ],
    ids=["longer", "with others", "not split", "split beside others"],
)
def test_a_backend_that_rounds_otherwise_is_found_out(strays: Callable[[Batch, str], bool], how: str) -> None:
    cache = make_cache()
    backend = Straying(cache)
    backend.strays = strays
    assert first_difference(backend, cache, torch.float32) == how


def test_every_shape_of_layers_is_tried() -> None:
    tried = set()

    class Noting(ReferenceAttention):
        def forward(self, layer: int, *arguments: Any) -> Tensor:
            tried.add(layer)
            return super().forward(layer, *arguments)

    cache = make_cache()
    assert first_difference(Noting(cache), cache, torch.float32) is None
    assert tried == {0, 2}


def test_a_model_whose_attention_fails_is_not_served(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(platform: CpuPlatform, cache: KVCache) -> AttentionBackend[Any]:
        backend = Straying(cache)
        backend.strays = lambda batch, _: len(batch.positions) > 1
        return backend

    monkeypatch.setattr(CpuPlatform, "attention", attention)
    with pytest.raises(UnsupportedModelError, match=r"rounds a row differently in the middle of a prompt, split than"):
        ModelRunner.load(RunnerConfig(tiny_model("llama"), kv_cache_gib=0.02))
