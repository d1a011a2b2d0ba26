"""Benchmark of decoding strategies: tokens per second of each, alternating with plain sampling, without speculation.

Prompts are the starts of texts, and all answers have the same length. The time includes the prompts. For beam search,
only the best sequence's tokens are counted. Contrastive decoding uses the model itself as the amateur, so it runs two
models of the same size.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.engine_environment import use_engine_environment
from bench.engine_run import EngineRun, Strategy, run
from bench.shared_runner import Engines
from bench.texts import longest_topics
from model_runner.config import RunnerConfig
from model_runner.contract import Contrastive, DoLa, Dry, Mirostat, SamplingParams, Xtc
from model_runner.hub.repository import resolve_model
from scheduler.interface import BeamSearch

PROMPT = 64
"""Length of a prompt in tokens."""
CONCURRENCY = (1, 8)
BEAMS = 4
"""Beams of the search whose steps are compared with the steps of as many plain requests."""
STEP_GOAL = 1.3
_PLAIN = Strategy(SamplingParams())
_GREEDY = SamplingParams(temperature=0.0)
STRATEGIES = {
    "greedy": Strategy(_GREEDY),
    "plain sampling": _PLAIN,  # compared with itself, to show the machine's noise
    "top_p 0.9, top_k 40": Strategy(SamplingParams(top_p=0.9, top_k=40)),
    "repetition 1.1, no_repeat_ngram 3": Strategy(SamplingParams(repetition_penalty=1.1, no_repeat_ngram_size=3)),
    "typical_p 0.9": Strategy(SamplingParams(typical_p=0.9)),
    "epsilon_cutoff, eta_cutoff": Strategy(SamplingParams(epsilon_cutoff=0.0005, eta_cutoff=0.001)),
    "top_n_sigma 1": Strategy(SamplingParams(top_n_sigma=1.0)),
    "xtc": Strategy(SamplingParams(xtc=Xtc(0.5))),
    "dry": Strategy(SamplingParams(dry=Dry(0.8))),
    "mirostat 2": Strategy(SamplingParams(mirostat=Mirostat())),
    "beam search, 2 beams": Strategy(_GREEDY, BeamSearch(2)),
    "beam search, 4 beams": Strategy(_GREEDY, BeamSearch(BEAMS)),
    "diverse beams, 4 in 2 groups": Strategy(_GREEDY, BeamSearch(4, groups=2, diversity_penalty=0.5)),
    "contrastive search, top_k 4": Strategy(replace(_GREEDY, penalty_alpha=0.6, top_k=4)),
    "DoLa low": Strategy(replace(_GREEDY, dola=DoLa("low"))),
    "contrastive decoding": Strategy(SamplingParams(contrastive=Contrastive())),
    "guidance": Strategy(SamplingParams(guidance=1.5)),
}


@dataclass(frozen=True, slots=True)
class StrategySpeed:
    """Speed of one strategy and of plain sampling at one concurrency. Medians of the rounds."""

    strategy: str
    concurrency: int
    tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a beam search's step and of a step of as many plain requests. Medians of the rounds.

    The first steps, which compute the prompts, are not counted.
    """

    beams_ms: float
    plain_ms: float

    @property
    def ratio(self) -> float:
        return self.beams_ms / self.plain_ms


class Bench:
    """Runs prompts on one loaded model."""

    def __init__(self, folder: Path, num_texts: int, num_tokens: int, rounds: int) -> None:
        """Uses `num_texts` prompts and generates `num_tokens` tokens for each."""
        self._engines = Engines(RunnerConfig(folder, kv_cache_gib=1.0, aux_model=folder))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._prompts = longest_topics(tokenizer, num_texts, PROMPT)
        self._num_tokens = num_tokens
        self._rounds = rounds

    def speed(self, name: str, concurrency: int) -> StrategySpeed:
        """Measure one strategy and plain sampling, after a warm-up of both."""
        strategy, prompts = STRATEGIES[name], self._prompts
        for warming in (_PLAIN, strategy):
            self._run(warming, prompts[:concurrency], concurrency)
        plain, runs = self._in_turns((_PLAIN, prompts), (strategy, prompts), concurrency)
        return StrategySpeed(name, concurrency, _tokens_per_s(runs), _tokens_per_s(plain))

    def step(self) -> StepCost:
        """Measure one beam search and as many plain requests as it has beams."""
        search = Strategy(_GREEDY, BeamSearch(BEAMS))
        plain, searches = self._in_turns((_PLAIN, self._prompts[:BEAMS]), (search, self._prompts[:1]), BEAMS)
        return StepCost(_step_ms(searches), _step_ms(plain))

    def _in_turns(
        self,
        first: tuple[Strategy, Sequence[tuple[int, ...]]],
        second: tuple[Strategy, Sequence[tuple[int, ...]]],
        concurrency: int,
    ) -> tuple[list[EngineRun], list[EngineRun]]:
        pairs = [(self._run(*first, concurrency), self._run(*second, concurrency)) for _ in range(self._rounds)]
        return [one for one, _ in pairs], [other for _, other in pairs]

    def _run(self, strategy: Strategy, prompts: Sequence[tuple[int, ...]], concurrency: int) -> EngineRun:
        return run(self._engines.make(), strategy.requests(prompts, self._num_tokens), concurrency)


def _tokens_per_s(runs: Sequence[EngineRun]) -> float:
    return statistics.median(run.num_tokens / run.seconds for run in runs)


def _step_ms(runs: Sequence[EngineRun]) -> float:
    return 1e3 * statistics.median(statistics.mean(run.step_s[1:]) for run in runs)


def table(results: Sequence[StrategySpeed]) -> Table:
    """One line for each strategy and concurrency."""
    lines = Table("strategy", "concurrency", "tok/s", "plain sampling, tok/s", "ratio")
    for column in lines.columns[1:]:
        column.justify = "right"
    for result in results:
        numbers = f"{result.tokens_per_s:.1f}", f"{result.plain_tokens_per_s:.1f}", f"{result.ratio:.2f}"
        lines.add_row(result.strategy, str(result.concurrency), *numbers)
    return lines


def main() -> None:
    """Measure and print; with --output also write JSON."""
    use_engine_environment()
    parser = argparse.ArgumentParser(description="Measure the speed of decoding strategies against plain sampling.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--texts", type=int, default=8, help="number of prompts in a run")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="number of alternating rounds")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    if arguments.texts < max(CONCURRENCY):
        parser.error(f"--texts must be at least {max(CONCURRENCY)}, the highest concurrency")
    console = Console()
    folder = resolve_model(arguments.model, console).path
    bench = Bench(folder, arguments.texts, arguments.tokens, arguments.rounds)
    cells = [(name, concurrency) for concurrency in CONCURRENCY for name in arguments.strategies]
    results = [bench.speed(*cell) for cell in track(cells, "Measuring", console=console)]
    step = bench.step()
    console.print(table(results))
    console.print(
        f"Medians of {arguments.rounds} rounds that alternate with plain sampling; {PROMPT} tokens in, "
        f"{arguments.tokens} out. Contrastive decoding uses a second copy of the model as the amateur."
    )
    console.print(
        f"A step of a beam search with {BEAMS} beams took {step.beams_ms:.2f} ms, one of {BEAMS} plain requests "
        f"{step.plain_ms:.2f} ms: {step.ratio:.2f} x; the goal is at most {STEP_GOAL} x."
    )
    if arguments.output:
        content = {
            "rounds": arguments.rounds,
            "speeds": [asdict(result) for result in results],
            "step": asdict(step) | {"ratio": step.ratio, "goal": STEP_GOAL},
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
