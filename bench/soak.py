"""Soak test: many clients send mixed requests, some disconnect early. The rest must complete, and nothing may leak."""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

from bench.local_server import local_server, process_family, resident_mib
from bench.soak_mix import SoakRequest, SoakTarget, make_mix
from server.client.openai_answers import AnswerError, Chunk, ChunkParser

SETTLE_S = 10.0
SETTLE_CHECK_S = 0.2
MEMORY_SLACK_MIB = 24.0
MEMORY_SLACK_SHARE = 0.05
SERVER_ARGUMENTS = ("--kv-cache-gib", "0.25", "--log-level", "warning")
"""A small cache is soon fully used, so that memory growth means a leak; it also causes preemptions."""

Answer = tuple[tuple[str, str | None], ...]
"""Text and finish reason of each choice."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Parameters of a soak test on the server at `url` (without /v1)."""

    url: str
    requests: int = 2000
    clients: int = 64
    leave_share: float = 0.2
    checked: int = 50
    """Number of completed requests that are repeated alone and must return the same answer."""
    pid: int | None = None
    """Process id of a local server, to monitor the memory of it and its children."""
    seed: int = 0


@dataclass(slots=True)
class SoakReport:
    """The result of a soak test."""

    completed: int = 0
    left: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    mismatches: list[str] = field(default_factory=list)
    left_behind: dict[str, float] = field(default_factory=dict)
    """Gauges that did not return to zero."""
    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    """Samples of resident memory by process id, in order."""

    @property
    def growing(self) -> list[str]:
        """Processes that use much more memory at the end than in the first half."""
        found = []
        for pid, samples in self.memory_mib.items():
            half, end = samples[: len(samples) // 2], samples[-len(samples) // 4 :]
            if half and max(end) > max(half) * (1 + MEMORY_SLACK_SHARE) + MEMORY_SLACK_MIB:
                found.append(f"process {pid} grew from {max(half):.0f} to {max(end):.0f} MiB")
        return found

    @property
    def problems(self) -> list[str]:
        """All failures; empty if the test passed."""
        return [
            *(f"{count} x {failure}" for failure, count in self.failures.most_common()),
            *self.mismatches,
            *(f"{name} is {value:g}, not 0" for name, value in self.left_behind.items()),
            *self.growing,
        ]


async def soak(plan: SoakPlan, progress: Progress | None = None) -> SoakReport:
    """Run the plan. Failures are in the report; raises only if the server's capabilities cannot be read."""
    report = SoakReport()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=plan.url, timeout=None, limits=limits, trust_env=False) as client:
        mix = make_mix(plan.requests, plan.leave_share, await _describe(client), plan.seed)
        answers = await _run_clients(client, plan, mix, report, progress)
        report.left_behind = await _settle(client)
        await _check_alone(client, plan, answers, report)
    return report


async def _run_clients(
    client: httpx.AsyncClient, plan: SoakPlan, mix: Sequence[SoakRequest], report: SoakReport, progress: Progress | None
) -> list[tuple[SoakRequest, Answer]]:
    """Send all requests, `clients` at a time. Returns the requests that were answered."""
    answers: list[tuple[SoakRequest, Answer]] = []
    queue = iter(mix)
    task = progress.add_task("requests", total=len(mix)) if progress else None
    sample_every = max(1, len(mix) // 40)

    async def one_client() -> None:
        for request in queue:
            try:
                answer = await _send(client, request)
            except AnswerError as error:
                report.failures[f"{error.kind}: {error}"] += 1
            except httpx.TransportError as error:
                report.failures[str(error) or type(error).__name__] += 1
            else:
                if answer is None:
                    report.left += 1
                else:
                    report.completed += 1
                    answers.append((request, answer))
            if (report.completed + report.left) % sample_every == 0 and plan.pid is not None:
                _sample_memory(plan.pid, report)
            if progress and task is not None:
                progress.advance(task)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.clients):
            group.create_task(one_client())
    return answers


