"""A whole model of a known family as plain data: the forms of its layers, and what is around them.

Weights may still be in files: a form is read in milliseconds, and says how much memory the model needs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from model_runner.kernels.library import INT4_GROUP
from model_runner.refusal import UnsupportedModelError, describe_model, is_bare
from model_runner.spec.families import WRAPPERS, ModelFamily, find_family
from model_runner.spec.layer_family import Config
from model_runner.spec.layer_spec import AttentionSpec, LayerSpec, read_layer_spec
from model_runner.spec.model_folder import is_unused_head
from model_runner.spec.model_shape import ModelShape, rotated
from model_runner.spec.rotary import Frequencies, rotary_frequencies
from model_runner.weights.checkpoint import Checkpoint
from model_runner.weights.matrix import Linear, Matrix
from model_runner.weights.parameters import Parameters

_HEAD = "lm_head"
"""The head's name, below the module that has the decoder, or at the top."""
_RECOMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Weights of old checkpoints that follow from the configuration."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: an embedding, decoder layers with rotary positions, an RMS norm and a linear head."""

    config: Any
    """The whole configuration."""
    embedding: Matrix  # [vocabulary, hidden]
    embedding_scale: float
    layers: Sequence[LayerSpec]
    rotary_kinds: Sequence[str | None]
    """For each layer the kind whose frequencies it has."""
    frequencies: Mapping[str | None, Frequencies]
    """Rotary frequencies of each kind of layer, or of all kinds as None."""
    max_model_len: int
    norm: Tensor  # [hidden], the factor
    norm_eps: float
    logits_scale: float
    logits_softcap: float
    """Logits x become softcap * tanh(x / softcap); 0 leaves them."""
    head: Linear
    shares_head: bool
    """Whether head and embedding are the same weight."""

    @property
    def linears(self) -> list[Linear]:
        """All linear layers and experts, and the head, without the routers."""
        return [*(linear for layer in self.layers for linear in _linears(layer)), self.head]

    @property
    def num_small(self) -> int:
        """Weights of norms, biases and routers."""
        return self.norm.numel() + sum(one.numel() for layer in self.layers for one in _small_tensors(layer))

    @property
    def row_bytes(self) -> int:
        """About what the kernels need for a row of a step: the row, and the outputs of all linears of one layer."""
        return torch.float32.itemsize * (2 * self.embedding.shape[1] + max(map(_width, self.layers), default=0))

    def shape(self) -> ModelShape:
        """The sizes that decide how much memory the model needs."""
        *inner, _ = self.linears
        attention = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]
        recurrent = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        num_inner = sum(_size(linear) for linear in inner)
        num_head, num_embedding = _size(self.head), self.embedding.shape[0] * self.embedding.shape[1]
        distinct = num_embedding if self.shares_head else num_embedding + num_head
        return ModelShape(
            kv=tuple(mixer.kv for mixer in attention),
            num_layers=len(self.layers),
            num_parameters=num_inner + distinct + self.num_small,
            num_shared=num_embedding if self.shares_head else 0,
            num_multiplied=num_inner + num_head,
            num_rotated=sum(rotated(_size(linear), linear.inputs) for linear in [*inner, self.head]),
            num_inner=num_inner,
            num_groupable=sum(_size(linear) for linear in inner if linear.inputs % INT4_GROUP == 0),
            hidden=self.embedding.shape[1],
            vocab_size=self.head.outputs,
            max_model_len=self.max_model_len,
            recurrences=tuple(mixer.recurrence for mixer in recurrent if mixer.recurrence is not None),
            convolutions=tuple(mixer.convolution for mixer in recurrent),
            spec=self,
        )


def read_model_spec(config: Any, checkpoint: Checkpoint) -> ModelSpec | None:
    """Read a model of a known family.

    Returns:
        None if the family is not known, or the configuration asks for something else than its common computation.

    Raises:
        UnsupportedModelError: if the checkpoint lacks weights, or has others than the model.
    """
    text: Config = config.get_text_config()
    family = find_family(config.model_type, text.model_type)
    if family is None:
        return None
    parameters = Parameters(checkpoint, family.layer.names)
    path = _find_decoder(family.model, config, parameters)
    if path is None:
        return None
    decoder, head_names = parameters.below(path) if path else parameters, _head_names(path)
    if any(parameters.has(f"{name}.bias") for name in head_names):
        return None
    layers = [
        read_layer_spec(family.layer, text, index, decoder.below(f"layers.{index}"))
        for index in range(text.num_hidden_layers)
    ]
    known = [layer for layer in layers if layer is not None]
    frequencies = rotary_frequencies(family.model, text) if any(layer.uses_rotary for layer in known) else {}
    if len(known) < len(layers) or not known or frequencies is None:
        return None
    embedding = decoder.linear([family.model.embedding], text.vocab_size, text.hidden_size)
    norm = decoder.require(f"{family.model.norm}.weight", text.hidden_size).float()
    head = _read_head(config, head_names, parameters, embedding)
    _use_unneeded(family.model, config, path, parameters)
    if (fault := parameters.fault()) is not None:
        raise UnsupportedModelError(f"{describe_model(config)} {fault}")
    return ModelSpec(
        config=config,
        embedding=embedding.matrices[0],
        embedding_scale=family.model.embedding_scale(text),
        layers=known,
        rotary_kinds=text.layer_types if family.model.rotary_by_kind else [None] * len(layers),
        frequencies=frequencies,
        max_model_len=text.max_position_embeddings,
        norm=1 + norm if family.model.norm_adds_one else norm,
        norm_eps=family.model.norm_eps(text),
        logits_scale=family.model.logits_scale(text),
        logits_softcap=family.model.logits_softcap(text) or 0.0,
        head=head,
        shares_head=head is embedding,
    )


