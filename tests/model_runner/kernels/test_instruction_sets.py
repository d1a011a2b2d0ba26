"""All instruction sets give the same bits, so that a model answers the same on every processor."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.cpu import NativeAttention
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import HydraProposer
from tests.model_runner.kernels.conftest import ISAS
from tests.model_runner.kernels.decoder_runs import LENGTHS, FusedModel
from tests.model_runner.kernels.drafting import (
    CASES,
    Case,
    choice_step,
    prepared,
    random_embedding,
    random_features,
    random_heads,
    target_step,
)
from tests.model_runner.sequences import (
    CROWD,
    OPTIONS,
    SMALL_CHUNKS_AND_SINKS,
    WINDOW_AND_SINKS,
    Sequences,
    Sizes,
    Storage,
    random_tree,
)

PLAIN, NARROW, ONE_BLOCK, CAPPED = OPTIONS
SIZES: dict[WeightKind, dict[str, int]] = {
    "int8": {"hidden_size": 72},  # no multiple of a vector
    "int4": {"hidden_size": 64, "head_dim": 24, "intermediate_size": 96},  # whole groups in every linear
}


@pytest.fixture(scope="module")
def teams(kernels_library: Path) -> list[Kernels]:
    """Portable kernels, then those for each instruction set that this machine has."""
    teams = []
    for isa in ISAS:
        try:
            teams.append(Kernels(kernels_library, threads=1, isa=isa))
        except NoKernelsError:
            continue
    if len(teams) < 2:
        pytest.skip("this machine has no instruction set but the portable one")
    return teams


def assert_same(results: list[Tensor]) -> None:
    for result in results[1:]:
        assert torch.equal(result, results[0])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "inputs"), [("int8", 5), ("int8", 577), ("int4", 64), ("int4", 1536)])
def test_linears(teams: list[Kernels], kind: WeightKind, inputs: int) -> None:
    weight, bias, rows = random(53, inputs), random(53, seed=1), random(13, inputs, seed=2)
    weight[7] *= 1e-35
    rows[3] *= 1e30
    rows[4] *= 1e-35
    packed = [(kernels, kernels.pack(kind, weight, bias)) for kernels in teams]
    assert_same([each.scales for _, each in packed])
    assert_same([each.packed for _, each in packed])
    assert_same([kernels.linear(each, rows) for kernels, each in packed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("sizes", "block_size", "options"),
    [
        (Sizes(6, 2, key_dim=20, value_dim=100), 16, CAPPED),
        (Sizes(6, 2, key_dim=25, value_dim=37), 48, NARROW),
        (Sizes(9, 3, key_dim=64, value_dim=64), 32, PLAIN),
        (Sizes(7, 1, key_dim=96, value_dim=80), 64, ONE_BLOCK),
        (Sizes(9, 3, key_dim=64, value_dim=64), 32, WINDOW_AND_SINKS),
        (Sizes(6, 2, key_dim=20, value_dim=100), 16, SMALL_CHUNKS_AND_SINKS),
    ],
)
def test_attention(
    teams: list[Kernels], sizes: Sizes, block_size: int, options: AttentionOptions, dtype: torch.dtype
) -> None:
    sequences = Sequences.random([83, 40, 1, 17], sizes)
    tree = [[(0, 0, 43)], [(0, 43, 83, random_tree(40, seed=0))]]
    for steps in (CROWD, tree):
        outputs = [
            sequences.attend(steps, options, lambda cache, kernels=kernels: NativeAttention(kernels, cache), storage)
            for kernels in teams
            for storage in [Storage(dtype, block_size)]
        ]
        assert_same([torch.cat(output).nan_to_num(7.0) for output in outputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_numbers_of_all_magnitudes(teams: list[Kernels], dtype: torch.dtype) -> None:
    """AVX512-BF16 alone would flush subnormal numbers to zero."""
    sequences = Sequences.random([70], Sizes(6, 2))
    exponents = torch.empty(70, 2, 32).uniform_(-42, 1, generator=torch.Generator().manual_seed(3))
    sequences.value[0].mul_(10**exponents)
    sequences.value[0][:, :, 3:6] *= 1e-38
    sequences.key[0].mul_(10 ** exponents[..., :24])
    outputs = [
        sequences.attend([[(0, 0, 70)]], PLAIN, lambda cache, kernels=kernels: NativeAttention(kernels, cache), storage)
        for kernels in teams
        for storage in [Storage(dtype)]
    ]
    assert_same([output[0] for output in outputs])
    assert outputs[0][0].isfinite().all()


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("case", ["llama with biases", "gemma2", "qwen3", "granite", "qwen3_5_text"])
def test_models(teams: list[Kernels], case: str, kind: WeightKind) -> None:
    """Whole decoder layers, one on the other: norms of many widths, both activations, windows and soft caps,
    gates and recurrences.
    """
    step = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]
    logits = [torch.cat(FusedModel(case, kernels, kind, **SIZES[kind]).logits([step])) for kernels in teams]
    assert logits[0].isfinite().all()
    assert_same(logits)


@pytest.mark.parametrize("case", CASES)
def test_drafts(teams: list[Kernels], case: Case) -> None:
    """Trees are equal with all confidences."""
    step = target_step([choice_step(index, 12) for index in range(25)], random_features(case))
    heads, embedding = random_heads(case), random_embedding(case)
    drafts = [
        HydraProposer(prepared(kernels, heads), embedding, GrowthLimits(case.depth)).propose(step) for kernels in teams
    ]
    assert any(drafts[0])
    assert all(draft == drafts[0] for draft in drafts)


def test_a_difference_in_the_last_bit_would_be_found_out() -> None:
    numbers = random(3, 5)
    other = numbers.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(torch.inf))
    with pytest.raises(AssertionError):
        assert_same([numbers, other])
