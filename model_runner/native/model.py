"""Models whose parts are all known: one native call goes from tokens to logits."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.attention.cpu import NativeAttention, NativeStep
from model_runner.batch import NO_TOKENS, Batch, IntArray
from model_runner.features import LAST, Feature, layer_of, require_layers
from model_runner.kernels.block_formats import find_block_format
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels, ModelPass, NativeWeight, embedding_struct
from model_runner.kv_cache import cache_structs
from model_runner.native.layer import NativeLayer
from model_runner.native.packer import NativePacker
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.sampling.rows import NO_EARLY_TOKENS, EarlySamplingPlan, EarlyTokens
from model_runner.spec.model_spec import ModelSpec
from model_runner.spec.rotary import RotaryTable
from model_runner.weights.matrix import Matrix
from model_runner.weights.packed_weight import NativeProduct, PackedWeight

_TABLES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of embeddings that are looked up as they are."""


class StoredEmbedding(nn.Module):
    """An embedding whose rows are looked up as they are stored, and multiplied by a factor."""

    def __init__(self, packer: NativePacker, matrix: Matrix, embed_scale: float) -> None:
        """Copies the table, whose file may change later."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.embed_scale = embed_scale
        self._kernels = packer.kernels
        table, self._format = stored_table(matrix)
        self._table = table.clone()
        self.struct = embedding_struct(self._table, self._format)
        """An SwEmbedding."""
        matrix.drop(0, self.num_embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> [..., hidden] float32."""
        wanted = tokens.flatten()
        if self._format is None:
            rows = self._table[wanted].float()
        else:
            rows = self._kernels.unpack(self._format, self._table, self.embedding_dim, wanted.int())
        return rows.view(*tokens.shape, -1) * self.embed_scale


def stored_table(matrix: Matrix) -> tuple[Tensor, int | None]:
    """The rows of an embedding as they are stored, and the format of their blocks; None for plain numbers."""
    blocks = matrix.blocks()
    if blocks is not None and blocks.order is None and blocks.output_scales is None and blocks.input_order is None:
        return blocks.rows, blocks.block_format
    rows = matrix.read()
    return (rows if rows.dtype in _TABLES else rows.float()).contiguous(), None


def embedding_bytes(matrix: Matrix) -> int:
    """Memory of a stored embedding."""
    number = matrix.block_format
    stored = None if number is None else find_block_format(number)
    row = stored.row_bytes(matrix.shape[1]) if stored else matrix.shape[1] * matrix.read(0, 1).dtype.itemsize
    return matrix.shape[0] * row


