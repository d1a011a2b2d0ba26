"""Runs of tiny models on native attention: native layers against transformers' own, and whole models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.attention.cpu import NativeAttention
from model_runner.batch import Batch, ImageRows, StateTables
from model_runner.features import Feature, decoder_layers, layer_input
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.kv_cache import KVCache
from model_runner.modules.activations import replace_activations
from model_runner.modules.attention import ATTENTION_NAME, register_attention
from model_runner.modules.experts import EXPERTS_NAME, pack_experts, register_experts
from model_runner.modules.linears import OneDNNPacker, pack_weights
from model_runner.modules.packing import make_native_experts, prepare
from model_runner.modules.target import HFTargetModel
from model_runner.native.model import NativeModel, NativeTargetModel
from model_runner.native.packer import NativePacker
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.recurrence.states import StateCache
from model_runner.spec.layer_spec import AttentionSpec, LayerSpec
from model_runner.spec.model_spec import ModelSpec, read_model_spec
from model_runner.weights.checkpoint import TensorCheckpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.decoder_models import tiny_model

BLOCK = 16
NUM_BLOCKS = 16
CPU = torch.device("cpu")
ROWS_BLOCKS = 3
"""Blocks of recurrent states of a sequence."""
LENGTHS = [70, 40, 5]  # the first is beyond the windows, and beyond the original length of scaled rotary positions

Step = Sequence[tuple[int, int, int]]  # (sequence, start, end)
Change = Callable[[LayerSpec], LayerSpec]


def step_batch(step: Step, seed: int = 0) -> Batch:
    """Random tokens of the sequences, whose blocks are dealt out in an order that depends on the seed."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]
    free = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
    tables = [[free.pop() for _ in range(-(-length // BLOCK))] for length in LENGTHS]
    batch = make_batch([Chunk(tokens[s][start:end], start, tables[s]) for s, start, end in step], BLOCK)
    rows = [range(ROWS_BLOCKS * s, ROWS_BLOCKS * (s + 1)) for s, _, _ in step]
    return replace(batch, states=StateTables(rows, [(0, -1)] * len(step), [()] * len(step)))


def make_cache(specs: Sequence[LayerSpec], dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache for layers of these forms."""
    shapes = [spec.mixer.kv for spec in specs if isinstance(spec.mixer, AttentionSpec)]
    return KVCache(shapes, NUM_BLOCKS, BLOCK, dtype, CPU)


def make_states(specs: Sequence[LayerSpec]) -> StateCache:
    """Recurrent states of the sequences for layers of these forms."""
    mixers = [spec.recurrent for spec in specs if spec.recurrent is not None]
    recurrences = [mixer.recurrence for mixer in mixers if mixer.recurrence is not None]
    convolutions = [mixer.convolution for mixer in mixers]
    return StateCache(recurrences, convolutions, ROWS_BLOCKS * len(LENGTHS), 1, CPU)


def forms_of(model: PreTrainedModel) -> Sequence[LayerSpec]:
    """The layers' forms. None of them may be unknown."""
    return model_spec_of(model).layers


def served_model(case: str, **changes: Any) -> PreTrainedModel:
    """A tiny model whose attention is ours; changes are of its configuration."""
    register_attention()
    model = tiny_model(case, **changes)
    model.set_attn_implementation(ATTENTION_NAME)
    register_experts()
    model.config.get_text_config()._experts_implementation = EXPERTS_NAME
    return model


def layer_errors(
    case: str,
    packer: NativePacker,
    change: Change = lambda spec: spec,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Tensor:
    """How far native layers are from transformers' layers with the same packed weights and native attention.

    Each native layer sees what transformers' layer saw, so errors do not add up.

    Args:
        case: the tiny model.
        packer: of the weights in both; its kernels also attend.
        change: what is done to the forms of the native layers.
        dtype: of all caches.
        sizes: what the tiny model's configuration has instead.

    Returns:
        [layers, tokens] the size of the difference as a share of what the layer adds to its input.
    """
    model = served_model(case, **sizes)
    spec = model_spec_of(model)
    layers = iter([OneLayer(spec, index, packer, change, dtype) for index in range(len(spec.layers))])
    pack_experts(model, packer, partial(make_native_experts, packer))
    replace_activations(model)
    onednn = OneDNNPacker()
    for name, module in model.named_modules():
        if name.endswith("shared_expert_gate"):
            pack_weights(module, onednn, onednn)  # as exact as the routers
    pack_weights(model, packer, onednn)
    errors = []

    def compare(layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], answer: Any) -> None:
        rows, answer = args[0][0], (answer[0] if isinstance(answer, tuple) else answer)[0]
        errors.append((next(layers)(rows, batch) - answer).norm(dim=-1) / (answer - rows).norm(dim=-1))

    for layer in model.model.layers:
        layer.register_forward_hook(compare, with_kwargs=True)
    batch = step_batch([(sequence, 0, length) for sequence, length in enumerate(LENGTHS)])
    attention = NativeAttention(packer.kernels, make_cache(spec.layers, dtype))
    recurrence = NativeRecurrence(packer.kernels, make_states(spec.layers))
    HFTargetModel(model, attention, recurrence=recurrence).forward(batch)
    return torch.stack(errors)


def model_spec_of(model: PreTrainedModel) -> ModelSpec:
    """The form of a whole model, which must be known."""
    spec = read_model_spec(model.config, deinterleave_experts(TensorCheckpoint(model.state_dict())))
    assert spec is not None
    return spec


@cache
def spec_of(case: str, **sizes: int) -> ModelSpec:
    """The form of a tiny model."""
    return model_spec_of(served_model(case, **sizes))


class FusedModel:
    """A tiny model as one native call, and as transformers' modules around the same native layers."""

    def __init__(
        self,
        case: str,
        kernels: Kernels,
        kind: WeightKind = "int8",
        changes: Mapping[str, float] | None = None,
        **sizes: int,
    ) -> None:
        """`changes` are made to the native model's form alone."""
        self._kernels, self._packer = kernels, NativePacker(kernels, kind)
        self._make = partial(served_model, case, **sizes)
        self._spec = spec_of(case, **sizes)
        self.native = NativeModel(self._packer, replace(self._spec, **dict(changes or {})))

    def target(self, needs: Sequence[Feature] = ()) -> NativeTargetModel:
        """The model by one native call, on a new cache."""
        attention = NativeAttention(self._kernels, make_cache(self._spec.layers))
        recurrence = NativeRecurrence(self._kernels, make_states(self._spec.layers))
        return NativeTargetModel(self.native, attention, needs, recurrence)

    def modules(self, needs: Sequence[Feature] = ()) -> "ModulesTarget":
        """The modules of transformers around the same layers."""
        model = self._make()
        layers = decoder_layers(model)
        for index, layer in enumerate(layers):
            layers[index] = LayerModule(layer, OneLayer(self._spec, index, self._packer))
        prepare(model, self._packer)
        return ModulesTarget(model, NativeAttention(self._kernels, make_cache(self._spec.layers)), needs)

    def logits(self, steps: Sequence[Step], seed: int = 0) -> list[Tensor]:
        """Logits [length, vocabulary] of each sequence after the steps; NaN for tokens that none computes."""
        target = self.target()
        outputs = [torch.full((length, self.native.num_logits), torch.nan) for length in LENGTHS]
        for step in steps:
            batch = step_batch(step, seed)
            rows = target.forward(batch)
            for (s, start, end), part in zip(step, rows.split([end - start for _, start, end in step]), strict=True):
                outputs[s][start:end] = part
        return outputs


def agree(errors: Tensor) -> bool:
    """Whether layers are equal except for rounding.

    Before each linear a row is rounded to 255 steps. Numbers that differ in the last bit are sometimes rounded to
    different steps. One step in one number changes the row's result by that step's share of the row, some thousandths
    here; a step in a key or value changes all later rows. Most rows are not affected, and there the results agree like
    floats.
    """
    return bool(errors.median() < 2e-6) and bool(errors.max() < 0.02)


class OneLayer:
    """One native layer of a model, on its own."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        packer: NativePacker,
        change: Change = lambda spec: spec,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layer, kind = change(spec.layers[index]), spec.rotary_kinds[index]
        self.width = layer.hidden
        # The input of a second layer is the output of the first.
        two = replace(spec, layers=[layer] * 2, rotary_kinds=[kind] * 2)
        attention = NativeAttention(packer.kernels, make_cache(two.layers, dtype))
        recurrence = NativeRecurrence(packer.kernels, make_states(two.layers))
        self._target = NativeTargetModel(NativeModel(packer, two), attention, [layer_input(1)], recurrence)

    @classmethod
    def of(
        cls, case: str, kernels: Kernels, index: int = 0, change: Change = lambda spec: spec, **sizes: int
    ) -> "OneLayer":
        """A layer of a tiny model in int8."""
        return cls(spec_of(case, **sizes), index, NativePacker(kernels, "int8"), change)

    def __call__(self, hidden: Tensor, step: Batch | Step) -> Tensor:
        """Hidden [tokens, width] of the step's tokens -> the same shape."""
        batch = step if isinstance(step, Batch) else step_batch(step)
        images = [ImageRows(0, hidden[None])] if len(hidden) else []
        self._target.forward(replace(batch, images=images))
        return self._target.features()[layer_input(1)]


class LayerModule(nn.Module):
    """A native layer in place of a decoder layer of transformers."""

    def __init__(self, replaced: nn.Module, layer: OneLayer) -> None:
        super().__init__()
        self.block_type = getattr(replaced, "block_type", None)  # Nemotron-H's model reads it
        self.batch: Batch | None = None
        self._layer = layer
        self._returns_tuple = type(replaced).__name__ == "FalconH1DecoderLayer"

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor | tuple[Tensor]:
        """[1, tokens, width] -> the same shape."""
        assert self.batch is not None
        output = self._layer(hidden_states[0], self.batch)[None]
        return (output,) if self._returns_tuple else output


class ModulesTarget:
    """Transformers' modules around native layers."""

    def __init__(self, model: PreTrainedModel, attention: NativeAttention, needs: Sequence[Feature]) -> None:
        self._layers = decoder_layers(model)
        self._target = HFTargetModel(model, attention, needs)

    def forward(self, batch: Batch) -> Tensor:
        for layer in self._layers:
            layer.batch = batch
        return self._target.forward(batch)

    def features(self) -> Mapping[Feature, Tensor]:
        return self._target.features()
