"""Target models of transformers: flat tokens in, logits out."""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.batch import Batch, IntArray, to_device
from model_runner.features import Feature, FeatureTap
from model_runner.modules.activations import ExactFunctions
from model_runner.modules.call import ModelCall
from model_runner.modules.image_rows import StepImages
from model_runner.modules.step import StepAttention, StepStates
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.sampling.rows import NO_EARLY_TOKENS, EarlySamplingPlan, EarlyTokens


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The model's inputs for a step, on its device."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] or [3, T] int64, rotary positions
    logits_index: Tensor  # [R] int64

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "TokenRows":
        """Copy a batch's inputs to the device."""
        arrays = (batch.tokens, batch.rotary_positions, batch.logits_index)
        return cls(*(to_device(array, device) for array in arrays))


Pick = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps logits [R, vocab] and an EarlySamplingPlan's keys and temperatures to tokens [R] int64, or NO_TOKEN."""


class HFTargetModel:
    """A decoder-only transformers model with our attention.

    The head runs inside the model's own forward, only for the required rows, so that the family's own steps (soft caps,
    scaled logits) are included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend[Any],
        needs: Collection[Feature] = (),
        pick: Pick | None = None,
        recurrence: RecurrenceBackend[Any] | None = None,
    ) -> None:
        """Captures features from the model; raises UnsupportedModelError if the model does not have them.

        Args:
            model: on its device.
            attention: attention to the model's own cache.
            needs: features to capture from each forward pass.
            pick: samples tokens from logits.
            recurrence: recurrences and convolutions on the model's states; None if it has none.
        """
        self._model = model
        self._call = ModelCall(model)
        self._attention = attention
        self._pick = pick
        self._recurrence = recurrence
        self._picks: EarlySamplingPlan | None = None
        self.picked = torch.empty(0)
        """[R] int64 tokens of the last forward pass that sampled, with or without a CUDA graph."""
        self._tap = FeatureTap(model, needs)
        self._also: dict[Feature, Tensor] = {}
        self._functions = ExactFunctions() if model.device.type == "cpu" else None

    def settle(self) -> None:
        """Stop watching for activation functions if the model called none: watching slows every operation."""
        if self._functions is not None and not self._functions.was_needed:
            self._functions = None

    def features(self) -> Mapping[Feature, Tensor]:
        also, self._also = self._also, {}
        return self._tap.take() | also

    def picks(self) -> Callable[[], EarlyTokens]:
        return fetch_early_tokens(self.picked, self._picks)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: EarlySamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        rows = TokenRows.of(batch, self._model.device)
        if follows is not None:
            rows = replace(rows, tokens=take_early_tokens(self.picked, follows))
        plan = () if picks is None else [to_device(array, self._model.device) for array in picks.arrays]
        metadata = self._attention.prepare(batch)
        states = None if self._recurrence is None else StepStates(self._recurrence, self._recurrence.prepare(batch))
        images = StepImages.of(batch, self._model.device) if batch.images else None
        if also:
            with closing(FeatureTap(self._model, also)) as tap:
                logits = self.run(rows, metadata, states, images)
                self._also = tap.take()
        else:
            logits = self.run(rows, metadata, states, images)
        if picks is not None:
            self.picked = self.pick(logits, *plan)
        self._picks = picks
        return logits

    def pick(self, logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
        """Sample the token of each row with `Pick`."""
        assert self._pick is not None, "this model finds no tokens"
        return self._pick(logits, keys, temperatures)

    def run(
        self, rows: TokenRows, metadata: Any, states: StepStates | None = None, images: StepImages | None = None
    ) -> Tensor:
        """Logits for tensors that are on the device, with the attention metadata, states and images of these tokens."""
        with self._functions or nullcontext():
            attention = StepAttention(self._attention, metadata)
            logits = self._call(rows.tokens, rows.positions, rows.logits_index, attention, states, images)
        return logits.float()


def take_early_tokens(picked: Tensor, rows: IntArray) -> Tensor:
    """The sampled tokens [R] of these rows [T] as inputs of the next step; any token will do where there is none."""
    return picked.index_select(0, to_device(rows, picked.device)).clamp_(min=0)


def fetch_early_tokens(picked: Tensor, plan: EarlySamplingPlan | None) -> Callable[[], EarlyTokens]:
    """Begin to copy sampled tokens [R] to the host; returns a function that waits for them."""
    if plan is None:
        return lambda: NO_EARLY_TOKENS
    if picked.device.type != "cuda":
        tokens = picked.tolist()
        return lambda: EarlyTokens(tokens, plan.choices)
    host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
    host.copy_(picked, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> EarlyTokens:
        copied.synchronize()
        return EarlyTokens(host.tolist(), plan.choices)

    return wait
