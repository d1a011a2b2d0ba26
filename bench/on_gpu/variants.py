"""Measures the ways to run the model on a GPU against the machine's limits and plain transformers."""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.on_gpu.plain import PlainSteps
from bench.on_gpu.report import Figure, Goal, Report
from bench.on_gpu.steps import MARGIN, STEPS, RunnerSteps, StepTime
from bench.on_gpu.turns import Turns, take_turns
from bench.on_gpu.work import DecoderWork, Limits
from model_runner.config import KVCacheDType, Quantization, RunnerConfig
from model_runner.platforms.memory import GIB

PREFILL = 8192
CONTEXT = 1024
"""Tokens of each choice that decodes. The first PREFILLED choices are computed, the others get copies."""
PREFILLED = PREFILL // CONTEXT
DECODE_OF_BANDWIDTH = 0.80
PREFILL_OF_RATE = 0.50
OUTSIDE_FORWARD = 0.05
COMPARED, COMPARED_ALONE = 1000, 8
"""Number of tokens whose log-probabilities are compared with plain transformers', and how many of these are computed
one by one, as in decoding."""
LARGEST_ERROR = {"none": 0.1, "fp8": 0.4, "int4": 0.8}
"""Maximum error of log-probabilities, relative to their standard deviation. In this model, rounding to these types
causes about half of it; omitting the attention of one of 32 layers would cause 0.2, and unrelated numbers 1.4."""
UNTIMED = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the model, and its measurements."""

    name: str
    exact: bool = True
    cuda_graphs: bool = True
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    decode_rows: tuple[int, ...] = (1, 64, 256)
    has_prefill: bool = True

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type in which keys and values are stored."""
        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else torch.bfloat16

    def config(self, folder: Path, work: DecoderWork) -> RunnerConfig:
        """The runner's configuration, with a cache large enough for the measurements."""
        tokens = max(PREFILL + MARGIN, max(self.decode_rows) * (CONTEXT + MARGIN))
        return RunnerConfig(
            folder,
            device="cuda",
            dtype="bfloat16",
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_gib=1.05 * work.kv_bytes(tokens, self.kv_dtype) / GIB,  # scales, and blocks for proposers
            max_model_len=PREFILL + MARGIN,
            max_num_seqs=256,
            max_num_batched_tokens=PREFILL,
            speculation="off",
            exact=self.exact,
            cuda_graphs=self.cuda_graphs,
        )


