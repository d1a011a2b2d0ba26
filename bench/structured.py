"""Benchmark of structured output with JSON schemas: steps alternating with free answers' steps, masks, and compilation.

All answers have the same length. Masks are timed on matchers that replay the answers on one thread; in a step, a mask
is computed only if the model's own choice is not allowed. Compilation is timed in an engine while other requests
decode: their longest step shows whether they are held up.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.engine_environment import use_engine_environment
from bench.engine_run import EngineRun, Strategy, run
from bench.shared_runner import Engines
from bench.texts import longest_topics
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.hub.repository import resolve_model
from model_runner.sampling.grammar import Grammars
from scheduler.interface import EngineRequest
from server.generation.constraints.check import grammar_of
from server.generation.constraints.json_schema import JsonSchema

CONCURRENCY = (1, 8, 32)
PROMPT = 64
"""Length of a prompt in tokens."""
STEP_GOAL = 1.05
SCHEMA_LINES = 2_000
NUM_DECODING, NUM_COMPILING = 8, 4
"""Numbers of requests that decode, and of requests whose grammars are compiled meanwhile."""


def _item(**limits: int) -> dict[str, Any]:
    """Schema of an item whose strings have these limits."""
    return {
        "type": "object",
        "properties": {
            "kind": {"enum": ["book", "article", "website", "manual"]},
            "title": {"type": "string", **limits},
            "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
            "tags": {"type": "array", "items": {"type": "string", **limits}, "maxItems": 3},
            "is_read": {"type": "boolean"},
        },
        "required": ["kind", "title", "year", "tags", "is_read"],
        "additionalProperties": False,
    }


SCHEMAS = {"any strings": _item(), "maxLength 16": _item(maxLength=16)}
"""Schemas of the items of an endless array. Near a string's maximum length, most tokens must be checked one by one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of structured ("held") against free answers at one number of clients. Medians of the rounds."""

    schema: str
    clients: int
    free_step_ms: float
    held_step_ms: float
    ratio: float
    """Held step divided by free step: median of the rounds' ratios."""
    noise: float
    """Free step divided by another free step: median of the rounds' ratios."""
    free_tokens_per_s: float
    held_tokens_per_s: float
    drafted_tokens_per_s: float
    """Speed of held answers with speculation `auto`."""
    accepted: float
    """Accepted draft tokens per output token of held answers with speculation."""


@dataclass(frozen=True, slots=True)
class MaskTime:
    """Time per mask in microseconds."""

    schema: str
    count: int
    p50_us: float
    p99_us: float
    mean_us: float
    longest_us: float


@dataclass(frozen=True, slots=True)
class CompileCost:
    """Cost of compiling a large schema. Times are medians except the longest ones."""

    lines: int
    read_ms: float
    """Time in the HTTP process to turn the schema into a grammar and to check it."""
    compile_ms: float
    """Time in the engine to compile the grammar, for each choice."""
    step_ms: float
    """Step of other requests while nothing is compiled."""
    longest_step_ms: float
    steps_meanwhile: int
    longest_step_meanwhile_ms: float


def grammar_for(schema: object) -> str:
    """The grammar that the server makes for a schema."""
    return grammar_of(JsonSchema(schema, "schema"), "schema")


def endless(name: str) -> dict[str, Any]:
    """Schema of an endless list of items."""
    return {"type": "array", "items": SCHEMAS[name], "minItems": 1_000}


def large_schema(num_lines: int, variant: int = 0) -> dict[str, Any]:
    """A schema with at least `num_lines` lines of indented JSON; variants differ in the properties' names."""
    parts: dict[str, Any] = {}
    while True:
        schema = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        if len(json.dumps(schema, indent=2).splitlines()) >= num_lines:
            return schema
        parts[f"part_{variant}_{len(parts)}"] = _item()


