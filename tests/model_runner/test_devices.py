"""Device-independent code never mixes tensors of two devices: on a simulated device it returns the CPU's results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.contract import BlockCopy, Contrastive, SamplingParams
from model_runner.draft_tree import DraftDistribution, Fork
from model_runner.kv_cache import KVCache, KVShape, Move
from model_runner.sampling.logprobs import prompt_logprobs
from model_runner.sampling.sampler import Draw, Sampler
from model_runner.scoring.contrastive_search import HiddenStates
from model_runner.scoring.transforms import contrast
from model_runner.speculative.verify import RejectionDraw, TypicalDraw
from tests.model_runner.elsewhere import ELSEWHERE, elsewhere, there
from tests.model_runner.oracles.attention import read_blocks
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.sampling.cases import OUTPUT, PROMPT, SETTINGS
from tests.model_runner.sampling.harness import CPU, Case, random_logits, rows_of

SIZE = 1003


def both(run: Callable[[torch.device, Callable[[Tensor], Tensor]], Any]) -> tuple[Any, Any]:
    """Results on the CPU and on the other device; `run` gets the device and a function that moves a tensor to it."""
    on_cpu = run(CPU, Tensor.clone)
    with elsewhere() as device:
        return on_cpu, run(device, there)


def test_two_devices_do_not_mix() -> None:
    with elsewhere():
        one = torch.ones(3, device=ELSEWHERE)
        assert one.device == ELSEWHERE == (one + 1).device
        assert one.is_cuda
        assert one.cpu().device == CPU
        with pytest.raises(RuntimeError, match="on the CPU and on the device"):
            one + torch.ones(3)
        with pytest.raises(TypeError):
            one.numpy()
        assert (one + torch.ones(3).to(one.device) + 1).tolist() == [3.0] * 3


@pytest.mark.parametrize("kinds", [[kind] for kind in SETTINGS.values()] + [list(SETTINGS.values())])
def test_sampling(kinds: Sequence[SamplingParams]) -> None:
    cases = [Case(replace(kind, seed=seed, logprobs=2), PROMPT, OUTPUT) for seed, kind in enumerate([*kinds, kinds[0]])]

    def run(device: torch.device, bring: Callable[[Tensor], Tensor]) -> object:
        return Sampler(TorchDraw(SIZE, device))(bring(random_logits(len(cases), SIZE, 5)), rows_of(cases, SIZE, device))

    on_cpu, found = both(run)
    assert found.tokens == on_cpu.tokens
    assert found.errors == on_cpu.errors


@pytest.mark.parametrize("kind", [RejectionDraw, TypicalDraw])
def test_tests_of_drafts(kind: Callable[[Sequence[Fork], Draw], Draw]) -> None:
    cases = [Case(SamplingParams(temperature=0.8, seed=seed)) for seed in range(3)]
    drawn = DraftDistribution(torch.tensor([5, 7, 9]), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    forks = [Fork((5, 7), drawn), Fork((3,), None), Fork((), None)]

    def run(device: torch.device, bring: Callable[[Tensor], Tensor]) -> object:
        draw = kind(forks, TorchDraw(SIZE, device))
        return draw(bring(random_logits(3, SIZE, 6)), rows_of(cases, SIZE, device))

    on_cpu, found = both(run)
    assert found == on_cpu


def test_scores_and_reports() -> None:
    settings = [Contrastive(1.5, 0.5, 1.0)] * 4

    def run(device: torch.device, bring: Callable[[Tensor], Tensor]) -> object:
        one, other = bring(random_logits(4, SIZE, 1)), bring(random_logits(4, SIZE, 2))
        states = HiddenStates(20)
        states.put(0, one[:3])
        states.put(3, one[3:])
        return (
            contrast(one, other, settings).tolist(),
            prompt_logprobs(one, torch.tensor([5, 6, 7, 8]), 3),
            states.similarity(other, 4),
        )

    on_cpu, found = both(run)
    assert found[0] == on_cpu[0]
    assert found[1] == on_cpu[1]
    assert found[2] == pytest.approx(on_cpu[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_cache(dtype: torch.dtype) -> None:
    def run(device: torch.device, bring: Callable[[Tensor], Tensor]) -> object:
        cache = KVCache([KVShape(2, 16, 16)], 6, 4, dtype, device, whole_keys=True)
        key, value = (bring(torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(seed))) for seed in (0, 1))
        cache.write(0, key, value, bring(torch.tensor([0, 0, 3])), bring(torch.tensor([0, 3, 1])))
        cache.copy_blocks([BlockCopy(0, 2), BlockCopy(3, 4)])
        cache.move([Move(2, 3, 5, 0)])
        return [tensor.float().tolist() for tensor in read_blocks(cache, 0, bring(torch.arange(6)))]

    on_cpu, found = both(run)
    assert found == on_cpu
