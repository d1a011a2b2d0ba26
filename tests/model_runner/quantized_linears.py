"""Random linears in the layouts of GPTQ, AWQ and compressed-tensors, packed as their definitions say."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


@dataclass
class Weight:
    """Random integers [outputs, inputs] with scales and zeros [outputs, groups]."""

    levels: Integers
    scales: Tensor
    zeros: Integers
    group_of: Integers

    @classmethod
    def random(
        cls,
        outputs: int = 48,
        inputs: int = 256,
        size: int = 64,
        *,
        zero: int | None = None,
        shuffled: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> "Weight":
        rng = np.random.default_rng(abs(size))
        groups = 1 if size == -1 else inputs // size
        group_of = np.arange(inputs) // (inputs // groups)
        scales = torch.from_numpy(rng.uniform(1e-3, 2e-2, (outputs, groups)) * rng.choice([1, 1e-3], (outputs, 1)))
        return cls(
            rng.integers(0, 16, (outputs, inputs)),
            scales.to(dtype),
            rng.integers(0, 16, (outputs, groups)) if zero is None else np.full((outputs, groups), zero),
            rng.permutation(group_of) if shuffled else group_of,
        )

    @classmethod
    def near(cls, weight: Tensor, size: int = 32, *, shuffled: bool = False) -> "Weight":
        """Symmetric, with values near a weight."""
        outputs, inputs = weight.shape
        made = cls.random(outputs, inputs, size, zero=8, shuffled=shuffled)
        by_group = [weight[:, made.group_of == group].abs().amax(1) for group in range(inputs // size)]
        made.scales = (torch.stack(by_group, 1) / 7).half()
        scales = made.scales.double().numpy()[:, made.group_of]
        made.levels = np.rint(weight.double().numpy() / scales).astype(np.int64) + 8
        return made

    def values(self) -> NDArray[np.float64]:
        scales = self.scales.double().numpy()[:, self.group_of]
        return scales * (self.levels - self.zeros[:, self.group_of])


def packed(numbers: Integers, axis: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Numbers in words of 32 bits along an axis: number order[i] of each is its i-th from below."""
    in_word = 32 // bits
    moved = np.moveaxis(numbers, axis, 0)
    moved = np.concatenate([moved, np.zeros((-len(moved) % in_word, *moved.shape[1:]), np.int64)])
    words = np.zeros((len(moved) // in_word, *moved.shape[1:]), np.int64)
    for place, source in enumerate(order[:in_word]):
        words |= moved[source::in_word] << place * bits
    return torch.from_numpy(np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32).copy())


def gptq(weight: Weight, minus: int) -> dict[str, Tensor]:
    zeros = packed(weight.zeros.T, 1).numpy().view(np.uint32) - np.uint32(0x11111111 * minus)
    return {
        "qweight": packed(weight.levels.T, 0),
        "scales": weight.scales.T.contiguous(),
        "qzeros": torch.from_numpy(zeros.view(np.int32)),
        "g_idx": torch.from_numpy(weight.group_of.astype(np.int32)),
    }


def awq(weight: Weight) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(weight.levels.T, 1, order),
        "scales": weight.scales.T.contiguous(),
        "qzeros": packed(weight.zeros.T, 1, order),
    }


def compressed(weight: Weight) -> dict[str, Tensor]:
    return {
        "weight_packed": packed(weight.levels, 1),
        "weight_shape": torch.tensor(weight.levels.shape),
        "weight_scale": weight.scales,
        "weight_zero_point": packed(weight.zeros, 0),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}


def compressed_config(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """With settings of the weights, and of their group where they are named so."""
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": settings.pop("input_activations", None)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
