"""Hydra heads (arXiv:2402.05109): each draft token depends on the draft tokens before it.

Head i (1, 2, ...) sees the target's hidden state h_t and the embeddings of the next i tokens, x_{t+1} .. x_{t+i}, and
predicts x_{t+i+1}. Its first layer is u = R z + r + silu(W z + b), where z joins all inputs; further layers are u +
silu(W u + b).

The published format has `hydra_num_heads`, `hydra_num_layers`, `hydra_head_arch` and `hidden_state_offset` (k for the
input of the k-th layer from the end) in config.json, and the tensors

    hydra_mlp.{i}.{j}.linear.weight|bias           [hidden, (i + 2) * hidden] if j = 0, else [hidden, hidden]; i from 0
    hydra_mlp.{i}.0.res_connection.weight|bias     [hidden, (i + 2) * hidden]
    hydra_lm_head.{i}.weight|bias                  [vocab, hidden]

The published training code repeats one module for all layers except the first, so these are equal there. Its other
architectures, `prefix-mlp` (Hydra++), `cross-attn` and `eagle-attn`, are not supported. This project's checkpoints
extend the format:

- one head for all, `hydra_lm_head.weight` without bias, and `d2t` (see checkpoint.py);
- several hidden states, joined in the order of the list `hidden_state_offsets`, as in EAGLE-3 (arXiv:2503.01840): with
  F of them, the first layers are [hidden, (F + i + 1) * hidden];
- `feature_scale` [F * hidden], a factor on the hidden states (see HydraHeads).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from model_runner.draft_tree import DraftTree
from model_runner.features import LAST, Feature, layer_input, layer_of
from model_runner.heads.base import Heads, TargetShape, to_offsets
from model_runner.heads.checkpoint import HeadsCheckpoint
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import PANEL, Kernels
from model_runner.weights.packed_weight import NativeProduct, PackedWeight


@dataclass(frozen=True, slots=True)
class HydraShape:
    """Sizes of a set of Hydra heads."""

    hidden: int
    depth: int
    num_layers: int
    draft_vocab: int
    shared_head: bool
    """Whether one matrix, without bias, gives the logits of all heads."""
    features: tuple[Feature, ...] = (LAST,)
    """The target's hidden states that the heads use, joined in this order."""


class _FirstLayer(nn.Module):
    """Joins a head's inputs into one vector of the hidden size."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Linear(inputs, hidden)

    def forward(self, joined: Tensor) -> Tensor:
        residual: Tensor = self.res_connection(joined)
        return residual + F.silu(self.linear(joined))


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, state: Tensor) -> Tensor:
        return state + F.silu(self.linear(state))


@dataclass(frozen=True, slots=True)
class HydraLinears:
    """The linear layers of one head; the weights were packed for the kernels by one packer."""

    linear: nn.Linear
    res_connection: nn.Linear
    layers: Sequence[nn.Linear]
    logits: nn.Linear


class NativeHydra:
    """Drafts for all choices of a step in one call: the trees that speculative.growing grows from these heads.

    A tree does not depend, in any bit, on other choices.
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
        """Uses the modules' memory for the weights."""
        self._kernels = kernels
        self._hidden = hidden
        self._heads = heads
        self._kept: list[object] = []
        """Further memory that the structs refer to."""
        self._num_features = heads[0].linear.in_features // hidden - 1
        self._struct = CPU.new(
            "SwHydra",
            hidden=hidden,
            num_features=self._num_features,
            depth=len(heads),
            num_layers=num_layers,
            heads=self._keep(CPU.array("SwHydraHead", [self._head(linears) for linears in heads])),
            feature_scale=self._numbers(feature_scale.contiguous()),
        )
        if draft_ids is not None:
            self._struct.draft_ids = self._numbers(draft_ids.int())

    def draft(self, draft: CData, choices: NDArray[np.void], features: Sequence[Tensor]) -> list[DraftTree]:
        """A draft tree for each of the choices.

        Args:
            draft: an SwDraft with the limits and the embedding; the rest is filled in here.
            choices: items of SwDraftChoice.
            features: the heads' features, in their order, [., hidden] float32 each.

        Raises:
            ValueError: if there are too few features, or they have too few rows.
        """
        shape = len(choices), int(choices["max_nodes"].max())
        fewest = min(map(len, features), default=0)
        if len(features) != self._num_features or not 0 <= choices["row"].min() <= choices["row"].max() < fewest:
            raise ValueError(f"{len(features)} features of {fewest} rows do not match the heads and the choices")
        pointers = CPU.array("float *", [pointer(feature, len(feature), self._hidden) for feature in features])
        num_nodes = np.empty(shape[0], dtype=np.int32)
        of_nodes = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.int32), np.empty(shape)
        draft.num_choices, draft.width = shape
        draft.features, draft.choices = pointers, CPU.structs_of("SwDraftChoice", choices)
        draft.num_nodes = pointer(num_nodes, shape[0])
        draft.tokens, draft.parents, draft.confidence = (pointer(column, *shape) for column in of_nodes)
        self._kernels.draft(self._struct, draft)
        columns = zip(num_nodes.tolist(), *(column.tolist() for column in of_nodes), strict=True)
        return [
            DraftTree(tuple(tokens[:count]), tuple(parents[:count]), tuple(confidence[:count]))
            for count, tokens, parents, confidence in columns
        ]

    def _head(self, linears: HydraLinears) -> tuple[CData, ...]:
        layers = self._keep(CPU.array("SwWeight", [self._weight(linear) for linear in linears.layers]))
        first = self._weight(linears.linear), self._weight(linears.res_connection)
        return *first, layers, self._weight(linears.logits)

    def _weight(self, linear: nn.Linear) -> CData:
        packed: Any = linear.weight
        assert isinstance(packed, PackedWeight)
        assert isinstance(packed.product, NativeProduct)
        struct = CPU.new("SwWeight", packed.product.weight.struct[0])
        if linear.bias is not None:
            struct.bias = self._numbers(F.pad(linear.bias.detach().float(), (0, -linear.out_features % PANEL)))
        return self._keep(struct)[0]

    def _numbers(self, tensor: Tensor) -> CData:
        return pointer(self._keep(tensor), *tensor.shape)

    def _keep(self, memory: Any) -> Any:
        self._kept.append(memory)
        return memory


