"""Multi-head latent attention with latents in the cache instead of keys and values (DeepSeek-V2, arXiv:2405.04434).

A layer's keys and values are products of one latent c of each token, W_k c and W_v c for each head, with a rotated part
of the key that all heads share. With q' = W_k^T q, scores are q'·c, and an output is W_v applied to the weighted sum of
latents. So all heads attend to one key, the latent and the rotated part, whose value is the latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.kernels.interface import CPU
from model_runner.modules.linears import OneDNNPacker
from model_runner.native.packer import NativePacker
from model_runner.weights.matrix import DenseMatrix, Linear
from model_runner.weights.packed_weight import PackedWeight

HeadProduct = Callable[[Tensor], Tensor]
"""Multiplies the rows of each head [T, heads, inputs] -> [T, heads, outputs]. A row's result depends on no other."""
MakeProduct = Callable[[Tensor], HeadProduct]
"""Takes the weights of all heads [heads, outputs, inputs]."""


@dataclass(frozen=True, slots=True)
class Latents:
    """The products that a layer's queries and outputs need in addition."""

    into: HeadProduct
    out_of: HeadProduct
    num_plain: int
    """Numbers of a query that are not rotated."""

    def absorb(self, queries: Tensor) -> Tensor:
        """[T, heads, plain + rotated] -> [T, heads, latent + rotated]."""
        plain, rotated = queries[..., : self.num_plain], queries[..., self.num_plain :]
        return torch.cat((self.into(plain), rotated), dim=-1)

    def expand(self, outputs: Tensor) -> Tensor:
        """[T, heads, latent] -> [T, heads, value_dim]."""
        return self.out_of(outputs)


def keep_latents(model: nn.Module, make: MakeProduct) -> bool:
    """Let every layer with latents store these; `paged_attention` uses `Latents`. Returns whether there are any.

    Args:
        model: changed in place; the layers' own products of keys and values are removed.
        make: makes the products.
    """
    found = False
    for module in list(model.modules()):
        own: Any = module
        if not hasattr(module, "expand_kv") or own.kv_b_proj.bias is not None:
            continue
        num_plain, value_dim = own.qk_nope_head_dim, own.v_head_dim
        weight = own.kv_b_proj.weight.detach().view(-1, num_plain + value_dim, own.kv_lora_rank)
        keys, values = weight.split((num_plain, value_dim), dim=1)
        own.latents = Latents(make(keys.transpose(1, 2)), make(values), num_plain)
        own.expand_kv = _as_stored
        del own.kv_b_proj
        found = True
    return found


def pack_groups(model: nn.Module, make: MakeProduct) -> None:
    """Have every linear layer in groups multiply each group's rows by `make`'s product."""
    modules: list[Any] = [one for one in model.modules() if isinstance(one, nn.Linear) and hasattr(one, "n_groups")]
    for module in modules:
        weight = module.weight.detach()
        product = make(weight.view(module.n_groups, -1, weight.shape[1]))
        del module.weight
        module.forward = partial(_multiply_groups, product)


def _multiply_groups(product: HeadProduct, rows: Tensor) -> Tensor:
    """[.., groups, inputs] -> [.., groups, outputs]."""
    return product(rows.flatten(0, -3)).view(*rows.shape[:-1], -1)


def _as_stored(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [1, 1, T, rank] and rotated parts [1, 1, T, width] as key and value of one head."""
    return torch.cat((latent, rotated), dim=-1), latent


class NativeHeads:
    """Implements HeadProduct with the kernels."""

    def __init__(self, packer: NativePacker, weights: Tensor) -> None:
        self._kernels = packer.kernels
        self._outputs = weights.shape[1]
        self._packed = packer.pack_alike([Linear([DenseMatrix(weight.contiguous())]) for weight in weights])
        self._structs = CPU.array("SwWeight", [packed.struct[0] for packed in self._packed])

    def __call__(self, rows: Tensor) -> Tensor:
        return self._kernels.linears(self._structs, rows.float().contiguous(), self._outputs)


class PackedHeads:
    """Implements HeadProduct in float32."""

    def __init__(self, packer: OneDNNPacker, weights: Tensor) -> None:
        self._weights = [PackedWeight(weight, packer) for weight in weights]

    def __call__(self, rows: Tensor) -> Tensor:
        products = [weight.linear(of_head) for weight, of_head in zip(self._weights, rows.unbind(1), strict=True)]
        return torch.stack(products, dim=1)


def plain_heads(weights: Tensor) -> HeadProduct:
    """Computes shapes on the meta device: on others, a row's bits would depend on the number of rows."""
    return lambda rows: torch.einsum("thi,hoi->tho", rows, weights)
