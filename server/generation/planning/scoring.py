"""What a request's `contrastive`, `dola` and `guidance` mean for the loaded models: numbers, or a refusal."""

from dataclasses import dataclass

from model_runner.contract import Contrastive, DoLa
from server.errors import InvalidRequestError
from server.generation.settings import ContrastiveSettings, DoLaSettings, GuidanceSettings

_CONTRASTIVE = Contrastive()
_DOLA = DoLa("low")


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """What this server offers."""

    aux_model: str | None
    """Name of the auxiliary model, if one is loaded."""
    num_early_exits: int
    """Layers before which the model can be asked for the next token; 0 if it cannot."""

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields of which the loaded models have not what they need."""
        missing = {"contrastive": self.aux_model is None, "dola": self.num_early_exits == 0}
        return frozenset(name for name, is_missing in missing.items() if is_missing)

    def contrastive(self, asked: ContrastiveSettings | None) -> Contrastive | None:
        """Raises InvalidRequestError without an auxiliary model, or if another one is named."""
        if asked is None:
            return None
        if self.aux_model is None:
            message = "Unsupported parameter: 'contrastive' is not supported by this server: it has no auxiliary model."
            raise InvalidRequestError(message, param="contrastive", code="unsupported_parameter")
        if asked.amateur not in {None, self.aux_model}:
            message = (
                f"Unsupported value: 'contrastive.amateur' does not support '{asked.amateur}' with this server. "
                f"Supported values are: '{self.aux_model}'."
            )
            raise InvalidRequestError(message, param="contrastive.amateur", code="unsupported_value")
        beta = _CONTRASTIVE.amateur_weight if asked.beta is None else asked.beta
        return Contrastive(
            alpha=_CONTRASTIVE.alpha if asked.alpha is None else asked.alpha,
            expert_weight=1 + beta if asked.expert_weight is None else asked.expert_weight,
            amateur_weight=beta,
            temperature=_CONTRASTIVE.temperature if asked.temperature is None else asked.temperature,
        )

    def guidance(self, asked: GuidanceSettings | None) -> float | None:
        """The scale, if it changes anything."""
        return None if asked is None or asked.scale == 1 else asked.scale

    def dola(self, asked: DoLaSettings | None) -> DoLa | None:
        """Raises InvalidRequestError for layers that the model does not have."""
        if asked is None:
            return None
        if self.num_early_exits == 0:
            message = "Unsupported parameter: 'dola' is not supported with this model."
            raise InvalidRequestError(message, param="dola", code="unsupported_parameter")
        alpha = _DOLA.alpha if asked.alpha is None else asked.alpha
        if isinstance(asked.layers, str):
            return DoLa(asked.layers, alpha)
        last = self.num_early_exits - 1
        for index, layer in enumerate(asked.layers):
            if layer > last:
                path = f"dola.layers[{index}]"
                shown = layer if layer < 10**20 else "a very large integer"
                expected = f"Expected a value <= {last}, the model's last layer, but got {shown} instead."
                message = f"Invalid '{path}': integer above maximum value. {expected}"
                raise InvalidRequestError(message, param=path, code="integer_above_max_value")
        return DoLa(tuple(sorted(set(asked.layers))), alpha)
