"""Measures how probable and how repetitive each decoding strategy's texts are.

Every strategy continues the starts of texts. The same model in float32 computes each continuation's probability. The
original continuations are measured, too: a good strategy is near to them. Special tokens are excluded, so that all
continuations are text of the same length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.engine_run import Strategy, run
from bench.shared_runner import Engines
from bench.texts import longest_topics
from model_runner.config import RunnerConfig
from model_runner.contract import DoLa, Mirostat, SamplingParams
from scheduler.interface import BeamSearch

PROMPT = 32
"""Length of a prompt in tokens."""
CONTINUED = 128
THE_TEXT_ITSELF = "the text itself"
_GREEDY = SamplingParams(temperature=0.0)
STRATEGIES = {
    "greedy": Strategy(_GREEDY),
    "sampling": Strategy(SamplingParams()),
    "top-p 0.9": Strategy(SamplingParams(top_p=0.9)),
    "mirostat, tau 5": Strategy(SamplingParams(mirostat=Mirostat(tau=5.0))),
    "beam search, 4 beams": Strategy(_GREEDY, BeamSearch(4)),
    "contrastive search": Strategy(replace(_GREEDY, penalty_alpha=0.6, top_k=4)),
    "DoLa low, penalty 1.2": Strategy(replace(_GREEDY, dola=DoLa("low"), repetition_penalty=1.2)),
}

Texts = Sequence[tuple[int, ...]]
"""Tokenised texts."""


@dataclass(frozen=True, slots=True)
class TextQuality:
    """Quality of one strategy's continuations."""

    strategy: str
    perplexity: float
    """Perplexity over all tokens of all continuations."""
    distinct_1: float
    """Mean fraction of distinct 1-grams over the continuations; likewise for 2- and 4-grams."""
    distinct_2: float
    distinct_4: float
    repeated_4grams: float
    """Mean fraction of a continuation's 4-grams that occurred in it before."""


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct n-grams divided by all n-grams of a text (Li et al., arXiv:1510.03055); 1 if it has none."""
    ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def perplexity(logprobs: Sequence[float]) -> float:
    """Perplexity of one or more tokens with these log-probabilities."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def text_quality(strategy: str, continuations: Texts, logprobs: Sequence[float]) -> TextQuality:
    """Quality of continuations, from their tokens and the log-probabilities of all tokens."""

    def mean_distinct(n: int) -> float:
        return math.fsum(distinct(tokens, n) for tokens in continuations) / len(continuations)

    ones, twos, fours = map(mean_distinct, (1, 2, 4))
    return TextQuality(strategy, perplexity(logprobs), ones, twos, fours, 1 - fours)


def measure(folder: Path, num_texts: int, console: Console) -> list[TextQuality]:
    """Quality of the original texts, then of every strategy. Everything is computed in float32."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = longest_topics(tokenizer, num_texts, PROMPT + CONTINUED)
    prompts = [text[:PROMPT] for text in texts]
    config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_dtype="float32", kv_cache_gib=1.0)
    engines = Engines(config)
    special = tuple((token,) for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    made = {THE_TEXT_ITSELF: tuple(text[PROMPT:] for text in texts)}
    for name, strategy in track(STRATEGIES.items(), "Continuing", console=console):
        only_text = replace(strategy, sampling=replace(strategy.sampling, bad_words=special))
        made[name] = run(engines.make(), only_text.requests(prompts, CONTINUED)).tokens
    return [text_quality(name, texts, _logprobs(engines, prompts, texts)) for name, texts in made.items()]


def _logprobs(engines: Engines, prompts: Texts, continuations: Texts) -> list[float]:
    """Log-probabilities of all tokens of the continuations."""
    reading = Strategy(replace(_GREEDY, prompt_logprobs=0))
    whole = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
    logprobs = run(engines.make(), reading.requests(whole, 0)).prompt_logprobs
    return [
        entry.logprob
        for entries, continuation in zip(logprobs, continuations, strict=True)
        for entry in entries[-len(continuation) :]
    ]


def table(results: Sequence[TextQuality]) -> Table:
    """One line for each strategy."""
    lines = Table("strategy", "perplexity", "distinct-1", "distinct-2", "distinct-4", "repeated 4-grams")
    for column in lines.columns[1:]:
        column.justify = "right"
    for result in results:
        lines.add_row(
            result.strategy,
            f"{result.perplexity:.2f}",
            f"{result.distinct_1:.2f}",
            f"{result.distinct_2:.2f}",
            f"{result.distinct_4:.2f}",
            f"{100 * result.repeated_4grams:.1f} %",
        )
    return lines
