"""What quantisation costs in quality: perplexity and greedy agreement with float32, on text that Python ships.

The texts are the help topics of Python's own documentation (pydoc_data.topics), English prose about a programming
language that is the same on every machine with the same Python.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from model_runner.config import KVCacheDType, Quantization, RunnerConfig
from model_runner.contract import SamplingParams, TokenLogprobs
from model_runner.models.repository import resolve_model
from model_runner.runner import ModelRunner
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.interface import EngineRequest
from scheduler.scheduler import Scheduler

CHUNK = 512
"""Tokens of a text over which perplexity is taken."""
PROMPT = 64
"""Tokens of a text that are continued greedily."""
CONTINUED = 128


@dataclass(frozen=True, slots=True)
class Reading:
    """What one configuration made of the texts."""

    logprobs: list[float]
    """Of each token but the first of each text."""
    best: list[int]
    """The most probable token at each of those places."""
    continued: list[tuple[int, ...]]
    """The greedy continuation of each text's beginning."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A configuration against float32."""

    quantization: str
    kv_cache_dtype: str
    perplexity: float
    same_best: float
    """Share of places where the most probable token is that of float32."""
    same_tokens: float
    """Mean number of greedy tokens up to the first that differs, of CONTINUED."""


def read(folder: Path, quantization: Quantization, kv: KVCacheDType, texts: Sequence[tuple[int, ...]]) -> Reading:
    """Run all texts through the engine."""
    config = RunnerConfig(folder, device="cpu", quantization=quantization, kv_cache_dtype=kv, kv_cache_gib=1.0)
    runner = ModelRunner.load(config)
    scheduler = SchedulerConfig(
        block_size=runner.info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=runner.info.max_model_len,
    )
    engine = Engine(Scheduler(scheduler, runner.num_blocks), runner)
    prompts: dict[str, tuple[TokenLogprobs, ...]] = {}
    outputs: dict[str, tuple[int, ...]] = {}
    greedy = SamplingParams(temperature=0.0)
    for index, text in enumerate(texts):
        engine.add(EngineRequest(f"read-{index}", text, SamplingParams(temperature=0.0, prompt_logprobs=1), 1))
        engine.add(EngineRequest(f"continue-{index}", text[:PROMPT], greedy, CONTINUED))
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = outputs.get(output.request_id, ()) + output.tokens
            if output.prompt_logprobs:
                prompts[output.request_id] = output.prompt_logprobs
    entries = [entry for index in range(len(texts)) for entry in prompts[f"read-{index}"]]
    return Reading(
        logprobs=[entry.logprob for entry in entries],
        best=[entry.top[0][0] for entry in entries],
        continued=[outputs[f"continue-{index}"] for index in range(len(texts))],
    )


def compare(quantization: str, kv: str, reading: Reading, reference: Reading) -> Quality:
    """Perplexity, and agreement with the reference."""
    agreeing = sum(a == b for a, b in zip(reading.best, reference.best, strict=True))
    lengths = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(theirs))
        for mine, theirs in zip(reading.continued, reference.continued, strict=True)
    ]
    return Quality(
        quantization,
        kv,
        math.exp(-sum(reading.logprobs) / len(reading.logprobs)),
        agreeing / len(reference.best),
        sum(lengths) / len(lengths),
    )


def texts_of(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """The first CHUNK tokens of the longest topics."""
    longest = sorted(topics.values(), key=len, reverse=True)[:count]
    encoded = [tuple(tokenizer.encode(text).ids[:CHUNK]) for text in longest]
    return [text for text in encoded if len(text) == CHUNK]


def table(results: Sequence[Quality]) -> Table:
    """One line for each configuration."""
    lines = Table("weights", "KV cache", "perplexity", "same best token", f"same greedy tokens of {CONTINUED}")
    for column in lines.columns[2:]:
        column.justify = "right"
    for result in results:
        lines.add_row(
            result.quantization,
            result.kv_cache_dtype,
            f"{result.perplexity:.3f}",
            f"{100 * result.same_best:.1f} %",
            f"{result.same_tokens:.0f}",
        )
    return lines


def main() -> None:
    """Compare every configuration with float32; print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Measure what quantisation costs in quality, on the CPU.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model when left out")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    console = Console()
    folder = resolve_model(arguments.model, console).path
    texts = texts_of(Tokenizer.from_file(str(folder / "tokenizer.json")), arguments.texts)
    configurations: list[tuple[Quantization, KVCacheDType]] = [
        ("none", "float32"),
        ("none", "bfloat16"),
        ("int8", "float32"),
        ("int8", "bfloat16"),
        ("int8", "int8"),
        ("int4", "float32"),
        ("int4", "bfloat16"),
    ]
    readings = [
        read(folder, *configuration, texts) for configuration in track(configurations, "Reading", console=console)
    ]
    results = [
        compare(*configuration, reading, readings[0])
        for configuration, reading in zip(configurations, readings, strict=True)
    ]
    console.print(table(results))
    if arguments.output:
        arguments.output.write_text(
            json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
