"""Benchmark of `--learn`: compares a server that trains its heads with one that does not, as the subject changes twice.

Two servers answer the same requests, which arrive at random times and leave idle time. The servers take turns, and
the other one is stopped meanwhile. Then both restart. Finally another model starts with the same folder of learnt
heads, and must not use them.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from safetensors.torch import load_file, save_file

from bench.learning_plot import draw
from bench.learning_report import Answer, Turn, conclusion, different, table, tokens_per_step
from bench.learning_traffic import SUBJECTS, Question, make_questions, turns
from bench.local_server import LocalServer, local_server, paused
from model_runner.hub.repository import resolve_model
from server.cli.loadtest.benchmark import find_model
from server.cli.loadtest.load import Arrivals, arrival_times, open_client
from server.client.openai_answers import AnswerError, EventParser

METHOD = "hydra"
CALIBRATED = 24
"""Number of answers that are used to measure a server's maximum rate."""
CLIENTS = 8
"""Number of clients in that measurement."""
NUM_STRANGE = 4
"""Answers of the other model; too few to learn anything useful from."""
_LEARNING = "samewise:learning_"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared servers, with a client for it."""

    server: LocalServer
    client: httpx.AsyncClient
    model: str
    speculation: object
    """Value of the request field `speculation`."""

    async def ask(self, question: Question) -> Answer:
        """Send one request. Raises AnswerError."""
        body = question.body(self.model) | {"speculation": self.speculation}
        start = time.perf_counter()
        first, is_done = 0.0, False
        texts: list[str] = []
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", f"{self.server.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise AnswerError.refusal(response.status_code, await response.aread())
            events = EventParser()
            async for data in response.aiter_bytes():
                for payload in events.feed(data):
                    is_done = payload == b"[DONE]"
                    chunk = {} if is_done else json.loads(payload)
                    texts += [choice["delta"].get("content") or "" for choice in chunk.get("choices", ())]
                    first = first or (time.perf_counter() if texts and texts[-1] else 0.0)
                    usage = chunk.get("usage") or usage
        if not is_done:
            raise AnswerError("incomplete stream", f"the answer to {question.text!r} is incomplete")
        accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        return Answer("".join(texts), usage["completion_tokens"], accepted, (first or time.perf_counter()) - start)

    async def answer(self, questions: Sequence[Question], arrivals: Arrivals) -> list[Answer]:
        """Send all questions at their arrival times; returns the answers."""
        gate = asyncio.Semaphore(arrivals.concurrency or len(questions))

        async def one(question: Question, due: float) -> Answer:
            await asyncio.sleep(due)
            async with gate:
                return await self.ask(question)

        due = arrival_times(arrivals, len(questions))
        return list(await asyncio.gather(*map(one, questions, due)))

    async def metrics(self) -> dict[str, float]:
        """The server's metrics of learning, without prefix."""
        text = (await self.client.get(f"{self.server.url}/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            "_".join([sample.name.removeprefix(_LEARNING), *filter(None, [sample.labels.get("heads")])]): sample.value
            for sample in samples
            if sample.name.startswith(_LEARNING)
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the measurement."""

    probe: Sequence[Question]
    """Questions that are used to measure the maximum rate."""
    questions: Sequence[Question]
    again: Sequence[Question]
    """Questions after the restart."""
    turn: int
    """Answers of one server before the other's turn."""
    share: float
    """Arrival rate, as a fraction of the maximum rate."""
    num_draft_tokens: int
    """Draft tokens per step on both servers; fixed, so that results do not depend on the machine's load."""
    server_arguments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the measurement."""

    rate: float
    """Requests per second."""
    turns: Sequence[Turn]
    metrics: Mapping[str, float]
    restarted: Turn
    strange: Sequence[Answer]
    """Answers of the other model."""

    @property
    def num_different(self) -> int:
        """Number of answers that differ with and without learning."""
        return sum(len(different(turn.plain, turn.learning)) for turn in (*self.turns, self.restarted))

    @property
    def num_taken(self) -> int:
        """Accepted draft tokens of the other model, which must be 0."""
        return sum(answer.accepted for answer in self.strange)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "metrics": dict(self.metrics),
            "turns": [_numbers(turn) for turn in self.turns],
            "restarted": _numbers(self.restarted),
            "different": self.num_different,
            "taken by another model": self.num_taken,
        }


def _numbers(turn: Turn) -> dict[str, Any]:
    """A turn's numbers for JSON, without texts."""
    sides = {
        side: [{name: value for name, value in asdict(answer).items() if name != "text"} for answer in answers]
        for side, answers in (("plain", turn.plain), ("learning", turn.learning))
    }
    return {"first": turn.first, "subject": turn.subject, "ratio": turn.ratio, **sides}


async def measure(plan: Plan, folder: str | None, strange: Path) -> Result:
    """Run the whole measurement.

    Args:
        plan: questions and settings.
        folder: the model; None for the embedded one.
        strange: another model of the same shape.
    """
    async with _both(plan, folder) as (plain, learning):
        with paused(learning.server):
            rate = plan.share * await _most(plain, plan)
        spans = turns(len(plan.questions), plan.turn)
        answered = [
            await _in_turn((plain, learning), plan.questions[span.start : span.stop], Arrivals(rate=rate, seed=number))
            for number, span in enumerate(spans)
        ]
        metrics = await learning.metrics()
    async with _both(plan, folder) as servers:
        first, second = [await server.answer(plan.again, Arrivals(concurrency=1)) for server in servers]
    async with _side([str(strange), "--learn", *plan.server_arguments], plan) as other:
        found = await other.answer(plan.questions[:NUM_STRANGE], Arrivals(concurrency=1))
    restarted = Turn(len(plan.questions), plan.again[0].subject, first, second)
    return Result(rate, answered, metrics, restarted, found)


async def _in_turn(sides: tuple[Side, Side], questions: Sequence[Question], arrivals: Arrivals) -> Turn:
    """Ask one side, then the other; which is first alternates with the seed."""
    answers: dict[int, list[Answer]] = {}
    for side in (0, 1) if arrivals.seed % 2 == 0 else (1, 0):
        with paused(sides[1 - side].server):
            answers[side] = await sides[side].answer(questions, arrivals)
    return Turn(questions[0].number, questions[0].subject, answers[0], answers[1])


def another_model(folder: Path, target: Path) -> Path:
    """Create a model of the same shape with other weights: its last one-dimensional tensor is scaled by 1.01."""
    target.mkdir(parents=True)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    changed = next(file for file in files if file.suffix == ".safetensors")
    for file in files:
        if file != changed:
            (target / file.name).symlink_to(file.resolve())
    tensors = load_file(changed)
    name = [name for name, tensor in sorted(tensors.items()) if tensor.dim() == 1][-1]
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, target / changed.name, metadata={"format": "pt"})
    return target


@asynccontextmanager
async def _both(plan: Plan, folder: str | None) -> AsyncIterator[tuple[Side, Side]]:
    """Run a server without learning and one with it."""
    arguments = [*filter(None, [folder]), *plan.server_arguments]
    async with _side(arguments, plan) as plain, _side([*arguments, "--learn"], plan) as learning:
        yield plain, learning


@asynccontextmanager
async def _side(arguments: Sequence[str], plan: Plan) -> AsyncIterator[Side]:
    """Run a server; requests use its heads if it has any."""
    async with local_server([*arguments, "--log-level", "warning"]) as server, open_client({}) as client:
        has = (await client.get(f"{server.url}/v1/capabilities")).json()["speculation"]["methods"]
        speculation = {"method": METHOD, "num_tokens": plan.num_draft_tokens} if METHOD in has else "off"
        yield Side(server, client, await find_model(client, f"{server.url}/v1"), speculation)


async def _most(side: Side, plan: Plan) -> float:
    """The maximum rate, in answers per second."""
    start = time.perf_counter()
    await side.answer(plan.probe, Arrivals(concurrency=CLIENTS))
    return len(plan.probe) / (time.perf_counter() - start)


def arguments_of(command: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse our arguments; returns them and the rest, for `samewise serve`."""
    parser = argparse.ArgumentParser(
        description="Measure heads that learn while they serve.", epilog="Further arguments go to `samewise serve`."
    )
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=100, help="answers of one server before the other's turn")
    parser.add_argument("--again", type=int, default=50, help="answers after the restart")
    parser.add_argument(
        "--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="subjects, in this order"
    )
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=(64, 128), metavar=("MIN", "MAX"), help="length of an answer"
    )
    parser.add_argument("--share", type=float, default=0.3, help="arrival rate, as a fraction of the maximum rate")
    parser.add_argument("--draft-tokens", type=int, default=4, help="number of draft tokens in each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/learning"), help="folder for kernels, models and heads"
    )
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    parser.add_argument("--plot", type=Path, help="also draw the result to this SVG file")
    arguments, rest = parser.parse_known_args(command)
    if min(arguments.answers, arguments.turn, arguments.again, arguments.draft_tokens) < 1:
        parser.error("--answers, --turn, --again and --draft-tokens must be at least 1")
    if not 0 < arguments.share < 1 or not 1 < arguments.tokens[0] <= arguments.tokens[1]:
        parser.error("--share must be between 0 and 1, and --tokens needs 2 <= MIN <= MAX")
    return arguments, rest


def make_plan(arguments: argparse.Namespace, server_arguments: Sequence[str]) -> Plan:
    """Make the plan; the same arguments give the same questions."""
    lengths, subjects = (arguments.tokens[0], arguments.tokens[1]), arguments.subjects
    return Plan(
        probe=make_questions(CALIBRATED, CALIBRATED // 4, subjects, lengths, arguments.seed + 1),
        questions=make_questions(arguments.answers, arguments.turn, subjects, lengths, arguments.seed),
        again=make_questions(arguments.again, arguments.again, subjects[-1:], lengths, arguments.seed + 2),
        turn=arguments.turn,
        share=arguments.share,
        num_draft_tokens=arguments.draft_tokens,
        server_arguments=server_arguments,
    )


def report(result: Result, console: Console) -> None:
    """Print the result."""
    console.print(table(result.turns))
    for line in conclusion(result.turns):
        console.print(line)
    console.print(f"Learning: {', '.join(f'{name} {value:g}' for name, value in result.metrics.items())}")
    again, last = result.restarted, result.turns[-1]
    console.print(
        f"The first {len(again.plain)} answers after a restart: {tokens_per_step(again.learning):.2f} tokens per step, "
        f"{again.ratio:.2f} x the initial heads' (before the restart {last.ratio:.2f} x)."
    )
    console.print(f"Accepted draft tokens when another model starts with these learnt heads: {result.num_taken}.")


def main() -> None:
    """Measure and print; optionally write JSON and a plot. Exits with 1 if an answer differs or heads were mixed up."""
    arguments, server_arguments = arguments_of()
    console = Console()
    cache = arguments.cache.resolve()
    os.environ["SAMEWISE_CACHE"] = str(cache)  # also for the servers
    for made in ("learnt", "another"):
        shutil.rmtree(cache / made, ignore_errors=True)
    another = another_model(resolve_model(arguments.model, console).path, cache / "another")
    plan = make_plan(arguments, server_arguments)
    result = asyncio.run(measure(plan, arguments.model, another))
    report(result, console)
    if arguments.output:
        content = {"share": plan.share, "draft_tokens": plan.num_draft_tokens, **result.as_dict()}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(result.turns, arguments.plot)
    if result.num_different or result.num_taken:
        sys.exit(1)


if __name__ == "__main__":
    main()
