"""A model that one native call runs, as the runner uses it."""

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from model_runner.attention.cpu import NativeAttention
from model_runner.batch import Batch, IntArray
from model_runner.models.features import LAST, Feature, layer_of, require_layers
from model_runner.models.native_model import NativeModel
from model_runner.sampling.picks import NO_PICKS, PickPlan, Prepicks

_KEPT_ROWS = 64
"""Memory for the logits of so many rows is kept from pass to pass: the system takes its time to hand out pages."""


class NativeTargetModel:
    """Implements TargetModel."""

    def __init__(self, model: NativeModel, attention: NativeAttention, needs: Collection[Feature] = ()) -> None:
        """Raises UnsupportedModelError if the model has not the layers that a feature names.

        Args:
            model: bound to the cache of the attention.
            attention: to the model's own cache.
            needs: the features to take from each forward pass.
        """
        require_layers(needs, model.num_layers)
        self._model = model
        self._attention = attention
        self._needs = frozenset(needs)
        self._taken: dict[Feature, Tensor] = {}
        self._picks = NO_PICKS
        self._kept = torch.empty(0, model.num_logits, dtype=torch.float32)

    def settle(self) -> None:
        """See TargetModel.settle."""

    def features(self) -> Mapping[Feature, Tensor]:
        """See TargetModel.features."""
        taken, self._taken = self._taken, {}
        return taken

    def picks(self) -> Callable[[], Prepicks]:
        """See TargetModel.picks."""
        picks = self._picks
        return lambda: picks

    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: PickPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        """See TargetModel.forward."""
        assert follows is None, "a step is over before the next one begins"
        shape = len(batch.tokens), self._model.hidden
        self._taken = {need: torch.empty(shape, dtype=torch.float32) for need in self._needs.union(also)}
        logits = self._logits(len(batch.logits_index))
        self._model.forward(
            self._attention.prepare(batch),
            batch.tokens.astype(np.int32),
            batch.logits_index.astype(np.int32),
            int(batch.positions.max(initial=-1)) + 1,
            logits,
            {layer_of(need): memory for need, memory in self._taken.items() if need != LAST},
            self._taken.get(LAST),
        )
        self._picks = NO_PICKS if picks is None else Prepicks(self._model.pick(logits, picks), picks.choices)
        return logits

    def _logits(self, rows: int) -> Tensor:
        """Float32 memory [rows, vocabulary]."""
        if rows > _KEPT_ROWS:
            return torch.empty(rows, self._model.num_logits, dtype=torch.float32)
        if rows > len(self._kept):
            self._kept = torch.empty(rows, self._model.num_logits, dtype=torch.float32)
        return self._kept[:rows]


class NativeEarlyExit:
    """Implements EarlyExit."""

    def __init__(self, model: NativeModel) -> None:
        self.num_layers = model.num_layers
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """See EarlyExit."""
        return self._model.head(hidden.contiguous())
