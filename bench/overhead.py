"""Benchmark of the server's overhead: CPU time of its two processes per streamed token, without the model.

Everything is real except the runner, which sleeps for the duration of a forward pass and answers with a text's tokens.
So all CPU time of the engine process is overhead. Unlike elapsed time, it does not depend on the machine's other load.

`--everything` also measures with all telemetry and accounting on, and `--page` with the page closed or open in browser
tabs. Each alternates with a plain server.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from bench.everything import everything_on
from bench.local_server import local_server, process_family
from bench.page_tabs import Page
from bench.surroundings import Kind, Surroundings
from model_runner.config import RunnerConfig
from model_runner.contract import ChoiceResult, StepPlan, StepResult
from model_runner.hub.repository import resolve_model
from model_runner.runner_interface import Runner, RunnerInfo
from scheduler.engine import Engine
from scheduler.interface import SchedulerConfig
from scheduler.prefix_cache import CacheLog
from scheduler.scheduler import Scheduler
from server.api.model_services import ModelParts
from server.app import create_app
from server.cli.lifecycle import open_publisher
from server.cli.loadtest.benchmark import BenchOptions, run_bench
from server.cli.loadtest.display import progress_bar
from server.cli.loadtest.load import WORDS, Endpoint, Lengths, Workload
from server.config import Settings
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess, ProcessLink
from server.engine.supervisor import EngineLimits
from server.http.draining_server import DrainingServer, configure
from server.http.listening import bind, url_of
from server.page.gate import WEBSOCKETS, PageGate
from server.text.tokenizer import Tokenizer

CONTEXT = 4096
NUM_BLOCKS = 4096
STEP_VARIABLE = "SAMEWISE_BENCH_STEP_S"


class SleepingRunner(Runner):
    """A Runner without a model: each step sleeps, then returns the next word for each choice that has caught up."""

    num_blocks = NUM_BLOCKS

    def __init__(self, words: list[int], step_s: float) -> None:
        self._words = words
        self._step_s = step_s
        self._to_compute: dict[str, int] = {}
        self._num_said = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Sleep for a step and return meaningless tokens."""
        time.sleep(self._step_s)
        for key in plan.released:
            self._to_compute.pop(key, None)
        for choice in plan.admitted:
            self._to_compute[choice.key] = len(choice.tokens) - choice.num_computed
        return StepResult(tuple(self._advance(share.key, share.num_tokens) for share in plan.scheduled))

    def _advance(self, key: str, num_tokens: int) -> ChoiceResult:
        self._to_compute[key] -= num_tokens
        if self._to_compute[key]:
            return ChoiceResult(key, ())
        self._to_compute[key] = 1
        self._num_said += 1
        return ChoiceResult(key, (self._words[self._num_said % len(self._words)],))


def load(config: EngineConfig) -> LoadedEngine:
    """Build the real engine with a sleeping runner."""
    tokenizer = Tokenizer.from_folder(config.runner.model)
    words = tokenizer.encode(" ".join(WORDS), add_special_tokens=False)
    runner = SleepingRunner(words, float(os.environ[STEP_VARIABLE]))
    limits = SchedulerConfig(
        block_size=config.runner.block_size,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=CONTEXT,
        policy=config.policy,
    )
    info = RunnerInfo(
        vocab_size=tokenizer.vocab_size,
        max_model_len=CONTEXT,
        block_size=limits.block_size,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device="none",
        dtype="none",
        kv_dtype="none",
        kernels="none",
    )
    cache_log = CacheLog() if config.kv_events else None
    scheduler = Scheduler(limits, NUM_BLOCKS, cache_log=cache_log)
    return LoadedEngine(Engine(scheduler, runner), info, cache_log=cache_log)


async def serve(port: int) -> None:
    """Run the HTTP process of `samewise serve` with the sleeping engine."""
    settings = Settings(host="127.0.0.1", port=port, log_level="warning")
    folder = resolve_model(settings.model, Console(stderr=True))
    publishes = settings.kv_events is not None
    config = EngineConfig(RunnerConfig(folder.path), settings.policy, log_level="warning", kv_events=publishes)
    limits = EngineLimits(settings.max_waiting, settings.engine_timeout_s)
    with open_publisher(settings) as publisher, bind(settings.host, settings.port) as listener:
        publish = None if publisher is None else publisher.publish
        engine = EngineProcess(config, limits, publish, partial(ProcessLink.open, "bench.overhead"))
        app = create_app([ModelParts(engine, Tokenizer.from_folder(folder.path), settings, folder)], settings)
        await engine.start()
        gate = PageGate(app, f"{url_of(listener)}/v1")
        served, websockets = (gate, WEBSOCKETS) if settings.page else (app, None)
        uvicorn_config = configure(served, settings.client_timeout_s, websockets)
        server = DrainingServer(uvicorn_config, engine, settings.drain_grace_s)
        await server.serve(sockets=[listener])
        await gate.close()
        await engine.stop()


