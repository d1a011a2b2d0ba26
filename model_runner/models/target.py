"""The model that answers: flat tokens in, logits out."""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.batch import Batch, IntArray, to_device
from model_runner.models.activations import ExactFunctions
from model_runner.models.features import Feature, FeatureTap
from model_runner.models.hf_attention import StepAttention
from model_runner.sampling.fused_sampling import NO_PICKS, FusedSamplingPlan, PreSampledTokens


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What a model is given of a step, on its device."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logits_index: Tensor  # [R] int64

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "TokenRows":
        """Of a batch."""
        arrays = (batch.tokens, batch.positions, batch.logits_index)
        return cls(*(to_device(array, device) for array in arrays))


Pick = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps logits [R, vocab] and a FusedSamplingPlan's keys and temperatures to tokens [R] int64; NO_TOKEN for none."""


class TargetModel(Protocol):
    """One forward pass over a step's tokens."""

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: FusedSamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        """Float32 logits [rows, vocab] of the tokens in `batch.logits_index`. They hold until the next pass.

        Args:
            batch: the step's tokens.
            also: features to take from this pass beside those that are taken from every one.
            picks: how to find tokens in these logits; only for models that can.
            follows: [T] for each token, in place of that in the batch: the row of the pass before whose pick it is.
        """
        ...

    def features(self) -> Mapping[Feature, Tensor]:
        """Those of all tokens of the last forward pass, [T, width] each; once."""
        ...

    def picks(self) -> Callable[[], PreSampledTokens]:
        """Waits for those of the last forward pass, if it was given a plan; to be asked for before the next pass."""
        ...

    def settle(self) -> None:
        """Called after the first steps: what they did not need will not be needed later."""
        ...


class HFTargetModel:
    """A decoder-only model of transformers whose attention is ours.

    The head runs inside the model's own forward, for the wanted rows only, so that what a family does there (soft caps,
    scaled logits) is done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend[Any],
        needs: Collection[Feature] = (),
        pick: Pick | None = None,
    ) -> None:
        """Takes features from the model; raises UnsupportedModelError if it has them not.

        Args:
            model: on its device.
            attention: to the model's own cache.
            needs: the features to take from each forward pass.
            pick: finds tokens in logits.
        """
        self._model = model
        self._attention = attention
        self._pick = pick
        self._picks: FusedSamplingPlan | None = None
        self.picked = torch.empty(0)
        """[R] int64 of the last forward pass that found tokens, in a graph or not."""
        self._tap = FeatureTap(model, needs)
        self._also: dict[Feature, Tensor] = {}
        self._functions = ExactFunctions() if model.device.type == "cpu" else None

    def settle(self) -> None:
        """No longer watch for activation functions, if the model called none: it costs time at every operation."""
        if self._functions is not None and not self._functions.was_needed:
            self._functions = None

    def features(self) -> Mapping[Feature, Tensor]:
        also, self._also = self._also, {}
        return self._tap.take() | also

    def picks(self) -> Callable[[], PreSampledTokens]:
        return fetch_picks(self.picked, self._picks)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: FusedSamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        rows = TokenRows.of(batch, self._model.device)
        if follows is not None:
            rows = replace(rows, tokens=take_picks(self.picked, follows))
        plan = () if picks is None else [to_device(array, self._model.device) for array in picks.arrays]
        metadata = self._attention.prepare(batch)
        if also:
            with closing(FeatureTap(self._model, also)) as tap:
                logits = self.run(rows, metadata)
                self._also = tap.take()
        else:
            logits = self.run(rows, metadata)
        if picks is not None:
            self.picked = self.pick(logits, *plan)
        self._picks = picks
        return logits

    def pick(self, logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
        """The token of each row; see Pick."""
        assert self._pick is not None, "this model finds no tokens"
        return self._pick(logits, keys, temperatures)

    def run(self, rows: TokenRows, metadata: Any) -> Tensor:
        """The same from tensors, with the metadata of the model's attention for these tokens."""
        with self._functions or nullcontext():
            output: Any = self._model(
                input_ids=rows.tokens.unsqueeze(0),
                position_ids=rows.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows.logits_index,
                attention=StepAttention(self._attention, metadata),
            )
        logits: Tensor = output.logits[0].float()
        return logits


class OtherVocabulary:
    """Implements TargetModel for a model beside the target that is filled up to another number of tokens.

    Both know the same tokens; what one has beyond them stands for no text, but a prompt may hold it. A token that the
    model lacks is its last one to it, and of a token that the target lacks it says nothing.
    """

    def __init__(self, model: TargetModel, num_tokens: int, target_tokens: int) -> None:
        """
        Args:
            model: the model.
            num_tokens: how many it has.
            target_tokens: how many the target has.
        """
        self._model = model
        self._num_tokens = num_tokens
        self._target_tokens = target_tokens

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: FusedSamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        known = replace(batch, tokens=np.minimum(batch.tokens, self._num_tokens - 1))
        return self._model.forward(known, also, picks, follows)[:, : self._target_tokens]

    def features(self) -> Mapping[Feature, Tensor]:
        return self._model.features()

    def picks(self) -> Callable[[], PreSampledTokens]:
        return self._model.picks()

    def settle(self) -> None:
        self._model.settle()


def take_picks(picked: Tensor, rows: IntArray) -> Tensor:
    """The picks [R] of these rows [T] as tokens to go on with; where there is none, any will do."""
    return picked.index_select(0, to_device(rows, picked.device)).clamp_(min=0)


def fetch_picks(picked: Tensor, plan: FusedSamplingPlan | None) -> Callable[[], PreSampledTokens]:
    """Begin to copy picks [R] to the host; what is returned waits for them."""
    if plan is None:
        return lambda: NO_PICKS
    if picked.device.type != "cuda":
        tokens = picked.tolist()
        return lambda: PreSampledTokens(tokens, plan.choices)
    host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
    host.copy_(picked, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> PreSampledTokens:
        copied.synchronize()
        return PreSampledTokens(host.tolist(), plan.choices)

    return wait
