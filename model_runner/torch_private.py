"""All uses of PyTorch's private parts, so that a new version can be checked in one place.

`tests/test_private_parts.py` says which part a version has not, and finds private parts that are used elsewhere.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def flatten(output: Any) -> tuple[list[Any], TreeSpec]:
    """The tensors in a model's output, and its structure."""
    return tree_flatten(output)


def unflatten(leaves: list[Any], structure: TreeSpec) -> Any:
    """An output of this structure."""
    return tree_unflatten(leaves, structure)


def hollow_tensor(own: type[AnyTensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> AnyTensor:
    """A tensor without memory, of a subclass that defines all operations itself."""
    tensor: AnyTensor = Tensor._make_wrapper_subclass(own, shape, dtype=dtype, device=device)
    return tensor


def reorder_for_onednn(weight: Tensor) -> Tensor:
    """A float32 weight [out, in] in the order in which oneDNN multiplies fastest."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return reordered


def multiply_by_onednn(rows: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [n, in] -> [n, out]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
    return result


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children by name. `named_children` omits the second name of a child."""
    return module._modules
