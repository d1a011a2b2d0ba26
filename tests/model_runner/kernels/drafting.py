"""Random Hydra heads and steps to draft after."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_runner.contract import SamplingParams
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.modules.linears import OneDNNPacker, pack_weights
from model_runner.native.packer import NativePacker
from model_runner.speculative.proposer import ChoiceStep, TargetStep

VOCABULARY = 2711  # of the target
TEMPERATURES = (0.0, 1.0, 0.6, 0.0, 1.7)
ROWS = 200  # of features


@dataclass(frozen=True, slots=True)
class Case:
    """Heads of one shape."""

    hidden: int
    depth: int = 3
    num_layers: int = 1
    num_features: int = 1
    draft_vocab: int | None = None
    """None for the target's own vocabulary."""
    shared_head: bool = True

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"layers.{layer}" for layer in range(self.num_features))


CASES = [
    Case(37, draft_vocab=53),
    Case(37, draft_vocab=53, num_layers=3, shared_head=False),
    Case(70, draft_vocab=2500, num_features=3, num_layers=2),
    Case(48, depth=4, shared_head=False, num_features=2),
    Case(129, depth=1, draft_vocab=31),
]


def random_heads(case: Case, seed: int = 0) -> HydraHeads:
    """Heads with random float32 weights, scaled so that some tokens are much more probable than others."""
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if case.draft_vocab is not None:
        ids = torch.randperm(VOCABULARY, generator=generator)[: case.draft_vocab].sort().values
    draft_vocab = case.draft_vocab or VOCABULARY
    shape = HydraShape(case.hidden, case.depth, case.num_layers, draft_vocab, case.shared_head, case.features)
    heads = HydraHeads(shape, ids)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            size = 0.5 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            if "lm_head.weight" in name or ("lm_head" in name and parameter.dim() == 2):
                size *= 3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
        heads.feature_scale.uniform_(0.5, 2.0, generator=generator)
    return heads.requires_grad_(requires_grad=False)


def prepared(kernels: Kernels, heads: HydraHeads, kind: WeightKind = "int8_rotated") -> HydraHeads:
    """A copy of the heads in the kernels' form; the original stays unchanged."""
    packed = copy.deepcopy(heads)
    pack_weights(packed, NativePacker(kernels, kind, kernels.copy()), OneDNNPacker())
    packed.make_native(kernels)
    return packed


def in_python(heads: HydraHeads) -> HydraHeads:
    """The same packed weights without the one call."""
    without = copy.copy(heads)
    without.native = None
    return without


def random_embedding(case: Case, seed: int = 1) -> nn.Embedding:
    weight = torch.randn(VOCABULARY, case.hidden, generator=torch.Generator().manual_seed(seed))
    return nn.Embedding.from_pretrained(weight)


def random_features(case: Case, seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {need: torch.randn(ROWS, case.hidden, generator=generator) for need in case.features}


def choice_step(index: int, max_nodes: int, *, draws: bool = False, temperature: float | None = None) -> ChoiceStep:
    """A choice of its own: another row, newest token, seed and length for each index."""
    tokens = (*range(index + 3), index * 7919 % VOCABULARY)
    heat = TEMPERATURES[index % len(TEMPERATURES)] if temperature is None else temperature
    return ChoiceStep(
        slot=index,
        tokens=tokens,
        num_prompt=2 + index % 3,
        num_new=1,
        num_computed=len(tokens) - 1,
        rows=(0, index * 31 % ROWS),
        blocks=(),
        max_nodes=max_nodes,
        sampling=SamplingParams(temperature=heat, seed=(index * 0x9E3779B97F4A7C15) % (1 << 64), choice=index % 4),
        draws=draws,
    )


def target_step(choices: Sequence[ChoiceStep], features: dict[str, Tensor]) -> TargetStep:
    return TargetStep(choices, features, torch.zeros(0, 1))
