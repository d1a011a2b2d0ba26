"""The int4 linear in numpy: packed weights are unpacked and multiplied in float64."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_runner.kernels.library import NativeWeight
from tests.model_runner.kernels.int8_oracle import Floats, quantise

GROUP = 32
PANEL = 16
ROW_LEVELS = 2047
_WORDS, _NIBBLES = 4, 4  # of each output for the first inputs of pairs in a group; of a word
_ROUNDINGS = 4  # of each group: two products, two sums

Groups = npt.NDArray[np.float64]  # [outputs, groups, GROUP]


def unpack(weight: NativeWeight) -> tuple[Groups, Floats, Floats]:
    """Integers [outputs, groups, 32], scales and minimums [outputs, groups]."""
    groups = weight.inputs // GROUP
    packed = weight.packed.numpy().view(np.uint16).reshape(-1, groups, GROUP * PANEL // 4 + 2 * PANEL)
    words, lines = np.split(packed, [GROUP * PANEL // 4], axis=2)
    words = words.reshape(-1, groups, _WORDS, 1, PANEL, 2)
    integers = words >> np.arange(0, 16, 4, dtype=np.uint16).reshape(_NIBBLES, 1, 1) & 15
    # [panels, groups, words, nibbles, outputs, the two of a pair]
    integers = integers.transpose(0, 4, 1, 2, 3, 5).reshape(-1, groups, GROUP)
    scales, minimums = np.ascontiguousarray(lines).view(np.float16).reshape(-1, groups, 2, PANEL).transpose(2, 0, 3, 1)
    count = weight.outputs
    factor = weight.scales.double().numpy()[:, None]
    return (
        integers[:count].astype(np.float64),
        scales.reshape(-1, groups)[:count] * factor,
        minimums.reshape(-1, groups)[:count] * factor,
    )


def dense(weight: NativeWeight) -> Floats:
    """The weight [outputs, inputs] that is multiplied with."""
    integers, scales, minimums = unpack(weight)
    values: Floats = (scales[..., None] * integers + minimums[..., None]).reshape(weight.outputs, weight.inputs)
    return values


def between_extremes(weight: Tensor) -> Floats:
    """The weight [outputs, inputs] with its groups' smallest numbers as minimums, and the largest as 15."""
    groups = weight.numpy().reshape(len(weight), -1, GROUP)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    scale, minimum = ((high - low) / 15).astype(np.float16).astype(np.float64), low.astype(np.float16).astype(float)
    integers = np.divide(groups - minimum, scale, out=np.zeros(groups.shape), where=scale > 0).round().clip(0, 15)
    values: Floats = (scale * integers + minimum).reshape(weight.shape)
    return values


def linear(rows: Tensor, weight: NativeWeight, bias: Tensor | None = None) -> tuple[Floats, Floats]:
    """The product [n, outputs] of quantised rows [n, inputs] and the packed weight, and how far off float32 may be."""
    x = quantise(rows, ROW_LEVELS)
    integers, scales, minimums = unpack(weight)
    groups = x.integers.reshape(len(rows), -1, GROUP).astype(np.float64)
    products = np.einsum("rgi,ogi->rog", groups, integers) * scales
    offsets = groups.sum(2)[:, None] * minimums
    row_scales = x.scales[:, None].astype(np.float64)
    added = np.zeros(1) if bias is None else bias.double().numpy()
    magnitude = (np.abs(products) + np.abs(offsets)).sum(2) * row_scales + np.abs(added)
    error = (_ROUNDINGS * scales.shape[1] + 4) * 2.0**-24 * magnitude
    return (products + offsets).sum(2) * row_scales + added, error + np.finfo(np.float32).smallest_subnormal
