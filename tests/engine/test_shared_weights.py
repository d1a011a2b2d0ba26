"""A model in several roles is loaded once, and answers and drafts as if it had been loaded for each."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_runner.config import Quantization, RunnerConfig
from model_runner.contract import Contrastive, DoLa, SamplingParams, Speculation
from model_runner.native.model import NativeTargetModel
from model_runner.platforms.cpu import CpuPlatform
from model_runner.runner import ModelRunner
from model_runner.spec.model_shape import ModelShape
from scheduler.interface import EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Answer, Harness

DRAFTING = Speculation("draft_model", 4)
CONTRASTIVE = SamplingParams(seed=1, logprobs=2, contrastive=Contrastive())
REQUESTS = [
    EngineRequest("drafting", tuple(range(3, 23)) * 3, SamplingParams(seed=2, logprobs=2), 24, speculation=DRAFTING),
    EngineRequest("contrastive", tuple(range(4, 20)) * 2, CONTRASTIVE, 24),
    EngineRequest("both", tuple(range(5, 21)) * 4, CONTRASTIVE, 24, speculation=DRAFTING),
    EngineRequest("layers", tuple(range(3, 17)), SamplingParams(seed=3, logprobs=2, dola=DoLa("low")), 24),
]


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize(
    ("family", "quantization"), [("llama", "auto"), ("llama", "none"), ("qwen3_moe", "auto"), ("gemma2", "int4")]
)
def test_roles_of_one_folder_are_those_of_separate_copies(
    family: str,
    quantization: Quantization,
    is_target: bool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = tiny_model(family, SMALL_VOCAB)
    model = beside if is_target else tiny_model("qwen3", SMALL_VOCAB)
    copies = [shutil.copytree(beside, tmp_path / name) for name in ("draft", "aux")]
    loaded: list[Path] = []
    load = CpuPlatform.load

    def noting(self: CpuPlatform, folder: Path, shape: ModelShape) -> object:
        loaded.append(folder)
        return load(self, folder, shape)

    monkeypatch.setattr(CpuPlatform, "load", noting)

    def answers(draft: Path, aux: Path) -> dict[tuple[str, int], Answer]:
        config = RunnerConfig(
            model, draft_model=draft, aux_model=aux, quantization=quantization, kv_cache_gib=0.02, max_num_seqs=8
        )
        harness = Harness(ModelRunner.load(config))
        return harness.run(harness.engine(), REQUESTS)

    apart = answers(*copies)
    assert len(loaded) == 3
    together = answers(beside, beside)
    assert loaded[3:] == ([model] if is_target else [model, beside])
    assert together == apart
    assert all(apart[name, 0].num_accepted > 0 for name in ("drafting", "both"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_each_role_writes_to_its_own_cache(family: str, tiny_model: Callable[..., Path]) -> None:
    """As they write the same there, no answer would tell."""
    model = tiny_model(family, SMALL_VOCAB)
    config = RunnerConfig(model, draft_model=model, aux_model=model, kv_cache_gib=0.02, max_num_seqs=8)
    harness = Harness(ModelRunner.load(config))
    drafter = harness.runner._drafter
    assert isinstance(drafter, NativeTargetModel)
    target, aux = harness.runner._caches

    def written(request: EngineRequest) -> list[bool]:
        caches = [target, drafter._attention.cache, aux]
        before = [[layer.clone() for layer in cache.keys] for cache in caches]
        harness.run(harness.engine(prefix_caching=False), [request])
        return [
            all(not torch.equal(old, new) for old, new in zip(layers, cache.keys, strict=True))
            for layers, cache in zip(before, caches, strict=True)
        ]

    drafting, contrastive = REQUESTS[:2]
    assert written(drafting) == [True, True, False]
    assert written(contrastive) == [True, False, True]
    harness.forget()
