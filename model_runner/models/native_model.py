"""Models whose parts are all known: one native call goes from tokens to logits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.attention.cpu import NativeAttention, NativeStep
from model_runner.batch import Batch, IntArray
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels, ModelPass, NativeWeight
from model_runner.models.families import MODEL_FAMILIES
from model_runner.models.features import LAST, Feature, layer_of, require_layers
from model_runner.models.native_layer import FusedDecoderLayer
from model_runner.models.packed import NativeProduct, PackedWeight
from model_runner.sampling.fused_sampling import NO_PICKS, FusedSamplingPlan, PreSampledTokens

_STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary types whose angles depend only on the position."""
_POSITIONS = 1024
"""Cos and sin are computed for this many positions at a time, starting at a multiple."""


class RotaryTable:
    """Cos and sin of all positions used so far, as the model's own module computes them."""

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """`compute` returns cos and sin [1, n, dim] for positions [1, n]."""
        self._compute = compute
        self._cos, self._sin = self._part(0)
        self.dim = self._cos.shape[1]
        self.struct: CData = CPU.new("SwRotary", self._pointers())

    def reach(self, length: int) -> None:
        """Extend the table to all positions below `length`; it at least doubles."""
        known = len(self._cos)
        if length <= known:
            return
        parts = [self._part(start) for start in range(known, max(length, 2 * known), _POSITIONS)]
        cos = torch.cat([self._cos, *(part for part, _ in parts)])
        sin = torch.cat([self._sin, *(part for _, part in parts)])
        self._cos, self._sin = cos, sin  # both or, if memory runs out, neither
        self.struct.cos, self.struct.sin = self._pointers()

    def _pointers(self) -> tuple[CData, CData]:
        return pointer(self._cos, *self._cos.shape), pointer(self._sin, *self._sin.shape)

    def _part(self, start: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._compute(torch.arange(start, start + _POSITIONS).unsqueeze(0))
        return cos[0].float().contiguous(), sin[0].float().contiguous()


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a model."""

    embedding: Tensor  # [vocabulary, hidden] float32
    embedding_scale: float
    layers: Sequence[FusedDecoderLayer]
    rotaries: Sequence[RotaryTable | None]
    """The table of each layer; None for layers without rotary positions."""
    norm: Tensor  # [hidden] float32, the factor
    norm_eps: float
    head: NativeWeight
    logits_scale: float
    logits_softcap: float | None


class NativeModel:
    """Runs a model on a step's tokens. Requesting more outputs for one token does not affect other tokens."""

    def __init__(self, kernels: Kernels, parts: ModelParts) -> None:
        self._kernels = kernels
        self._parts = parts
        self.num_layers = len(parts.layers)
        self._vocab_size, self.hidden = parts.embedding.shape
        self.num_logits = parts.head.outputs
        """Logits per row."""
        self._tables = list({id(table): table for table in parts.rotaries if table is not None}.values())
        self._known = 0
        """Positions that all tables cover."""
        for layer, table in zip(parts.layers, parts.rotaries, strict=True):
            layer.struct.rotary_dim = 0 if table is None else table.dim
        null = CPU.ffi.NULL
        self._layers = CPU.array("SwDecoderLayer *", [layer.struct for layer in parts.layers])
        self._rotaries = CPU.array("SwRotary *", [null if table is None else table.struct for table in parts.rotaries])
        self._struct = CPU.new(
            "SwModel",
            hidden=self.hidden,
            num_layers=self.num_layers,
            embedding_scale=parts.embedding_scale,
            norm_eps=parts.norm_eps,
            logits_scale=parts.logits_scale,
            logits_softcap=parts.logits_softcap or 0.0,
            embedding=pointer(parts.embedding, *parts.embedding.shape),
            layers=self._layers,
            rotaries=self._rotaries,
            norm=pointer(parts.norm, self.hidden),
            head=parts.head.struct[0],
        )

    def forward(self, step: NativeStep, num_positions: int, wanted: ModelPass) -> None:
        """Fill a pass's output buffers; all positions of the step are below `num_positions`.

        Raises:
            IndexError: if a token is not in the vocabulary.
        """
        tokens = wanted.tokens
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise IndexError(f"a token is not in the vocabulary of {self._vocab_size} tokens")
        if num_positions > self._known:
            for table in self._tables:
                table.reach(num_positions)
            self._known = num_positions
        self._kernels.forward(self._struct, step.struct, wanted)

    def pick(self, logits: Tensor, plan: FusedSamplingPlan) -> list[int]:
        """Sample a token for each row of logits [R, num_logits] by the plan; NO_TOKEN if the logits are not finite."""
        tokens: list[int] = self._kernels.pick(logits, plan.keys, plan.temperatures).tolist()
        return tokens

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, num_logits] for hidden states [n, hidden] after any layer."""
        bare = CPU.new("SwModel", self._struct[0])
        bare.num_layers, bare.embedding, bare.embedding_scale = 0, pointer(hidden, len(hidden), self.hidden), 1.0
        rows = np.arange(len(hidden), dtype=np.int32)
        logits = torch.empty(len(hidden), self.num_logits, dtype=torch.float32)
        self._kernels.forward(bare, CPU.new("SwStep", num_tokens=len(hidden)), ModelPass(rows, rows, logits))
        return logits


def read_native_model(model: PreTrainedModel, kernels: Kernels) -> NativeModel | None:
    """Read a model whose weights are packed.

    Returns:
        None if a part is not supported. The class must be in the table, all decoder layers fused, the rotary type
        static, and the head packed for the kernels without a bias.
    """
    family = MODEL_FAMILIES.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if family is None or not family.is_plain(model):
        return None
    decoder: Any = model.get_submodule(family.decoder)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    product = head.weight.product if isinstance(getattr(head, "weight", None), PackedWeight) else None
    layers = [layer for layer in decoder.layers if isinstance(layer, FusedDecoderLayer)]
    if not isinstance(product, NativeProduct) or head.bias is not None or len(layers) < len(decoder.layers):
        return None
    rotaries = _rotaries(decoder, layers, by_kind=family.rotary_by_kind)
    if rotaries is None:
        return None
    norm = decoder.norm.weight.detach().float()
    parts = ModelParts(
        embedding=decoder.embed_tokens.weight.detach().contiguous(),
        embedding_scale=family.embedding_scale(model),
        layers=layers,
        rotaries=rotaries,
        norm=1 + norm if family.norm_adds_one else norm,
        norm_eps=decoder.config.rms_norm_eps,
        head=product.weight,
        logits_scale=family.logits_scale(model),
        logits_softcap=family.logits_softcap(model),
    )
    return NativeModel(kernels, parts)


def _rotaries(
    decoder: Any, layers: Sequence[FusedDecoderLayer], *, by_kind: bool
) -> Sequence[RotaryTable | None] | None:
    """The table of each layer, None for layers without rotary positions.

    None altogether if angles depend on more than the position. With `by_kind`, each kind of layer has its own angles.
    """
    module = decoder.rotary_emb
    kinds = decoder.config.layer_types if by_kind else [None] * len(layers)
    tables: dict[str | None, RotaryTable] = {}
    for kind in {kind for kind, layer in zip(kinds, layers, strict=True) if layer.uses_rotary}:
        if (module.rope_type[kind] if by_kind else module.rope_type) not in _STATIC_ROTARY:
            return None
        compute = partial(module, decoder.embed_tokens.weight)
        tables[kind] = RotaryTable(partial(compute, layer_type=kind) if by_kind else compute)
    return [tables[kind] if layer.uses_rotary else None for kind, layer in zip(kinds, layers, strict=True)]


_KEPT_ROWS = 64
"""Rows of the logits buffer that is kept between passes: the system is slow to hand out pages."""


class NativeTargetModel:
    """Implements TargetModel on a NativeModel."""

    def __init__(self, model: NativeModel, attention: NativeAttention, needs: Collection[Feature] = ()) -> None:
        """Raises UnsupportedModelError if the model lacks a layer that a feature names.

        Args:
            model: bound to the attention's cache.
            attention: attention to the model's own cache.
            needs: features to capture from each forward pass.
        """
        require_layers(needs, model.num_layers)
        self._model = model
        self._attention = attention
        self._needs = frozenset(needs)
        self._taken: dict[Feature, Tensor] = {}
        self._picks = NO_PICKS
        self._kept = torch.empty(0, model.num_logits, dtype=torch.float32)

    def settle(self) -> None:
        """Nothing to do: the native model watches nothing."""

    def features(self) -> Mapping[Feature, Tensor]:
        taken, self._taken = self._taken, {}
        return taken

    def picks(self) -> Callable[[], PreSampledTokens]:
        picks = self._picks
        return lambda: picks

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: FusedSamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        assert follows is None, "a step is over before the next one begins"
        shape = len(batch.tokens), self._model.hidden
        self._taken = {need: torch.empty(shape, dtype=torch.float32) for need in self._needs.union(also)}
        logits = self._logits(len(batch.logits_index))
        wanted = ModelPass(
            batch.tokens.astype(np.int32),
            batch.logits_index.astype(np.int32),
            logits,
            {layer_of(need): memory for need, memory in self._taken.items() if need != LAST},
            self._taken.get(LAST),
        )
        self._model.forward(self._attention.prepare(batch), int(batch.positions.max(initial=-1)) + 1, wanted)
        self._picks = NO_PICKS if picks is None else PreSampledTokens(self._model.pick(logits, picks), picks.choices)
        return logits

    def _logits(self, rows: int) -> Tensor:
        """A float32 buffer [rows, vocabulary]."""
        if rows > _KEPT_ROWS:
            return torch.empty(rows, self._model.num_logits, dtype=torch.float32)
        if rows > len(self._kept):
            self._kept = torch.empty(rows, self._model.num_logits, dtype=torch.float32)
        return self._kept[:rows]


class NativeEarlyExit:
    """Implements EarlyExit with a NativeModel's head."""

    def __init__(self, model: NativeModel) -> None:
        self.num_layers = model.num_layers
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden.contiguous())
