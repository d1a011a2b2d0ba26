"""Hidden states captured from the target's forward pass, for draft heads and for scores that mix layers."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from model_runner.refusal import UnsupportedModelError, describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAST = "last"
"""The input of the target's head: the last layer's output after the final norm."""

Feature = str
"""LAST, or a name from `layer_input`."""


def layer_input(layer: int) -> Feature:
    """Name of the hidden states that enter a decoder layer: transformers' `hidden_states[layer]`, except the last."""
    return f"layers.{layer}"


def layer_of(feature: Feature) -> int:
    """The layer of a feature from `layer_input`."""
    return int(feature.removeprefix("layers."))


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """The decoder layers of the generating model. Raises UnsupportedModelError if they cannot be found."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    text: Any = model.config.get_text_config()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return module
    raise UnsupportedModelError(f"the decoder layers of {describe_model(model.config)} were not found")


def require_layers(needs: Collection[Feature], num_layers: int) -> None:
    """Raises UnsupportedModelError if a feature needs a layer that a model of `num_layers` does not have."""
    for need in set(needs) - {LAST}:
        if not 0 <= layer_of(need) < num_layers:
            raise UnsupportedModelError(
                f"the heads need the input of layer {layer_of(need)}, but the model has only {num_layers} layers"
            )


class FeatureTap:
    """Keeps the required hidden states of a model's forward pass until they are taken.

    Works with transformers' decoder layers and with their replacements. A model that nothing is required from is not
    modified.
    """

    def __init__(self, model: "PreTrainedModel", needs: Collection[Feature]) -> None:
        """Raises UnsupportedModelError if the model's decoder layers cannot be found or are too few."""
        self._taken: dict[Feature, Tensor] = {}
        decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        layers = decoder_layers(model) if set(needs) - {LAST} else nn.ModuleList()
        require_layers(needs, len(layers))
        self._hooks = [
            decoder.register_forward_hook(self._keep_last)
            if need == LAST
            else layers[layer_of(need)].register_forward_pre_hook(self._keeper(need), with_kwargs=True)
            for need in needs
        ]

    def take(self) -> dict[Feature, Tensor]:
        """Each required feature of the last forward pass, [T, hidden] in the type that the model computes in."""
        taken, self._taken = self._taken, {}
        return taken

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _keep_last(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._taken[LAST] = output.last_hidden_state[0]

    def _keeper(self, need: Feature) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def keep(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._taken[need] = (arguments[0] if arguments else keywords["hidden_states"])[0]

        return keep
