"""Paged attention for transformers' models, through transformers' attention interface.

The step's backend and metadata travel as one keyword argument from the model's call through every layer to the
attention function. Some families' layers drop it, so every module also has the model's `CurrentStep`, which holds the
same. There is no global state, and the model code needs no change.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.modules.compressed import hook_compressors
from model_runner.modules.image_rows import StepImages
from model_runner.modules.indexers import MASKS, Mask, hook_indexers
from model_runner.modules.mixers import States, hook_mixers
from model_runner.modules.ngrams import hook_ngrams

ATTENTION_NAME = "samewise"
_STEP = "current_step"
"""Attribute of all modules with their CurrentStep."""

_HARMLESS = frozenset(
    {
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Keyword arguments that models pass along and that have no effect here."""


class StepAttention:
    """An attention backend and its metadata for one forward pass.

    Each call of a pass has keys and values of its own, numbered in the order of the calls. A module may be called
    several times, with different keys and values: `layer_idx` would not tell these apart.
    """

    def __init__(self, backend: AttentionBackend[Any], metadata: Any) -> None:
        self.backend = backend
        self.metadata = metadata
        self.positions = torch.empty(0, dtype=torch.int64)
        """[T] the step's positions, which ModelCall sets."""
        self.states: States | None = None
        """The recurrent states of the step, which ModelCall sets."""
        self.num_calls = 0
        """Calls of this pass so far. Layers that attend by themselves count theirs."""
        self._beside: tuple[Tensor, Tensor] | None = None
        self._shared: dict[str, int] = {}
        """By the kind of layer, the call whose keys and values later layers use."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        beside, self._beside = self._beside, None
        if beside is None:
            return self.backend.forward(self._next_call(), query, key, value, options, self.metadata)
        entries, selection = beside
        sums = [query.new_empty(*query.shape[:2], 2, dtype=torch.float32) for _ in range(2)]
        of_entries = AttentionOptions(options.scale, softcap=options.softcap, selection=selection, sums=sums[1])
        of_window = replace(options, sums=sums[0])
        outputs = [
            self.backend.forward(self._next_call(), query, *rows, limits, self.metadata)
            for rows, limits in (((key, value), of_window), ((entries, entries), of_entries))
        ]
        return _joined(outputs, sums)

    def _next_call(self) -> int:
        call = self.num_calls
        self.num_calls += 1
        return call

    def select(self, query: Tensor, key: Tensor, weights: Tensor | None, options: IndexOptions) -> Tensor:
        """The arguments and the result of `AttentionBackend.select`. Index keys count as a call of their own."""
        return self.backend.select(self._next_call(), query, key, weights, options, self.metadata)

    def recall(self, rows: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
        """The arguments and the result of `AttentionBackend.recall`. Rows count as a call of their own."""
        return self.backend.recall(self._next_call(), rows, block, count, self.metadata)

    def see_entries(self, block: int) -> Tensor:
        """As `AttentionBackend.see_entries`."""
        return self.backend.see_entries(block, self.metadata)

    def put_beside(self, entries: Tensor, selection: Tensor) -> None:
        """Let the next call also see entries [T, 1, dim], which are key and value, as the selection says."""
        self._beside = entries, selection

    def of(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """The same for a module that may use the keys and values of an earlier layer of its kind (Gemma 3n and 4).

        Mistral Large 4 shares latents: layers that expand these have keys and values of their own.
        """
        if not hasattr(module, "store_full_length_kv") or hasattr(module, "kv_b_proj"):
            return self(query, key, value, options)
        kind = str(module.layer_type if hasattr(module, "layer_type") else module.use_rope)
        if module.is_kv_shared_layer:
            return self.backend.attend(self._shared[kind], query, options, self.metadata)
        if module.store_full_length_kv:
            self._shared[kind] = self.num_calls
        return self(query, key, value, options)


def _joined(outputs: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """One softmax over what two attentions saw: outputs [T, heads, dim] and `AttentionOptions.sums` of each.

    Every row saw something by the first attention.
    """
    (highest, total), (other_highest, other_total) = (one.unbind(-1) for one in sums)
    top = torch.maximum(highest, other_highest)
    weight, other = total * (highest - top).exp(), other_total * (other_highest - top).exp()
    mixed = (outputs[0] * weight.unsqueeze(-1) + outputs[1] * other.unsqueeze(-1)) / (weight + other).unsqueeze(-1)
    return torch.where((other_total > 0).unsqueeze(-1), mixed, outputs[0]).to(outputs[0].dtype)


class CurrentStep:
    """The attention and states of the pass that a model is in; all modules of the model and its twins share one."""

    attention: StepAttention | None = None
    states: States | None = None


class ModelCall:
    """Calls a model of transformers for flat tokens."""

    def __init__(self, model: Any) -> None:
        """Gives every module of the model its CurrentStep, and families without the interface our functions."""
        adapt_attention(model)
        self._model = model
        self._step: CurrentStep = getattr(model, _STEP, None) or CurrentStep()
        for module in model.modules():
            setattr(module, _STEP, self._step)
            kind = f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
            if kind in _OWN_ATTENTION:
                name, function = _OWN_ATTENTION[kind]
                setattr(module, name, partial(function, module))
        hook_mixers(model, lambda: self._step.states)
        hook_compressors(model, lambda: self._step.attention)
        hook_ngrams(model, lambda: self._step.states)
        parameters = inspect.signature(model.forward).parameters
        self._keywords = {name for name in ("position_ids", "logits_to_keep", "use_cache") if name in parameters}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self._keywords |= {"position_ids", "use_cache", "attention"}
        if hook_indexers(model, lambda: self._step.attention, lambda: self._step.states):
            self._keywords |= {"attention_mask"}

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        logits_index: Tensor,
        attention: StepAttention,
        states: States | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Logits [R, vocab], in the model's type.

        Args:
            tokens: [T].
            positions: [T], or [3, T] for models with rotary positions in three axes.
            logits_index: [R] the tokens whose logits are needed.
            attention: the attention of these tokens.
            states: the recurrent states of these tokens.
            images: features of some tokens.
        """
        arguments = {
            "position_ids": positions.unsqueeze(-2),
            "use_cache": False,
            "logits_to_keep": logits_index,
            "attention": attention,
            "attention_mask": MASKS,
        }
        self._step.attention, self._step.states = attention, states
        attention.positions = positions if positions.dim() == 1 else positions[0]
        attention.states = states
        try:
            with nullcontext(tokens) if images is None else images.placed_in(self._model, tokens) as shown:
                output: Any = self._model(
                    input_ids=shown.unsqueeze(0), **{name: arguments[name] for name in self._keywords}
                )
        finally:
            self._step.attention = self._step.states = None
        logits: Tensor = output.logits[0]
        return logits if "logits_to_keep" in self._keywords else logits.index_select(0, logits_index)


