"""Hydra heads as the native kernels draft with them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from model_runner.draft_tree import DraftTree
from model_runner.kernels.library import PANEL, Kernels
from model_runner.kernels.structs import DraftStruct, HydraHeadStruct, HydraStruct, WeightStruct
from model_runner.models.native import NativeProduct
from model_runner.models.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class HydraLinears:
    """One head; the weights are packed for the kernels, all by one packer."""

    linear: nn.Linear
    res_connection: nn.Linear
    layers: Sequence[nn.Linear]
    logits: nn.Linear


class NativeHydra:
    """Drafts for all choices of a step in one call: the trees that speculative.growing grows from these heads.

    A tree does not depend, in any bit, on the other choices.
    """

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        heads: Sequence[HydraLinears],
        num_layers: int,
        draft_ids: Tensor | None,
        feature_scale: Tensor,
    ) -> None:
        """The memory of the weights is the modules' own."""
        self._kernels = kernels
        self._feature_scale = feature_scale.contiguous()
        self._heads = heads  # the structs point into these, ...
        self._biases: list[Tensor] = []  # ... these ...
        self._draft_ids = None if draft_ids is None else draft_ids.numpy().astype(np.int32)  # ... and these
        num_features = heads[0].linear.in_features // hidden - 1
        structs = (HydraHeadStruct * len(heads))(*(self._head(linears) for linears in heads))
        ids = None if self._draft_ids is None else self._draft_ids.ctypes.data
        scale = self._feature_scale.data_ptr()
        self._struct = HydraStruct(hidden, num_features, len(heads), num_layers, structs, ids, scale)

    def draft(self, draft: DraftStruct, choices: NDArray[np.void], features: Sequence[Tensor]) -> list[DraftTree]:
        """A tree for each of the choices.

        Args:
            draft: the limits and the embedding; the rest is filled in here.
            choices: of the type DRAFT_CHOICE.
            features: those that the heads take, in this order, [., hidden] float32 each.
        """
        shape = len(choices), int(choices["max_nodes"].max())
        num_nodes = np.empty(shape[0], dtype=np.int32)
        of_nodes = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.int32), np.empty(shape)
        pointers = (ctypes.c_void_p * len(features))(*(feature.data_ptr() for feature in features))
        draft.num_choices, draft.width = shape
        draft.features, draft.choices = ctypes.addressof(pointers), choices.ctypes.data
        draft.num_nodes = num_nodes.ctypes.data
        draft.tokens, draft.parents, draft.confidence = (column.ctypes.data for column in of_nodes)
        self._kernels.draft(self._struct, draft)
        columns = zip(num_nodes.tolist(), *(column.tolist() for column in of_nodes), strict=True)
        return [
            DraftTree(tuple(tokens[:count]), tuple(parents[:count]), tuple(confidence[:count]))
            for count, tokens, parents, confidence in columns
        ]

    def _head(self, linears: HydraLinears) -> HydraHeadStruct:
        layers = (WeightStruct * len(linears.layers))(*map(self._weight, linears.layers))
        first = self._weight(linears.linear), self._weight(linears.res_connection)
        return HydraHeadStruct(*first, layers, self._weight(linears.logits))

    def _weight(self, linear: nn.Linear) -> WeightStruct:
        packed: Any = linear.weight
        assert isinstance(packed, PackedWeight)
        assert isinstance(packed.product, NativeProduct)
        struct = WeightStruct.from_buffer_copy(packed.product.weight.struct)
        if linear.bias is not None:
            bias = F.pad(linear.bias.detach().float(), (0, -linear.out_features % PANEL))
            self._biases.append(bias)
            struct.bias = bias.data_ptr()
        return struct
