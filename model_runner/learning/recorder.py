"""Takes down what the target computes for some of the choices: tokens and, beside them, hidden states.

        sequence   | prompt ............................... | output ..................... | last token
        computed   | cached, by others |  by this choice ........................ |  not yet |
        recorded                            | _CONTEXT, then all of the output .. |
        pieces                              | one of about _TOKENS | the next .. |

A step's features last until the next step is launched, so they are copied at once, on the host, in half of their size.
A choice that was preempted comes back with its output: what is recorded then begins with the first token that was never
computed before, so no row is recorded twice.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_runner.contract import AdmittedRequest
from model_runner.learning.link import Piece
from model_runner.models.features import Feature
from model_runner.speculative.proposer import ChoiceStep, TargetStep

_CHOICES = 4
"""Recorded at a time, whoever comes first: a bound on the memory, and on what a step spends on it."""
_CONTEXT = 64
"""Tokens of the prompt that are recorded before the output."""
_TOKENS = 256
"""From this length on a piece is done, and another one begins."""
_LEAST = 8
"""Tokens of output that a piece must have to be of any use."""
_LIMITS = torch.finfo(torch.float16)

HalfArray = npt.NDArray[np.float16]


def teaches(admitted: AdmittedRequest) -> bool:
    """Whether a choice may be learnt from, and has answers to learn from.

    A guide draws no tokens, one that asks for numbers has no output, and a search computes more than it says.
    """
    sampling = admitted.sampling
    answers = sampling.pooling is None and admitted.guides is None
    searches = sampling.num_candidates > 0 or sampling.beam_candidates > 0
    return admitted.learn and not admitted.cache_salt and answers and not searches


@dataclass(slots=True)
class _Recording:
    """One choice. Its tokens from `start` on are recorded, as they are computed."""

    start: int
    """Position in the sequence."""
    num_prompt: int
    """Of the sequence."""
    temperature: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    features: dict[Feature, bytearray] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position of the next token to record."""
        return self.start + len(self.tokens)

    def take(self, tokens: Sequence[int], features: Mapping[Feature, HalfArray]) -> None:
        """Record the next tokens, with their features [n, hidden]."""
        self.tokens.extend(tokens)
        for name, rows in features.items():
            self.features.setdefault(name, bytearray()).extend(rows.tobytes())

    def piece(self) -> Piece:
        """What is recorded."""
        return Piece(
            start=self.start,
            num_prompt=max(self.num_prompt - self.start, 1),
            temperature=self.temperature,
            tokens=self.tokens.tobytes(),
            features={name: bytes(rows) for name, rows in self.features.items()},
        )

    def begin_again(self) -> None:
        """Keep the last token alone: what the first one of the next piece is guessed from."""
        width = {name: len(rows) // len(self.tokens) for name, rows in self.features.items()}
        self.start = self.end - 1
        self.tokens = self.tokens[-1:]
        for name, rows in self.features.items():
            del rows[: -width[name]]


class Recorder:
    """Records choices by their slots, and hands out pieces as they are done."""

    def __init__(self, needs: Collection[Feature], offer: Callable[[Piece], None]) -> None:
        """`needs` are the features that are recorded."""
        self.needs = frozenset(needs)
        self._offer = offer
        self._recordings: dict[int, _Recording] = {}

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """A choice begins, or begins again; it is recorded if it may be and there is room for it."""
        if len(self._recordings) == _CHOICES or not teaches(admitted):
            return
        known, num_prompt = len(admitted.tokens), admitted.num_prompt
        start = max(admitted.num_computed, num_prompt - _CONTEXT) if known == num_prompt else known - 1
        self._recordings[slot] = _Recording(start, num_prompt, admitted.sampling.temperature)

    def has(self, slot: int) -> bool:
        """Whether the choice in this slot is recorded."""
        return slot in self._recordings

    def end(self, slot: int) -> None:
        """The choice in the slot has ended, or was preempted."""
        recording = self._recordings.pop(slot, None)
        if recording is not None:
            self._hand_out(recording)

    def forget(self) -> None:
        """Record none of the choices that run any further."""
        self._recordings.clear()

    @torch.inference_mode()
    def observe(self, step: TargetStep) -> None:
        """Take down what a step computed for the choices that are recorded; others may be among them."""
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
    """Positions of the tokens that the step computed and that are to be recorded."""
    computed = choice.num_computed
    return range(max(recording.end, computed - len(choice.rows)), computed)


def _in_half(rows: Tensor) -> HalfArray:
    """Rows [n, hidden] on the host, clipped to what float16 can hold."""
    clipped = rows.clamp(_LIMITS.min, _LIMITS.max).half()
    half: HalfArray = clipped.cpu().numpy()
    return half
