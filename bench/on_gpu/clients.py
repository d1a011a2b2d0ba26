"""Load clients in several processes, so that parsing answers does not limit the measured server.

Each process runs `python -m bench.on_gpu.clients SHARE`: it warms up, reports that it is ready, waits for a line, and
then sends its share of the requests.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from bench.local_server import environment
from server.cli.loadtest.load import (
    Arrivals,
    Lengths,
    LoadResult,
    Outcome,
    Target,
    Workload,
    make_requests,
    open_client,
    run_load,
)

PER_PROCESS = 64
"""Clients in one process."""
READY = b"ready\n"
LONGEST_LINE = 1 << 28


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a server. Prompts are token ids that depend on the seed."""

    url: str
    """The server's address with /v1."""
    model: str
    vocab_size: int
    clients: int
    num_requests: int
    prompt: int
    answer: int
    """Length of each answer in tokens; stop tokens are ignored."""
    seed: int

    def shares(self) -> list["Load"]:
        """Divide the load among processes; there is only one if the clients do not divide evenly."""
        count = self.clients // PER_PROCESS if self.clients % PER_PROCESS == 0 else 1
        part = replace(self, clients=self.clients // count, num_requests=self.num_requests // count)
        return [replace(part, seed=self.seed * PER_PROCESS + index) for index in range(count)]


async def put_load(load: Load) -> LoadResult:
    """Send the load after one warm-up request per client. Raises RuntimeError if a client process fails."""
    processes = [await _start(share) for share in load.shares()]
    try:
        for process in processes:
            if await _line(process) != READY:
                raise RuntimeError("a client process ended before it was ready")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        lines = [await _line(process) for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    outcomes = [outcome for line in lines for outcome in msgspec.json.decode(line, type=list[Outcome])]
    began, ended = min(outcome.started for outcome in outcomes), max(outcome.finished for outcome in outcomes)
    return LoadResult(tuple(outcomes), ended - began)


async def _start(share: Load) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "bench.on_gpu.clients", json.dumps(asdict(share))]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, limit=LONGEST_LINE, env=environment()
    )


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def _send(load: Load, wait: Callable[[], object]) -> Sequence[Outcome]:
    """Warm up, wait for the other processes, and send the load."""
    target = Target(load.url, load.model, "completions", {"temperature": 0.0, "ignore_eos": True})
    lengths = Lengths(load.prompt, load.prompt), Lengths(load.answer, load.answer)
    warm_up = Workload(load.clients, *lengths, seed=load.seed ^ 0x5EED)  # other prompts, so that none is cached
    workload = Workload(load.num_requests, *lengths, seed=load.seed)
    async with open_client({}) as client:
        await run_load(client, target, make_requests(warm_up, load.vocab_size), Arrivals(load.clients))
        wait()
        requests = make_requests(workload, load.vocab_size)
        return (await run_load(client, target, requests, Arrivals(load.clients))).outcomes


def _wait() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    sys.stdin.readline()


def main() -> None:
    """Run one client process."""
    outcomes = asyncio.run(_send(Load(**json.loads(sys.argv[1])), _wait))
    sys.stdout.buffer.write(msgspec.json.encode(outcomes) + b"\n")


if __name__ == "__main__":
    main()
