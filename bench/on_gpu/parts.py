"""The parts of the run that compute on the device. Later parts use the figures of earlier ones."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.on_gpu.model import llama_8b, write_model
from bench.on_gpu.plain import PlainSteps
from bench.on_gpu.report import Figure, Report
from bench.on_gpu.steps import RunnerSteps
from bench.on_gpu.timing import Spans, median_ms
from bench.on_gpu.variants import PREFILLED, VARIANTS, Comparison, compared_tokens, decode_kind
from bench.on_gpu.work import DecoderWork, Limits
from model_runner.runner import ModelRunner

COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192


def measure_limits(device: torch.device, *, copy_bytes: int = COPY_BYTES, matrix_size: int = MATRIX_SIZE) -> Limits:
    """Measure medians, with buffers much larger than the cache and random numbers (zeros would be faster)."""
    return Limits(_copy_bytes_per_s(device, copy_bytes), _matrix_flop_per_s(device, matrix_size))


def _copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.randint(1 << 62, (size // 8,), device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device) * 1e3


def _matrix_flop_per_s(device: torch.device, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_ms(lambda: torch.matmul(a, b, out=out), device) * 1e3


PLAIN_REPEATS = 5
LOGPROBS = "logprobs.npy"
"""File in the model's folder with plain transformers' log-probabilities of variants.compared_tokens."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the run."""

    folder: Path
    """Folder for the model."""
    num_layers: int
    repeats: int
    served: Mapping[int, int]
    """Mean number of tokens in a request's context while the server is measured, by number of clients."""


class DeviceParts:
    """Measures parts by name: `limits`, `model`, `exact`, `kernels`, and the names in variants.VARIANTS."""

    def __init__(self, report: Report, settings: Settings) -> None:
        self._report = report
        self._settings = settings
        self._device = torch.device("cuda")
        self._plain: PlainSteps | None = None
        self._named: dict[str, Callable[[], Figure]] = {
            "limits": self.limits,
            "model": self.model,
            "exact": self.exact,
            "kernels": self.kernels,
        }

    def measure(self, name: str, needs_s: float) -> None:
        """Measure and report a part, then free its memory."""
        self._report.attempt(name, "", self._named.get(name) or partial(self.variant, name), needs_s)
        gc.collect()
        torch.cuda.empty_cache()

    def limits(self) -> Figure:
        """Measure the machine's limits."""
        found = measure_limits(self._device)
        copy, rate = found.copy_bytes_per_s / 1e9, found.bf16_flop_per_s / 1e12
        self._report.add(Figure("limits", "copy, read and written", copy, "GB/s"))
        return Figure("limits", "bf16 product", rate, "TFLOP/s", details=asdict(found))

    def model(self) -> Figure:
        """Write the model with random weights to disk."""
        start = time.perf_counter()
        size = write_model(self._settings.folder, llama_8b(self._settings.num_layers), self._device)
        seconds = time.perf_counter() - start
        return Figure("model", f"{self._settings.num_layers} layers, {size / 1e9:.1f} GB", seconds, "s")

    def exact(self) -> Figure:
        """Measure the variant `exact`, alternating with plain transformers."""
        self._report.attempt("load", "plain transformers", self.load_plain)
        try:
            if self._plain is not None:
                self._report.attempt("logprobs", "transformers", partial(self.plain_logprobs, self._plain))
                for rows, context in self._settings.served.items():
                    what = decode_kind(rows, context)
                    self._report.attempt(what, "transformers", partial(self.plain_decode, self._plain, rows, context))
            return self.variant("exact")
        finally:
            self._plain = None

    def load_plain(self) -> Figure:
        """Load plain transformers with the same weights."""
        start = time.perf_counter()
        self._plain = PlainSteps(self._settings.folder, self._device, torch.bfloat16)
        return Figure("load", "plain transformers", time.perf_counter() - start, "s")

    def plain_logprobs(self, plain: PlainSteps) -> Figure:
        """Compute and save plain transformers' log-probabilities, the reference for the variants."""
        vocab_size = DecoderWork.of(self._settings.folder).shape.vocab_size
        logprobs = plain.logprobs(compared_tokens(vocab_size))
        np.save(self._settings.folder / LOGPROBS, logprobs)
        return Figure("logprobs", "transformers", float(logprobs.std()), "nats apart")

    @staticmethod
    def plain_decode(plain: PlainSteps, rows: int, context: int) -> Figure:
        """Measure plain transformers' decode step for `rows` clients."""
        plain.admit(rows, context, prefilled=PREFILLED)
        try:
            times = [plain.decode() for _ in range(PLAIN_REPEATS)]
        finally:
            plain.release()
        return Figure(decode_kind(rows, context), "transformers", plain=statistics.median(times))

    def variant(self, name: str) -> Figure:
        """Measure a variant; returns the figure of its loading time."""
        from bench.on_gpu.forward import TimedCuda  # noqa: PLC0415  (needs Triton)

        variant, settings = VARIANTS[name], self._settings
        work, spans = DecoderWork.of(settings.folder), Spans(self._device)
        config = variant.config(settings.folder, work)
        device = torch.device("cuda", torch.cuda.current_device())
        runner = ModelRunner.load(config, TimedCuda(config, device, spans))
        steps, info = RunnerSteps(runner, spans), runner.info
        limits = known_limits(self._report.figures)
        comparison = Comparison(variant, steps, self._plain, work, limits, self._report, settings.repeats)
        comparison.measure(known_logprobs(settings.folder))
        took = dict(info.started_in)
        parts = {"weights_s": took["weights"], "first_step_s": took["first step"], "num_blocks": info.num_blocks}
        return Figure("load", variant.name, sum(took.values()), "s", details=parts)

    def kernels(self) -> Figure:
        """Measure single kernels."""
        from bench.on_gpu.kernels import KernelBench  # noqa: PLC0415  (needs Triton)

        return KernelBench(self._report, known_limits(self._report.figures), self._device).measure()


def known_limits(figures: Sequence[Figure]) -> Limits | None:
    """The machine's limits, if they were measured."""
    found = (figure for figure in figures if figure.part == "limits" and not figure.is_failure)
    return next((Limits(**figure.details) for figure in found if figure.details), None)


def known_logprobs(folder: Path) -> NDArray[np.float64] | None:
    """Plain transformers' log-probabilities, if they were computed."""
    path = folder / LOGPROBS
    return np.load(path) if path.exists() else None