def _find_decoder(family: ModelFamily, config: Any, parameters: Parameters) -> str | None:
    """The path of the decoder's weights in the checkpoint; None unless exactly one module has such an embedding.

    Modules for multi-token prediction may have copies of it.
    """
    embedding = f"{family.embedding}.weight"
    names = [name for name in parameters.checkpoint.shapes if f".{name}".endswith(f".{embedding}")]
    paths = [name.removesuffix(embedding).removesuffix(".") for name in names if not is_unused_head(name, config)]
    if not paths and parameters.has(f"model.{embedding}"):  # by another name
        return "model"
    return paths[0] if len(paths) == 1 else None


def _head_names(decoder: str) -> list[str]:
    """Names that the head may have in a checkpoint with the decoder at this path."""
    beside, _, _ = decoder.rpartition(".")
    return [f"{beside}.{_HEAD}", _HEAD] if beside else [_HEAD]


def _read_head(config: Any, names: Sequence[str], parameters: Parameters, embedding: Linear) -> Linear:
    """The head; the embedding where the two are one, or where the model has no head and its logits are of no use."""
    name = next((name for name in names if parameters.has(f"{name}.weight")), None)
    if _is_tied(config) or (name is None and is_bare(config.architectures)):
        return embedding
    text = config.get_text_config()
    return parameters.linear([name or _HEAD], text.vocab_size, text.hidden_size)


def _is_tied(config: Any) -> bool:
    """Whether the head is the embedding. Configurations of some wrappers leave that to the language model's."""
    whole = getattr(config, "tie_word_embeddings", None)
    return bool(config.get_text_config().tie_word_embeddings if whole is None else whole)


def _use_unneeded(family: ModelFamily, config: Any, decoder: str, parameters: Parameters) -> None:
    """Count weights as used that the model's text has no use for, so that they are no fault."""
    heads, is_wrapper, is_tied = _head_names(decoder), config.model_type in WRAPPERS, _is_tied(config)
    for name in parameters.checkpoint.shapes:
        is_head = name.removesuffix(".weight") in heads
        is_outside = is_wrapper and not is_head and not name.startswith(f"{decoder}.")
        is_copy = is_head and is_tied
        is_unneeded = name.startswith(tuple(family.ignored)) or is_unused_head(name, config)
        if is_outside or is_copy or is_unneeded or _RECOMPUTED.search(name):
            parameters.used.add(name)


def _linears(layer: LayerSpec) -> list[Linear]:
    """The linear layers and experts, without the router, in the order in which they are packed."""
    mixer, experts = [layer.mixer_input, layer.mixer_output, layer.parallel_output], layer.experts
    if experts is None:
        mlp = [layer.gate_up, layer.down]
    elif experts.latent_input is None:  # the MLP's gate and up take the experts' rows
        mlp = [layer.down, *experts.gate_up, layer.gate_up, *experts.down]
    else:
        latent = [experts.latent_output, experts.latent_input, layer.gate_up]
        mlp = [layer.down, *latent, *experts.gate_up, *experts.down]
    return [linear for linear in [*mixer, *mlp] if linear is not None]


def _width(layer: LayerSpec) -> int:
    """Numbers that a layer's linears and chosen experts give for a row."""
    linears = [layer.mixer_input, layer.mixer_output, layer.gate_up, layer.down]
    if (experts := layer.experts) is not None:
        linears += [experts.gate_up[0], experts.down[0]] * experts.top_k
    return sum(linear.outputs for linear in linears if linear is not None)


def _small_tensors(layer: LayerSpec) -> list[Tensor]:
    """Norms, biases and routers."""
    norms = layer.norms
    tensors = [norms.attention, norms.attention_post, norms.mlp, norms.mlp_post, norms.query, norms.key]
    tensors += [linear.bias for linear in _linears(layer)]
    if isinstance(layer.mixer, AttentionSpec):
        tensors.append(layer.mixer.options.sinks)
    if layer.recurrent is not None:
        parameters = layer.recurrent.parameters
        tensors += [getattr(parameters, one.name) for one in fields(parameters)]
    if (experts := layer.experts) is not None:
        tensors += [experts.router, experts.router_bias, experts.choice_bias, experts.mlp_gate]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _size(linear: Linear) -> int:
    return linear.outputs * linear.inputs
