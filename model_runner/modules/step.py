"""The forward pass that a model of transformers is in: its attention, and its recurrent states.

Modules reach both by the model's `CurrentStep`. There is no global state, and the model code needs no change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.states import ConvShape, RecurrentShape, ScanShape

Function = Callable[..., Any]
_STEP = "current_step"
"""Attribute of all modules with their CurrentStep."""


class States(Protocol):
    """The recurrences, scans and convolutions of one forward pass, each numbered in the order of the calls."""

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.recur`."""
        ...

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.scan`."""
        ...

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.convolve`."""
        ...


class StepStates:
    """A recurrence backend and its metadata for one forward pass."""

    def __init__(self, backend: RecurrenceBackend[Any], metadata: Any) -> None:
        self._backend = backend
        self._metadata = metadata
        self._num_recurrences = self._num_scans = self._num_convolutions = 0

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        index, self._num_recurrences = self._num_recurrences, self._num_recurrences + 1
        return self._backend.recur(index, query, key, value, log_decay, beta, self._metadata)

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        index, self._num_scans = self._num_scans, self._num_scans + 1
        return self._backend.scan(index, step, value, a, b, c, self._metadata)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        index, self._num_convolutions = self._num_convolutions, self._num_convolutions + 1
        return self._backend.convolve(index, x, weight, bias, activation, self._metadata)


class RecordedStates:
    """Records the shapes of the recurrences, scans and convolutions of a pass on the meta device."""

    def __init__(self) -> None:
        self.recurrences: list[RecurrentShape] = []
        self.scans: list[ScanShape] = []
        self.convolutions: list[ConvShape] = []

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        (_, key_heads, key_dim), (_, heads, value_dim) = key.shape, value.shape
        shape = RecurrentShape(
            heads, key_heads, key_dim, value_dim, delta=beta is not None, per_channel=log_decay.dim() == value.dim()
        )
        self.recurrences.append(shape)
        return torch.empty_like(value)

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        self.scans.append(ScanShape(*a.shape))
        return torch.empty_like(value)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        self.convolutions.append(ConvShape(*weight.shape))
        return torch.empty_like(x)


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

    def __init__(self) -> None:
        self._attention: StepAttention | None = None
        self._states: States | None = None

    @property
    def attention(self) -> StepAttention:
        """The attention of the pass."""
        assert self._attention is not None, "the model is in a pass"
        return self._attention

    @property
    def states(self) -> States:
        """The recurrent states of the pass."""
        assert self._states is not None, "the model is in a pass, and has states"
        return self._states

    @contextmanager
    def during(self, attention: StepAttention, states: States | None) -> Iterator[None]:
        """A pass with this attention, and with these states if the model is recurrent."""
        self._attention, self._states = attention, states
        try:
            yield
        finally:
            self._attention = self._states = None

    def choose(self, own: Function, ours: Function) -> Function:
        """A function that calls `ours` during a pass, and `own` at other times."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return (own if self._attention is None else ours)(*arguments, **keywords)

        return call


def step_of(module: nn.Module) -> CurrentStep:
    """The step that a module shares with all of its model, from `share_step`."""
    step: CurrentStep = getattr(module, _STEP)
    return step


def share_step(model: nn.Module) -> CurrentStep:
    """Give all modules of a model the same step: its own, or a new one."""
    step: CurrentStep = getattr(model, _STEP, None) or CurrentStep()
    for module in model.modules():
        setattr(module, _STEP, step)
    return step
