"""Our attention inside transformers' models, through the interface that transformers offers for it.

The step's backend and metadata travel as one keyword argument from the model's call through every layer to the
attention function, so there is no global state and the model code stays as it is.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.attention.backend import AttentionBackend, AttentionOptions

ATTENTION_NAME = "samewise"

_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits"})
"""Keyword arguments that models pass along and that change nothing here."""


class StepAttention:
    """A backend together with its metadata for one step."""

    def __init__(self, backend: AttentionBackend[Any], metadata: Any) -> None:
        self.backend = backend
        self.metadata = metadata

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.backend.forward(layer, query, key, value, options, self.metadata)


def register_attention() -> None:
    """Make `paged_attention` known to transformers under ATTENTION_NAME, if nothing is: see compile_layers.

    No mask function is registered for that name, so that transformers builds no mask.
    """
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention: StepAttention,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """What a transformers attention module calls.

    Args:
        module: the calling module; its `layer_idx` names the layer.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, tokens, dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: always None, see `register_attention`.
        scaling: factor on the scores; 1 / sqrt(dim) when None.
        sliding_window: positions that a query sees, itself included; None for all.
        softcap: soft cap of the scores.
        attention: the step's attention.
        dropout: 0, for the model is in evaluation mode.
        extra: other arguments of the model's family.

    Returns:
        The output [1, tokens, heads, value_dim], and no attention weights.

    Raises:
        ValueError: if the model asks for a kind of attention that is not implemented.
    """
    unknown = sorted(name for name, argument in extra.items() if argument is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or dropout:
        raise ValueError(f"the model's attention asks for {', '.join(unknown) or 'a mask or dropout'}: not supported")
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("the model's attention is not causal: it cannot generate token by token")
    options = AttentionOptions(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    output = attention(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None
