"""The memory of an engine process, planned before it is loaded: a load follows the plan."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model_runner.assemble import assemble
from model_runner.config import RunnerConfig
from model_runner.model_needs import DoesNotFitError
from model_runner.planning import plan_model
from model_runner.platforms.memory import GIB

IMPORTED = 150 << 20
MIB = 1 << 20
PLENTY = {"cpu": GIB}


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> RunnerConfig:
    return RunnerConfig(tiny_model("llama"), device="cpu")


def test_a_load_gets_the_planned_cache_whatever_else_is_in_memory(
    llama: RunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = plan_model(llama, IMPORTED, {"cpu": 200 * MIB}, cache_share=0.3)
    assert 0 < needs.num_tokens < 64 * 1024  # the cache is smaller than what is of use
    for free in (GIB // 4, 100 * GIB):
        monkeypatch.setattr("model_runner.platforms.cpu.free_memory", lambda free=free: free)
        assert plan_model(llama, IMPORTED, {"cpu": 200 * MIB}, cache_share=0.3) == replace(needs, free_bytes=free)
        parts, info = assemble(replace(llama, kv_cache_gib=needs.kv_cache_gib))
        assert (info.max_model_len, info.num_blocks * info.block_size) == (needs.max_model_len, needs.num_tokens)
        cache = parts.caches[0]
        tensors = [*cache.keys, *cache.values]  # type: ignore[attr-defined]
        assert sum(tensor.nbytes for tensor in tensors) == needs.cache_bytes  # and nothing that no plan counts


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_plan_stays_within_what_it_may_take(tiny_model: Callable[[str], Path], model: str) -> None:
    config = RunnerConfig(tiny_model(model), device="cpu")
    refused = 0
    for free in range(150 * MIB, 420 * MIB, 20 * MIB):
        try:
            needs = plan_model(config, IMPORTED, {"cpu": free})
        except DoesNotFitError:
            assert not refused or free < refused + 21 * MIB  # only the smallest
            refused = free
        else:
            assert needs.reserved_bytes <= free
            assert needs.reserved_bytes >= IMPORTED + needs.cache_bytes + needs.weight_bytes
    assert refused


def test_a_step_needs_more_with_more_rows_and_choices(llama: RunnerConfig) -> None:
    steps = [
        plan_model(replace(llama, max_num_batched_tokens=tokens, max_num_seqs=seqs), IMPORTED, PLENTY).step_bytes
        for tokens, seqs in ((64, 8), (512, 8), (512, 64))
    ]
    assert steps == sorted(set(steps))


def test_a_model_that_transformers_runs_needs_memory_for_it(llama: RunnerConfig) -> None:
    native, other = (plan_model(replace(llama, quantization=kind), IMPORTED, PLENTY) for kind in ("int8", "none"))
    assert other.process_bytes - native.process_bytes > 100 * MIB


def test_damage_is_named_and_does_not_stop_later_plans(llama: RunnerConfig, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(llama.model, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"nothing")
    for folder in (tmp_path / "missing", damaged):
        with pytest.raises((ValueError, OSError), match=folder.name):
            plan_model(replace(llama, model=folder), IMPORTED, PLENTY)
    assert plan_model(llama, IMPORTED, PLENTY).max_model_len == 1024
