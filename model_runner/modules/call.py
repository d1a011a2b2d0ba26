"""Calls models of transformers for flat tokens."""

import inspect
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from model_runner.modules.classes import has_indexers, hook_modules
from model_runner.modules.image_rows import StepImages
from model_runner.modules.indexers import MASKS
from model_runner.modules.step import States, StepAttention, share_step


class ModelCall:
    """Calls a model of transformers for flat tokens."""

    def __init__(self, model: Any) -> None:
        """Connects the modules of known classes with the model's step, which all its modules share."""
        self._model = model
        self._step = share_step(model)
        hook_modules(model, self._step)
        parameters = inspect.signature(model.forward).parameters
        self._keywords = {name for name in ("position_ids", "logits_to_keep", "use_cache") if name in parameters}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self._keywords |= {"position_ids", "use_cache", "attention"}
        if has_indexers(model):
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
        attention.positions = positions if positions.dim() == 1 else positions[0]
        placed = nullcontext(tokens) if images is None else images.placed_in(self._model, tokens)
        with self._step.during(attention, states), placed as shown:
            output: Any = self._model(
                input_ids=shown.unsqueeze(0), **{name: arguments[name] for name in self._keywords}
            )
        logits: Tensor = output.logits[0]
        return logits if "logits_to_keep" in self._keywords else logits.index_select(0, logits_index)
