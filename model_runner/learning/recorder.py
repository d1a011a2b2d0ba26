"""Records tokens and hidden states of some of the running choices, as training data.

        sequence   | prompt ............................... | output ..................... | last token
        computed   | cached, by others |  by this choice ........................ |  not yet |
        recorded                            | _CONTEXT, then all of the output .. |
        pieces                              | one of about _TOKENS | the next .. |

A step's features are valid until the next step is launched, so they are copied at once, to the host, in half precision.
A choice that returns after preemption already has output. Its recording begins with the first token that was never
computed before, so that no row is recorded twice.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model_runner.contract import AdmittedRequest
from model_runner.features import Feature
from model_runner.heads.base import Example, Float16Array
from model_runner.speculative.proposer import ChoiceStep, TargetStep

_CHOICES = 4
"""Maximum number of choices recorded at a time; it bounds memory and time per step."""
_CONTEXT = 64
"""Prompt tokens that are recorded before the output."""
_TOKENS = 256
"""A piece ends when it has at least this many tokens."""
_LEAST = 8
"""Minimum number of output tokens for a useful piece."""
_LIMITS = torch.finfo(torch.float16)


def teaches(admitted: AdmittedRequest) -> bool:
    """Whether a choice is allowed and useful as training data.

    A guide draws no tokens, pooling requests have no output, and a beam search computes tokens that it does not return.
    """
    sampling = admitted.sampling
    answers = sampling.pooling is None and admitted.guides is None
    searches = sampling.num_candidates > 0 or sampling.beam_candidates > 0
    return admitted.learn and not admitted.cache_salt and answers and not searches


@dataclass(slots=True)
class _Recording:
    """The recording of one choice, from position `start` on."""

    start: int
    """Position in the sequence."""
    num_prompt: int
    """Prompt tokens of the sequence."""
    temperature: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    features: dict[Feature, list[Float16Array]] = field(default_factory=dict)
    """The features of consecutive tokens, in parts [n, hidden]."""

    @property
    def end(self) -> int:
        """Position of the next token to record."""
        return self.start + len(self.tokens)

    def take(self, tokens: Sequence[int], features: Mapping[Feature, Float16Array]) -> None:
        """Record the next tokens with their features [n, hidden]."""
        self.tokens.extend(tokens)
        for name, rows in features.items():
            self.features.setdefault(name, []).append(rows)

    def piece(self) -> Example:
        """The recorded tokens as a piece."""
        return Example(
            tokens=np.array(self.tokens, dtype=np.int64),
            num_prompt=max(self.num_prompt - self.start, 1),
            temperature=self.temperature,
            features={name: np.concatenate(parts) for name, parts in self.features.items()},
            start=self.start,
        )

    def begin_again(self) -> None:
        """Start the next piece with the last token, which predicts its first one."""
        self.start = self.end - 1
        self.tokens = self.tokens[-1:]
        self.features = {name: [parts[-1][-1:]] for name, parts in self.features.items()}


class Recorder:
    """Records choices by slot, and offers finished pieces."""

    def __init__(self, needs: Collection[Feature], offer: Callable[[Example], None]) -> None:
        """`needs` are the features to record."""
        self.needs = frozenset(needs)
        self._offer = offer
        self._recordings: dict[int, _Recording] = {}
        self.slots = self._recordings.keys()
        """Slots of the choices that are being recorded."""

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """A choice begins or returns; record it if it is allowed and fewer than `_CHOICES` are recorded."""
        if len(self._recordings) == _CHOICES or not teaches(admitted):
            return
        known, num_prompt = len(admitted.tokens), admitted.num_prompt
        start = max(admitted.num_computed, num_prompt - _CONTEXT) if known == num_prompt else known - 1
        self._recordings[slot] = _Recording(start, num_prompt, admitted.sampling.temperature)

    def end(self, slot: int) -> None:
        """The choice in the slot has ended or was preempted."""
        recording = self._recordings.pop(slot, None)
        if recording is not None:
            self._hand_out(recording)

    def forget(self) -> None:
        """Stop recording all running choices."""
        self._recordings.clear()

    @torch.inference_mode()
    def observe(self, step: TargetStep) -> None:
        """Record a step's results for choices that are being recorded; the step may have others."""
        parts = [(self._recordings[one.slot], one) for one in step.choices if one.slot in self._recordings]
        spans = [_unrecorded(recording, choice) for recording, choice in parts]
        rows = [
            row for (_, choice), span in zip(parts, spans, strict=True) for row in choice.rows[-len(span) :] if span
        ]
        if not rows:
            return
        features = {need: _in_half(step.features[need][rows]) for need in self.needs}
        first = 0
        for (recording, choice), span in zip(parts, spans, strict=True):
            own = slice(first, first + len(span))
            first = own.stop
            tokens = choice.tokens[span.start : span.stop]
            recording.take(tokens, {need: of_all[own] for need, of_all in features.items()})
            if len(recording.tokens) >= _TOKENS:
                self._hand_out(recording)
                recording.begin_again()

    def _hand_out(self, recording: _Recording) -> None:
        piece = recording.piece()
        if len(recording.tokens) - piece.num_prompt >= _LEAST:
            self._offer(piece)


def _unrecorded(recording: _Recording, choice: ChoiceStep) -> range:
    """Positions of the tokens that the step computed and that need to be recorded."""
    computed = choice.num_computed
    return range(max(recording.end, computed - len(choice.rows)), computed)


def _in_half(rows: Tensor) -> Float16Array:
    """Rows [n, hidden] on the host, clipped to the range of float16."""
    clipped = rows.clamp(_LIMITS.min, _LIMITS.max).half()
    half: Float16Array = clipped.cpu().numpy()
    return half
