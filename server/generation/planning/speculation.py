"""What a request's `speculation` and `prediction` mean for the engine: a method that it has, or a refusal."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from model_runner.config import METHOD_ALIASES, REMOVED_METHODS
from model_runner.contract import Speculation
from server.errors import InvalidRequestError
from server.generation.settings import SpeculationSettings

_AUTO, _OFF, _PREDICTION = "auto", "off", "prediction"
_TAKES_PREDICTION = (_AUTO, _PREDICTION)


@dataclass(frozen=True, slots=True)
class SpeculationRules:
    """What this server offers."""

    methods: tuple[str, ...]
    """Those of the engine."""
    default: str
    """The setting: a method for requests that name none, or "off"."""

    @property
    def of_silence(self) -> str:
        """The method of a request that says nothing, or "off": without a prediction there is none to follow."""
        return self.default if self.default in self.methods and self.default != _PREDICTION else _OFF

    def choose(
        self, asked: Literal["off"] | SpeculationSettings | None, prediction: Sequence[int] | None
    ) -> Speculation | None:
        """How to speculate for a request; None: not at all. `prediction` are the tokens of its prediction.

        Raises InvalidRequestError for a method that is not there, and for a method and a prediction that do not fit.
        """
        if asked is None and prediction is None:
            return None if self.of_silence == _OFF else Speculation(self.of_silence)
        options = asked if isinstance(asked, SpeculationSettings) else SpeculationSettings()
        asked_method = options.method and METHOD_ALIASES.get(options.method, options.method)
        is_off = asked == _OFF or options.num_tokens == 0
        if asked_method is not None:
            self._check_method(asked_method)
        self._check_prediction(asked_method, is_off=is_off, given=prediction is not None)
        if is_off:
            return None
        method = asked_method or self._implied_method(prediction)
        self._check_method(method)
        return Speculation(method, options.num_tokens, options.verify or "match", tuple(prediction or ()))

    def _implied_method(self, prediction: Sequence[int] | None) -> str:
        if prediction is not None:
            return _PREDICTION
        return _AUTO if self.default in (_OFF, _PREDICTION) else self.default

    def _check_method(self, method: str) -> None:
        if method in self.methods:
            return
        message = f"Unsupported value: 'speculation.method' does not support '{method}' with this server."
        if method in REMOVED_METHODS:
            message += f" {REMOVED_METHODS[method]}"
        elif near := difflib.get_close_matches(method, self.methods, n=1):
            message += f" Did you mean '{near[0]}'?"
        there = ", ".join(f"'{name}'" for name in self.methods)
        message += f" Supported values are: {there}." if there else " It has no method of speculation."
        raise InvalidRequestError(message, param="speculation.method", code="unsupported_value")

    def _check_prediction(self, method: str | None, *, is_off: bool, given: bool) -> None:
        if not given:
            if method == _PREDICTION and not is_off:
                message = (
                    "'speculation.method': 'prediction' needs the parameter 'prediction', which chat completions have."
                )
                raise InvalidRequestError(message, param="speculation.method", code="invalid_parameter_combination")
            return
        if _PREDICTION not in self.methods:
            message = "Unsupported parameter: 'prediction' is not supported by this server."
            raise InvalidRequestError(message, param="prediction", code="unsupported_parameter")
        if is_off or method not in (None, *_TAKES_PREDICTION):
            found = "is off" if is_off else f"has the method '{method}'"
            message = (
                f"'prediction' cannot be followed while 'speculation' {found}. "
                "Leave 'speculation' out, or give it the method 'prediction' or 'auto'."
            )
            raise InvalidRequestError(message, param="prediction", code="invalid_parameter_combination")
