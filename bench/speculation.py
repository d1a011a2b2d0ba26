"""Benchmark of each speculation method: tokens per step, acceptance, and time, alternately with and without it.

With --matrix it instead checks every method with every request feature: the answers must equal those without
speculation.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.changing_heads import ChangingHeads
from bench.engine_run import run
from bench.shared_runner import Engines
from bench.speculation_matrix import FEATURES, Cell, Matrix
from bench.speculation_workloads import Workload, asked, copied, repeated, unrelated
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.hub.repository import resolve_model
from model_runner.learning.link import ProcessLink
from model_runner.learning.wiring import MakeLink
from model_runner.runner_interface import SpeculationStats
from scheduler.interface import EngineRequest
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

NUM_TOKENS = 128
ROUNDS = 5
PER_CLIENT = 4
"""Minimum number of requests per client in a round, so that the end of a round, when few run, matters little."""

WORKLOADS = {"chat": asked, "repeated": repeated, "copied": copied, "random": unrelated}


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one method on one workload."""

    workload: str
    method: str
    temperature: float
    concurrency: int
    tokens_per_step: float
    """Mean for one choice over all steps, including steps without drafts."""
    accepted: tuple[float, ...]
    """Acceptance by depth, from 1: fraction of the draft tokens whose predecessors were all accepted."""
    seconds: float
    seconds_without: float
    """Durations with and without speculation are medians of alternating rounds."""

    @property
    def speedup(self) -> float:
        return self.seconds_without / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, their decoding settings, and the number of concurrent requests."""

    prompts: Sequence[tuple[int, ...]]
    before: Sequence[tuple[int, ...]]
    """Prompts that are answered before the measurement."""
    temperature: float
    concurrency: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run of a load."""

    seconds: float
    tokens_per_step: float
    answers: tuple[tuple[int, ...], ...]


class Bench:
    """Runs loads on one loaded model."""

    def __init__(self, config: RunnerConfig, num_draft: int | None = None, make_link: MakeLink = ProcessLink) -> None:
        """`num_draft` is the number of draft tokens per step; None leaves it to the budget. `make_link` connects to a
        learner, if the configuration has one.
        """
        self.engines = Engines(config, make_link)
        self.runner = self.engines.runner
        self._num_draft = num_draft
        self._num_runs = 0

    def measure(self, name: str, method: str, load: Load) -> Result:
        """Measure a method and no speculation alternately. Raises RuntimeError if the answers differ."""
        with_it: list[Run] = []
        without: list[Run] = []
        before = {stats.method: stats for stats in self.runner.speculation_stats()}
        for turn in range(ROUNDS):
            for speculates in (turn % 2 == 1, turn % 2 == 0):
                speculation = Speculation(method, self._num_draft) if speculates else None
                (with_it if speculates else without).append(self._run(load, speculation))
            if with_it[-1].answers != without[-1].answers:
                raise RuntimeError(f"{method} changed the answers to {name}")
        return Result(
            workload=name,
            method=method,
            temperature=load.temperature,
            concurrency=load.concurrency,
            tokens_per_step=statistics.median(run.tokens_per_step for run in with_it),
            accepted=_accepted(before, self.runner.speculation_stats()),
            seconds=statistics.median(run.seconds for run in with_it),
            seconds_without=statistics.median(run.seconds for run in without),
        )

    def _run(self, load: Load, speculation: Speculation | None) -> Run:
        engine = self.engines.make()
        self._num_runs += 1
        before = enumerate(load.before, len(load.prompts))  # with other seeds
        run(engine, [self._request(index, prompt, load, speculation) for index, prompt in before], concurrency=1)
        requests = [self._request(index, prompt, load, speculation) for index, prompt in enumerate(load.prompts)]
        done = run(engine, requests, load.concurrency)
        later = [output for outputs in done.outputs for output in outputs[1:]]  # the first token comes with the prompt
        return Run(done.seconds, sum(len(output.tokens) for output in later) / len(later), done.tokens)

    def _request(
        self, index: int, prompt: tuple[int, ...], load: Load, speculation: Speculation | None
    ) -> EngineRequest:
        """Make a request. The salt keeps a run from reusing another run's outputs as drafts."""
        sampling = SamplingParams(temperature=load.temperature, seed=index, stop_token_ids=load.stop_token_ids)
        return EngineRequest(
            f"{index:03}",
            prompt,
            sampling,
            NUM_TOKENS,
            cache_salt=str(self._num_runs),
            speculation=speculation,
        )


def _accepted(before: dict[str, SpeculationStats], after: Sequence[SpeculationStats]) -> tuple[float, ...]:
    """Acceptance by depth since `before`, over all methods that drafted."""
    accepted, verified = [0] * 64, [0] * 64
    for stats in after:
        old = before.get(stats.method)
        for sums, now, then in (
            (accepted, stats.accepted_by_depth, old.accepted_by_depth if old else ()),
            (verified, stats.verified_by_depth, old.verified_by_depth if old else ()),
        ):
            for depth, count in enumerate(now):
                sums[depth] += count - (then[depth] if depth < len(then) else 0)
    return tuple(a / v for a, v in zip(accepted, verified, strict=True) if v)