async def _send(client: httpx.AsyncClient, request: SoakRequest) -> Answer | None:
    """Send a request; returns None if the client left early. Raises AnswerError and httpx.TransportError."""
    async with client.stream("POST", request.path, json=request.body) as response:
        if response.status_code != 200:
            raise AnswerError.refusal(response.status_code, await response.aread())
        if not request.body["stream"]:
            return _answer_of([msgspec.json.decode(await response.aread(), type=Chunk)])
        chunks: list[Chunk] = []
        parser = ChunkParser()
        async for data in response.aiter_bytes():
            for chunk in parser.feed(data):
                if request.leaves_after is not None and len(chunks) >= request.leaves_after:
                    return None
                chunks.append(chunk)
            if parser.is_done:
                break
    parser.close()
    return _answer_of(chunks)


def _answer_of(parts: Sequence[Chunk]) -> Answer:
    """Assemble the answer from one body or from a stream's chunks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.content
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return tuple((texts[index], reasons[index]) for index in sorted(texts))


async def _check_alone(
    client: httpx.AsyncClient, plan: SoakPlan, answers: list[tuple[SoakRequest, Answer]], report: SoakReport
) -> None:
    """Repeat some requests alone, neither streamed nor with speculation: the answers must be the same."""
    sample = random.Random(plan.seed).sample(answers, min(plan.checked, len(answers)))
    for request, answer in sample:
        body = {name: value for name, value in request.body.items() if name != "prediction"}
        alone = await _send(client, SoakRequest(request.path, {**body, "stream": False, "speculation": "off"}, None))
        report.checked += 1
        if alone != answer:
            body = {key: value for key, value in request.body.items() if key not in ("prompt", "messages")}
            report.mismatches.append(f"alone: {alone}, under load: {answer}, for {body}")


async def _describe(client: httpx.AsyncClient) -> SoakTarget:
    found = (await client.get("/v1/capabilities")).raise_for_status().json()
    return SoakTarget(found["model"], found["vocab_size"], tuple(found["speculation"]["methods"]))


async def _settle(client: httpx.AsyncClient) -> dict[str, float]:
    """Wait until no request runs and no cache is used; returns the gauges that stay above 0."""
    for _ in range(round(SETTLE_S / SETTLE_CHECK_S)):
        if not await _held(client):
            break
        await asyncio.sleep(SETTLE_CHECK_S)
    return await _held(client)


async def _held(client: httpx.AsyncClient) -> dict[str, float]:
    names = ("samewise:num_requests_running", "samewise:num_requests_waiting", "samewise:kv_cache_usage_perc")
    families = text_string_to_metric_families((await client.get("/metrics")).raise_for_status().text)
    values = {sample.name: sample.value for family in families for sample in family.samples if sample.name in names}
    return {name: values.get(name, float("nan")) for name in names if values.get(name) != 0}


def _sample_memory(pid: int, report: SoakReport) -> None:
    for one in process_family(pid):
        report.memory_mib.setdefault(one, []).append(resident_mib(one))


async def _run(arguments: argparse.Namespace) -> SoakReport:
    with Progress(console=Console(stderr=True)) as progress:
        plan = SoakPlan(
            arguments.url or "", arguments.requests, arguments.clients, pid=arguments.pid, seed=arguments.seed
        )
        if arguments.url:
            return await soak(plan, progress)
        async with local_server(SERVER_ARGUMENTS) as server:
            own = SoakPlan(server.url, plan.requests, plan.clients, pid=server.pid, seed=plan.seed)
            return await soak(own, progress)


def main() -> None:
    """Run the soak test on a new or a running server; exits with 1 if there are failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="address of a running server, without /v1; by default one is started")
    parser.add_argument("--pid", type=int, help="process id of that server, to monitor its memory")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    report = asyncio.run(_run(parser.parse_args()))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{report.completed} completed, {report.left} left early, {report.failures.total()} failed")
    console.print(f"{report.checked - len(report.mismatches)} of {report.checked} have the same answer when sent alone")
    for pid, samples in report.memory_mib.items():
        console.print(
            f"process {pid}: {samples[0]:.0f} MiB at start, {max(samples):.0f} peak, {samples[-1]:.0f} at end"
        )
    for problem in report.problems:
        console.print(problem, style="red", markup=False)
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