class PackedHead(nn.Module):
    """A linear layer whose weight is packed."""

    def __init__(self, kernels: Kernels, weight: NativeWeight) -> None:
        super().__init__()
        self.weight = PackedWeight.of_product(NativeProduct(kernels.linear, weight), weight.outputs, weight.inputs)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n, inputs] -> [n, outputs]."""
        return F.linear(rows, self.weight)


class NativeModel:
    """A loaded model that runs on a step's tokens in one call. Requesting more outputs for one token does not affect
    other tokens.
    """

    def __init__(self, packer: NativePacker, spec: ModelSpec) -> None:
        """Packs the weights, one after the other."""
        packer, kernels = packer.with_slab(), packer.kernels
        layers = [NativeLayer(layer, packer) for layer in spec.layers]
        # The error of the head reaches every logit, so it stays in int8.
        head = packer.in_int8.pack(spec.head)
        self.config = spec.config
        self._embedding = StoredEmbedding(packer, spec.embedding, spec.embedding_scale)
        self._head = PackedHead(kernels, head)
        self._norm = spec.norm.contiguous()
        self._kernels = kernels
        self._vocab_size, self.hidden = spec.embedding.shape
        self.num_logits = head.outputs
        """Logits per row."""
        self._known = 0
        """Positions that all tables cover."""
        tables = {kind: RotaryTable(*frequencies) for kind, frequencies in spec.frequencies.items()}
        self._tables = list(tables.values())
        self._rotaries = [
            tables[kind] if layer.uses_rotary else None
            for kind, layer in zip(spec.rotary_kinds, spec.layers, strict=True)
        ]
        self._struct = CPU.new(
            "SwModel",
            hidden=self.hidden,
            embedding_scale=self._embedding.embed_scale,
            norm_eps=spec.norm_eps,
            logits_scale=spec.logits_scale,
            logits_softcap=spec.logits_softcap,
            embedding=self._embedding.struct[0],
            norm=pointer(self._norm, self.hidden),
            head=head.struct[0],
        )
        self._set_layers(layers)

    def _set_layers(self, layers: Sequence[NativeLayer]) -> None:
        self.layers = layers
        for layer, table in zip(layers, self._rotaries, strict=True):
            layer.struct.rotary_dim = 0 if table is None else table.dim
        null = CPU.ffi.NULL
        structs = [null if table is None else table.struct for table in self._rotaries]
        self._arrays = (
            CPU.array("SwDecoderLayer *", [layer.struct for layer in layers]),
            CPU.array("SwRotary *", structs),
        )
        self._struct.num_layers = len(layers)
        self._struct.layers, self._struct.rotaries = self._arrays

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def twin(self) -> "NativeModel":
        """A copy that can be bound to another cache. It shares the weights."""
        copied = copy.copy(self)
        copied._struct = CPU.new("SwModel", self._struct[0])
        copied._set_layers([layer.twin() for layer in self.layers])
        return copied

    def bind(self, caches: Sequence[CData], recurrence: NativeRecurrence | None = None) -> None:
        """Bind each layer to its SwKvCache, and to its recurrence and convolution, before the first forward."""
        remaining, recurrences, convolutions = iter(caches), 0, 0
        for layer in self.layers:
            if layer.attention is not None:
                layer.bind(next(remaining))
            if layer.recurrent is not None:
                assert recurrence is not None, "the model has recurrent layers"
                layer.bind_states(recurrence, (recurrences, convolutions))
                recurrences, convolutions = recurrences + (layer.recurrent.recurrence is not None), convolutions + 1

    def get_input_embeddings(self) -> StoredEmbedding:
        """The embedding, as transformers' models return it."""
        return self._embedding

    def get_output_embeddings(self) -> PackedHead:
        """The head, as transformers' models return it."""
        return self._head

    def forward(self, step: NativeStep, num_positions: int, wanted: ModelPass, batch: Batch = NO_TOKENS) -> None:
        """Fill a pass's output buffers; all positions of the step are below `num_positions`.

        `batch` has the images of the step, and its rotary positions where they are others.

        Raises:
            IndexError: if a token is not in the vocabulary.
        """
        tokens = wanted.tokens
        for rows in batch.images:  # their token may be beyond the vocabulary
            tokens[rows.token : rows.token + rows.features.shape[1]] = 0
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise IndexError(f"a token is not in the vocabulary of {self._vocab_size} tokens")
        if num_positions > self._known:
            for table in self._tables:
                table.reach(num_positions)
            self._known = num_positions
        model, numbers = self._struct, np.arange(len(tokens), dtype=np.int32)
        if batch.images:
            embedded = self._embedding(torch.from_numpy(tokens))
            for rows in batch.images:
                embedded[rows.token : rows.token + rows.features.shape[1]] = rows.features[0]
            model, wanted = self._fed_with(embedded), replace(wanted, tokens=numbers)
        if batch.rotary is not None and batch.rotary.ndim == 1:
            wanted = replace(wanted, angles=batch.rotary.astype(np.int32))
        elif batch.rotary is not None:
            of_step = {id(table): table.of_axes(torch.from_numpy(batch.rotary)) for table in self._tables}
            structs = [CPU.ffi.NULL if one is None else of_step[id(one)].struct for one in self._rotaries]
            rotaries = CPU.array("SwRotary *", structs)
            model, wanted = CPU.new("SwModel", model[0]), replace(wanted, angles=numbers)
            model.rotaries = rotaries
        self._kernels.forward(model, step.struct, wanted)

    def pick(self, logits: Tensor, plan: EarlySamplingPlan) -> list[int]:
        """Sample a token for each row of logits [R, num_logits] by the plan; NO_TOKEN if the logits are not finite."""
        tokens: list[int] = self._kernels.pick(logits, plan.keys, plan.temperatures).tolist()
        return tokens

    def _fed_with(self, rows: Tensor) -> CData:
        """An SwModel with these rows [n, hidden], which must outlive it, in place of the embeddings."""
        fed = CPU.new("SwModel", self._struct[0])
        fed.embedding, fed.embedding_scale = embedding_struct(rows)[0], 1.0
        return fed

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, num_logits] for hidden states [n, hidden] after any layer."""
        bare = self._fed_with(hidden)
        bare.num_layers = 0
        rows = np.arange(len(hidden), dtype=np.int32)
        logits = torch.empty(len(hidden), self.num_logits, dtype=torch.float32)
        self._kernels.forward(bare, CPU.new("SwStep", num_tokens=len(hidden)), ModelPass(rows, rows, logits))
        return logits


_KEPT_ROWS = 64
"""Rows of the logits buffer that is kept between passes: the system is slow to hand out pages."""


class NativeTargetModel:
    """Implements TargetModel on a NativeModel."""

    def __init__(
        self,
        model: NativeModel,
        attention: NativeAttention,
        needs: Collection[Feature] = (),
        recurrence: NativeRecurrence | None = None,
    ) -> None:
        """Binds the model to the caches of its attention and of its recurrence.

        Args:
            model: not bound yet.
            attention: attention to the model's own cache.
            needs: features to capture from each forward pass.
            recurrence: recurrences and convolutions on the model's states; None if it has none.

        Raises:
            UnsupportedModelError: if the model lacks a layer that a feature names.
        """
        require_layers(needs, model.num_layers)
        model.bind(cache_structs(attention.cache), recurrence)
        self._model = model
        self._recurrence = recurrence
        self._attention = attention
        self._needs = frozenset(needs)
        self._taken: dict[Feature, Tensor] = {}
        self._picks = NO_EARLY_TOKENS
        self._kept = torch.empty(0, model.num_logits, dtype=torch.float32)

    def settle(self) -> None:
        """Nothing to do: the native model watches nothing."""

    def features(self) -> Mapping[Feature, Tensor]:
        taken, self._taken = self._taken, {}
        return taken

    def picks(self) -> Callable[[], EarlyTokens]:
        picks = self._picks
        return lambda: picks

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: EarlySamplingPlan | None = None,
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
        step = self._attention.prepare(batch)
        if self._recurrence is not None:
            states = self._recurrence.prepare(batch)
            step.struct.states = states.native.struct
        self._model.forward(step, int(batch.positions.max(initial=-1)) + 1, wanted, batch)
        self._picks = NO_EARLY_TOKENS if picks is None else EarlyTokens(self._model.pick(logits, picks), picks.choices)
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