class Bench:
    """Runs prompts on one loaded model."""

    def __init__(self, folder: Path, num_tokens: int, rounds: int) -> None:
        """Generates `num_tokens` tokens for each prompt."""
        self._engines = Engines(RunnerConfig(folder, kv_cache_gib=1.0))
        self._grammars = Grammars(
            partial((folder / "tokenizer.json").read_text, encoding="utf-8"), self._engines.runner.info.vocab_size
        )
        self._prompts = longest_topics(Tokenizer.from_file(str(folder / "tokenizer.json")), max(CONCURRENCY), PROMPT)
        self._num_tokens = num_tokens
        self._rounds = rounds
        self._stop_ids = tuple(self._grammars.vocabulary.tokenizer.eos_tokens)
        self._free = SamplingParams(temperature=0.8)
        self._num_runs = 0
        self._answers: dict[str, list[tuple[int, ...]]] = {name: [] for name in SCHEMAS}

    def _held(self, grammar: str) -> SamplingParams:
        return replace(self._free, grammar=grammar, stop_token_ids=self._stop_ids)

    def cost(self, name: str, clients: int) -> Cost:
        """Measure one schema against free answers, after a warm-up of both."""
        sampling = self._held(grammar_for(endless(name)))
        for warming in (self._free, sampling):
            self._run(warming, clients)
        rounds = [self._round(sampling, clients) for _ in range(self._rounds)]
        free, again, held, drafted = zip(*rounds, strict=True)
        self._answers[name] += held[0].tokens
        pairs = zip(free, held, again, strict=True)
        ratios = [(_step_ms(one) / _step_ms(other), _step_ms(third) / _step_ms(other)) for other, one, third in pairs]
        return Cost(
            schema=name,
            clients=clients,
            free_step_ms=statistics.median(map(_step_ms, free)),
            held_step_ms=statistics.median(map(_step_ms, held)),
            ratio=statistics.median(ratio for ratio, _ in ratios),
            noise=statistics.median(noise for _, noise in ratios),
            free_tokens_per_s=statistics.median(map(_tokens_per_s, free)),
            held_tokens_per_s=statistics.median(map(_tokens_per_s, held)),
            drafted_tokens_per_s=statistics.median(map(_tokens_per_s, drafted)),
            accepted=statistics.median(map(_accepted, drafted)),
        )

    def _round(self, held: SamplingParams, clients: int) -> tuple[EngineRun, EngineRun, EngineRun, EngineRun]:
        return (
            self._run(self._free, clients),
            self._run(self._free, clients),
            self._run(held, clients),
            self._run(held, clients, Speculation("auto")),
        )

    def masks(self, name: str) -> MaskTime:
        """Time the masks along all answers so far with this schema."""
        grammar, times = grammar_for(endless(name)), []
        for answer in self._answers[name]:
            matcher = self._grammars.matcher(grammar, self._stop_ids, ())
            for token in answer:
                start = time.perf_counter()
                matcher.mask()
                times.append(1e6 * (time.perf_counter() - start))
                matcher.advance(token)
        p50, p99 = np.percentile(times, [50, 99]).tolist()
        return MaskTime(name, len(times), p50, p99, statistics.mean(times), max(times))

    def compiling(self) -> CompileCost:
        """Time the compilation of schemas that differ only in their properties' names, so that none is cached."""
        schemas = [large_schema(SCHEMA_LINES, variant) for variant in range(NUM_COMPILING)]
        read_ms = _median_ms([partial(grammar_for, schema) for schema in schemas])
        grammars = [grammar_for(schema) for schema in schemas]
        compile_ms = _median_ms([partial(self._grammars.prepare, grammar, 1) for grammar in grammars])
        alone, meanwhile = self._steps_while_compiling(grammars)
        return CompileCost(
            lines=len(json.dumps(schemas[0], indent=2).splitlines()),
            read_ms=read_ms,
            compile_ms=compile_ms,
            step_ms=1e3 * statistics.median(alone),
            longest_step_ms=1e3 * max(alone),
            steps_meanwhile=len(meanwhile),
            longest_step_meanwhile_ms=1e3 * max(meanwhile, default=0.0),
        )

    def _steps_while_compiling(self, grammars: Sequence[str]) -> tuple[list[float], list[float]]:
        """Seconds of free requests' steps: undisturbed, and while the grammars are compiled."""
        engine = self._engines.make()
        free = Strategy(self._free).requests(self._prompts[:NUM_DECODING], 4 * self._num_tokens)
        for request in free:
            engine.add(request)
        engine.step()
        alone = [_seconds(engine.step) for _ in range(self._num_tokens)]
        for index, grammar in enumerate(grammars):
            engine.add(EngineRequest(f"compiled-{index}", self._prompts[0][:1], self._held(grammar), 1))
        meanwhile = []
        while engine.stats().num_waiting:  # the step after the last one computes their prompts
            meanwhile.append(_seconds(engine.step))
        while engine.has_work:
            engine.step()
        return alone, meanwhile

    def _run(self, sampling: SamplingParams, clients: int, speculation: Speculation | None = None) -> EngineRun:
        """Run the prompts with new seeds, and with a salt so that no earlier output is reused."""
        self._num_runs += 1
        requests = Strategy(sampling).requests(self._prompts[:clients], self._num_tokens)
        changed = [
            replace(
                request,
                sampling=replace(request.sampling, seed=1000 * self._num_runs + index),
                speculation=speculation,
                cache_salt=str(self._num_runs),
            )
            for index, request in enumerate(requests)
        ]
        return run(self._engines.make(), changed)