def table(results: Sequence[Result]) -> Table:
    """One line for each result."""
    lines = Table(
        "workload", "method", "temperature", "clients", "tokens per step", "accepted by depth", "s", "s without", ""
    )
    for result in results:
        lines.add_row(
            result.workload,
            result.method,
            f"{result.temperature:g}",
            str(result.concurrency),
            f"{result.tokens_per_step:.2f}",
            " ".join(f"{share:.2f}"[1:] if share < 1 else "1" for share in result.accepted[:5]),
            f"{result.seconds:.2f}",
            f"{result.seconds_without:.2f}",
            f"{result.speedup:.2f} x",
        )
    return lines


def matrix_table(cells: dict[tuple[str, str], Cell], methods: Sequence[str]) -> Table:
    """Features by methods: accepted/verified draft tokens if all answers are equal, otherwise `differs`."""
    lines = Table("feature", *methods)
    for feature in FEATURES:
        row = [cells[method, feature] for method in methods]
        lines.add_row(
            feature,
            *(f"= {cell.num_accepted}/{cell.num_drafted}" if cell.is_equal else "[red]differs[/red]" for cell in row),
        )
    return lines


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Measure the effect of speculation on the embedded or another model.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--draft-model", type=Path, help="folder of a smaller model")
    parser.add_argument(
        "--heads",
        type=Path,
        action="append",
        default=[],
        help="folder of trained heads, instead of the model's",
    )
    parser.add_argument("--methods", nargs="+", help="methods to measure; all by default")
    parser.add_argument("--num-tokens", type=int, help="draft tokens per step; chosen by the budget by default")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1])
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts of each workload")
    parser.add_argument("--matrix", action="store_true", help="check every method with every feature instead")
    parser.add_argument(
        "--learn", action="store_true", help="with --matrix: record choices, and change the heads every few steps"
    )
    parser.add_argument("--least", type=float, default=0.0, help="fail if a speedup is below this")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    if arguments.learn and not arguments.matrix:
        parser.error("--learn needs --matrix; use bench.learning to measure the effect of learning")
    console = Console(width=130)
    model = resolve_model(arguments.model, console)
    folder = model.path
    heads = tuple(arguments.heads) or model.heads
    config = RunnerConfig(
        folder, kv_cache_gib=1.0, draft_model=arguments.draft_model, heads=heads, learn=arguments.learn
    )
    bench = Bench(config, arguments.num_tokens, ChangingHeads)
    methods = arguments.methods or bench.runner.info.speculation_methods
    content: object
    slow: list[Result] = []
    if arguments.matrix:
        info = bench.runner.info
        matrix = Matrix(
            lambda chunk, num_blocks: bench.engines.make(prefix_caching=True, chunk=chunk, num_blocks=num_blocks),
            info.num_blocks,
            info.block_size,
            info.vocab_size,
        )
        cells = {(method, feature): matrix.cell(method, feature) for method in methods for feature in FEATURES}
        console.print(matrix_table(cells, methods))
        content = [{"method": m, "feature": f, **asdict(cell)} for (m, f), cell in cells.items()]
    else:
        results = [bench.measure(name, method, load) for name, load in _loads(folder, arguments) for method in methods]
        console.print(table(results))
        content = [asdict(result) | {"speedup": result.speedup} for result in results]
        slow = [result for result in results if result.speedup < arguments.least]
    if arguments.output:
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if slow:
        raise SystemExit(f"{len(slow)} speedups are below {arguments.least:g} x")


def _loads(folder: Path, arguments: argparse.Namespace) -> list[tuple[str, Load]]:
    tokenizer = Tokenizer.from_folder(folder)
    stops = ServedModel.from_folder(folder, tokenizer, "bench").defaults.eos_token_ids
    made = {name: WORKLOADS[name](tokenizer) for name in arguments.workloads}
    return [
        (name, _load(work, temperature, concurrency, arguments.prompts, stops))
        for name, work in made.items()
        for temperature in arguments.temperatures
        for concurrency in arguments.concurrency
    ]


def _load(work: Workload, temperature: float, concurrency: int, num_prompts: int, stops: tuple[int, ...]) -> Load:
    """Make a load; prompts are repeated with other seeds if there are too few for the clients."""
    prompts = islice(cycle(work.prompts), max(min(num_prompts, len(work.prompts)), PER_CLIENT * concurrency))
    return Load(tuple(prompts), work.before, temperature, concurrency, () if work.is_endless else stops)


if __name__ == "__main__":
    main()