@dataclass(frozen=True, slots=True)
class Overhead:
    """CPU time under one load with answers of `output_len` tokens."""

    endpoint: Endpoint
    beside: str
    """Name of the server's surroundings."""
    concurrency: int
    step_ms: float
    output_len: int
    tokens_per_s: float
    http_us_per_token: float
    engine_us_per_token: float

    @property
    def engine_share(self) -> float:
        """The engine's CPU time as a fraction of a step's duration."""
        return self.engine_us_per_token * self.concurrency / (1000 * self.step_ms)


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a server."""

    endpoint: Endpoint
    concurrency: int
    step_ms: float
    output_len: int
    rounds: int
    """Requests of each client."""


async def measure(load: Load, beside: Surroundings) -> Overhead:
    """Start a server, apply the load, and measure the CPU time of its processes."""
    os.environ[STEP_VARIABLE] = str(load.step_ms / 1000)
    num_requests = load.rounds * load.concurrency
    workload = Workload(num_requests, Lengths(128, 128), Lengths(load.output_len, load.output_len))
    async with local_server([], ("-m", "bench.overhead", "--serve"), beside.environment) as server:
        options = BenchOptions(
            f"{server.url}/v1",
            workload,
            api_key=beside.api_key,
            endpoint=load.endpoint,
            concurrency=load.concurrency,
        )
        async with beside.watching(server.url):
            await run_bench(options, lambda outcome: None)  # warm-up: imports and caches
            http, engine = split_cpu_seconds(server.pid)
            with progress_bar(num_requests) as advance:
                result = await run_bench(options, advance)
            http_after, engine_after = split_cpu_seconds(server.pid)
    tokens = result.report.output_tokens
    return Overhead(
        endpoint=load.endpoint,
        beside=beside.name,
        concurrency=load.concurrency,
        step_ms=load.step_ms,
        output_len=load.output_len,
        tokens_per_s=result.report.output_tokens_per_s,
        http_us_per_token=1e6 * (http_after - http) / tokens,
        engine_us_per_token=1e6 * (engine_after - engine) / tokens,
    )


def split_cpu_seconds(pid: int) -> tuple[float, float]:
    """A server's CPU time so far: HTTP process with its workers, and engine."""
    family = process_family(pid)
    engines = [one for one in family if b"server.engine.worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return sum(cpu_seconds(one) for one in family if one not in engines), sum(map(cpu_seconds, engines))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(results: list[Overhead]) -> Table:
    """One line for each load."""
    numbers = ("streams", "step ms", "tokens/s", "HTTP us/token", "engine us/token", "engine / step")
    lines = Table("endpoint", "with", *numbers)
    for column in lines.columns[2:]:
        column.justify = "right"
    for result in results:
        lines.add_row(
            result.endpoint,
            result.beside,
            str(result.concurrency),
            f"{result.step_ms:g}",
            f"{result.tokens_per_s:.0f}",
            f"{result.http_us_per_token:.0f}",
            f"{result.engine_us_per_token:.0f}",
            f"{result.engine_share:.1%}",
        )
    return lines


def in_turns(load: Load, turns: int, kinds: Sequence[Kind]) -> list[Overhead]:
    """Medians over `turns` alternating turns of each kind of surroundings."""
    results: list[list[Overhead]] = [[] for _ in kinds]
    for _ in range(turns):
        for kind, of_kind in zip(kinds, results, strict=True):
            with kind() as beside:
                of_kind.append(asyncio.run(measure(load, beside)))
    return [median(of_kind) for of_kind in results]


def median(results: Sequence[Overhead]) -> Overhead:
    """Medians of results under the same load."""
    return replace(
        results[0],
        tokens_per_s=statistics.median(result.tokens_per_s for result in results),
        http_us_per_token=statistics.median(result.http_us_per_token for result in results),
        engine_us_per_token=statistics.median(result.engine_us_per_token for result in results),
    )


def _there(page: Page) -> AbstractContextManager[Surroundings]:
    return nullcontext(page)


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Measure the server's CPU time without the model.")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[5.0, 25.0], help="step duration for each concurrency"
    )
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--turns", type=int, default=1, help="number of servers of each kind; results are medians")
    parser.add_argument("--everything", action="store_true", help="also with keys, limits, traces, KV events and more")
    parser.add_argument(
        "--page", type=int, nargs="+", default=[], metavar="TABS", help="also with this many tabs; 0: closed"
    )
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.port))
        return
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # for the engine process, which imports this module
    kinds: list[Kind] = [partial(_there, Page(tabs)) for tabs in (None, *arguments.page)]
    if arguments.everything:
        kinds.append(everything_on)
    results = [
        result
        for concurrency, step_ms in zip(arguments.concurrency, arguments.step_ms, strict=True)
        for result in in_turns(
            Load(arguments.endpoint, concurrency, step_ms, arguments.output_len, arguments.rounds),
            arguments.turns,
            kinds,
        )
    ]
    Console().print(table(results))
    if arguments.output:
        arguments.output.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
