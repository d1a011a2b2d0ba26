"""The ways to run the model on a GPU: their steps beside what the machine allows and beside plain transformers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu_plain import PlainSteps
from bench.gpu_report import Figure, Goal, Report
from bench.gpu_steps import MARGIN, STEPS, RunnerSteps, StepTime
from bench.gpu_work import DecoderWork, Limits
from model_runner.config import KVCacheDType, Quantization, RunnerConfig
from model_runner.memory import GIB
from model_runner.runner import ModelRunner

PREFILL = 8192
CONTEXT = 1024
"""Of each choice that decodes. As many as a prefill holds get theirs by one, the others a copy."""
PREFILLED = PREFILL // CONTEXT
DECODE_OF_BANDWIDTH = 0.80
PREFILL_OF_RATE = 0.50
OUTSIDE_FORWARD = 0.05
_UNTIMED = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the model, and what is measured of it."""

    name: str
    exact: bool = True
    cuda_graphs: bool = True
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    decode_rows: tuple[int, ...] = (1, 64, 256)
    has_prefill: bool = True

    @property
    def kv_dtype(self) -> torch.dtype:
        """What it stores keys and values as."""
        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else torch.bfloat16

    def config(self, folder: Path, work: DecoderWork) -> RunnerConfig:
        """With a cache that holds what is measured."""
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
    "exact": Variant("exact"),
    "fast": Variant("fast", exact=False),
    "fast-fp8": Variant("fast fp8", exact=False, quantization="fp8"),
    "fast-int4": Variant("fast int4", exact=False, quantization="int4", decode_rows=(1, 64)),
    "exact-fp8-kv": Variant("exact, fp8 KV", kv_cache_dtype="fp8", decode_rows=(256,), has_prefill=False),
    "exact-no-graphs": Variant("exact, no graphs", cuda_graphs=False, decode_rows=(1, 64), has_prefill=False),
}


class PlainTimes:
    """What plain transformers takes: measured in turns with the first variant, and remembered for the others."""

    def __init__(self) -> None:
        self.steps: PlainSteps | None = None
        self._ms: dict[str, float] = {}

    def load(self, folder: Path, device: torch.device) -> None:
        self.steps = PlainSteps(folder, device, torch.bfloat16)

    def unload(self) -> None:
        """The times stay."""
        self.steps = None

    def book(self, kind: str, times: Sequence[float]) -> float | None:
        """The median of these, else what it was before; None if it never was measured."""
        if times:
            self._ms[kind] = statistics.median(times)
        return self._ms.get(kind)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measures variants of one model, in turns with plain transformers where that is loaded."""

    folder: Path
    work: DecoderWork
    limits: Limits
    device: torch.device
    plain: PlainTimes
    report: Report
    repeats: int

    def measure(self, variant: Variant) -> Figure:
        """Load it, run it, and report its figures. Returns what loading took."""
        runner = ModelRunner.load(variant.config(self.folder, self.work))
        steps, info = RunnerSteps(runner, self.device), runner.info
        for rows in variant.decode_rows:
            self.report.attempt(f"decode {rows}", variant.name, partial(self.decode, steps, variant, rows))
        if variant.has_prefill:
            self.report.attempt("prefill", variant.name, partial(self.prefill, steps, variant))
        parts = {"weights_s": info.weights_s, "first_step_s": info.first_step_s, "num_blocks": info.num_blocks}
        return Figure("load", variant.name, info.weights_s + info.first_step_s, "s", details=parts)

    def decode(self, steps: RunnerSteps, variant: Variant, rows: int, context: int = CONTEXT) -> Figure:
        """One token for each of `rows` choices."""
        plain = self.plain.steps
        try:
            steps.admit(rows, context, prefilled=PREFILLED)
            if plain is not None:
                plain.admit(rows, context, prefilled=PREFILLED)
            ours, others = self._in_turns(steps.decode, None if plain is None else plain.decode, self.repeats)
        finally:
            steps.release()
            if plain is not None:
                plain.release()
        seen = context + 1 + STEPS * (_UNTIMED + (self.repeats + 1) / 2)
        num_bytes = self.work.decode_bytes(rows, seen, variant.quantization, variant.kv_dtype)
        flops = self.work.decode_flops(rows, seen)
        kind = f"decode {rows} x {context:,}"
        return self._figure(kind, variant, (num_bytes, flops), ours, self.plain.book(kind, others))

    def prefill(self, steps: RunnerSteps, variant: Variant, tokens: int = PREFILL) -> Figure:
        """A prompt of so many tokens in one step."""
        plain = self.plain.steps
        theirs = None if plain is None else lambda: plain.prefill(tokens)
        ours, others = self._in_turns(lambda: steps.prefill(tokens), theirs, max(3, self.repeats // 4))
        num_bytes = self.work.weight_bytes(variant.quantization)
        flops = self.work.prefill_flops(tokens)
        kind = f"prefill {tokens:,}"
        return self._figure(kind, variant, (num_bytes, flops), ours, self.plain.book(kind, others))

    @staticmethod
    def _in_turns(
        ours: Callable[[], StepTime], theirs: Callable[[], float] | None, repeats: int
    ) -> tuple[list[StepTime], list[float]]:
        times, others = [], []
        for _ in range(_UNTIMED + repeats):
            times.append(ours())
            if theirs is not None:
                others.append(theirs())
        return times[_UNTIMED:], others[_UNTIMED:]

    def _figure(
        self, kind: str, variant: Variant, least: tuple[float, float], times: list[StepTime], plain_ms: float | None
    ) -> Figure:
        """`least` are the bytes and the operations of a step."""
        step_ms = statistics.median(time.step_ms for time in times)
        forward_ms = statistics.median(time.forward_ms for time in times)
        outside = statistics.median(1 - time.forward_ms / time.step_ms for time in times)
        of_limit = self.limits.least_ms(*least) / step_ms
        return Figure(
            kind,
            variant.name,
            step_ms,
            of_limit=of_limit,
            plain=plain_ms,
            goals=(*_speed_goal(kind, variant, of_limit), Goal("outside", outside, OUTSIDE_FORWARD, at_least=False)),
            details={
                "forward_ms": forward_ms,
                "fastest_ms": min(time.step_ms for time in times),
                "slowest_ms": max(time.step_ms for time in times),
                "least_ms": self.limits.least_ms(*least),
                "bytes": least[0],
                "flops": least[1],
                "repeats": len(times),
            },
        )


def _speed_goal(kind: str, variant: Variant, of_limit: float) -> tuple[Goal, ...]:
    """There is one for the decode of a single choice, and one for prompts, in 16 bits."""
    if variant.quantization != "none":
        return ()
    if kind.startswith("prefill"):
        return (Goal("of limit", of_limit, PREFILL_OF_RATE, at_least=True),)
    return (Goal("of limit", of_limit, DECODE_OF_BANDWIDTH, at_least=True),) if kind.startswith("decode 1 ") else ()