def _step_ms(one: EngineRun) -> float:
    """Median step without the first quarter, which includes the prompts."""
    return 1e3 * statistics.median(one.step_s[len(one.step_s) // 4 :])


def _tokens_per_s(one: EngineRun) -> float:
    return one.num_tokens / one.seconds


def _accepted(one: EngineRun) -> float:
    return sum(output.num_accepted for outputs in one.outputs for output in outputs) / one.num_tokens


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _median_ms(actions: Sequence[Callable[[], object]]) -> float:
    return 1e3 * statistics.median(map(_seconds, actions))


def table(costs: Sequence[Cost]) -> Table:
    """One line for each number of clients."""
    names = "free ms", "held ms", "held/free", "free/free", "free/s", "held/s", "drafted/s", "accepted"
    lines = Table("schema", "clients", *names)
    for column in lines.columns[1:]:
        column.justify = "right"
    for cost in costs:
        lines.add_row(
            cost.schema,
            str(cost.clients),
            f"{cost.free_step_ms:.2f}",
            f"{cost.held_step_ms:.2f}",
            f"{cost.ratio:.3f}",
            f"{cost.noise:.3f}",
            f"{cost.free_tokens_per_s:.0f}",
            f"{cost.held_tokens_per_s:.0f}",
            f"{cost.drafted_tokens_per_s:.0f}",
            f"{cost.accepted:.2f}",
        )
    return lines


def main() -> None:
    """Measure and print; with --output also write JSON."""
    use_engine_environment()
    parser = argparse.ArgumentParser(description="Measure the cost of structured output with a JSON schema.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="number of alternating rounds")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    console = Console()
    bench = Bench(resolve_model(arguments.model, console).path, arguments.tokens, arguments.rounds)
    cells = [(name, clients) for name in SCHEMAS for clients in CONCURRENCY]
    costs = [bench.cost(*cell) for cell in track(cells, "Measuring", console=console)]
    masks, compiling = [bench.masks(name) for name in SCHEMAS], bench.compiling()
    console.print(table(costs))
    console.print(
        f"Step times and tokens per second, medians of {arguments.rounds} alternating rounds; {PROMPT} tokens in, "
        f"{arguments.tokens} out. The goal for held steps is at most {STEP_GOAL} x free steps."
    )
    for of_schema in masks:
        console.print(
            f"{of_schema.schema}: {of_schema.count} masks, p50 {of_schema.p50_us:.0f} us, "
            f"p99 {of_schema.p99_us:.0f} us, mean {of_schema.mean_us:.0f} us, longest {of_schema.longest_us:.0f} us."
        )
    console.print(
        f"A schema of {compiling.lines} lines is read in {compiling.read_ms:.1f} ms and compiled in "
        f"{compiling.compile_ms:.1f} ms. Steps of {NUM_DECODING} others took {compiling.step_ms:.1f} ms, at most "
        f"{compiling.longest_step_ms:.1f} ms; while {NUM_COMPILING} of these schemas were compiled, there were "
        f"{compiling.steps_meanwhile} steps of at most {compiling.longest_step_meanwhile_ms:.1f} ms."
    )
    if arguments.output:
        content = {
            "rounds": arguments.rounds,
            "goal": STEP_GOAL,
            "costs": [asdict(cost) for cost in costs],
            "masks": [asdict(of_schema) for of_schema in masks],
            "compiling": asdict(compiling),
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