def register_attention() -> None:
    """Register `paged_attention` with transformers, unless compile_layers registered an uncompiled version.

    Without a mask function for that name, transformers builds no mask.
    """
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Llama 4's factor on the queries of layers without rotary positions."""

    interval: float
    strength: float

    def __call__(self, positions: Tensor) -> Tensor:
        """Positions [T] -> factors [T, 1, 1]."""
        steps = ((positions.float() + 1) / self.interval).floor()
        return (steps.log1p() * self.strength + 1)[:, None, None]


def adapt_attention(model: nn.Module) -> None:
    """Let `paged_attention` scale queries, where the modules would take a token's place in the batch for its position.

    The modules are changed in place.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            module.attn_temperature_tuning = False
            module.query_scale = QueryScale(module.floor_scale, module.attn_scale)


def _chunk_of(module: Any) -> int | None:
    """The chunk size of a layer; transformers does not pass it on."""
    config = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    if config is None or size is None or config.layer_types[module.layer_idx] != "chunked_attention":
        return None
    return size


def sees_images(module: Any) -> bool:
    """Whether the rows of an image see each other in a layer: in all of Gemma 3, in sliding ones of some Gemma 4."""
    config = getattr(module, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    if model_type.startswith("gemma4"):
        return bool(module.is_sliding) and getattr(config, "use_bidirectional_attention", None) == "vision"
    return model_type == "gemma3_text"


def paged_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    attention: StepAttention | None = None,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that a transformers attention module calls.

    Args:
        module: the calling module.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, tokens, dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: None, because no mask function is registered, or from MASKS.
        scaling: factor on the scores; None: 1 / sqrt(dim).
        sliding_window: positions that a query sees, including its own; None: all.
        softcap: soft cap of the scores.
        s_aux: [heads] attention sinks, logits that take part in the softmax and have no value.
        indices: the selection of the layer's indexer, or of an earlier one.
        block_indices: the same, where the family calls it so.
        attention: the step's attention; None where the family's layers drop it: the module has it, too.
        dropout: 0, because the model is in evaluation mode.
        extra: other arguments of the model's family.

    Returns:
        The output [1, tokens, heads, value_dim], and no attention weights.

    Raises:
        ValueError: if the model uses a kind of attention that is not supported.
    """
    unknown = sorted(name for name, argument in extra.items() if argument is not None and name not in _HARMLESS)
    if unknown or isinstance(attention_mask, Tensor) or dropout:
        raise ValueError(f"the model's attention needs {', '.join(unknown) or 'a mask or dropout'}: not supported")
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("the model's attention is not causal, so it cannot generate token by token")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    selections = indices, block_indices, getattr(attention_mask, "selection", None)
    selection = next((one for one in selections if one is not None), None)
    options = AttentionOptions(
        scale, sliding_window, softcap, _chunk_of(module), s_aux, selection, sees_spans=sees_images(module)
    )
    step: StepAttention = attention or getattr(module, _STEP).attention
    queries = query[0].transpose(0, 1)
    if (query_scale := getattr(module, "query_scale", None)) is not None:
        queries = (queries * query_scale(step.positions)).to(queries.dtype)
    if (latents := getattr(module, "latents", None)) is not None:
        queries = latents.absorb(queries)
    output = step.of(module, queries, key[0].transpose(0, 1), value[0].transpose(0, 1), options)
    return (output if latents is None else latents.expand(output)).unsqueeze(0), None