class HydraHeads(Heads):
    """All heads of a checkpoint.

    Hidden states can be thousands of times as large as embeddings. Products use one scale for all inputs of a row, and
    files one scale for all weights of an output, which would destroy small values. So hidden states are multiplied by
    `feature_scale` [F * hidden], which brings all inputs to about the same magnitude.
    """

    kind = "hydra"
    depth: int
    native: NativeHydra | None = None
    """The same heads as one native call, if there are native kernels."""

    def __init__(self, shape: HydraShape, draft_ids: Tensor | None = None) -> None:
        super().__init__(draft_ids, shape.features, shape.depth)
        self.shape = shape
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", torch.ones(len(shape.features) * shape.hidden))
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                _FirstLayer((len(shape.features) + index + 1) * shape.hidden, shape.hidden),
                *(_Layer(shape.hidden) for _ in range(shape.num_layers - 1)),
            )
            for index in range(shape.depth)
        )
        self.hydra_lm_head: nn.Linear | nn.ModuleList = (
            nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
            if shape.shared_head
            else nn.ModuleList(nn.Linear(shape.hidden, shape.draft_vocab) for _ in range(shape.depth))
        )

    def join(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Join the heads' features, [n, d] each, in their order: [n, F * d]."""
        return torch.cat([features[need] for need in self.shape.features], dim=-1) * self.feature_scale

    @torch.no_grad()
    def balance(self) -> None:
        """Choose `feature_scale` from the weights' magnitudes; logits stay the same.

        Typical input sizes are not known here, but trained weights are smaller where inputs are larger.
        """
        firsts: list[Any] = [mlp[0] for mlp in self.hydra_mlp]  # type: ignore[index]
        weights = [torch.cat([first.linear.weight, first.res_connection.weight]) for first in firsts]
        count = len(self.feature_scale)
        of_embeddings = torch.cat([weight[:, count:].flatten() for weight in weights]).square().mean().sqrt()
        scale = torch.stack([weight[:, :count].square().mean(0) for weight in weights]).mean(0).sqrt() / of_embeddings
        if not (scale.isfinite().all() and scale.any()):
            return
        scale = scale.clamp_min(float(scale.max()) * 1e-6)  # otherwise some would be rounded to zero
        self.feature_scale.mul_(scale)
        for linear in (linear for first in firsts for linear in (first.linear, first.res_connection)):
            linear.weight[:, :count] /= scale

    def state(self, index: int, hidden: Tensor, embedded_path: Tensor) -> Tensor:
        """State [n, d] of head `index` (1, 2, ...) for hidden [n, F * d] and embedded_path [n, index, d]."""
        joined = torch.cat([hidden, embedded_path.flatten(1)], dim=1)  # [n, (F + index) * d]
        state: Tensor = self.hydra_mlp[index - 1](joined)
        return state

    def logits(self, index: int, state: Tensor) -> Tensor:
        """Logits [n, draft_vocab] of head `index` for its state [n, d]."""
        logits: Tensor = self._head(index - 1)(state)
        return logits

    def _head(self, index: int) -> nn.Linear:
        heads: Any = self.hydra_lm_head
        head: nn.Linear = heads if isinstance(heads, nn.Linear) else heads[index]
        return head

    def make_native(self, kernels: Kernels) -> None:
        """Create `native`, after the weights are packed for the kernels."""
        heads = []
        for index in range(self.shape.depth):
            layers: Any = self.hydra_mlp[index]
            first, *others = layers
            further = [layer.linear for layer in others]
            heads.append(HydraLinears(first.linear, first.res_connection, further, self._head(index)))
        self.native = NativeHydra(
            kernels, self.shape.hidden, heads, self.shape.num_layers, self.draft_ids, self.feature_scale
        )

    def head(self, index: int, hidden: Tensor, embedded_path: Tensor) -> Tensor:
        """Logits [n, draft_vocab] for the token after the path.

        Args:
            index: 1 for the first head.
            hidden: [n, F * d] the target's F hidden states at a position, from `join`.
            embedded_path: [n, index, d] the target's embeddings of the next tokens.
        """
        return self.logits(index, self.state(index, hidden, embedded_path))


def hydra_features(num_layers: int) -> tuple[Feature, ...]:
    """Features of heads that are trained here. The last layers mostly encode the next token, which is already known."""
    return (layer_input(max(num_layers - 3, 0)),)


def load_hydra(checkpoint: HeadsCheckpoint, target: TargetShape) -> HydraHeads:
    """Make the heads of a checkpoint. Raises HeadsError."""
    arch = checkpoint.config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or not checkpoint.config.get("grounded_heads", True):
        raise checkpoint.error(f"Hydra heads of architecture {arch} are not supported, only grounded mlp heads")
    draft_ids = checkpoint.draft_ids(target)
    shape = HydraShape(
        hidden=target.hidden,
        depth=checkpoint.integer("hydra_num_heads"),
        num_layers=checkpoint.integer("hydra_num_layers"),
        draft_vocab=target.vocab_size if draft_ids is None else len(draft_ids),
        shared_head="hydra_lm_head.weight" in checkpoint.names,
        features=_features(checkpoint, target),
    )
    checkpoint.check_hidden(checkpoint.rows("hydra_mlp.0.0.linear.weight"), target)
    with torch.device("meta"):  # initial weights, which the checkpoint's replace, would take half of the time
        heads = HydraHeads(shape, draft_ids)
    heads.feature_scale = torch.ones(heads.feature_scale.shape)
    checkpoint.fill(heads, optional=("feature_scale",))
    if "feature_scale" not in checkpoint.names:
        heads.balance()
    return heads


def _features(checkpoint: HeadsCheckpoint, target: TargetShape) -> tuple[Feature, ...]:
    """Features by offsets k: each is transformers' hidden_states[-(k + 1)], of which the last is normed."""
    offsets = checkpoint.config.get("hidden_state_offsets", [checkpoint.integer("hidden_state_offset", default=0)])
    if not isinstance(offsets, list) or not offsets or not all(type(k) is int and k >= 0 for k in offsets):
        raise checkpoint.error(f"hidden_state_offsets is {offsets!r}, not a list of layers counted from the end")
    if max(offsets) > target.num_layers:
        raise checkpoint.error(f"hidden_state_offset is {max(offsets)}, but the model has {target.num_layers} layers")
    return tuple(layer_input(target.num_layers - offset) if offset else LAST for offset in offsets)


def hydra_checkpoint(heads: HydraHeads, num_layers: int) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and tensors for save_heads; `num_layers` is the target's."""
    offsets = [0 if one == LAST else num_layers - layer_of(one) for one in heads.shape.features]
    where = {"hidden_state_offset": offsets[0]} if len(offsets) == 1 else {"hidden_state_offsets": offsets}
    config = {
        "hydra_num_heads": heads.shape.depth,
        "hydra_num_layers": heads.shape.num_layers,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        **where,
        "hidden_size": heads.shape.hidden,
    }
    tensors = dict(heads.state_dict())
    if heads.draft_ids is not None:
        tensors["d2t"] = to_offsets(heads.draft_ids)
    return config, tensors
