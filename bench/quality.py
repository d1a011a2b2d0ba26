"""Measures the quality of quantised models: perplexity and greedy agreement with float32, on Python's help texts.

With --strategies it measures the text quality of each decoding strategy instead (text_quality.py).
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

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
from model_runner.batch import prompt_batch
from model_runner.config import InputType, KVCacheDType, Quantization, RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.hub.repository import resolve_model


def log_probabilities(config: RunnerConfig, texts: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Log-probabilities of the next token, [tokens, vocab] float32 for each text. Each text is computed in one step."""
    parts, info = assemble(config)
    for text in texts:
        batch = prompt_batch([text], info.block_size)
        yield parts.target.forward(batch).log_softmax(-1)


def divergence(reference: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """Mean Kullback-Leibler divergence of `other` from `reference`, in nats, over all positions."""
    of_texts = [
        (one.exp() * (one - another)).sum(-1).mean().item() for one, another in zip(reference, other, strict=True)
    ]
    return statistics.mean(of_texts)


CONFIGURATIONS: tuple[tuple[Quantization, InputType, KVCacheDType], ...] = (
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
    ("auto", "auto", "float32"),
    ("auto", "auto", "bfloat16"),
)
"""Types of weights, rows and KV cache; the first configuration is the reference. auto keeps blocks of GGUF files."""
CHUNK = 512
"""Tokens of a text that perplexity is computed on."""
PROMPT = 64
"""Tokens of a text's start that is continued greedily."""
CONTINUED = 128
NUM_DIVERGENCE = 16
"""Texts whose distributions are compared; the reference needs 100 MB of memory per text with the embedded model."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One configuration's results on the texts."""

    rows: str
    """Type that the rows are rounded to."""
    logprobs: list[float]
    """Log-probability of each token except each text's first."""
    best: list[int]
    """The most probable token at each of these positions."""
    continued: Sequence[tuple[int, ...]]
    """The greedy continuation of each text's start."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A configuration compared with float32."""

    quantization: str
    rows: str
    kv_cache_dtype: str
    perplexity: float
    same_best: float
    """Fraction of positions with the same most probable token as float32."""
    divergence: float
    """Mean Kullback-Leibler divergence from float32 in nats, on NUM_DIVERGENCE texts."""
    same_tokens: float
    """Mean number of greedy tokens before the first difference, at most CONTINUED."""


def read(config: RunnerConfig, texts: Sequence[tuple[int, ...]]) -> Reading:
    """Compute a configuration's results on all texts with the engine."""
    engines = Engines(config)
    reading = Strategy(SamplingParams(temperature=0.0, prompt_logprobs=1))
    entries = list(chain.from_iterable(run(engines.make(), reading.requests(texts, 0)).prompt_logprobs))
    greedy = Strategy(SamplingParams(temperature=0.0))
    return Reading(
        rows=engines.runner.info.activation_type,
        logprobs=[entry.logprob for entry in entries],
        best=[entry.top[0][0] for entry in entries],
        continued=run(engines.make(), greedy.requests([text[:PROMPT] for text in texts], CONTINUED)).tokens,
    )


def compare(config: RunnerConfig, reading: Reading, reference: Reading, diverged: float) -> Quality:
    """Compute perplexity and agreement with the reference; `diverged` is the divergence from it."""
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
        RunnerConfig(
            folder,
            device="cpu",
            quantization=quantization,
            multiplies_stored_blocks=True,
            activation_type=rows,
            kv_cache_dtype=kv,
            kv_cache_gib=1.0,
        )
        for quantization, rows, kv in CONFIGURATIONS
    ]
    compared = texts[:NUM_DIVERGENCE]
    reference, expected = read(configs[0], texts), list(log_probabilities(configs[0], compared))
    return [
        compare(config, read(config, texts), reference, divergence(expected, log_probabilities(config, compared)))
        for config in track(configs, "Reading", console=console)
    ]


def main() -> None:
    """Measure configurations or strategies and print; optionally write JSON and a plot."""
    use_engine_environment()
    parser = argparse.ArgumentParser(
        description="Measure the quality of quantised models or of decoding strategies, on the CPU."
    )
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--strategies", action="store_true", help="continue texts by every decoding strategy instead")
    parser.add_argument("--texts", type=int, help="maximum number of texts; default 40, or 50 for strategies")
    parser.add_argument("--plot", type=Path, help="with --strategies: also draw the result to this SVG file")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    if arguments.plot:
        if not arguments.strategies:
            parser.error("--plot needs --strategies")
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