def _attend_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> tuple[Tensor, None]:
    """Attention for families that do not use transformers' interface: [1, heads, tokens, dim] in and out."""
    output, _ = paged_attention(module, query, key, value, None, scale, window)
    return output.transpose(1, 2), None


def _gpt_neo(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend_alone(module, query, key, value, 1.0, window)


def _gpt_neox_japanese(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _attend_alone(module, query, key, value, 1 / float(module.norm_factor))


def _openai_gpt(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    scale = value.shape[-1] ** -0.5 if module.scale else 1.0
    return [_attend_alone(module, query, key.transpose(-2, -1), value, scale)[0]]


def _xglm(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """A whole attention module, which has no method for its middle: [1, T, hidden] -> the same shape."""
    rows = (projection(hidden_states) for projection in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in rows)
    output, _weights = paged_attention(module, query, key, value, None, module.scaling)
    return module.out_proj(output.flatten(2)), None


def _falcon(
    module: Any, hidden_states: Tensor, alibi: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """The same for Falcon. Each group of heads has its queries, then its key and its value.

    Raises:
        ValueError: if scores depend on distances.
    """
    if alibi is not None:
        raise ValueError("the model's attention has a bias by distance (alibi): not supported")
    groups = module.num_kv_heads if module.new_decoder_architecture or module.multi_query else module.num_heads
    rows = module.query_key_value(hidden_states).unflatten(-1, (groups, -1, module.head_dim))
    parts = rows[..., :-2, :].flatten(2, 3), rows[..., -2, :], rows[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in parts)
    rotate = type(module).forward.__globals__["apply_rotary_pos_emb"]
    query, key = rotate(query, key, *position_embeddings)
    output, _weights = paged_attention(module, query, key, value, None, module.inv_norm_factor)
    return module.dense(output.flatten(2)), None


_OWN_ATTENTION: dict[str, tuple[str, Callable[..., Any]]] = {
    "modeling_falcon.FalconAttention": ("forward", _falcon),
    "modeling_gpt_neo.GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "modeling_openai.Attention": ("_attn", _openai_gpt),
    "modeling_xglm.XGLMAttention": ("forward", _xglm),
}
"""Methods that are replaced, and functions that replace them, by module and name of the class."""
