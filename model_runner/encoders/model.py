"""An encoder of transformers whose rows do not influence each other, over a flat batch of texts."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from model_runner.encoders.attention import ATTENTION_NAME, MPNetBias, Texts, register_attention
from model_runner.encoders.folder import EncoderFolder
from model_runner.modules.activations import ExactFunctions, replace_activations
from model_runner.modules.linears import OneDNNPacker, pack_weights
from model_runner.modules.loading import quiet, refuse_faults
from model_runner.modules.transformers_private import set_attention
from model_runner.refusal import UnsupportedModelError, describe_model, refused
from model_runner.weights.damage import naming_damage
from model_runner.weights.packed_weight import Packer
from model_runner.weights.size_check import check_folder

_BUFFERS = (".position_ids", ".token_type_ids", ".inv_freq")
"""Endings of the names of tensors in old checkpoints that follow from the configuration."""
_PROBED = ((37, 1, 90), (90, 37), (1, 128, 1, 37))
"""Lengths of the texts in the batches that are compared with each text alone."""


@dataclass(frozen=True, slots=True)
class EncoderText:
    """A text to encode."""

    tokens: Sequence[int]
    num_first: int | None = None
    """For a pair of texts: tokens of the first with the special tokens around it; None: one text."""


class EncoderModel:
    """Hidden states and class scores of texts. A text's bits are the same in every batch."""

    def __init__(self, folder: EncoderFolder, pack: Packer | None) -> None:
        """Load the model in float32.

        Args:
            folder: the model's folder.
            pack: packs the linear layers; None: they stay in float32.

        Raises:
            UnsupportedModelError: if the model or its checkpoint is not supported.
        """
        register_attention()
        model = _load(folder)
        config: Any = model.config
        self.config = config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._base: Any = model.base_model
        what = f"{describe_model(config)} cannot be served as an encoder"
        onednn = OneDNNPacker()
        with refused(what, RuntimeError, MemoryError):
            replace_activations(model)
            if (pooler := getattr(self._base, "pooler", None)) is not None:
                pack_weights(pooler, onednn, onednn)
            pack_weights(self._base, pack or onednn, onednn)
            pack_weights(model, onednn, onednn)  # the head, if there is one
        self._bias = MPNetBias(self._base.encoder) if config.model_type == "mpnet" else None
        types = getattr(getattr(self._base, "embeddings", None), "token_type_embeddings", None)
        self._num_types: int = 0 if types is None else types.num_embeddings
        self._padding = _padding_of(self._base)
        self._given = _Given(self._base)
        self._classifier: Any = model if folder.classifies else None
        if folder.classifies:
            setattr(model, model.base_model_prefix, self._given)
        self._functions: ExactFunctions | None = ExactFunctions()
        self.max_tokens = _max_tokens(self._base)
        """Positions that the model has."""
        with refused(what, RuntimeError, MemoryError):
            self._check_rows()

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        """The hidden states [tokens, hidden] of each text, after the model's last layer."""
        flat = Texts([len(text.tokens) for text in texts])
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([[token for text in texts for token in text.tokens]]),
            "position_ids": torch.cat([self._positions(text) for text in texts])[None],
        }
        if self._num_types:
            inputs["token_type_ids"] = torch.cat([self._types(text) for text in texts])[None]
        if self._bias is None:
            inputs["texts"] = flat
        else:
            self._bias.begin(flat)
        with self._functions or nullcontext():
            hidden = self._base(**inputs).last_hidden_state[0]
        return [hidden[start:end] for start, end in flat.spans]

    @torch.inference_mode()
    def classify(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """The scores [classes] of texts with these hidden states, by the model's head."""
        scores = []
        with self._functions or nullcontext():
            for states in hidden:
                self._given.hidden = states[None].contiguous()
                scores.append(self._classifier(input_ids=torch.zeros(1, len(states), dtype=torch.long)).logits[0])
        return scores

    def _positions(self, text: EncoderText) -> Tensor:
        if self._padding is None:
            return torch.arange(len(text.tokens))
        is_token = (torch.tensor(text.tokens) != self._padding).long()
        return is_token.cumsum(0) * is_token + self._padding

    def _types(self, text: EncoderText) -> Tensor:
        types = torch.zeros(len(text.tokens), dtype=torch.long)
        if text.num_first is not None and self._num_types > 1:
            types[text.num_first :] = 1
        return types

    def _check_rows(self) -> None:
        """Raise UnsupportedModelError unless random texts have the same bits alone and in several batches."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = self.config.vocab_size
        longest = min(self.max_tokens, max(map(max, _PROBED)))
        tokens = torch.randint(0, vocab_size, (longest,), generator=generator).tolist()
        texts = {length: EncoderText(tokens[:length]) for lengths in _PROBED for length in lengths}
        alone = {length: self._results([text])[0] for length, text in texts.items()}
        if self._functions is not None and not self._functions.was_needed:
            self._functions = None  # watching for activation functions slows every operation
        for lengths in _PROBED:
            results = self._results([texts[length] for length in lengths])
            if not all(torch.equal(result, alone[length]) for length, result in zip(lengths, results, strict=True)):
                raise UnsupportedModelError(
                    f"{describe_model(self.config)} mixes the texts of a batch, so a text's numbers would depend on "
                    "other requests; it is not supported"
                )

    def _results(self, texts: Sequence[EncoderText]) -> list[Tensor]:
        """All numbers that the model makes of each text."""
        hidden = self.encode(texts)
        if self._classifier is None:
            return hidden
        scores = self.classify(hidden)
        return [torch.cat([states.flatten(), one]) for states, one in zip(hidden, scores, strict=True)]


class _Given(nn.Module):
    """Stands in for the encoder of a classification model: returns given hidden states, pooled as the encoder does it.

    So the model's own forward pass applies its head to one text, and each family's pooling needs no code here.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._pooler = getattr(base, "pooler", None)
        self._activation = getattr(base, "pooler_activation", None)
        """It follows a pooler that is only a linear layer, as in ALBERT."""
        self.hidden = torch.empty(0)

    def forward(self, *ignored: Any, **also_ignored: Any) -> BaseModelOutputWithPooling:
        """The output for the hidden states [1, tokens, hidden]."""
        pooled = None
        if isinstance(self._pooler, nn.Linear) and self._activation is not None:
            pooled = self._activation(self._pooler(self.hidden[:, 0]))
        elif self._pooler is not None:
            pooled = self._pooler(self.hidden)
        return BaseModelOutputWithPooling(last_hidden_state=self.hidden, pooler_output=pooled)


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes that an encoder's configuration decides."""

    max_tokens: int
    """Positions that it has."""
    vocab_size: int
    hidden: int
    linears: tuple[tuple[int, int], ...]
    """Outputs and inputs of each linear layer."""

    @classmethod
    def of(cls, folder: EncoderFolder) -> "EncoderShape":
        """Reads no weights. Raises UnsupportedModelError as loading does."""
        check_folder(folder.path)
        with _reading(folder), torch.device("meta"):
            kind, config, options = _class_of(folder)
            model = kind(config, **options)
            linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
            sizes = tuple((one.out_features, one.in_features) for one in linears)
            return cls(_max_tokens(model.base_model), config.vocab_size, config.hidden_size, sizes)

    @property
    def widest(self) -> int:
        """Numbers of a token in the widest layer."""
        return max(chain([self.hidden], *self.linears))


def _padding_of(base: Any) -> int | None:
    """RoBERTa's first position is the one after this token's id; such tokens have the id as their position."""
    embeddings = getattr(base, "embeddings", None)
    has_places = getattr(embeddings, "position_embeddings", None) is not None
    return getattr(embeddings, "padding_idx", None) if has_places else None


def _max_tokens(base: Any) -> int:
    padding = _padding_of(base)
    return int(base.config.max_position_embeddings) - (0 if padding is None else padding + 1)


@contextmanager
def _reading(folder: EncoderFolder) -> Iterator[None]:
    """Turns errors of transformers into messages about the folder."""
    with refused(f"{folder.path} holds no encoder that transformers can read"), naming_damage(folder.path), quiet():
        yield


def _class_of(folder: EncoderFolder) -> tuple[Any, Any, dict[str, bool]]:
    """The model's class, its configuration, and further arguments of its constructor."""
    config: Any = AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    mapping: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if folder.classifies else MODEL_MAPPING
    if type(config) not in mapping:
        raise UnsupportedModelError(f"{describe_model(config)} has a classification head that is not known")
    kind: Any = mapping[type(config)]
    options = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}
    return kind, config, options


def _load(folder: EncoderFolder) -> PreTrainedModel:
    """The model in evaluation mode."""
    with _reading(folder):
        kind, config, options = _class_of(folder)
        model, report = kind.from_pretrained(
            folder.path,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager" if config.model_type == "mpnet" else ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            **options,
        )
        _check_report(model, report)
    set_attention(model.config, ATTENTION_NAME)  # transformers then builds no masks for MPNet, either
    loaded: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return loaded


def _check_report(model: Any, report: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError unless the checkpoint has the model's weights, and no others of its encoder.

    Heads for other tasks are not used.

    Args:
        model: the loaded model.
        report: transformers' loading report: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
    """
    prefix = f"{model.base_model_prefix}."
    own = {name for name, _ in model.base_model.named_children()} - {"pooler"}
    unexpected = [
        key
        for key in report["unexpected_keys"]
        if key.removeprefix(prefix).split(".")[0] in own and not key.endswith(_BUFFERS)
    ]
    refuse_faults(model.config, {**report, "unexpected_keys": unexpected})