VARIANTS = {
    "exact": Variant("exact", decode_rows=(1, 16, 64, 256)),
    "fast": Variant("fast", exact=False),
    "fast-fp8": Variant("fast fp8", exact=False, quantization="fp8"),
    "fast-int4": Variant("fast int4", exact=False, quantization="int4", decode_rows=(1, 64)),
    "exact-fp8-kv": Variant("exact, fp8 KV", kv_cache_dtype="fp8", decode_rows=(256,), has_prefill=False),
    "exact-no-graphs": Variant("exact, no graphs", cuda_graphs=False, decode_rows=(1, 64), has_prefill=False),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measures a variant, alternating with plain transformers if that is loaded."""

    variant: Variant
    steps: RunnerSteps
    plain: PlainSteps | None
    work: DecoderWork
    limits: Limits | None
    """The machine's limits; None if they are unknown."""
    report: Report
    repeats: int

    def measure(self, expected: NDArray[np.float64] | None) -> None:
        """Measure and report all figures. `expected` are plain transformers' log-probabilities of `compared_tokens`."""
        attempt, name = self.report.attempt, self.variant.name
        if expected is not None:
            attempt("logprobs", name, partial(self.logprobs, expected))
        for rows in self.variant.decode_rows:
            attempt(f"decode {rows}", name, partial(self.decode, rows))
        if self.variant.has_prefill:
            attempt("prefill", name, self.prefill)

    def logprobs(self, expected: NDArray[np.float64]) -> Figure:
        """Compare the log-probabilities with plain transformers'."""
        prompt = compared_tokens(self.work.shape.vocab_size, len(expected) + 1)
        found = self.steps.logprobs(prompt, alone=COMPARED_ALONE)
        whole = slice(None, -COMPARED_ALONE)
        prefilled = relative_error(found[whole], expected[whole], expected.std())
        decoded = relative_error(found[-COMPARED_ALONE:], expected[-COMPARED_ALONE:], expected.std())
        bound = LARGEST_ERROR[self.variant.quantization]
        goal = Goal("decoded", decoded, bound, at_least=False)
        goals = (Goal("prefilled", prefilled, bound, at_least=False), goal)
        is_failure = not all(goal.is_met for goal in goals)
        what = self.variant.name
        return Figure("logprobs", what, 100 * max(prefilled, decoded), "% off", goals=goals, is_failure=is_failure)

    def decode(self, rows: int, context: int = CONTEXT) -> Figure:
        """Measure a step that decodes one token for each of `rows` choices."""
        admit = partial(self.steps.admit, rows, context, prefilled=PREFILLED)
        ours = Turns(self.steps.decode, admit, self.steps.release)
        theirs = None
        if (plain := self.plain) is not None:
            theirs = Turns(plain.decode, partial(plain.admit, rows, context, prefilled=PREFILLED), plain.release)
        # Mean number of tokens that a choice attends to, including its own, over the timed steps.
        seen = context + 1.5 + STEPS * (UNTIMED + self.repeats / 2)
        least = (
            self.work.decode_bytes(rows, seen, self.variant.quantization, self.variant.kv_dtype),
            self.work.decode_flops(rows, seen),
        )
        return self._figure(decode_kind(rows, context), least, ours, theirs)

    def prefill(self, tokens: int = PREFILL) -> Figure:
        """Measure a step that computes a prompt of `tokens` tokens."""
        ours = Turns(partial(self.steps.prefill, tokens))
        theirs = None if self.plain is None else Turns(partial(self.plain.prefill, tokens))
        least = self.work.weight_bytes(self.variant.quantization), self.work.prefill_flops(tokens)
        return self._figure(f"prefill {tokens:,}", least, ours, theirs)

    def _figure(
        self, kind: str, least: tuple[float, float], ours: Turns[StepTime], theirs: Turns[float] | None
    ) -> Figure:
        """Measure a step, given its minimum bytes and operations. If ours fails, report theirs and raise our error."""
        take_turns([ours] if theirs is None else [ours, theirs], UNTIMED + self.repeats)
        plain_ms, note = self.report.plain(kind), ""
        if theirs is not None and theirs.error is None:
            plain_ms = statistics.median(theirs.results[UNTIMED:])
        elif theirs is not None:
            note = f"plain: {type(theirs.error).__name__}"
        if ours.error is not None:
            if theirs is not None:
                self.report.add(Figure(kind, "transformers", plain=plain_ms, note=note))
            raise ours.error
        times = ours.results[UNTIMED:]
        step_ms = statistics.median(time.step_ms for time in times)
        outside = statistics.median(1 - time.forward_ms / time.step_ms for time in times)
        least_ms = None if self.limits is None else self.limits.least_ms(*least)
        of_limit = None if least_ms is None else least_ms / step_ms
        return Figure(
            kind,
            self.variant.name,
            step_ms,
            of_limit=of_limit,
            plain=plain_ms,
            goals=(*self._speed_goal(kind, of_limit), Goal("outside", outside, OUTSIDE_FORWARD, at_least=False)),
            note=note,
            details={
                "forward_ms": statistics.median(time.forward_ms for time in times),
                "fastest_ms": min(time.step_ms for time in times),
                "slowest_ms": max(time.step_ms for time in times),
                "least_ms": least_ms,
                "bytes": least[0],
                "flops": least[1],
                "repeats": len(times),
            },
        )

    def _speed_goal(self, kind: str, of_limit: float | None) -> tuple[Goal, ...]:
        """The speed goal, which exists for prefill and for decoding a single choice, both in 16 bits."""
        if self.variant.quantization != "none" or of_limit is None:
            return ()
        if kind.startswith("prefill"):
            return (Goal("of limit", of_limit, PREFILL_OF_RATE, at_least=True),)
        is_single = kind.startswith("decode 1 ")
        return (Goal("of limit", of_limit, DECODE_OF_BANDWIDTH, at_least=True),) if is_single else ()


def decode_kind(rows: int, context: int) -> str:
    """The name of the part in the figures of a decode step."""
    return f"decode {rows} x {context:,}"


def compared_tokens(vocab_size: int, count: int = COMPARED) -> list[int]:
    """Random tokens of the compared prompt, the same in every process."""
    tokens: list[int] = np.random.default_rng(1).integers(0, vocab_size, count).tolist()
    return tokens


def relative_error(found: NDArray[np.float64], expected: NDArray[np.float64], scale: float) -> float:
    """Root mean square of the differences divided by `scale`; NaN if any value is NaN."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / scale)
