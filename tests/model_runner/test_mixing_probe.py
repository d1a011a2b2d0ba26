"""The startup check that finds models whose tokens meet outside of attention."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.tiny_models import write_tiny_model
from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.mixing_probe import ProbedCache, mixes_tokens
from model_runner.modules import call
from model_runner.platforms.cpu import CpuPlatform
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from model_runner.state import RunnerState
from model_runner.target import LoadedModel, TargetModel

CACHE = ProbedCache(num_blocks=8, block_size=32, max_model_len=256)
VOCAB = 50


def load(folder: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(RunnerConfig(folder, device="cpu", kv_cache_gib=0.01, **settings))


@pytest.mark.parametrize("family", ["zaya", "falcon_h1", "lfm2"])
def test_models_with_mixers_that_are_not_hooked_are_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(family, tmp_path)
    monkeypatch.setattr(call, "hook_modules", lambda model, current: None)
    with pytest.raises(
        UnsupportedModelError, match=r"other logits in chunks next to another request .*model-types\.md"
    ):
        load(tmp_path, quantization="none")


def test_positions_by_the_place_in_the_row_are_refused(tmp_path: Path) -> None:
    write_tiny_model("bart", tmp_path)
    with pytest.raises(UnsupportedModelError, match="its positions are not those of the request"):
        load(tmp_path, quantization="none")


def test_only_models_of_foreign_code_are_probed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[type] = []

    def may_mix(platform: CpuPlatform, model: LoadedModel) -> bool:
        probed.append(type(model))
        return original(platform, model)

    original = CpuPlatform.may_mix
    monkeypatch.setattr(CpuPlatform, "may_mix", may_mix)
    monkeypatch.setattr("model_runner.assemble.mixes_tokens", lambda *_, **__: True)
    load(tiny_model("llama"))  # native, so the probe's result does not matter
    with pytest.raises(UnsupportedModelError, match="computes other logits"):
        load(tiny_model("llama"), quantization="none")
    assert [one.__name__ for one in probed] == ["NativeModel", "LlamaForCausalLM"]


class OfRows:
    """A target whose logits follow from each row's token, its position, and what `seen` adds."""

    def __init__(self, seen: Callable[[Batch], Tensor]) -> None:
        self._seen = seen
        self.lengths: list[int] = []

    def forward(self, batch: Batch, also: Collection[str] = (), picks: Any = None, follows: Any = None) -> Tensor:
        self.lengths.append(len(batch.tokens))
        tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
        rows = (tokens * 7 + positions * 3 + self._seen(batch)).float()
        return rows[batch.logits_index, None] + torch.arange(VOCAB)


TARGETS: dict[str, Callable[[Batch], Tensor]] = {
    "nothing": lambda batch: torch.zeros(len(batch.tokens), dtype=torch.int64),
    "the row before": lambda batch: torch.from_numpy(batch.tokens).roll(1),
    "its place in the row": lambda batch: torch.arange(len(batch.tokens)),
    "how many rows there are": lambda batch: torch.full((len(batch.tokens),), len(batch.tokens)),
}


@pytest.fixture(scope="module")
def state(tiny_model: Callable[[str], Path]) -> RunnerState:
    return load(tiny_model("llama"))._state


@pytest.mark.parametrize("tolerance", [0.0, 0.03])
@pytest.mark.parametrize("seen", TARGETS)
def test_what_a_row_may_see(seen: str, tolerance: float, state: RunnerState) -> None:
    target: TargetModel = OfRows(TARGETS[seen])  # type: ignore[assignment]
    assert mixes_tokens(target, state, CACHE, VOCAB, tolerance) == (seen != "nothing")


@pytest.mark.parametrize(
    ("num_blocks", "longest", "lengths"), [(8, 256, [45, 28, 28]), (2, 256, [32, 18, 21]), (8, 9, [])]
)
def test_small_caches(num_blocks: int, longest: int, lengths: list[int], state: RunnerState) -> None:
    target = OfRows(TARGETS["nothing"])
    cache = ProbedCache(num_blocks, block_size=32, max_model_len=longest)
    assert not mixes_tokens(target, state, cache, VOCAB, 0.0)  # type: ignore[arg-type]
    assert target.lengths == lengths or not lengths


def test_rounding_is_no_mixing_where_results_need_not_be_exact(state: RunnerState) -> None:
    target: TargetModel = OfRows(lambda batch: torch.full((len(batch.tokens),), len(batch.tokens)) * 1e-3)  # type: ignore[assignment]
    assert mixes_tokens(target, state, CACHE, VOCAB, 0.0)
    assert not mixes_tokens(target, state, CACHE, VOCAB, 0.03)
