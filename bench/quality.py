"""What quantisation costs in quality: perplexity and greedy agreement with float32, on text that Python ships.

With --strategies instead: what each decoding strategy makes of the beginnings of those texts (see text_quality.py).
"""

import argparse
import json
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from bench import text_quality
from bench.engine_environment import use_engine_environment
from bench.engine_run import Strategy, run
from bench.shared_runner import Engines
from bench.text_plot import draw, require_matplotlib
from bench.texts import longest_topics
from model_runner.assemble import assemble
from model_runner.batch import Batch
from model_runner.config import KVCacheDType, Quantization, Rows, RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.models.repository import resolve_model


def log_probabilities(config: RunnerConfig, texts: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Of what follows each token of each text, [tokens, vocab] float32: each text in one step, one after the other."""
    parts, info = assemble(config)
    for text in texts:
        positions = np.arange(len(text))
        batch = Batch(
            tokens=np.array(text, dtype=np.int64),
            positions=positions,
            choice_of=np.zeros_like(positions),
            block_tables=[array("i", range(-(-len(text) // info.block_size)))],
            block_of=positions // info.block_size,
            offset_of=positions % info.block_size,
            logits_index=positions,
            samples=[],
            prompt_rows=[],
        )
        yield parts.target.forward(batch).log_softmax(-1)


def divergence(reference: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """Kullback and Leibler's, of the other from the reference, in nats: the mean over all places [tokens, vocab]."""
    of_texts = [
        (one.exp() * (one - another)).sum(-1).mean().item() for one, another in zip(reference, other, strict=True)
    ]
    return statistics.mean(of_texts)


CONFIGURATIONS: tuple[tuple[Quantization, Rows, KVCacheDType], ...] = (
    ("none", "auto", "float32"),
    ("none", "auto", "bfloat16"),
    ("int8", "int16", "float32"),
    ("int8", "int16", "bfloat16"),
    ("int8", "int16", "int8"),
    ("int8", "int8", "float32"),
    ("int8", "int8", "bfloat16"),
    ("int8", "int8", "int8"),
    ("int4", "auto", "float32"),
    ("int4", "auto", "bfloat16"),
)
"""Of weights, rows and KV cache; the first is what the others are compared with."""
CHUNK = 512
"""Tokens of a text over which perplexity is taken."""
PROMPT = 64
"""Tokens of a text that are continued greedily."""
CONTINUED = 128
NUM_DIVERGENCE = 16
"""Texts whose whole distributions are compared: those of float32 are kept, 100 MB for each with the embedded model."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one configuration made of the texts."""

    rows: str
    """What its rows are rounded to."""
    logprobs: list[float]
    """Of each token but the first of each text."""
    best: list[int]
    """The most probable token at each of those places."""
    continued: Sequence[tuple[int, ...]]
    """The greedy continuation of each text's beginning."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A configuration against float32."""

    quantization: str
    rows: str
    kv_cache_dtype: str
    perplexity: float
    same_best: float
    """Share of places where the most probable token is that of float32."""
    divergence: float
    """Kullback and Leibler's, of the distributions from those of float32, in nats; see NUM_DIVERGENCE."""
    same_tokens: float
    """Mean number of greedy tokens up to the first that differs, of CONTINUED."""


def read(config: RunnerConfig, texts: Sequence[tuple[int, ...]]) -> Reading:
    """Run all texts through the engine."""
    engines = Engines(config)
    reading = Strategy(SamplingParams(temperature=0.0, prompt_logprobs=1))
    entries = list(chain.from_iterable(run(engines.make(), reading.requests(texts, 0)).prompt_logprobs))
    greedy = Strategy(SamplingParams(temperature=0.0))
    return Reading(
        rows=engines.runner.info.rows,
        logprobs=[entry.logprob for entry in entries],
        best=[entry.top[0][0] for entry in entries],
        continued=run(engines.make(), greedy.requests([text[:PROMPT] for text in texts], CONTINUED)).tokens,
    )


def compare(config: RunnerConfig, reading: Reading, reference: Reading, diverged: float) -> Quality:
    """Perplexity, and agreement with the reference, from which the distributions have so far diverged."""
    agreeing = sum(a == b for a, b in zip(reading.best, reference.best, strict=True))
    lengths = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(theirs))
        for mine, theirs in zip(reading.continued, reference.continued, strict=True)
    ]
    return Quality(
        config.quantization,
        reading.rows,
        config.kv_cache_dtype,
        math.exp(-sum(reading.logprobs) / len(reading.logprobs)),
        agreeing / len(reference.best),
        diverged,
        sum(lengths) / len(lengths),
    )


def table(results: Sequence[Quality]) -> Table:
    """One line for each configuration."""
    names = "perplexity", "same best token", "divergence", f"same greedy tokens of {CONTINUED}"
    lines = Table("weights", "rows", "KV cache", *names)
    for column in lines.columns[3:]:
        column.justify = "right"
    for result in results:
        lines.add_row(
            result.quantization,
            result.rows,
            result.kv_cache_dtype,
            f"{result.perplexity:.3f}",
            f"{100 * result.same_best:.1f} %",
            f"{1e3 * result.divergence:.2f}e-3",
            f"{result.same_tokens:.0f}",
        )
    return lines


def quantisation(folder: Path, num_texts: int, console: Console) -> list[Quality]:
    """Compare every configuration with float32."""
    texts = longest_topics(Tokenizer.from_file(str(folder / "tokenizer.json")), num_texts, CHUNK)
    configs = [
        RunnerConfig(folder, device="cpu", quantization=quantization, rows=rows, kv_cache_dtype=kv, kv_cache_gib=1.0)
        for quantization, rows, kv in CONFIGURATIONS
    ]
    compared = texts[:NUM_DIVERGENCE]
    reference, expected = read(configs[0], texts), list(log_probabilities(configs[0], compared))
    return [
        compare(config, read(config, texts), reference, divergence(expected, log_probabilities(config, compared)))
        for config in track(configs, "Reading", console=console)
    ]


def main() -> None:
    """Measure one or the other; print, and write JSON and the plot if asked to."""
    use_engine_environment()
    parser = argparse.ArgumentParser(
        description="Measure what quantisation costs in quality, or what decoding strategies are for, on the CPU."
    )
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model when left out")
    parser.add_argument("--strategies", action="store_true", help="continue texts by every decoding strategy instead")
    parser.add_argument("--texts", type=int, help="at most; 40, or 50 for strategies, when left out")
    parser.add_argument("--plot", type=Path, help="with --strategies: also draw the result to this SVG file")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    if arguments.plot:
        if not arguments.strategies:
            parser.error("--plot goes with --strategies")
        require_matplotlib()
    console = Console()
    folder = resolve_model(arguments.model, console).path
    if arguments.strategies:
        texts = text_quality.measure(folder, arguments.texts or 50, console)
        console.print(text_quality.table(texts))
        content = [asdict(result) for result in texts]
        if arguments.plot:
            draw(texts, arguments.plot)
    else:
        configurations = quantisation(folder, arguments.texts or 40, console)
        console.print(table(configurations))
        content = [asdict(result) for result in configurations]
    if arguments.output:
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
